"""The results of `benchmarks.fewer_bytes` as a table and as a picture.

A run of a variant is compared with the exact run of its seed: both begin with the same parameters
and see the same examples in the same order, so that the difference varies much less than the loss.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from benchmarks.fewer_bytes import VARIANTS, Line
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import Bar
from manualpar.system.reports.tables import UNKNOWN, describe_bytes, print_table

EXACT = "exact"
TITLES = {"digits": "digits", "lm": "language model"}
HEADERS = ("", "a device\nsends", "over slow\nlinks", "held-out\nloss", "minus exact", "seeds")


class Outcome(NamedTuple):
    """What several seeds of a variant have come to.

    Attributes:
      variant: Its name.
      sent: The bytes that a device sends in a step.
      slow: Those over slow links.
      losses: The losses of the seeds.
      differences: The losses minus those of the exact runs with the same seeds.
    """

    variant: str
    sent: int
    slow: int
    losses: Sequence[float]
    differences: Sequence[float]

    def cells(self) -> list[str]:
        """The row of a table."""
        apart = UNKNOWN
        if self.differences and self.variant != EXACT:
            apart = f"{statistics.mean(self.differences):+.4f}{_spread(self.differences)}"
        return [
            self.variant,
            describe_bytes(self.sent),
            describe_bytes(self.slow),
            f"{statistics.mean(self.losses):.4f}{_spread(self.losses)}",
            apart,
            str(len(self.losses)),
        ]


def outcomes(lines: Sequence[Line], task: str, steps: int) -> list[Outcome]:
    """The outcomes of a task at so many steps, in the order of `VARIANTS`."""
    found: dict[str, dict[int, Line]] = {}
    for line in lines:
        if (line["task"], line["steps"]) == (task, steps):
            found.setdefault(line["variant"], {})[line["seed"]] = line
    exact = found.get(EXACT, {})
    rows = []
    for name in VARIANTS:
        if not (runs := found.get(name)):
            continue
        first = next(iter(runs.values()))
        apart = [run["loss"] - exact[seed]["loss"] for seed, run in runs.items() if seed in exact]
        losses = [run["loss"] for run in runs.values()]
        rows.append(Outcome(name, first["bytes"], first["slow_bytes"], losses, apart))
    return rows


def settings(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """The tasks, each with all numbers of steps that there are."""
    return sorted({(line["task"], line["steps"]) for line in lines})


def print_losses(console: rich.console.Console, lines: Sequence[Line]) -> None:
    """Prints a table for each task and number of steps."""
    for task, steps in settings(lines):
        rows = [each.cells() for each in outcomes(lines, task, steps)]
        print_table(console, HEADERS, rows, title=f"{TITLES[task]}, {steps} steps")


def draw_losses(lines: Sequence[Line], path: Path) -> None:
    """Draws what has been run at the most steps, into a PNG file.

    The variants and their bytes are those of the last task, the differences those of each.
    """
    shown = list(dict(settings(lines)).items())
    found = [outcomes(lines, *each) for each in shown]
    names = [row.variant for row in found[-1]]
    title = "Fewer bytes, and what they cost at equal steps"
    size = (6 + 3.6 * len(shown), 1.8 + 0.3 * len(names))
    with pictures.new_figure(path.name, size, title=title) as figure:
        first, *others = figure.subplots(1, 1 + len(shown), width_ratios=[1.3, *[1] * len(shown)])
        bars = [
            Bar(
                row.variant,
                [(row.slow, pictures.RED), (row.sent - row.slow, pictures.SKY)],
                f"{describe_bytes(row.sent)}, {describe_bytes(row.slow)} slow",
            )
            for row in found[-1]
        ]
        pictures.draw_bars(first, bars, end=2.1 * max(bar.length for bar in bars))
        pictures.scale_in_bytes(first)
        first.set_title(f"Sent by a device in a step ({TITLES[shown[-1][0]]})")
        pictures.add_legend(
            first, {"over slow links": pictures.RED, "over fast ones": pictures.SKY}
        )
        for axes, (task, steps), rows in zip(others, shown, found, strict=True):
            _draw_differences(axes, names, rows)
            axes.set_title(f"{TITLES[task]}, {steps} steps")
        figure.savefig(path)


def _draw_differences(axes: Any, names: Sequence[str], rows: Sequence[Outcome]) -> None:
    """A dot for each seed, and a line at the mean."""
    for row in rows:
        if row.variant not in names:
            continue
        y = names.index(row.variant)
        if row.differences:
            mean = statistics.mean(row.differences)
            axes.plot(mean, y, "|", color=pictures.INK, markersize=15, markeredgewidth=2)
            axes.plot(
                row.differences, [y] * len(row.differences), "o", color=pictures.BLUE, alpha=0.6
            )
    axes.axvline(0, color=pictures.DARK, linewidth=0.8)
    axes.set_yticks(range(len(names)), [])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("held-out loss minus exact, nats (dots: seeds)")


def _spread(values: Sequence[float]) -> str:
    """The standard deviation, if it can be told."""
    return f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
