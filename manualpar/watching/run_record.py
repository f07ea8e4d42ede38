"""Reads what a run has written, and makes charts of it: lines of points by the step.

A chart is data alone, which `report_picture` and `report_page` draw. A value that was not finite is
`None`: a gap in its line.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.watching.rewinding import DISCARDED_FILE, METRICS_FILE, THROUGHPUT_FILE
from manualpar.watching.writers import CONFIG_FILE

Point = tuple[int, float | None]
Record = Mapping[str, Any]


class RunRecord(NamedTuple):
    """What the files of a run hold.

    Attributes:
      config: The config in force.
      metrics: The lines of `metrics.jsonl`.
      throughput: The lines of `throughput.jsonl`.
      resumes: The lines of `discarded.jsonl`, one for each resume and each rollback.
    """

    config: Record
    metrics: Sequence[Record]
    throughput: Sequence[Record]
    resumes: Sequence[Record]


class Chart(NamedTuple):
    """Lines over the steps.

    Attributes:
      title: What is shown.
      unit: The unit of the values, empty for none.
      lines: The points of each split, in the order of steps.
      resumes: The steps after which the run was resumed or went back to.
      from_zero: Whether the axis begins at 0, so that small differences look small.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[Point]]
    resumes: Sequence[int] = ()
    from_zero: bool = False


SPLITS = ("train", "eval", "test")
# What there is a chart of, as far as the run has it: title, unit.
METRIC_CHARTS: Mapping[str, tuple[str, str]] = {
    "loss": ("Loss", "nats"),
    "bits_per_byte": ("Bits per byte", "bits"),
    "accuracy": ("Accuracy", ""),
}
THROUGHPUT_CHARTS: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("Throughput", "tokens/s"),
    "examples_per_second": ("Throughput", "examples/s"),
    "mfu": ("Model FLOPs utilization", ""),
}


def read_run(workdir: Path) -> RunRecord:
    """Reads the files of a run, also of one that was killed in the middle of a line.

    Args:
      workdir: The folder of the run.

    Returns:
      What they hold; a file that is not there holds nothing.

    Raises:
      ValueError: One of them is not what a run writes.
    """
    path = workdir / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    files = (METRICS_FILE, THROUGHPUT_FILE, DISCARDED_FILE)
    return RunRecord(config, *(_read_lines(workdir / name) for name in files))


def _read_lines(path: Path) -> Sequence[Record]:
    """The objects of a file of lines; a last line without an end is left out."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}, is {line}, expected an object.")
        records.append(record)
    return records


def make_charts(run: RunRecord) -> list[Chart]:
    """The charts that a run has numbers for: what it learns first, then how fast it is."""
    resumes = [record["resumed_after_step"] for record in run.resumes]
    charts: list[Chart] = []
    kinds = ((run.metrics, METRIC_CHARTS), (run.throughput, THROUGHPUT_CHARTS))
    for records, names in kinds:
        for name, (title, unit) in names.items():
            lines = _lines(records, name)
            # Examples say the same as tokens.
            is_known = name == "examples_per_second" and any(c.unit == "tokens/s" for c in charts)
            if lines and not is_known:
                charts.append(Chart(title, unit, lines, resumes, records is run.throughput))
    return charts


def _lines(records: Iterable[Record], name: str) -> dict[str, list[Point]]:
    """The points of one number, by the split, in the order of `SPLITS`."""
    lines: dict[str, list[Point]] = {}
    for record in records:
        if name in record:
            lines.setdefault(record["split"], []).append((record["step"], record[name]))
    return {split: lines[split] for split in sort_splits(lines)}


def sort_splits(splits: Iterable[str]) -> list[str]:
    """The names of splits in the order of `SPLITS`, others after them."""
    known = dict(zip(SPLITS, range(len(SPLITS)), strict=True))
    return sorted(splits, key=lambda split: (known.get(split, len(SPLITS)), split))


def decimate(points: Sequence[Point], limit: int) -> list[Point]:
    """Leaves out points so that a line looks as before: of each group the extremes stay.

    Args:
      points: The points of a line.
      limit: How many may remain, at least 4.

    Returns:
      The first and the last point, and of each group of neighbours the lowest, the highest and one
      that is not finite, if there is one.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 4))
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        finite = [index for index in group if points[index][1] is not None]
        chosen |= set([index for index in group if points[index][1] is None][:1])
        if finite:
            chosen.add(min(finite, key=lambda index: points[index][1] or 0.0))
            chosen.add(max(finite, key=lambda index: points[index][1] or 0.0))
    return [points[index] for index in sorted(chosen)]


def final_numbers(run: RunRecord) -> dict[str, dict[str, float | None]]:
    """The last number of each name, by name and split."""
    numbers: dict[str, dict[str, float | None]] = {}
    for record in (*run.metrics, *run.throughput):
        for name, value in record.items():
            if name not in ("step", "split"):
                numbers.setdefault(name, {})[record["split"]] = value
    return numbers
