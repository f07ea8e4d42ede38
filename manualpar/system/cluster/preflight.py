"""Checks, before JAX connects the processes of a run, what the run will need of its hosts.

All processes call `check_hosts` when they are connected to the hub. Each process examines its own
host and tries to connect to some of the others: to those at distances of 1, 2, 4, 8 and so on in
both directions, and to process 0. So the number of connections grows as n log n. A process listens
where JAX's collectives on CPUs (gloo) will listen: on a free port, at the address to which the
host's name resolves. Process 0 collects the findings of all, judges them, and sends its verdict.

Every wait has a limit, so that the checks take at most about ten seconds.
"""

import concurrent.futures
import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.errors import list_some
from manualpar.system.cluster.cluster import Cluster
from manualpar.system.cluster.facts import Facts, describe_differences
from manualpar.system.cluster.failure_detector import UNWATCHED
from manualpar.system.cluster.this_host import (
    Finding,
    Host,
    device_facts,
    device_memory,
    driver_version,
    find_host,
    free_space,
    limits,
    listen_at,
    name_findings,
)
from manualpar.system.storage import AnyPath
from manualpar.system.storage.untrusted import write_file

CONNECT_SECONDS = 3.0
SHARED_FILE_SECONDS = 3.0  # A network file system may show a new file this late on other hosts.
PHASE_SECONDS = 10.0
BUCKET_SECONDS = 60.0
DEVICE_SECONDS = 120.0
MOST_THREADS = 32
# A larger difference of the clocks is mentioned, but not refused.
MOST_CLOCK_SECONDS = 5.0
# The difference of the devices' memories that is mentioned, as a fraction.
MEMORY_TOLERANCE = 0.05
GREETING = struct.Struct("!Qd")  # The number of the process, and its clock in seconds.


class PreflightError(ValueError):
    """The hosts of a run lack something that it needs; every process raises this error."""


class Verdict(NamedTuple):
    """What process 0 has concluded.

    Attributes:
      lines: A line for each host: `n1: ok`, or what is wrong there and what to do; only in process
        0.
      fatal: The findings for which a run is refused, a sentence without its full stop each; of
        many findings the first, and the number of the others. The same in all processes.
    """

    lines: list[str]
    fatal: list[str]


def peers(process: int, num_processes: int) -> list[int]:
    """Returns the processes to which a process tries to connect, at most 2 log2(n) + 1 of them."""
    distances = [2**k for k in range(max(num_processes - 1, 1).bit_length())]
    others = [process + sign * distance for distance in distances for sign in (1, -1)]
    return sorted({0, *(other % num_processes for other in others)} - {process})


def check_hosts(
    cluster: Cluster,
    *,
    workdir: AnyPath | None = None,
    facts: Facts | None = None,
    has_devices: bool = False,
    host: Host | None = None,
) -> Verdict:
    """Checks the hosts of a run; every process calls this function.

    Args:
      cluster: The processes, connected to the hub. JAX need not have connected them.
      workdir: The folder that all processes must see, or a bucket; `None` to check none.
      facts: Values that must be equal in all processes, by a name that users understand.
      has_devices: Whether to compare the devices too. This makes JAX's devices.
      host: This process's host, by default as `find_host` finds it.
    """
    devices = _examine_devices(cluster) if has_devices else {"findings": []}
    with _folder(workdir):
        verdict = _check(cluster, find_host() if host is None else host, workdir, facts, devices)
        # The lines stay in process 0: if each process got a line for each, that would be n * n.
        judged = cluster.share({"fatal": verdict.fatal} if cluster.is_main else {}, [0])
    cluster.enter(UNWATCHED)
    if cluster.is_main:
        return verdict
    # Nothing was shared if another process was lost; then this process is about to end.
    return Verdict([], judged[0]["fatal"] if 0 in judged else [])


def _check(
    cluster: Cluster,
    host: Host,
    workdir: AnyPath | None,
    facts: Facts | None,
    devices: dict[str, Any],
) -> Verdict:
    """Checks the hosts; only process 0's verdict is of all processes."""
    own, count = cluster.process_id, cluster.num_processes
    cluster.enter("checking its host", limit=PHASE_SECONDS)
    findings = [*devices.pop("findings"), *limits(count), *free_space(workdir)]
    # If the name leads to no address of this host, others try the address that the hub has seen.
    through_hub, hub_address = cluster.addresses()
    listens_at_name = host.has_address and (not host.is_loopback or host.address == through_hub)
    address = host.address if listens_at_name else through_hub
    if own == 0 and not listens_at_name:
        address = ""  # Others know it, because they have reached the hub there.
    with _shared_file(workdir, own) as (file, problems), _greeting(address, own) as port:
        told = {"host": host.name, "address": address, "port": port, "file": file}
        cluster.enter("waiting for the checks of other hosts", limit=BUCKET_SECONDS)
        others = cluster.share(told, range(count) if own == 0 else peers(own, count))
        limit = PHASE_SECONDS if isinstance(workdir, Path) else BUCKET_SECONDS
        cluster.enter("checking the network and the workdir", limit=limit)
        unreachable, clock = _try_all(own, others, peers(own, count), hub_address)
        writers = others.values() if own == 0 else [others[0]] if 0 in others else []
        problems += [] if problems else _unseen_files(workdir, writers)
        report = {
            "host": host.name,
            "name": name_findings(host),
            "findings": [*findings, *problems],
            "unreachable": unreachable,
            "clock": clock,
            "driver": driver_version(),
            "facts": {**(facts or {}), **devices.pop("facts", {})},
            **devices,
        }
        cluster.enter("waiting for the connections of other hosts", limit=PHASE_SECONDS)
        reports = cluster.share(report, range(count) if own == 0 else [])
    cluster.enter("waiting for process 0's verdict", limit=PHASE_SECONDS)
    return _judge(reports)


@contextlib.contextmanager
def _folder(path: AnyPath | None) -> Iterator[None]:
    """Makes a folder for the context, unless it is there or cannot be made."""
    made: list[Path] = []
    if isinstance(path, Path):
        with contextlib.suppress(OSError):  # Writing the file fails too, and gives a finding.
            made = [one for one in (path, *path.parents) if not one.exists()]
            path.mkdir(parents=True, exist_ok=True)
    yield
    for folder in made:
        with contextlib.suppress(OSError):  # Another process has removed it.
            folder.rmdir()


def compare_devices(cluster: Cluster) -> list[str]:
    """Compares the devices of the processes; returns, in process 0, what is unusual but allowed.

    Raises:
      DisagreementError: The number or the kind of devices differs.
    """
    cluster.agree(device_facts())
    told = {"host": socket.gethostname(), "memory": device_memory()}
    reports = cluster.share(told, range(cluster.num_processes) if cluster.is_main else [])
    return _unequal(reports)


def _examine_devices(cluster: Cluster) -> dict[str, Any]:
    cluster.enter("making its devices", limit=DEVICE_SECONDS)
    try:
        return {"findings": [], "facts": device_facts(), "memory": device_memory()}
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        return {"findings": [_fatal(f"has no devices that JAX can use ({reason})")]}


def describe_refusal(verdict: Verdict) -> str:
    """Returns the sentence with which a run is refused."""
    return "the hosts are not ready for this run: " + "; ".join(verdict.fatal)


@contextlib.contextmanager
def _greeting(address: str, process: int) -> Iterator[int]:
    """Listens at an address, and tells every connection this process's number and clock.

    Yields the port.
    """

    def greet() -> None:
        with contextlib.suppress(OSError):  # The listener has been shut down.
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(GREETING.pack(process, time.time()))

    with listen_at(address) as listener:
        thread = threading.Thread(target=greet, name="cluster-preflight", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(CONNECT_SECONDS)


def _try_all(
    own: int, others: Mapping[int, Any], tried: Sequence[int], hub_address: str
) -> tuple[list[list[str]], float | None]:
    """Connects to the processes `tried`.

    Returns the unreachable ones as [host, address, reason], and how many seconds this host's clock
    is ahead of process 0's; `None` if it is not known.
    """
    unreachable, clock = [], 0.0 if own == 0 else None
    known = [other for other in tried if other in others]
    addresses = [(others[x]["address"] or hub_address, others[x]["port"]) for x in known]
    with concurrent.futures.ThreadPoolExecutor(MOST_THREADS) as pool:
        results = list(pool.map(_try_one, known, addresses))
    for other, (address, port), result in zip(known, addresses, results, strict=True):
        if isinstance(result, str):
            where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            unreachable.append([others[other]["host"], where, result])
        elif other == 0:
            clock = result
    return unreachable, clock


def _try_one(process: int, address: tuple[str, int]) -> float | str:
    """Connects to a process; returns the difference of the clocks, or why it is not reached."""
    try:
        with socket.create_connection(address, CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            began, greeting = time.time(), b""
            while len(greeting) < GREETING.size:
                if not (part := connection.recv(GREETING.size - len(greeting))):
                    return "the connection was closed"
                greeting += part
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    number, clock = GREETING.unpack(greeting)
    if number != process:
        return "another program answers there"
    return (began + time.time()) / 2 - clock


@contextlib.contextmanager
def _shared_file(
    workdir: AnyPath | None, process: int
) -> Iterator[tuple[list[str], list[Finding]]]:
    """Writes a file of random content into the workdir, and deletes it after the context.

    Yields the file's name and content, and the findings.
    """
    if workdir is None:
        yield [], []
        return
    name, content = f".preflight-{process}-{secrets.token_hex(8)}", secrets.token_hex(16)
    try:
        write_file(workdir / name, content)
    except OSError as error:
        mend = "make room there, or name another folder that this host may write to"
        yield [], [_fatal(f"cannot write to the workdir {workdir} ({error}); {mend}")]
        return
    try:
        yield [name, content], []
    finally:
        with contextlib.suppress(OSError):
            path = workdir / name
            path.unlink() if isinstance(path, Path) else path.delete()


def _unseen_files(workdir: AnyPath | None, writers: Iterable[Any]) -> list[Finding]:
    """Looks for the files that other processes have written into the workdir; returns findings."""
    if workdir is None:
        return []
    unread = {one["host"]: one["file"] for one in writers if one["file"]}
    unseen: set[str] = set()
    deadline = time.monotonic() + SHARED_FILE_SECONDS
    while unread and time.monotonic() < deadline:
        for host, (name, content) in list(unread.items()):
            unseen.add(host)
            with contextlib.suppress(OSError):  # It is not there, or not yet.
                if (workdir / name).read_bytes() == content.encode():
                    unseen.remove(host)
                    del unread[host]
            if time.monotonic() > deadline:  # With very many hosts, the last are not examined.
                break
        if unread:
            time.sleep(0.1)
    mend = "expected one folder that all hosts share, such as NFS, or a bucket"
    return [
        _fatal(f"does not see in {workdir} the file that {host} wrote there; {mend}")
        for host in sorted(unseen)
    ]


def _fatal(text: str) -> list[Any]:
    return [text, True]


def _judge(reports: Mapping[int, Any]) -> Verdict:
    """Concludes from the reports of all processes what is wrong, host by host."""
    names = list(dict.fromkeys(report["host"] for report in reports.values()))
    found: dict[str, dict[str, bool]] = {name: {} for name in names}
    unreached: set[tuple[str, str]] = set()
    for report in reports.values():
        name = report["host"]
        findings = [*report["findings"], *_clock_findings(report["clock"])]
        if len(names) > 1:
            findings += report["name"]  # On one host, its name need not lead anywhere.
        for other, address, reason in report["unreachable"]:
            if (name, other) not in unreached:
                unreached.add((name, other))
                what = f"cannot reach {other} at {address} ({reason})"
                mend = "let the hosts of a run connect to each other on all ports"
                findings.append(_fatal(f"{what}; {mend}"))
        for text, is_fatal in findings:
            found[name][text] = is_fatal
    lines = [f"{name}: {'; '.join(texts) or 'ok'}" for name, texts in found.items()]
    fatal = [
        f"{name} {text}" for name, texts in found.items() for text, bad in texts.items() if bad
    ]
    differences = describe_differences({process: one["facts"] for process, one in reports.items()})
    warnings = _unequal(reports)
    return Verdict([*lines, *differences, *warnings], list_some([*fatal, *differences]))


def _clock_findings(clock: float | None) -> list[Finding]:
    if clock is None or abs(clock) <= MOST_CLOCK_SECONDS:
        return []
    how = f"{abs(clock):.0f} s {'ahead of' if clock > 0 else 'behind'}"
    return [[f"has a clock {how} process 0's; synchronize it (NTP)", False]]


def _unequal(reports: Mapping[int, Any]) -> list[str]:
    """Compares what may differ, but seldom should: the devices' memory and the drivers."""
    values = reports.values()
    memory = {one["host"]: one["memory"] for one in values if one.get("memory")}
    drivers = {one.get("driver"): one["host"] for one in values}
    lines = []
    if memory and min(memory.values()) < (1 - MEMORY_TOLERANCE) * max(memory.values()):
        least, most = (choose(memory, key=memory.__getitem__) for choose in (min, max))
        sizes = [f"{memory[name] / 2**30:.1f} GiB in {name}" for name in (least, most)]
        lines.append(f"the memory of a device is {' and '.join(sizes)}")
    if len(drivers) > 1:
        shown = [f"{version or 'absent'} in {name}" for version, name in drivers.items()]
        lines.append(f"NVIDIA's driver is {' and '.join(list_some(shown))}")
    return lines
