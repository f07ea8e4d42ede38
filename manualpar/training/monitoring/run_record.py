"""Reads the files of a run and makes charts: lines of points over the steps.

A `Chart` is only data; the module `charts` draws it. `None` stands for a value that was not finite:
the line has a gap there.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.system.storage.untrusted import NotAFileError, open_file, parse_object, read_object
from manualpar.training.monitoring.run_files import (
    CONFIG_FILE,
    DISCARDED_FILE,
    METRICS_FILE,
    THROUGHPUT_FILE,
)
from manualpar.training.monitoring.run_times import TIMES_FILE, check_interval

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
    `from_zero`, the axis begins at 0, so that small differences look small.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[Point]]
    resumes: Sequence[int] = ()
    from_zero: bool = False


def read_run(workdir: Path) -> RunRecord:
    """Reads the existing files of a run; ignores a last line that a killed run left unfinished."""
    left_out: list[str] = []
    path, config = workdir / CONFIG_FILE, {}
    try:
        config = read_object(path, follow_links=True) if path.exists() else {}
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
        with open_file(path, follow_links=True) as file:
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
                charts.append(Chart(title, unit, lines, resumes, from_zero))
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
