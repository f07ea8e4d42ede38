"""Draws ledgers: the bytes that each step sends, by purpose, and the memory that it needs.

Lines mark numbers to compare with: the strategy's closed form, the compiled step, and limits such
as the memory of a chip.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.commands.inspection_report import describe_fit, read_collectives
from manualpar.inspect.ledger_difference import Json, sent_by
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import Bar
from manualpar.system.reports.tables import describe_bytes

ONE_SCALE = 12.0  # If bars differ by more than this ratio, each step has its own scale.
NEAR = 2.5  # A bound that is more than this many times the bar is shown only as text.
# The styles of the lines across bars.
CLOSED_FORM, COMPILED, BOUND = "-", ":", "--"


class Bound(NamedTuple):
    """A limit on memory, with its name."""

    name: str
    size: int


class _Mark(NamedTuple):
    """A line across a bar, and its text."""

    x: float
    line: str
    text: str


class _Panel(NamedTuple):
    """One half of a ledger's picture: the first bar is the total, the others are its parts."""

    bars: list[Bar]
    marks: list[_Mark]

    @property
    def longest(self) -> float:
        total = self.bars[0].length
        near = [mark.x for mark in self.marks if mark.line != BOUND or mark.x <= NEAR * total]
        return max([total, *near])


def draw_ledgers(
    ledgers: Mapping[str, Json], path: Path, *, bounds: Mapping[str, Sequence[Bound]]
) -> None:
    """Draws the ledger of each config's step, and the bounds of memory, into a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    panels = [(_sent(ledger), _held(ledger, bounds[name])) for name, ledger in ledgers.items()]
    lines = [max(2, len(sent.bars), len(held.bars)) for sent, held in panels]
    ends = [_ends([panel.longest for panel in column]) for column in zip(*panels, strict=True)]
    differ = any(len(set(column)) > 1 for column in ends)
    title = (
        "Per device and step: the bytes sent (left) and the peak memory (right)"
        f"{'; the scales differ' * differ}\n"
        "Lines: closed form of the strategy (solid), compiled step (dotted), bound (dashed)"
    )
    size = (15, 0.33 * sum(lines) + 0.85 * len(lines) + 1.2)
    with pictures.saved_figure(path, size, title=title) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False, height_ratios=lines)
        for row, (name, ledger) in enumerate(ledgers.items()):
            for column in (0, 1):
                axes = grid[row, column]
                _draw_panel(axes, panels[row][column], ends[column][row])
                axes.set_ylim(lines[row] - 0.45, -0.65)
            mesh = " x ".join(f"{axis}={size:,}" for axis, size in ledger["mesh"].items())
            heading = f"{name}: {ledger['name']}, {mesh}"
            grid[row, 0].set_title(heading, fontweight="bold", pad=20)


def _sent(ledger: Json) -> _Panel:
    """Makes the panel of the bytes that a step sends, by purpose, the largest first."""
    sums = sent_by(read_collectives(ledger), "purpose")
    parts = [
        (
            f"{purpose}  {sent.times:,} ×",
            sent.bytes,
            pictures.PURPOSE_COLORS.get(purpose, pictures.GREY),
        )
        for (purpose,), sent in sorted(sums.items(), key=lambda item: -item[1].bytes)
    ]
    marks = []
    if predicted := ledger["predicted_bytes"]:
        bound = "at most " if ledger["predicted_is_bound"] else ""
        text = f"closed form {bound}{describe_bytes(predicted['total'])}"
        marks.append(_Mark(predicted["total"], CLOSED_FORM, text))
    return _panel("sent", parts, marks + _as_compiled(ledger, "bytes"))


def _held(ledger: Json, bounds: Sequence[Bound]) -> _Panel:
    """Makes the panel of a step's peak memory, by class of arrays."""
    if not (memory := ledger["memory"]):
        return _Panel([Bar("memory: not known", [], "")], [])
    colors = {**pictures.MEMORY_COLORS, "other": pictures.GREY}
    parts = [(name, memory[name], color) for name, color in colors.items() if memory[name]]
    marks = _as_compiled(ledger, "peak")
    for name, size in bounds:
        marks.append(_Mark(size, BOUND, describe_fit(memory["peak"], name, size)))
    return _panel("held", parts, marks)


def _as_compiled(ledger: Json, key: str) -> list[_Mark]:
    compiled = ledger["compiled"]
    text = compiled and f"compiled {describe_bytes(compiled[key])}"
    return [_Mark(compiled[key], COMPILED, text)] if compiled else []


def _panel(label: str, parts: Sequence[tuple[str, float, str]], marks: list[_Mark]) -> _Panel:
    total = sum(size for _, size, _ in parts)
    bars = [Bar(f"{label}  {describe_bytes(total)}", [part[1:] for part in parts], "")]
    for name, size, color in parts:
        share = f"  ({size / total:.0%})" if total else ""
        bars.append(Bar(name, [(size, color)], describe_bytes(size) + share))
    return _Panel(bars, marks)


def _draw_panel(axes: Any, panel: _Panel, end: float) -> None:
    pictures.draw_bars_of_bytes(axes, panel.bars, end=end)
    axes.get_yticklabels()[0].set_fontweight("bold")
    for x, line, _ in panel.marks:
        if x <= end:
            axes.plot([x, x], [-0.52, 0.52], color=pictures.INK, linestyle=line, linewidth=2)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    words = "     ".join(mark.text for mark in panel.marks)
    axes.annotate(words, (0, 1), color=pictures.DARK, **above)


def _ends(longest: Sequence[float]) -> list[float]:
    """Chooses the end of each step's scale: one for all, unless some bars would be invisible."""
    shown = [length for length in longest if length] or [1.0]
    if max(shown) <= ONE_SCALE * min(shown):
        return [pictures.ROOM * max(shown)] * len(longest)
    return [pictures.ROOM * (length or 1.0) for length in longest]
