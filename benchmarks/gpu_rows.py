"""Writes each row of `benchmarks.gpu` once it is measured, and limits the time of a row.

A step that hangs cannot be ended from within its process, and a step that crashes ends its process.
So one process measures the rows and appends them to a file, and another process watches this file.
If a row takes too long, the second process ends the first, records the failure, and starts the
first process again. The new process leaves out all rows that are in the file.
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

# The environment variable with the path of the file, in the process that measures.
LOG_VARIABLE = "BENCHMARKS_GPU_ROWS"
POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Row:
    """The results for one step.

    Attributes:
      name: The name of the step, see `benchmarks.gpu_steps`.
      seconds: The seconds of a step, by round.
      ratio: The step's time divided by the time of the first row's step in the same round.
      counts: The counts of the step; `None` for PyTorch.
      memory: PyTorch's peak memory on a device, in bytes; `None` for other steps.
      mfu: The model's FLOP/s divided by the device's peak; `None` if the peak is unknown.
      losses: The losses of the first steps.
      problem: Why the row has no times, or that its losses differ from the first row's; or "".
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
    """The file to which the measuring process appends its rows, and what was read from it.

    Attributes:
      path: The file's path.
      rows: The rows that were measured or failed, by name.
      begun: The name of the row that has begun and not ended, or "".
      batch_size: The batch size that fits; 0 while it is unknown.
    """

    path: Path
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    begun: str = ""
    batch_size: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file, if there is one; an unfinished last line is ignored."""
        log = cls(path)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                log._take(json.loads(line))
        return log

    def begin(self, name: str) -> None:
        """Writes that the measurement of a row begins."""
        self._append({"begun": name})

    def end(self, row: Row) -> None:
        """Writes a finished row; its ratio, MFU and comparison of losses are added later."""
        self._append({"row": dataclasses.asdict(row)})

    def note_batch_size(self, size: int) -> None:
        """Writes the batch size, which takes long to find."""
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
    """Runs the command that measures rows, and starts it again after a row that did not end.

    Args:
      command: The command, which finds the path of the file in `LOG_VARIABLE`.
      path: The path of the file of rows.
      seconds: The time limit of a row.
      report: Called with a line about each row that did not end.

    Returns:
      The command's exit code; 1 in place of 0 if a row did not end.
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
        # PyTorch's processes are in the same process group, so they end too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
