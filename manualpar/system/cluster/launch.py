"""Starts several processes of a command on this machine, for development.

    manualpar launch --processes=2 [--devices-per-process=4] [--grace=15] <command ...>

The command begins at the first argument that is no flag, or after `--`. A Python file such as
`train.py` is run by this Python.

`manualpar launch --template=slurm` starts nothing, but prints a script for Slurm; see
`manualpar launch --template=slurm --help`.

Each process reads its number from its environment (`manualpar.system.cluster.initialize`). The
output of the processes is printed line by line with the prefixes `[0] `, `[1] ` and so on. The
launcher forwards the first SIGINT or SIGTERM that it receives to all processes; at a second one it
kills them. It forwards every SIGUSR1, which asks the processes to save and stop. When a process
ends with an error, the other processes have `--grace` seconds to end by themselves, with a sentence
that names the failed process. Then they get SIGTERM, and two seconds later SIGKILL. After a SIGTERM
to the launcher they also have `--grace` seconds, to save and end, before SIGKILL.

The processes connect to each other only on the loopback interface, and share a secret token. But
JAX's CPU collectives (gloo) in every process listen at the address of this host's name, and jax
0.10.2 has no setting for this address; see docs/cluster_reference.md.

The exit code is 0, or the code of the first process that failed: 128 plus the signal if a signal
ended it. A line names this process and its signal or exit code. If several processes failed at
about the same time, a process that was killed counts as the first, and after it a process that
aborted, because the other processes fail when they lose one. The exit code is 2 for a mistake on
the command line, and 127 if the command cannot be started.
"""

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from typing import IO

from manualpar.errors import UsageError
from manualpar.system.cluster import job_template
from manualpar.system.cluster.stopping import STOP_SIGNALS
from manualpar.system.reports.flags import Flag, parse_flags

NOT_STARTED_EXIT_CODE = 127
TOKEN_VARIABLE = "MANUALPAR_TOKEN"
MOST = 1024  # The most processes, and the most simulated devices in a process.
TERMINATE_SECONDS = 2.0
POLL_SECONDS = 0.05
# The system closes the connections of a killed process before it reports the end of this process.
# So other processes may fail earlier. For this long a killed process counts as the first.
SETTLE_SECONDS = 1.0
FLAGS: Mapping[str, Flag] = {
    "processes": Flag("The number of processes.", int, is_required=True),
    "devices_per_process": Flag("The number of CPU devices that each process simulates.", int),
    "grace": Flag(
        "The seconds that the other processes have to end after a failure.",
        float,
        15.0,
        value="SECONDS",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs the launcher; returns the exit code. `argv` begins with the program's name."""
    own, command = _split(argv[1:])
    if any(argument.partition("=")[0] == "--template" for argument in own):
        return job_template.main(argv)
    usage = (__doc__ or "").replace("manualpar launch", "{program}", 1)

    def check(flags: types.SimpleNamespace) -> None:
        _check_numbers(flags)
        if not command:
            raise UsageError(
                "no command, expected one after the flags, such as manualpar train fsdp."
            )

    flags = parse_flags([argv[0], *own], usage, FLAGS, check=check)
    if command[0].endswith(".py") and not os.access(command[0], os.X_OK):
        command = [sys.executable, *command]
    return _launch(command, flags.processes, flags.devices_per_process, flags.grace)


def _check_numbers(flags: types.SimpleNamespace) -> None:
    for name in ("processes", "devices_per_process"):
        count = getattr(flags, name)
        if count is not None and not 0 < count <= MOST:
            raise UsageError(
                f"--{name}={count}: expected a positive integer such as 2, at most {MOST}."
            )
    if not 0 <= flags.grace < float("inf"):
        raise UsageError(f"--grace={flags.grace}: expected a number of seconds.")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line into the launcher's flags and the command."""
    own, rest = [], list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        own.append(rest.pop(0))
        takes_value = "=" not in own[-1] and own[-1] not in ("-h", "--help")
        if takes_value and rest and not rest[0].startswith("-"):
            own.append(rest.pop(0))
    return own, rest[1:] if rest[:1] == ["--"] else rest


def _launch(command: Sequence[str], processes: int, devices: int | None, grace: float) -> int:
    """Starts the processes of a command and waits until all have ended; returns the exit code."""
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    earlier = {
        number: signal.signal(number, lambda number, frame: signals.put(number))
        for number in (signal.SIGINT, *STOP_SIGNALS)
    }
    # Without this variable, Python prints buffered output late, or never if the process is killed.
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    variables[TOKEN_VARIABLE] = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables["MANUALPAR_COORDINATOR_ADDRESS"] = f"127.0.0.1:{server.getsockname()[1]}"
    variables["MANUALPAR_NUM_PROCESSES"] = str(processes)
    if devices is not None:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    started: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    try:
        for process in range(processes):
            try:
                one = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**variables, "MANUALPAR_PROCESS_ID": str(process)},
                    # Ctrl-C in a terminal sends a signal to a whole process group. In a session of
                    # its own, a process gets the signal only from the launcher.
                    start_new_session=True,
                )
            except OSError as error:
                print(f"error: {command[0]!r} cannot be started: {error}", file=sys.stderr)
                return NOT_STARTED_EXIT_CODE
            started.append(one)
            for source, target in ((one.stdout, sys.stdout), (one.stderr, sys.stderr)):
                prefix = f"[{process}] ".encode()
                copying = (source, target.buffer, prefix, lock)
                readers.append(threading.Thread(target=_pass_on, args=copying, daemon=True))
                readers[-1].start()
        return _watch(started, signals, grace)
    finally:
        for one in started:
            _send(one, signal.SIGKILL)
            one.wait()
        for reader in readers:
            # Does not wait forever, because a child of the process may keep its output open.
            reader.join(TERMINATE_SECONDS)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _watch(
    started: Sequence[subprocess.Popen[bytes]], signals: queue.SimpleQueue[int], grace: float
) -> int:
    """Waits until all processes have ended, and forwards signals; returns the exit code."""
    code: int | None = None
    first: dict[int, int] = {}  # The processes that were the first seen to have failed.
    num_signals = num_forwarded = 0
    decide_at = terminate_at = kill_at = float("inf")
    while True:
        running = [one for one in started if one.poll() is None]
        failed = {number: one.returncode for number, one in enumerate(started) if one.returncode}
        killed = {number: status for number, status in failed.items() if _rank(status) == 0}
        if failed and not first:
            first, terminate_at = failed, time.monotonic() + grace
            decide_at = time.monotonic() + min(grace, SETTLE_SECONDS)
        if code is None and first and (killed or not running or time.monotonic() >= decide_at):
            # After a SIGTERM to the launcher, its own signals end processes.
            first = first if num_signals else first | killed
            best = min(map(_rank, first.values()))
            first = {number: status for number, status in first.items() if _rank(status) == best}
            status = next(iter(first.values()))
            code = 128 - status if status < 0 else status
            if not (num_signals if status < 0 else num_forwarded):
                print(_name_failed(first), file=sys.stderr, flush=True)
        if not running:
            return code or 0
        while not signals.empty():
            number = signals.get()
            num_forwarded += 1
            num_signals += number in (signal.SIGINT, signal.SIGTERM)
            for one in running:
                _send(one, number if num_signals < 2 else signal.SIGKILL)
            if number == signal.SIGTERM:
                kill_at = min(kill_at, time.monotonic() + grace)
        if time.monotonic() >= terminate_at:
            for one in running:
                _send(one, signal.SIGTERM)
            terminate_at = float("inf")
            kill_at = min(kill_at, time.monotonic() + TERMINATE_SECONDS)
        if time.monotonic() >= kill_at:
            names = ", ".join(str(started.index(one)) for one in running)
            print(f"killed, because it did not end: process {names}", file=sys.stderr, flush=True)
            for one in running:
                _send(one, signal.SIGKILL)
            kill_at = float("inf")
        time.sleep(POLL_SECONDS)


def _rank(status: int) -> int:
    """Returns 0 for a process that was killed, 1 for one that aborted, 2 for an exit code.

    A killed process ends by no fault of its own. The loss of it makes the other processes end with
    an error, and XLA aborts some of them.
    """
    if status >= 0:
        return 2
    return 1 if status == -signal.SIGABRT else 0


def _name_failed(failed: Mapping[int, int]) -> str:
    """Returns a line for each status of the failed processes, with their numbers."""
    lines = []
    for status in dict.fromkeys(failed.values()):
        numbers = [str(number) for number, other in failed.items() if other == status]
        are_many = len(numbers) > 1
        who = f"process{'es' * are_many} {', '.join(numbers)}"
        if status < 0:
            # Real-time signals have no names.
            names = {each.value: each.name for each in signal.Signals}
            by = names.get(-status, f"signal {-status}")
            lines.append(f"{who} {'were' if are_many else 'was'} ended by {by}")
        else:
            lines.append(f"{who} ended with exit code {status}")
    return "\n".join(lines)


def _pass_on(source: IO[bytes], target: IO[bytes], prefix: bytes, lock: threading.Lock) -> None:
    """Copies complete lines from `source` to `target`, each with the prefix in front."""
    with source:
        for line in source:
            with lock:
                target.write(prefix + line.rstrip(b"\r\n") + b"\n")
                target.flush()


def _send(one: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a process; sends SIGKILL also to the processes that it has started."""
    if number != signal.SIGKILL:
        one.send_signal(number)  # Does nothing if the process has ended.
        return
    with contextlib.suppress(ProcessLookupError):  # Raised if all of them have ended.
        os.killpg(one.pid, number)
