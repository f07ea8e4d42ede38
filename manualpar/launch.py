"""Starts several processes of a command on this machine, for development.

python -m manualpar.launch --processes=2 [--devices-per-process=4] [--grace=15] -- <command ...>

Each process finds out from its environment which one it is (`manualpar.cluster.initialize`). Their
output comes out line by line behind `[0] `, `[1] ` and so on. SIGINT and SIGTERM go to all of them,
and a second one kills them. When one ends with an error the others have `--grace` seconds to end by
themselves, which they do with a sentence that names it; then they get SIGTERM, and two seconds
later SIGKILL. After a SIGTERM to the launcher they have as long to save and end before SIGKILL.

All of them listen on the loopback alone, and share a token that nobody else knows.

The exit code is that of the first process that failed, 128 more than the signal if a signal ended
it; else 0. A mistake on the command line ends with 2, a command that cannot be started with 127.
"""

import dataclasses
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from manualpar.usage import OneSentenceParser

NOT_STARTED_EXIT_CODE = 127
TOKEN_VARIABLE = "MANUALPAR_TOKEN"
MOST = 1024  # Processes on one machine, or simulated devices in one of them.
TERMINATE_SECONDS = 2.0
POLL_SECONDS = 0.05


@dataclasses.dataclass
class _Process:
    """A process, and the threads that read its output."""

    popen: subprocess.Popen[bytes]
    readers: list[threading.Thread]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
      argv: The arguments, by default those of this process.

    Returns:
      The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[at + 1 :]
    parser = OneSentenceParser(
        prog="python -m manualpar.launch",
        usage="%(prog)s --processes=N [--devices-per-process=N] [--grace=SECONDS] -- command ...",
        description="Starts several processes of a command on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", required=True, help="how many")
    parser.add_argument("--devices-per-process", help="simulate so many CPU devices in each")
    parser.add_argument(
        "--grace", default="15", help="seconds to end in when one has failed (default: 15)"
    )
    options = parser.parse_args(arguments[:at])
    processes = _parse_count(parser, "--processes", options.processes)
    devices = options.devices_per_process
    if devices is not None:
        devices = _parse_count(parser, "--devices-per-process", devices)
    try:
        grace = float(options.grace)
    except ValueError:
        grace = -1.0
    if not 0 <= grace < float("inf"):
        parser.error(f"--grace={options.grace}: expected a number of seconds.")
    if not command:
        parser.error("no command, expected one after --, such as -- python -m experiments.fsdp.")
    return launch(command, processes=processes, devices_per_process=devices, grace_seconds=grace)


def launch(
    command: Sequence[str],
    *,
    processes: int,
    devices_per_process: int | None = None,
    grace_seconds: float = 15.0,
) -> int:
    """Starts processes and waits for their end; call it in the main thread.

    Args:
      command: What each runs.
      processes: How many.
      devices_per_process: How many CPU devices each simulates; `None` leaves the devices alone.
      grace_seconds: How long the others may take when one has failed, and all after a SIGTERM.

    Returns:
      The exit code.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def handle(number: int, frame: FrameType | None) -> None:
        signals.put(number)

    handled = (signal.SIGINT, signal.SIGTERM)
    earlier = {number: signal.signal(number, handle) for number in handled}
    started: list[_Process] = []
    try:
        address = f"127.0.0.1:{_free_port()}"
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        lock = threading.Lock()
        for process in range(processes):
            variables = _variables(address, processes, process, devices_per_process)
            variables[TOKEN_VARIABLE] = token
            try:
                started.append(_start(command, variables, f"[{process}] ".encode(), lock))
            except OSError as error:
                print(f"error: {command[0]!r} cannot be started: {error}", file=sys.stderr)
                return NOT_STARTED_EXIT_CODE
        return _watch(started, signals, grace_seconds)
    finally:
        for one in started:
            _send(one, signal.SIGKILL)
            one.popen.wait()
            for reader in one.readers:
                # A process that it started may keep its output open.
                reader.join(TERMINATE_SECONDS)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _watch(started: Sequence[_Process], signals: queue.SimpleQueue[int], grace: float) -> int:
    """Waits until all have ended, passing signals on; returns the exit code."""
    code: int | None = None
    num_signals = 0
    terminate_at = kill_at = float("inf")
    while running := [one for one in started if one.popen.poll() is None]:
        if code is None and (code := _first_failure(started)) is not None:
            terminate_at = time.monotonic() + grace
            if not num_signals:
                _say_who_was_killed(started)
        while not signals.empty():
            number, num_signals = signals.get(), num_signals + 1
            for one in running:
                _send(one, number if num_signals == 1 else signal.SIGKILL)
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
    return (code if code is not None else _first_failure(started)) or 0


def _say_who_was_killed(started: Sequence[_Process]) -> None:
    """Names processes that a signal ended, because they could not say it themselves."""
    for number, one in enumerate(started):
        if (one.popen.returncode or 0) < 0:
            name = signal.Signals(-one.popen.returncode).name
            print(f"process {number} was ended by {name}", file=sys.stderr, flush=True)


def _first_failure(started: Sequence[_Process]) -> int | None:
    """The exit code of a process that failed, by preference of one that a signal ended."""
    codes = [one.popen.returncode for one in started if one.popen.returncode]
    # The others' codes only say that they noticed.
    signalled = [128 - code for code in codes if code < 0]
    return (signalled or codes or [None])[0]


def _start(
    command: Sequence[str], variables: dict[str, str], prefix: bytes, lock: threading.Lock
) -> _Process:
    """Starts a process, and the threads that copy its output."""
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        # Ctrl-C in a terminal goes to a whole group. In a group of its own a process gets it only
        # from here.
        start_new_session=True,
    )
    assert popen.stdout is not None
    assert popen.stderr is not None
    readers = [
        threading.Thread(target=_pass_on, args=(source, target, prefix, lock), daemon=True)
        for source, target in (
            (popen.stdout, sys.stdout.buffer),
            (popen.stderr, sys.stderr.buffer),
        )
    ]
    for reader in readers:
        reader.start()
    return _Process(popen, readers)


def _pass_on(source: IO[bytes], target: IO[bytes], prefix: bytes, lock: threading.Lock) -> None:
    """Copies lines, each behind the prefix and as a whole."""
    with source:
        for line in source:
            with lock:
                target.write(prefix + line.rstrip(b"\r\n") + b"\n")
                target.flush()


def _send(one: _Process, number: int) -> None:
    """Sends a signal to a process; SIGKILL goes to the processes that it started too."""
    if number == signal.SIGKILL:
        try:
            os.killpg(one.popen.pid, number)
        except ProcessLookupError:
            return  # All of them have ended.
    elif one.popen.poll() is None:
        one.popen.send_signal(number)


def _variables(address: str, processes: int, process: int, devices: int | None) -> dict[str, str]:
    """The variables of a process's environment that ours does not have."""
    variables = {
        "MANUALPAR_COORDINATOR_ADDRESS": address,
        "MANUALPAR_NUM_PROCESSES": str(processes),
        "MANUALPAR_PROCESS_ID": str(process),
        # Output in Python's buffers would come late, or never if the process is killed.
        "PYTHONUNBUFFERED": "1",
    }
    if devices is not None:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return variables


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _parse_count(parser: OneSentenceParser, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 0 < int(text) <= MOST):
        parser.error(f"{name}={text}: expected a positive integer such as 2, at most {MOST}.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
