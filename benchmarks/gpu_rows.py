"""Runs each row of `benchmarks.gpu` in a process of its own, within a time limit.

A step that hangs cannot be ended from within its process, a step that crashes ends its process, and
JAX does not return memory to the device before its process ends. So the command starts a process
for each row. The process measures, writes its result to a file, and ends.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled_steps import Counts
from benchmarks.results import plain
from benchmarks.turns import Estimate

# A process that launches others has these seconds to end them.
END_SECONDS = 10.0
MOST_WORDS = 300
# The problem of a row that its process writes before it has measured all of the row.
UNFINISHED = "unfinished"
# The environment variable with the time at which `run_row` ends a process, and the seconds before
# it in which the process prints where it is.
ENDS, NOTE_SECONDS = "MANUALPAR_ROW_ENDS", 2.0


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one row.

    Attributes:
      name: The name of the row.
      seconds: The seconds of a step, by round.
      ratio: The step's time divided by the time of the first row's step in the same round.
      counts: The counts of the compiled step; `None` for PyTorch.
      memory: The most bytes that were in use on a device; `None` if the device does not tell.
      compiled: The bytes of the compiled step: arguments, results that are new, temporaries.
      planned: The plan of the step: `seconds`, `bytes`, `topology`; empty if there is none.
      options: The compiler options of the step, in words.
      mfu: The model's FLOP/s divided by the device's peak; `None` if the peak is unknown.
      losses: The losses of the first steps.
      bandwidths: For collectives: pairs of the bytes and the median seconds.
      facts: For rows about the machine: what was found.
      problem: Why the row has no times, or that its losses differ from the first row's; or "".
    """

    name: str
    seconds: tuple[float, ...] = ()
    ratio: Estimate | None = None
    counts: Counts | None = None
    memory: int | None = None
    compiled: int | None = None
    planned: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: str = ""
    mfu: float | None = None
    losses: tuple[float, ...] = ()
    bandwidths: tuple[tuple[int, float], ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problem: str = ""

    def write(self, path: Path) -> None:
        """Writes the row to a file; several processes may write the same row."""
        text = json.dumps(dataclasses.asdict(self), default=plain)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(text, encoding="utf-8")
        own.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Row":
        """Reads a row that `write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        found |= {name: tuple(found[name]) for name in ("seconds", "losses")}
        found["bandwidths"] = tuple((size, seconds) for size, seconds in found["bandwidths"])
        if found["counts"]:
            found["counts"] = Counts(**found["counts"])
        return cls(**found)


def run_row(
    name: str, command: Sequence[str], *, limit: float, environment: Mapping[str, str]
) -> Row:
    """Runs a command that measures a row.

    Args:
      name: The name of the row.
      command: The command, to which `--result FILE` is added, and which writes the row there.
      limit: The most seconds that the command may take.
      environment: The environment variables of the command.

    Returns:
      The row. If the command takes too long, or ends without a result, `problem` says so; the row
      then has what the command wrote of it before, with the problem `UNFINISHED`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, said = Path(folder) / "row.json", Path(folder) / "said"
        with said.open("wb") as output:
            child = subprocess.Popen(
                [*command, "--result", str(path)],
                env={**environment, ENDS: str(time.time() + limit)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        row = Row.read(path) if path.exists() else Row(name, problem=UNFINISHED)
        if code in (0, None) and row.problem != UNFINISHED:
            return row
        text = said.read_text(encoding="utf-8", errors="replace")
        if code is None:
            problem = f"ended, because it took longer than {limit:g} s{_where(text)}"
        else:
            problem = f"its process ended with {code}{_last_words(text)}"
        return dataclasses.replace(row, problem=problem)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process, which may have to end others first, and then its process group."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def note_where_it_hangs() -> None:
    """Lets this process print where it is shortly before `run_row` ends it."""
    if ends := os.environ.get(ENDS):
        faulthandler.dump_traceback_later(max(float(ends) - time.time() - NOTE_SECONDS, 0.1))


def _where(output: str) -> str:
    """Returns the function of ours in which a process hung, if its output says so."""
    found = re.search(r'File "\S*?((?:manualpar|benchmarks)/\S+)", line (\d+) in (\S+)', output)
    return f", in {found[3]} ({found[1]}:{found[2]})" if found else ""


def _last_words(output: str) -> str:
    """Returns the last error in the output of a process, with a colon in front; "" for none."""
    lines = [re.sub(r"^\[\d+\] ", "", line).strip() for line in output.splitlines()]
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|error)\b", line)]
    found = fatal[:1] or (errors or [line for line in lines if line])[-1:]
    return f": {found[0][:MOST_WORDS]}" if found else ""
