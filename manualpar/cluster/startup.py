"""Brings the processes of a run together.

Where the coordinator's address is given, the processes meet at the hub of `manualpar.cluster.hub`
first, and JAX introduces them to each other then (`jax.distributed.initialize`). Where JAX finds
the coordinator itself, it goes first, and process 0 tells the others by a collective where the hub
is. JAX's own watch over the processes stays as the second line, for when a process's threads do not
run.
"""

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from manualpar.cluster.admission import TOKEN_VARIABLE
from manualpar.cluster.cluster import Cluster, print_announcement
from manualpar.cluster.environment import Place, find_place
from manualpar.cluster.facts import Facts
from manualpar.cluster.hub import Hub
from manualpar.cluster.meeting import BIND_VARIABLE, knock, listen, split_address

# JAX's own timeouts are so much longer than ours.
JAX_EXTRA_SECONDS = 20
BROADCAST_BYTES = 2048
# JAX tries a connection that was refused again after a second only, so process 0 goes first.
HEAD_START_SECONDS = 0.2
LOOPBACK = ("localhost", "127.", "::1")


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: float = 10.0,
    start_timeout_seconds: float = 300.0,
    environment: Mapping[str, str] | None = None,
    facts: Facts | None = None,
) -> Cluster:
    """Joins the processes of a run; call it before anything has asked jax for a device.

    Without arguments the environment decides: the variables `MANUALPAR_COORDINATOR_ADDRESS` (or
    `JAX_COORDINATOR_ADDRESS`), `MANUALPAR_NUM_PROCESSES` and `MANUALPAR_PROCESS_ID`, then what JAX
    knows of (Slurm, Open MPI, Kubernetes, TPU pods); else this process is alone.

    If `MANUALPAR_TOKEN` is set, only processes that have it may join.

    JAX's preemption service is turned off, for it would swallow SIGTERM: use
    `Cluster.stop_on_sigterm`.

    Args:
      coordinator_address: `host:port` for JAX's coordination service, on the host of process 0;
        with `num_processes` and `process_id`. `"auto"`, alone, has JAX find all three.
      num_processes: How many processes there are. `1`, alone, says that this is the only one.
      process_id: Which of them this is, from 0.
      timeout_seconds: How long a process may be silent before the others end.
      start_timeout_seconds: How long to wait for all processes to start.
      environment: The variables to go by, by default `os.environ`.
      facts: What has to be the same in all processes, by a name that a user knows. Compared before
        JAX connects them, where the coordinator's address is given.

    Returns:
      The cluster, its processes connected.

    Raises:
      ValueError: Only some of the arguments are given, or they do not fit; or the processes differ
        in their facts, their number, their token, or their devices.
      ConnectionError: The other processes, or process 0, cannot be reached.
      RuntimeError: jax already has its devices.

    Communication:
      Where JAX finds the coordinator, one all-reduce of 2 KiB over all devices; else none.
    """
    for name, value in (
        ("timeout_seconds", timeout_seconds),
        ("start_timeout_seconds", start_timeout_seconds),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"initialize: {name}={value}, expected a positive number of seconds.")
    environment = os.environ if environment is None else environment
    place = find_place(coordinator_address, num_processes, process_id, environment)
    if place is None or place.num_processes == 1:
        return Cluster(timeout_seconds=timeout_seconds)
    token = environment.get(TOKEN_VARIABLE, "")
    timeouts = {"timeout_seconds": timeout_seconds, "start_timeout_seconds": start_timeout_seconds}
    if place.coordinator_address is None:
        _initialize_jax(place, None, **timeouts)
        cluster = Cluster(
            process_id=jax.process_index(),
            num_processes=jax.process_count(),
            timeout_seconds=timeout_seconds,
        )
        if cluster.num_processes > 1:
            _meet_after_jax(cluster, token, start_timeout_seconds)
            cluster.agree(facts or {})
    else:
        assert place.process_id is not None
        assert place.num_processes is not None
        cluster = Cluster(
            process_id=place.process_id,
            num_processes=place.num_processes,
            timeout_seconds=timeout_seconds,
        )
        bind_address = _meet_before_jax(
            cluster, place, token, environment.get(BIND_VARIABLE), start_timeout_seconds
        )
        cluster.agree(facts or {})
        try:
            _initialize_jax(place, bind_address, **timeouts)
        except Exception as error:
            # Mostly it does not return: another process is gone, and this one ends for its sake.
            cluster.explain_failure(error)
            cluster.failed(error)
            raise
    if cluster.num_processes > 1:
        cluster.agree(_device_facts())
    return cluster


def _device_facts() -> Facts:
    """What the devices of this process must have in common with those of the others."""
    devices = jax.local_devices()
    return {
        "the number of devices": str(len(devices)),
        "the kind of device": devices[0].device_kind,
    }


def _initialize_jax(
    place: Place,
    bind_address: str | None,
    *,
    timeout_seconds: float,
    start_timeout_seconds: float,
) -> None:
    """Has JAX introduce the processes to each other, and show each other their devices."""
    jax.config.update("jax_enable_preemption_service", False)
    is_given = place.coordinator_address is not None
    jax_timeout = math.ceil(timeout_seconds) + JAX_EXTRA_SECONDS
    try:
        jax.distributed.initialize(
            place.coordinator_address,
            place.num_processes,
            place.process_id,
            # An empty list restricts nothing, and keeps JAX from choosing one device a process.
            local_device_ids=[] if place.sees_all_devices else None,
            cluster_detection_method="deactivate" if is_given else None,
            initialization_timeout=math.ceil(start_timeout_seconds),
            heartbeat_timeout_seconds=jax_timeout,
            shutdown_timeout_seconds=jax_timeout,
            coordinator_bind_address=bind_address,
        )
        jax.devices()
    except jax.errors.JaxRuntimeError as error:
        who = f"all {place.num_processes} processes" if is_given else "the processes"
        raise ConnectionError(
            f"initialize: not {who} met at {place.coordinator_address or 'the coordinator'} within "
            f"{start_timeout_seconds:g} s; see that all were started, with the same address, which "
            f"the others can reach ({' '.join(str(error).split())[:300]})"
        ) from error


def _meet_before_jax(
    cluster: Cluster, place: Place, token: str, bind_address: str | None, join_seconds: float
) -> str | None:
    """Has the processes meet at the coordinator's address; returns where its service is to listen.

    Process 0 alone gets an address: the hub's, which is free by then.
    """
    assert place.coordinator_address is not None
    host, port = split_address(place.coordinator_address)
    if not cluster.is_main:
        _connect(cluster, [host], port, token, join_seconds)
        time.sleep(HEAD_START_SECONDS)
        return None
    listener = listen(bind_address or place.coordinator_address, backlog=cluster.num_processes)
    is_ipv6 = listener.family == socket.AF_INET6
    name, port = listener.getsockname()[:2]
    if not token and not host.startswith(LOOPBACK):
        print_announcement(
            f"{TOKEN_VARIABLE} is not set: whoever can reach {place.coordinator_address} can join "
            "this run, or end it; see SECURITY.md"
        )
    _serve(cluster, listener, token, join_seconds)
    _connect(cluster, [_reachable(name)], port, token, join_seconds)
    return f"[{name}]:{port}" if is_ipv6 else f"{name}:{port}"


def _meet_after_jax(cluster: Cluster, token: str, join_seconds: float) -> None:
    """Has the processes meet at an address that process 0 tells the others by a collective."""
    address: dict[str, Any] = {}
    if cluster.is_main:
        dual = socket.has_dualstack_ipv6()
        listener = listen("[::]:0" if dual else "0.0.0.0:0", backlog=cluster.num_processes)
        token = token or secrets.token_hex(16)
        _serve(cluster, listener, token, join_seconds)
        port = listener.getsockname()[1]
        address = {"token": token, "port": port, "hosts": _own_hosts(), "name": _host_name()}
    address = _broadcast(address)
    hosts = [str(host) for host in address["hosts"]]
    if address["name"] == _host_name():
        hosts.append("localhost")
    _connect(cluster, hosts, int(address["port"]), str(address["token"]), join_seconds)


def _serve(cluster: Cluster, listener: socket.socket, token: str, join_seconds: float) -> None:
    """Runs the hub in this process."""
    cluster.serve(
        Hub(
            listener,
            num_processes=cluster.num_processes,
            token=token,
            timeout_seconds=cluster.timeout_seconds,
            join_seconds=max(join_seconds, cluster.timeout_seconds),
            announce=print_announcement,
        )
    )


def _connect(
    cluster: Cluster, hosts: list[str], port: int, token: str, join_seconds: float
) -> None:
    """Connects this process to the hub."""
    cluster.connect(
        knock(
            hosts,
            port,
            process=cluster.process_id,
            num_processes=cluster.num_processes,
            token=token,
            warn_seconds=cluster.timeout_seconds / 2,
            give_up_seconds=max(join_seconds, cluster.timeout_seconds),
            announce=print_announcement,
        )
    )


def _reachable(name: str) -> str:
    """An address under which this process reaches itself, where it listens at `name`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)


def _broadcast(value: dict[str, Any]) -> dict[str, Any]:
    """What process 0 passes, in every process."""
    text = json.dumps(value).encode().ljust(BROADCAST_BYTES)
    if len(text) > BROADCAST_BYTES:
        raise AssertionError(f"{len(text)} bytes to broadcast, expected {BROADCAST_BYTES} at most")
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    result = json.loads(np.asarray(received, np.uint8).tobytes())
    assert isinstance(result, dict)
    return result


def _own_hosts() -> list[str]:
    """Names and addresses under which the others may reach this host, the likeliest first."""
    hosts = [_host_name()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing; the kernel chooses the interface.
            hosts.append(probe.getsockname()[0])
        except OSError:
            hosts.append(socket.getfqdn())  # A host without a route to anywhere.
    return hosts


def _host_name() -> str:
    """What this host calls itself."""
    return socket.gethostname()
