"""Gives malformed inputs to the commands, and checks their error messages.

python -m benchmarks.malformed_inputs [--only CLASS,CLASS] [--list] [--jobs 2]

A command survives an input if it ends with exit code 2, or with 6 for a damaged file. It must write
one line to standard error, which begins with `error: ` and names the mistake. It must print no
traceback and compile nothing, and stay within the limits of time and memory below. The inputs come
from `malformed_cases`, `malformed_files`, `malformed_models` and `malformed_programs`. Each input
runs in a fork of one interpreter that has imported everything, because imports take seconds. The
exit code of this command is 1 if a command does not survive an input.
"""

import argparse
import dataclasses
import importlib
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks.malformed_cases import Case
from benchmarks.malformed_files import make_cases

CPU_SECONDS = 30
WALL_SECONDS = 300  # Generous, because the machine may be busy.
RESIDENT_BYTES = 2**30
ADDRESS_BYTES = 2**35  # Most of this is only reserved, by simulated devices and their threads.
ALLOWED_CODES = (2, 6)
FORKING = threading.Lock()  # filelock refuses a fork while another thread forks.


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command did with a malformed input.

    Attributes:
      code: The exit code; `-N` if signal N ended the command.
      output: The text on standard output.
      error: The text on standard error.
      compiled: The number of compiled programs.
      resident: The peak resident memory, in bytes.
    """

    code: int
    output: str
    error: str
    compiled: int
    resident: int


def shortcomings(case: Case, answer: Answer) -> list[str]:
    """Returns the faults of an answer; an empty list if the command survived the input."""
    lines = answer.error.splitlines()
    checks = {
        f"exit code {answer.code}": answer.code in ALLOWED_CODES,
        "a traceback": "Traceback (most" not in answer.output + answer.error,
        f"{len(lines)} lines": len(lines) == 1 and lines[0].startswith("error: "),
        f"{case.names!r} is not named": case.names in answer.error,
        f"{answer.compiled} programs compiled": not answer.compiled,
        f"{answer.resident / 2**20:.0f} MiB": answer.resident <= RESIDENT_BYTES,
    }
    return [what for what, is_fine in checks.items() if not is_fine]


def ask(case: Case, folder: Path) -> Answer:
    """Runs a case in a fork of this process, which must not have initialised jax's devices."""
    paths = {name: folder / name for name in ("output", "error", "compiled")}
    with FORKING:
        pid = os.fork()
    if not pid:
        _answer(case, folder, paths)
    deadline = time.monotonic() + WALL_SECONDS
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    _, status, usage = ended
    texts = {
        name: path.read_text(errors="replace") if path.exists() else ""
        for name, path in paths.items()
    }
    unit = 1 if sys.platform == "darwin" else 1024
    return Answer(
        os.waitstatus_to_exitcode(status),
        texts["output"],
        texts["error"],
        len(texts["compiled"]),
        usage.ru_maxrss * unit,
    )


def _answer(case: Case, folder: Path, paths: dict[str, Path]) -> None:
    """Runs the command in the forked process, and ends the process."""
    code = 1
    try:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
        count_compilations(paths["compiled"])
        sys.argv = [case.module, *case.arguments]
        code = run_as_main(case.module)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


def count_compilations(path: Path) -> None:
    """Makes this process append a byte to a file for each program that it compiles from now on."""

    def note(event: str, duration_secs: float, **more: str | int) -> None:
        del duration_secs, more
        if "backend_compile" in event:
            # Neither a killed process nor `os._exit` flushes a file that is still open.
            with path.open("ab") as compiled:
                compiled.write(b"x")

    jax.monitoring.register_event_duration_secs_listener(note)


def run_as_main(module: str) -> int:
    """Runs a module as `python -m` does; returns the exit code that its process would have."""
    try:
        runpy.run_path(str(importlib.import_module(module).__file__), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return error.code or 0
    return 0


def main() -> int:
    """Runs the cases, and prints how many were tried and survived in each class."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.malformed_inputs", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="classes, with commas")
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (default: 2)")
    flags = parser.parse_args()
    tried: Counter[str] = Counter()
    fell: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "inputs").mkdir()
        wanted = [part for part in flags.only.split(",") if part]
        cases = [
            case
            for case in make_cases(Path(scratch) / "inputs")
            if not wanted or case.kind in wanted
        ]
        if flags.list:
            for case in cases:
                print(ascii(f"{case.kind}: {case.name}")[1:-1])
            return 0
        for module in {case.module for case in cases}:
            importlib.import_module(module)
        importlib.import_module("tokenizers")
        started = time.monotonic()

        def judge(number: int) -> tuple[Case, Answer]:
            folder = Path(scratch) / str(number)
            folder.mkdir()
            return cases[number], ask(cases[number], folder)

        with ThreadPoolExecutor(flags.jobs) as pool:
            for case, answer in pool.map(judge, range(len(cases))):
                tried[case.kind] += 1
                if found := shortcomings(case, answer):
                    fell[case.kind] += 1
                    print(ascii(f"{case.kind}: {case.name}: {', '.join(found)}")[1:-1])
                    print("   ", ascii(answer.error.strip()[-300:])[1:-1], flush=True)
    print(f"{'class':16s} tried  survived")
    for kind, count in tried.items():
        print(f"{kind:16s} {count:5d}  {count - fell[kind]:8d}")
    survived = tried.total() - fell.total()
    print(f"{'all':16s} {tried.total():5d}  {survived:8d}  in {time.monotonic() - started:.0f} s")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
