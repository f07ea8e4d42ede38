"""Compares finished or running runs by their files: losses, speed, memory, and what was set.

Nothing is trained, and no run is changed. The folder of results contains `comparison.html`, with
the charts and the tables, and `comparison.png`.
"""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from manualpar.commands.results import answer, check_output, results_folder, users_mistakes
from manualpar.errors import MissingExtraError, UsageError
from manualpar.inspect.tables import (
    describe_bytes,
    describe_seconds,
    print_line,
    print_table,
    text_columns,
)
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage import AnyPath, BucketPath
from manualpar.system.storage.untrusted import write_file
from manualpar.training.config import flatten_config
from manualpar.training.monitoring.report import draw_charts, make_page, make_table
from manualpar.training.monitoring.run_files import CONFIG_FILE, METRICS_FILE
from manualpar.training.monitoring.run_record import (
    Chart,
    RunRecord,
    add_up,
    final_numbers,
    make_charts,
    read_run,
    sort_splits,
)

USAGE = """Compares runs by their files: losses, speed, memory, and what was set.

{program} RUN RUN ... [--output=<folder>]

A RUN is the folder of a run, such as runs/fsdp/001; it may still be training.
"""
RESULTS = Path("runs") / "compare-runs"
PAGE, PICTURE = "comparison.html", "comparison.png"
# Colours of Okabe and Ito, which colour-blind readers can distinguish; more runs repeat them.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222")
DASHES: Mapping[str, Any] = {"train": "-", "eval": (0, (4, 2)), "test": (0, (1, 1))}
# Numbers of a run's throughput, each with its name and format.
SPEEDS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "examples_per_second": ("examples/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "memory_bytes": ("memory in use", describe_bytes),
}
NOT_THERE = "-"
FLAGS: Mapping[str, Flag] = {
    "run": Flag(
        "Folders of runs, at least two.",
        Path,
        default=[],
        in_buckets=True,
        is_required=True,
        repeats=True,
        is_argument=True,
    ),
    "output": Flag(
        f"Folder of the results, by default a new numbered folder in {RESULTS}.",
        Path,
        in_buckets=True,
    ),
}

Row = list[str]  # A name, and a text for each run.


def main(argv: Sequence[str]) -> int:
    """Compares the runs that the command line `argv` names; returns the exit code."""
    flags = parse_flags(argv, USAGE, FLAGS)
    return answer(lambda console: _compare(flags.run, flags.output, console))


def _compare(
    folders: Sequence[AnyPath], output: AnyPath | None, console: rich.console.Console
) -> Path:
    paths = [_on_disk("RUN", folder) for folder in folders]
    target = None if output is None else _on_disk("--output", output)
    if len({path.resolve() for path in paths}) < max(len(paths), 2):
        raise UsageError(f"got {', '.join(map(str, paths))}, expected two or more different runs.")
    for path in paths:
        if not any(os.path.lexists(path / name) for name in (CONFIG_FILE, METRICS_FILE)):
            raise UsageError(
                f"{path} has neither {CONFIG_FILE} nor {METRICS_FILE}, expected the folder of a "
                "run, such as runs/fsdp/001."
            )
    with users_mistakes():
        check_output(target, RESULTS)
    runs = dict(zip(short_names(paths), map(read_run, paths), strict=True))
    for sentence in itertools.chain.from_iterable(run.left_out for run in runs.values()):
        print_line(console, sentence)
    tables = {"Results": result_rows(runs), "Set differently": config_rows(runs)}
    title = f"Comparison of {len(runs)} runs"
    try:
        svg, picture = draw_charts(
            overlaid_charts(runs), title=title, style=lambda label: _style(label, list(runs))
        )
    except MissingExtraError as error:
        print_line(console, str(error))
        svg, picture = "", b""
    with results_folder(target, RESULTS) as folder:
        sections = {head: make_table(rows, ["", *runs]) for head, rows in tables.items()}
        write_file(folder / PAGE, make_page(f"<figure>{svg}</figure>", sections, title=title))
        if picture:
            write_file(folder / PICTURE, picture)
    for head, rows in tables.items():
        print_table(console, text_columns(["", *runs]), rows, title=head)
    return folder


def _on_disk(what: str, path: AnyPath) -> Path:
    if isinstance(path, BucketPath):
        raise UsageError(f"{what} is {path}, expected a folder on a disk.")
    return Path(path)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Names each folder by the last parts of its path that tell all of them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in itertools.count(1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different folders have different paths")


def result_rows(runs: Mapping[str, RunRecord]) -> list[Row]:
    """Returns the rows of the table of results: steps, last metrics, speed, memory, time."""
    numbers = [final_numbers(run) for run in runs.values()]
    steps = [max((x["step"] for x in run.metrics), default=0) for run in runs.values()]
    rows = [["steps", *(f"{step:,}" for step in steps)]]
    speeds = {name for run in runs.values() for record in run.throughput for name in record}
    metrics = dict.fromkeys(name for of in numbers for name in of if name not in speeds)
    for metric in metrics:
        found = [of.get(metric, {}) for of in numbers]
        for split in sort_splits({split for of in found for split in of}):
            rows.append([f"{metric}, {split}", *(_last(of, split) for of in found)])
    for name, (label, describe) in SPEEDS.items():
        values = [
            [x[name] for x in run.throughput if x.get(name) is not None] for run in runs.values()
        ]
        if any(values):
            texts = [describe(statistics.median(of)) if of else NOT_THERE for of in values]
            rows.append([label, *texts])
    totals = [add_up(run.times).total for run in runs.values()]
    if any(totals):
        rows.append(["time in all", *(describe_seconds(total) for total in totals)])
    return rows


def _last(by_split: Mapping[str, float | None], split: str) -> str:
    """Formats the last value of a split; a run that reported infinity or NaN has `None`."""
    if split not in by_split:
        return NOT_THERE
    value = by_split[split]
    return "not finite" if value is None else f"{value:,.5g}"


def config_rows(runs: Mapping[str, RunRecord]) -> list[Row]:
    """Returns a row for each field of the runs' configs that differs."""
    configs = [flatten_config(run.config) for run in runs.values()]
    rows = []
    for field in dict.fromkeys(name for config in configs for name in config):
        texts = [str(config[field]) if field in config else NOT_THERE for config in configs]
        if len(set(texts)) > 1:
            rows.append([field, *texts])
    return rows


def overlaid_charts(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Makes a chart of each number that any of the runs reports, with the lines of all runs."""
    merged: dict[str, Chart] = {}
    for name, run in runs.items():
        for chart in make_charts(run):
            lines = {f"{name} {split}": points for split, points in chart.lines.items()}
            before = merged.get(chart.title, chart._replace(lines={}, resumes=()))
            merged[chart.title] = before._replace(lines={**before.lines, **lines})
    return list(merged.values())


def _style(label: str, names: Sequence[str]) -> Mapping[str, Any]:
    """Returns the colour of a line's run and the dashes of its split."""
    name, _, split = label.rpartition(" ")
    color = COLORS[names.index(name) % len(COLORS)]
    return {"color": color, "linestyle": DASHES.get(split, "-.")}
