"""Connects the processes of a run.

If the coordinator's address is known, the processes first connect to the hub
(`manualpar.system.cluster.hub`), check their hosts (`manualpar.system.cluster.preflight`), and then
JAX connects them (`jax.distributed.initialize`). If JAX has to find the coordinator itself, JAX
connects the processes first, and process 0 sends the hub's address to the other processes by a
collective. JAX's own failure detection stays on, because it
finds a process whose threads do not run.
"""

import dataclasses
import errno
import functools
import math
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Mapping

import jax

from manualpar.system.cluster.agreement import from_first
from manualpar.system.cluster.cluster import Cluster
from manualpar.system.cluster.environment import MEND, Assignment, find_assignment
from manualpar.system.cluster.facts import Facts, announce
from manualpar.system.cluster.hub import Hub
from manualpar.system.cluster.messages import TOKEN_VARIABLE, NotMetError, Terms
from manualpar.system.cluster.preflight import (
    PreflightError,
    Verdict,
    check_hosts,
    compare_devices,
    describe_refusal,
)
from manualpar.system.cluster.this_host import check_hub_limits, raise_limits
from manualpar.system.storage import AnyPath

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
# The time that processes wait for each other at the start.
WAIT_SECONDS = 300.0
# The timeouts of JAX are longer than the timeouts of this package by these seconds, so that this
# package reports a lost process first.
JAX_EXTRA_SECONDS = 20
# Process 0 starts JAX this much earlier, because JAX repeats a refused connection only after a
# second.
HEAD_START_SECONDS = 0.2
LOOPBACK = ("localhost", "127.", "::1")
ALL_ADDRESSES = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
# The clusters in which JAX gives each process one device, if they run several on a host.
DIVIDES_DEVICES = ("slurm", "ompi")


def initialize(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: float = 10.0,
    start_timeout_seconds: float = WAIT_SECONDS,
    environment: Mapping[str, str] | None = None,
    facts: Facts | None = None,
    workdir: AnyPath | None = None,
) -> Cluster:
    """Connects this process with the other processes of a run.

    Call this function before any code uses a JAX device. Without arguments the environment decides:
    first the variables `MANUALPAR_COORDINATOR_ADDRESS` (or `JAX_COORDINATOR_ADDRESS`),
    `MANUALPAR_NUM_PROCESSES` and `MANUALPAR_PROCESS_ID`, then the clusters that JAX detects (Slurm,
    Open MPI, Kubernetes, TPU pods). If neither is found, this process is the only process.

    If `MANUALPAR_TOKEN` is set, only processes with the same token may join.

    JAX's preemption service is turned off, because it would handle SIGTERM itself. Use
    `Cluster.stop_on_sigterm` instead.

    Args:
      coordinator_address: `host:port` for JAX's coordination service, on the host of process 0;
        also pass `num_processes` and `process_id`. With `"auto"`, and without these two arguments,
        JAX finds all three values.
      num_processes: The number of processes. `1` without the other two arguments means that this
        process is the only process.
      process_id: The number of this process, from 0.
      timeout_seconds: The time that a process may be silent before the other processes end.
      start_timeout_seconds: The time to wait until all processes have started.
      environment: The environment variables, by default `os.environ`.
      facts: Values that must be equal in all processes, by a name that users understand. If the
        coordinator's address is known, they are compared before JAX connects the processes.
      workdir: The folder of the run, or a bucket, to check that all hosts see the same.

    Returns:
      The cluster, with connected processes.

    Raises:
      ValueError: Only some of the arguments are given, or they do not fit together; or processes
        differ in their facts, their number, their token, or their devices; or the hosts lack
        something that a run needs, see `manualpar.system.cluster.preflight`.
      ConnectionError: The other processes, or process 0, cannot be reached.
      RuntimeError: JAX has already made its devices.

    Communication:
      Two small all-reduces over all devices if JAX finds the coordinator; else none.
    """
    for name, value in (
        ("timeout_seconds", timeout_seconds),
        ("start_timeout_seconds", start_timeout_seconds),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"initialize: {name}={value}, expected a positive number of seconds.")
    environment = os.environ if environment is None else environment
    own = find_assignment(coordinator_address, num_processes, process_id, environment)
    start_jax = functools.partial(
        _start_jax, timeout_seconds=timeout_seconds, start_timeout_seconds=start_timeout_seconds
    )
    meets_first = own is not None and own.coordinator_address is not None
    cluster, bind_address = _meet(
        own, start_jax, environment, timeout_seconds, start_timeout_seconds
    )
    if own is None or cluster.num_processes == 1:
        return cluster
    cluster.agree(facts or {})
    _refuse_unready(cluster, check_hosts(cluster, workdir=workdir))
    if meets_first:
        if not cluster.is_main:
            time.sleep(HEAD_START_SECONDS)
        try:
            start_jax(own, bind_address)
        except Exception as error:
            # If another process was lost, this call usually ends this process.
            cluster.explain_failure(error)
            cluster.failed(error)
            raise
    for line in compare_devices(cluster):
        announce(line)
    return cluster


def examine(
    *,
    timeout_seconds: float = 10.0,
    start_timeout_seconds: float = WAIT_SECONDS,
    environment: Mapping[str, str] | None = None,
    facts: Facts | None = None,
    workdir: AnyPath | None = None,
) -> tuple[Cluster, Verdict]:
    """Checks the hosts of a cluster without a run, see `check_hosts`.

    JAX connects the processes only where it has to find the coordinator itself.

    Returns:
      The processes, which have disconnected, and the verdict.

    Raises:
      ValueError: The environment's variables do not fit together.
      ConnectionError: The other processes, or process 0, cannot be reached.
    """
    environment = os.environ if environment is None else environment
    own = find_assignment(None, None, None, environment)
    start_jax = functools.partial(
        _start_jax, timeout_seconds=timeout_seconds, start_timeout_seconds=start_timeout_seconds
    )
    cluster, _ = _meet(own, start_jax, environment, timeout_seconds, start_timeout_seconds)
    verdict = check_hosts(cluster, workdir=workdir, facts=facts, has_devices=True)
    cluster.close()
    return cluster, verdict


def _refuse_unready(cluster: Cluster, verdict: Verdict) -> None:
    """Prints what is noticed about the hosts; raises a `PreflightError` if a run is refused."""
    if verdict.fatal:
        cluster.close()  # All processes raise this error, so none is lost.
        raise PreflightError(describe_refusal(verdict))
    is_all_well_on_one_host = len(verdict.lines) == 1 and verdict.lines[0].endswith(": ok")
    if cluster.is_main and not is_all_well_on_one_host:
        for line in verdict.lines:
            announce(line)


def _meet(
    own: Assignment | None,
    start_jax: Callable[[Assignment, str | None], None],
    environment: Mapping[str, str],
    timeout_seconds: float,
    start_timeout_seconds: float,
) -> tuple[Cluster, str | None]:
    """Connects the processes to the hub, before JAX connects them if that is possible.

    Also returns the address at which JAX's coordination service must listen, in process 0.
    """
    if own is not None and own.coordinator_address is None:
        start_jax(own, None)
        count, process = jax.process_count(), jax.process_index()
        own = dataclasses.replace(own, num_processes=count, process_id=process)
    if own is None or own.num_processes == 1:
        return Cluster(timeout_seconds=timeout_seconds), None
    assert own.process_id is not None
    assert own.num_processes is not None
    raise_limits(own.num_processes)
    if own.process_id == 0:
        check_hub_limits(own.num_processes)
    cluster = Cluster(
        process_id=own.process_id, num_processes=own.num_processes, timeout_seconds=timeout_seconds
    )
    terms = Terms(
        own.process_id,
        own.num_processes,
        environment.get(TOKEN_VARIABLE, ""),
        timeout_seconds,
        join_seconds=start_timeout_seconds,
    )
    if own.coordinator_address is None:
        _meet_after_jax(cluster, terms)
        return cluster, None
    listen_at = environment.get(BIND_VARIABLE) or own.coordinator_address
    if own.manager and BIND_VARIABLE not in environment:
        # As JAX does: the name of the host may lead to an address that others cannot reach.
        listen_at = f"{ALL_ADDRESSES}:{split_address(own.coordinator_address)[1]}"
    return cluster, _meet_before_jax(cluster, terms, own.coordinator_address, listen_at)


def _start_jax(
    own: Assignment,
    bind_address: str | None,
    *,
    timeout_seconds: float,
    start_timeout_seconds: float,
) -> None:
    """Starts JAX's distributed runtime, which makes the devices of all processes known to each.

    Raises:
      ConnectionError: The processes have not connected in time, or cannot connect.
      RuntimeError: JAX has already made its devices.
    """
    jax.config.update("jax_enable_preemption_service", False)
    is_given = own.coordinator_address is not None
    detection = own.manager if own.manager in DIVIDES_DEVICES else "deactivate"
    jax_timeout = math.ceil(timeout_seconds) + JAX_EXTRA_SECONDS
    try:
        # Without the package `kubernetes` JAX prints a long warning, but the error that is raised
        # here is enough. `catch_warnings` would put back the filters of all threads.
        warnings.filterwarnings("ignore", "Kubernetes environment detected")
        jax.distributed.initialize(
            own.coordinator_address,
            own.num_processes,
            own.process_id,
            # An empty list means all devices. With `None` JAX may choose one device for each
            # process.
            local_device_ids=[] if own.sees_all_devices else None,
            cluster_detection_method=detection if is_given else None,
            initialization_timeout=math.ceil(start_timeout_seconds),
            heartbeat_timeout_seconds=jax_timeout,
            shutdown_timeout_seconds=jax_timeout,
            coordinator_bind_address=bind_address,
        )
    except jax.errors.JaxRuntimeError as error:
        raise _not_met(own, start_timeout_seconds, error) from error
    except Exception as error:  # JAX's search for a cluster may raise any exception.
        if is_given or "must be called before" in str(error):
            raise
        raise ValueError(
            f"initialize: {own.evidence} shows that this is one of several processes, but JAX does "
            f"not find the others ({_in_one_line(error)}). {MEND}, in every process. (In "
            "Kubernetes, JAX finds them itself if jax[k8s] is installed and the pods may be read; "
            "--num_processes=1 makes each process a separate run.)"
        ) from error
    try:
        jax.devices()
    except jax.errors.JaxRuntimeError as error:
        raise _not_met(own, start_timeout_seconds, error) from error
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        name = socket.gethostname()
        raise ConnectionError(
            "initialize: the collectives of CPUs (gloo) listen at the address of the host name "
            f"{name}, but this host does not have that address ({_in_one_line(error)}); correct "
            f"the line of {name} in /etc/hosts"
        ) from error


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _not_met(own: Assignment, seconds: float, error: Exception) -> NotMetError:
    who = f"the {own.num_processes} processes" if own.coordinator_address else "the processes"
    return NotMetError(
        f"initialize: {who} did not all connect to {own.coordinator_address or 'the coordinator'} "
        f"within {seconds:g} s; check that all processes were started with the same address and "
        f"can reach it ({' '.join(str(error).split())[:300]})"
    )


def _meet_before_jax(cluster: Cluster, terms: Terms, address: str, listen_at: str) -> str | None:
    """Connects the processes to the hub, which listens at the coordinator's address.

    Process 0 gets the address at which JAX's coordination service must listen; others get `None`.
    It is the hub's address: the hub frees its port when all processes have connected.
    """
    host, port = split_address(address)
    if not cluster.is_main:
        cluster.connect([host], port, terms)
        return None
    listener = listen(listen_at)
    if not terms.token and not host.startswith(LOOPBACK):
        announce(
            f"{TOKEN_VARIABLE} is not set: whoever can reach {address} can join this run, or end "
            "it; see SECURITY.md"
        )
    name, port = listener.getsockname()[:2]
    # If the hub listens at all addresses, process 0 connects to it at the loopback address.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(name, name)
    cluster.connect([reachable], port, terms, Hub(listener, terms))
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _meet_after_jax(cluster: Cluster, terms: Terms) -> None:
    """Connects the processes to the hub; a collective sends them process 0's address and port."""
    own_name, port, hub = socket.gethostname(), 0, None
    if cluster.is_main:
        terms = dataclasses.replace(terms, token=terms.token or secrets.token_hex(16))
        listener = listen(f"{ALL_ADDRESSES}:0")
        port, hub = listener.getsockname()[1], Hub(listener, terms)
    token, port, name, hosts = from_first([terms.token, port, own_name, _own_hosts()])
    hosts += ["localhost"] if name == own_name else []
    cluster.connect(hosts, port, dataclasses.replace(terms, token=token), hub)


def _own_hosts() -> list[str]:
    """Returns names and addresses of this host for other processes, in the order to try them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing; the kernel chooses the interface.
            return [socket.gethostname(), probe.getsockname()[0]]
        except OSError:  # The host has no network route.
            return [socket.gethostname(), socket.getfqdn()]


def listen(address: str) -> socket.socket:
    """Listens at `host:port`, only at this address, for the connections of processes.

    Raises:
      ConnectionError: This host does not have the address, or the port is in use.
    """
    host, port = split_address(address)
    try:
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            is_all = where[0] == "::" and socket.has_dualstack_ipv6()
            try:
                server = socket.create_server(where[:2], family=family, dualstack_ipv6=is_all)
            except OSError as error:
                failure = error
                continue
            # Accepted connections inherit this option, which asyncio sets only for connections that
            # it opens itself.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
    except OSError as error:  # The host name is unknown.
        failure = error
    mend = (
        "expected an address of this host, because it runs process 0; give one of its addresses, "
        f"or set {BIND_VARIABLE} to the address to listen at, such as [::]:{port} for all"
    )
    if failure.errno == errno.EADDRINUSE:
        mend = "another program uses that port; choose a free port"
    kind = NotMetError if isinstance(failure, socket.gaierror) else ConnectionError
    raise kind(f"initialize: process 0 cannot listen at {address} ({failure}): {mend}")


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` into the host, without brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
