"""Rows of `benchmarks.gpu`: on disk as soon as they are measured, and with a limit for each.

A step that hangs cannot be ended from within its process, and one that crashes takes the process
with it. So one process measures the rows, and another watches the file that they are appended to.
It ends the first process when a row takes too long, records that, and starts it again. The new
process leaves out all rows that are in the file.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.compiled_steps import Counts
from benchmarks.results import plain
from benchmarks.turns import Estimate

# Has the path of the file, in the process that measures.
LOG_VARIABLE = "BENCHMARKS_GPU_ROWS"
POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one step.

    Attributes:
      name: Whose it is.
      seconds: Of a step, by round.
      ratio: Of a step's time to that of the first contender in the same round.
      counts: What was counted of it; `None` of PyTorch's.
      memory: The most that PyTorch held on a device, in bytes; `None` of the others.
      mfu: The share of the peak that the model's own operations are; `None` where no peak is known.
      losses: Of the first steps.
      problem: What went wrong, or "".
    """

    name: str
    seconds: tuple[float, ...] = ()
    ratio: Estimate | None = None
    counts: Counts | None = None
    memory: int | None = None
    mfu: float | None = None
    losses: tuple[float, ...] = ()
    problem: str = ""


@dataclasses.dataclass
class RowLog:
    """The file of rows.

    Attributes:
      path: Its path.
      rows: Those that were measured, or failed, by name.
      begun: The row that was begun and has not ended, or "".
      batch_size: The batch size that was found to fit; 0 before that.
    """

    path: Path
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    begun: str = ""
    batch_size: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file, if there is one; a line without an end is no line."""
        log = cls(path)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                log._take(json.loads(line))
        return log

    def begin(self, name: str) -> None:
        """Notes that a row is measured now."""
        self._append({"begun": name})

    def end(self, row: Row) -> None:
        """Notes a row, before anything follows from its comparison with others."""
        self._append({"row": dataclasses.asdict(row)})

    def note_batch_size(self, size: int) -> None:
        """Notes the batch size, which takes long to find."""
        self._append({"batch_size": size})

    def _append(self, entry: dict[str, Any]) -> None:
        text = json.dumps(entry, default=plain) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        self._take(json.loads(text))

    def _take(self, entry: dict[str, Any]) -> None:
        self.begun = entry.get("begun", "")
        self.batch_size = entry.get("batch_size", self.batch_size)
        if found := entry.get("row"):
            counts = found["counts"] and Counts(**found["counts"])
            lists = {name: tuple(found[name]) for name in ("seconds", "losses")}
            self.rows[found["name"]] = Row(**{**found, **lists, "counts": counts})


def watch(
    command: Sequence[str], path: Path, *, seconds: float, report: Callable[[str], None]
) -> int:
    """Runs the command that measures rows, again after each row that did not end.

    Args:
      command: The command. It finds the path of the file in `LOG_VARIABLE`.
      path: Where the file of rows is to be.
      seconds: How long a row may take.
      report: Is called with a sentence about each row that did not end.

    Returns:
      The exit code of the command that came to its end; 1 in place of 0 if a row did not.
    """
    are_all_ended = True
    while True:
        code = _run(command, path, seconds)
        log = RowLog.read(path)
        if not log.begun and code is not None:
            return (code if code >= 0 else 128 - code) or int(not are_all_ended)
        are_all_ended = False
        problem = f"its process ended with {code}"
        if code is None:
            problem = f"ended, because it took longer than {seconds:g} s"
        report(f"{log.begun}: {problem}; going on without it")
        log.end(Row(log.begun, problem=problem))


def _run(command: Sequence[str], path: Path, seconds: float) -> int | None:
    """Runs a command; returns its exit code, or `None` if a row took too long."""
    child = subprocess.Popen(
        command, env=os.environ | {LOG_VARIABLE: str(path)}, start_new_session=True
    )
    try:
        size, since = -1, time.monotonic()
        while child.poll() is None:
            if (now := path.stat().st_size if path.exists() else 0) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > seconds and RowLog.read(path).begun:
                return None
            time.sleep(POLL_SECONDS)
        return child.returncode
    finally:
        # PyTorch's processes as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
