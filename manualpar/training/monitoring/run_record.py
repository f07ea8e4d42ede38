"""Reads the files of a run and makes charts: lines of points over the steps.

A `Chart` is only data; the module `charts` draws it. `None` stands for a value that was not finite:
the line has a gap there.
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from manualpar.system.storage.durable_files import LineFile
from manualpar.system.storage.untrusted import NotAFileError, open_file, parse_object, read_object
from manualpar.training.monitoring.run_files import (
    CONFIG_FILE,
    DISCARDED_FILE,
    METRICS_FILE,
    THROUGHPUT_FILE,
)

Point = tuple[int, float | None]
Record = Mapping[str, Any]

SHOWN_LINES = 10
LARGEST = 1e300  # The largest number in a chart, so that differences of two numbers stay finite.
SPLITS = ("train", "eval", "test")
# The charts of metrics: name of the metric -> (title, unit).
METRIC_CHARTS: Mapping[str, tuple[str, str]] = {
    "loss": ("Loss", "nats"),
    "bits_per_byte": ("Bits per byte", "bits"),
    "accuracy": ("Accuracy", ""),
    "learning_rate": ("Learning rate", ""),
    "gradient_norm": ("Gradient norm", ""),
}
FROM_ZERO = ("learning_rate", "gradient_norm")
LOG = ("loss", "bits_per_byte")
THROUGHPUT_CHARTS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("Throughput", "tokens/s"),
    "examples_per_second": ("Throughput", "examples/s"),
    "mfu": ("Model FLOPs utilization", ""),
}


class RunRecord(NamedTuple):
    """The content of a run's files.

    `resumes` are the lines of `discarded.jsonl`: one line for each resume and each rollback.
    `times` are the lines of `times.jsonl`: what the run spent its time on.
    `left_out` has a sentence for each file that has content which no run writes, so that it was
    left out.
    """

    config: Record
    metrics: Sequence[Record]
    throughput: Sequence[Record]
    resumes: Sequence[Record]
    left_out: Sequence[str]
    times: Sequence[Record] = ()


class Chart(NamedTuple):
    """The points of each split, in the order of steps.

    `resumes` are the steps from which the run was resumed, and the steps to which it went back. If
    `from_zero`, the axis begins at 0, so that small differences look small. If `is_log`, the axis
    is logarithmic where the values have several orders of magnitude.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[Point]]
    resumes: Sequence[int] = ()
    from_zero: bool = False
    is_log: bool = False


def read_run(workdir: Path) -> RunRecord:
    """Reads the existing files of a run; ignores a last line that a killed run left unfinished."""
    left_out: list[str] = []
    path, config = workdir / CONFIG_FILE, {}
    try:
        config = read_object(path) if os.path.lexists(path) else {}
    except (OSError, ValueError) as error:
        left_out.append(_explain_left_out(path, error))
    metrics = _read_lines(workdir / METRICS_FILE, _check_numbers, left_out)
    throughput = _read_lines(workdir / THROUGHPUT_FILE, _check_numbers, left_out)
    resumes = _read_lines(workdir / DISCARDED_FILE, _check_resume, left_out)
    times = _read_lines(workdir / TIMES_FILE, check_interval, left_out)
    return RunRecord(config, metrics, throughput, resumes, left_out, times)


def _read_lines(
    path: Path, check: Callable[[Record], None], left_out: list[str]
) -> Sequence[Record]:
    """Reads the JSON objects of a file, one per line, and ignores an unfinished last line.

    Lines that no run writes are left out, and a sentence about these lines is added to `left_out`.
    """
    records, damaged, reason, number = [], [], "", 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = parse_object(line)
                    check(record)
                    records.append(record)
                except ValueError as error:
                    damaged.append(number)
                    reason = reason or str(error)
    except FileNotFoundError:
        return []
    except OSError as error:
        left_out.append(_explain_left_out(path, error))
    if damaged:
        shown = ", ".join(map(str, damaged[:SHOWN_LINES]))
        more = f" and {len(damaged) - SHOWN_LINES} more" if len(damaged) > SHOWN_LINES else ""
        left_out.append(
            f"left out {len(damaged)} of the {number} lines of {path}, which no run writes: "
            f"{shown}{more} (line {damaged[0]} {reason})"
        )
    return records


def _explain_left_out(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, NotAFileError | ValueError):
        return f"left out {path}, which {error}"
    return f"left out {path}, which cannot be read: {error.strerror}"


def _check_numbers(record: Record) -> None:
    """Refuses a line that does not have a step, a split, and numbers that a chart can show."""
    values = {**record}
    _check_step(values.pop("step", None))
    split = values.pop("split", None)
    # A strict pattern, because matplotlib would read a dollar sign as the start of a formula.
    if not isinstance(split, str) or not re.fullmatch(r"[\w.-]{1,40}", split):
        raise ValueError(f"has the split {split!r:.40}")
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and abs(value) <= LARGEST):
            raise ValueError(f"has {value!r:.40} for {name!r:.40}")


def _check_resume(record: Record) -> None:
    _check_step(record.get("resumed_after_step"))


def _check_step(step: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        raise ValueError(f"has the step {step!r:.40}")


def make_charts(run: RunRecord) -> list[Chart]:
    """Makes a chart of each metric and each throughput number of a run, metrics first."""
    resumes = [record["resumed_after_step"] for record in run.resumes]
    charts: list[Chart] = []
    for records, names in ((run.metrics, METRIC_CHARTS), (run.throughput, THROUGHPUT_CHARTS)):
        for name, (title, unit) in names.items():
            lines: dict[str, list[Point]] = {}
            for record in (record for record in records if name in record):
                lines.setdefault(record["split"], []).append((record["step"], record[name]))
            # Leaves out examples per second, whose chart would look like tokens per second.
            is_known = name == "examples_per_second" and any(c.unit == "tokens/s" for c in charts)
            if lines and not is_known:
                lines = {split: lines[split] for split in sort_splits(lines)}
                from_zero = records is run.throughput or name in FROM_ZERO
                charts.append(Chart(title, unit, lines, resumes, from_zero, name in LOG))
    return charts


def sort_splits(splits: Iterable[str]) -> list[str]:
    """Sorts the names of splits in the order of `SPLITS`; other names come last."""
    return sorted(splits, key=lambda split: (*(split != known for known in SPLITS), split))


def final_numbers(run: RunRecord) -> dict[str, dict[str, float | None]]:
    """Returns the last value of each metric, by metric and split."""
    numbers: dict[str, dict[str, float | None]] = {}
    for record in (*run.metrics, *run.throughput):
        for name, value in record.items():
            if name not in ("step", "split"):
                numbers.setdefault(name, {})[record["split"]] = value
    return numbers


# -------------------------------------------------------------------------------------------------
# What a run spends its time on: training, starts, saves, stalls, stops, and steps done again.
#
# Process 0 writes a line into `times.jsonl` for each interval of its main thread. An interval
# begins where the earlier one ended, so the intervals of a start add up to its time. No line is
# ever cut off, because the time was spent even if a resumed run does the steps again. Between the
# last line of a start and the beginning of the next start the run stood still. So all intervals
# add up to the time since the run first began.
#
# A step is dispatched, and computed later. So a wait for the devices belongs to the interval in
# which the main thread waits. If a run is killed, the time since its last line counts as standing
# still.


TIMES_FILE = "times.jsonl"
STARTING, RESTORING, COMPILING = "starting", "restoring", "compiling"
TRAINING, EVALUATING, COMPARING = "training", "evaluating", "comparing replicas"
SAVING, STALLED, STOPPING, ENDING = "saving", "stalled", "stopping", "ending"
STOPPED, REPEATED = "standing still", "training again"  # Found by `add_up`, in no line.
WHAT = (
    *(STARTING, RESTORING, COMPILING, TRAINING, EVALUATING, COMPARING),
    *(SAVING, STALLED, STOPPING, ENDING),
)
# Shorter intervals are added to the next, so that a run of quick steps writes few lines.
SHORTEST = 1e-3
# An interval that goes on is written at a report if it has lasted this long.
FLUSH_SECONDS = 1.0


class TimeLedger:
    """Divides the time of this process's main thread. Only its main thread may use it."""

    def __init__(self, *, get_time: Callable[[], float] = time.monotonic) -> None:
        """Begins with the interval `STARTING`."""
        self._get_time = get_time
        self._began = self._at = get_time()
        self._epoch = time.time() - self._at
        self._what = STARTING
        self._first_step = self._step = 0  # At the beginning of the interval, and now.
        self._begins = True
        self._early: list[dict[str, Any]] | None = []  # Until `write_to`.
        self._file: LineFile | None = None

    def write_to(self, path: Path | None) -> None:
        """Writes all intervals into a file, also the earlier ones; `None`: drops them."""
        if path is not None:
            self._file = LineFile(path)
            for line in self._early or []:
                self._file.append(line)
        self._early = None

    @property
    def elapsed(self) -> float:
        """The seconds since this object was made."""
        return self._get_time() - self._began

    def set_step(self, step: int) -> None:
        """Records that `step` updates are made."""
        self._step = step

    def enter(self, what: str) -> None:
        """Ends the current interval, and begins another."""
        if (seconds := self._get_time() - self._at) >= SHORTEST:
            self._write(seconds)
        self._what = what

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Begins an interval for the context; afterwards the earlier kind goes on."""
        before = self._what
        self.enter(what)
        try:
            yield
        finally:
            self.enter(before)

    def flush(self, *, always: bool = False) -> None:
        """Writes the current interval, which goes on, so that a kill loses little of it.

        Unless `always`, an interval of less than a second is not written yet.
        """
        seconds = self._get_time() - self._at
        if always or seconds >= FLUSH_SECONDS:
            self._write(seconds)

    def stalled(self, seconds: float) -> None:
        """Turns the last seconds of the current interval into a stall."""
        what, now = self._what, self._get_time()
        seconds = min(seconds, now - self._at)
        self._write(now - self._at - seconds)
        self._what = STALLED
        self._write(now - self._at)
        self._what = what

    def close(self) -> None:
        """Writes the last interval, and closes the file."""
        if self._file is not None:
            self._write(self._get_time() - self._at)
            self._file.close()
            self._file = None

    def _write(self, seconds: float) -> None:
        line = {
            "what": self._what,
            "began": self._epoch + self._at,
            "seconds": seconds,
            "from": self._first_step,
            "step": self._step,
            **({"starts": True} if self._begins else {}),
        }
        self._at, self._first_step, self._begins = self._at + seconds, self._step, False
        if self._early is not None:
            self._early.append(line)
        elif self._file is not None:
            self._file.append(line)


def check_interval(line: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a line that no `TimeLedger` writes."""
    if line.get("what") not in WHAT:
        raise ValueError(f"has the interval {line.get('what')!r:.40}")
    for name in ("began", "seconds"):
        value: Any = line.get(name)
        if type(value) not in (int, float) or not 0 <= value < 1e12:
            raise ValueError(f"has {value!r:.40} for {name!r}")
    for name in ("from", "step"):
        value = line.get(name)
        if type(value) is not int or not 0 <= value < 2**53:
            raise ValueError(f"has {value!r:.40} for {name!r}")


@dataclasses.dataclass(frozen=True)
class Interval:
    """An interval of a run; `began` is in seconds since 1970, and `step` the step at its end."""

    what: str
    began: float
    seconds: float
    first_step: int
    step: int

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Self:
        """Reads a line of `times.jsonl`, which `check_interval` has checked."""
        return cls(line["what"], line["began"], line["seconds"], line["from"], line["step"])


class RunTimes(NamedTuple):
    """The time of a run.

    Attributes:
      seconds: The seconds of each kind of interval, in the order in which the kinds appeared.
      losses: The intervals in which the run did not train, the oldest first; an interval that goes
        on after another kind of interval is one.
    """

    seconds: dict[str, float]
    losses: list[Interval]

    @property
    def total(self) -> float:
        """The seconds since the run first began."""
        return math.fsum(self.seconds.values())


def add_up(lines: Iterable[Mapping[str, Any]]) -> RunTimes:
    """Adds up the intervals of a run, and finds when it stood still and which steps it did again.

    The time of the training after the checkpoint from which the run goes on is `REPEATED`: the run
    does these steps again.
    """
    parts: list[Interval] = []
    reached = 0  # The largest step of a training that lasts.
    for line in lines:
        one = Interval.from_line(line)
        if parts and line.get("starts"):
            ended = parts[-1].began + parts[-1].seconds
            # Clocks of two hosts may differ.
            gap, step = max(one.began - ended, 0.0), parts[-1].step
            parts.append(Interval(STOPPED, ended, gap, step, step))
        if one.what == TRAINING:
            if one.first_step < reached:
                parts = [half for part in parts for half in _split(part, one.first_step)]
            reached = one.step
        parts.append(one)
    seconds: dict[str, float] = {}
    losses: list[Interval] = []
    for one in parts:
        seconds[one.what] = seconds.get(one.what, 0.0) + one.seconds
        if one.what in (TRAINING, REPEATED):
            continue
        if losses and losses[-1].what == one.what and _follows(losses[-1], one):
            last = losses.pop()
            one = dataclasses.replace(last, seconds=last.seconds + one.seconds, step=one.step)
        losses.append(one)
    return RunTimes(seconds, losses)


def _follows(before: Interval, after: Interval) -> bool:
    return abs(before.began + before.seconds - after.began) < 0.01


def _split(part: Interval, step: int) -> list[Interval]:
    """Divides training into what lasts and what is done again after `step`."""
    if part.what != TRAINING or part.step <= step:
        return [part]
    if part.first_step >= step:
        return [dataclasses.replace(part, what=REPEATED)]
    kept = part.seconds * (step - part.first_step) / (part.step - part.first_step)
    return [
        dataclasses.replace(part, seconds=kept, step=step),
        Interval(REPEATED, part.began + kept, part.seconds - kept, step, part.step),
    ]
