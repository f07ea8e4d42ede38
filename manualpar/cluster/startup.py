"""Brings the processes of a run together.

JAX introduces them to each other (`jax.distributed.initialize`). Then process 0 opens a socket for
the channel of `manualpar.cluster.hub`, whose address it tells the others by a collective, so that
the channel is there on every cluster that JAX knows. JAX's own watch over the processes stays as
the second line, for when a process's threads do not run.
"""

import json
import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from manualpar.cluster.agreement import StopGate
from manualpar.cluster.channel import Channel
from manualpar.cluster.cluster import Cluster
from manualpar.cluster.environment import Place, find_place
from manualpar.cluster.hub import Hub
from manualpar.cluster.loss import Loss

# JAX's own timeouts are so much longer than ours.
JAX_EXTRA_SECONDS = 20
CONNECT_SECONDS = 5.0
BROADCAST_BYTES = 2048


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: float = 10.0,
    start_timeout_seconds: float = 300.0,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """Joins the processes of a run; call it before anything has asked jax for a device.

    Without arguments the environment decides: the variables `MANUALPAR_COORDINATOR_ADDRESS` (or
    `JAX_COORDINATOR_ADDRESS`), `MANUALPAR_NUM_PROCESSES` and `MANUALPAR_PROCESS_ID`, then what JAX
    knows of (Slurm, Open MPI, Kubernetes, TPU pods); else this process is alone.

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

    Returns:
      The cluster, its processes connected.

    Raises:
      ValueError: Only some of the arguments are given, or they do not fit.
      ConnectionError: The other processes, or process 0, cannot be reached.
      RuntimeError: jax already has its devices.

    Communication:
      One all-reduce of 2 KiB over all devices.
    """
    for name, value in (
        ("timeout_seconds", timeout_seconds),
        ("start_timeout_seconds", start_timeout_seconds),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"initialize: {name}={value}, expected a positive number of seconds.")
    place = find_place(
        coordinator_address,
        num_processes,
        process_id,
        os.environ if environment is None else environment,
    )
    if place is None or place.num_processes == 1:
        return Cluster(timeout_seconds=timeout_seconds)
    _initialize_jax(place, timeout_seconds, start_timeout_seconds)
    cluster = Cluster(
        process_id=jax.process_index(),
        num_processes=jax.process_count(),
        timeout_seconds=timeout_seconds,
    )
    if cluster.num_processes > 1:
        _open_channel(cluster, place)
    return cluster


def _initialize_jax(place: Place, timeout_seconds: float, start_timeout_seconds: float) -> None:
    """Has JAX introduce the processes to each other."""
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
        )
    except jax.errors.JaxRuntimeError as error:
        who = f"all {place.num_processes} processes" if is_given else "the processes"
        raise ConnectionError(
            f"initialize: not {who} met at {place.coordinator_address or 'the coordinator'} within "
            f"{start_timeout_seconds:g} s; see that all were started, with the same address, which "
            f"the others can reach ({' '.join(str(error).split())[:300]})"
        ) from error


def _open_channel(cluster: Cluster, place: Place) -> None:
    """Connects this process to the hub, which it runs if it is process 0."""
    own: socket.socket | None = None
    address: dict[str, object] = {}
    if cluster.is_main:
        # Both address families where the machine has them.
        dual = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=max(cluster.num_processes, 128),
            dualstack_ipv6=dual,
        )
        own, hubs = socket.socketpair()
        token = secrets.token_hex(16)
        cluster.serve(
            Hub(
                listener,
                hubs,
                num_processes=cluster.num_processes,
                token=token,
                timeout_seconds=cluster.timeout_seconds,
            )
        )
        port = listener.getsockname()[1]
        address = {"token": token, "port": port, "hosts": _own_hosts(), "name": _host_name()}
    address = _broadcast(address)
    if own is None:
        hosts = [str(host) for host in _as_list(address["hosts"])]
        if place.coordinator_address is not None:
            hosts.insert(0, place.coordinator_address.rpartition(":")[0].strip("[]"))
        if address["name"] == _host_name():
            hosts.append("localhost")
        own = _connect(hosts, int(str(address["port"])))
    connection = own

    def make_channel(gate: StopGate, on_loss: Callable[[Loss], None]) -> Channel:
        return Channel(
            connection,
            process=cluster.process_id,
            token=str(address["token"]),
            timeout_seconds=cluster.timeout_seconds,
            gate=gate,
            on_loss=on_loss,
        )

    cluster.connect(make_channel)


def _broadcast(value: dict[str, object]) -> dict[str, object]:
    """What process 0 passes, in every process."""
    text = json.dumps(value).encode().ljust(BROADCAST_BYTES)
    if len(text) > BROADCAST_BYTES:
        raise AssertionError(f"{len(text)} bytes to broadcast, expected {BROADCAST_BYTES} at most")
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    result = json.loads(np.asarray(received, np.uint8).tobytes())
    assert isinstance(result, dict)
    return result


def _connect(hosts: Sequence[str], port: int) -> socket.socket:
    """Connects to the first of the hosts that answers."""
    failures = []
    for host in dict.fromkeys(hosts):
        try:
            connection = socket.create_connection((host, port), CONNECT_SECONDS)
        except OSError as error:
            failures.append(f"{host}: {error}")
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
    raise ConnectionError(
        f"initialize: process 0 cannot be reached on its port {port}, expected an open network "
        f"between the hosts of a run ({'; '.join(failures)})"
    )


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


def _as_list(value: object) -> list[object]:
    """A list, as JSON has kept it."""
    assert isinstance(value, list)
    return value
