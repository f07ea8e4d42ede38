"""Ledgers as a picture: for each step the bytes that it sends, by purpose, and that it holds.

Lines mark what the bytes can be compared with: the closed form of the strategy, the compiled step,
and bounds such as the memory of a chip.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.inspect.ledger_difference import Json, sent_by
from manualpar.inspect.provenance import TENSOR_PARALLEL
from manualpar.purposes import (
    CAST_SCOPE,
    EXAMPLES_SCOPE,
    GATHER_SCOPE,
    NEW_PARAMS_SCOPE,
    OPTIMIZER_SCOPE,
    REDUCE_SCOPE,
    REGATHER,
    SCATTER_SCOPE,
)
from manualpar.training.inspection_report import describe_fit, read_collectives
from manualpar.watching.pictures import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    INK,
    MEMORY_COLORS,
    ORANGE,
    PINK,
    RED,
    ROOM,
    SKY,
    Bar,
    draw_bars,
    new_figure,
    scale_in_bytes,
)
from manualpar.watching.tables import describe_bytes

# Blue is for parameters, orange for gradients; purposes that are not named here send little.
PURPOSE_COLORS = {
    GATHER_SCOPE: BLUE,
    REGATHER: SKY,
    NEW_PARAMS_SCOPE: SKY,
    SCATTER_SCOPE: RED,
    REDUCE_SCOPE: ORANGE,
    CAST_SCOPE: ORANGE,
    TENSOR_PARALLEL: GREEN,
    EXAMPLES_SCOPE: GREEN,
    OPTIMIZER_SCOPE: PINK,
}
ONE_SCALE = 12.0  # Beyond this ratio the smallest step could not be seen on one scale.
NEAR = 2.5  # A bound that is this many times larger is written, not drawn.
# The lines across bars.
CLOSED_FORM, COMPILED, BOUND = "-", ":", "--"


class Bound(NamedTuple):
    """A limit on memory, and what it is called."""

    name: str
    size: int


class _Panel(NamedTuple):
    """One half of a ledger's picture: bars of one colour, and marks: a place, a line, a text."""

    label: str
    bars: list[Bar]
    marks: list[tuple[float, str, str]]

    @property
    def total(self) -> float:
        return sum(bar.length for bar in self.bars)

    @property
    def longest(self) -> float:
        near = [x for x, line, _ in self.marks if line != BOUND or x <= NEAR * self.total]
        return max([self.total, *near])


def draw_ledgers(
    ledgers: Mapping[str, Json], path: Path, *, bounds: Mapping[str, Sequence[Bound]]
) -> None:
    """Draws ledgers into a PNG file.

    Args:
      ledgers: The JSON of each config's step, by the name of the config.
      path: The file.
      bounds: The bounds of the memory of each step.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    panels = [(_sent(ledger), _held(ledger, bounds[name])) for name, ledger in ledgers.items()]
    heights = [1 + max(len(sent.bars), len(held.bars), 1) for sent, held in panels]
    ends = [_ends([panel.longest for panel in column]) for column in zip(*panels, strict=True)]
    differ = any(len(set(column)) > 1 for column in ends)
    title = (
        "Of a device in a step: what it sends (left), and what it holds at the peak (right)"
        f"{'; mind the scales, which differ' * differ}\n"
        "Lines: solid the closed form of the strategy, dotted as compiled, dashed a bound"
    )
    size = (15, 0.33 * sum(heights) + 0.85 * len(heights) + 1.2)
    with new_figure(path.name, size, title=title) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False, height_ratios=heights)
        for column in (0, 1):
            for axes, row, height, end in zip(
                grid[:, column], panels, heights, ends[column], strict=True
            ):
                _draw_panel(axes, row[column], end)
                axes.set_ylim(height - 0.45, -0.65)
        for axes, (name, ledger) in zip(grid[:, 0], ledgers.items(), strict=True):
            mesh = " x ".join(f"{axis}={size:,}" for axis, size in ledger["mesh"].items())
            title = f"{name}: {ledger['name']}, {mesh}"
            axes.set_title(title, fontweight="bold", pad=20)
        figure.savefig(path)


def _sent(ledger: Json) -> _Panel:
    """What a step sends by purpose, the most bytes first."""
    sums = sent_by(read_collectives(ledger), "purpose")
    total = sum(sent.bytes for sent in sums.values())
    bars = [
        _bar(f"{purpose}  {sent.times:,} ×", sent.bytes, PURPOSE_COLORS.get(purpose, GREY), total)
        for (purpose,), sent in sorted(sums.items(), key=lambda item: -item[1].bytes)
    ]
    marks = []
    if predicted := ledger["predicted_bytes"]:
        bound = "at most " if ledger["predicted_is_bound"] else ""
        text = f"closed form {bound}{describe_bytes(predicted['total'])}"
        marks.append((predicted["total"], CLOSED_FORM, text))
    return _Panel("sent", bars, marks + _as_compiled(ledger, "bytes"))


def _held(ledger: Json, bounds: Sequence[Bound]) -> _Panel:
    """What a step holds at its peak by class."""
    memory = ledger["memory"]
    if memory is None:
        return _Panel("memory: not known", [], [])
    colors = {**MEMORY_COLORS, "other": GREY}
    bars = [
        _bar(name, memory[name], color, memory["peak"])
        for name, color in colors.items()
        if memory[name]
    ]
    marks = _as_compiled(ledger, "peak")
    marks += [(size, BOUND, describe_fit(memory["peak"], name, size)) for name, size in bounds]
    return _Panel("held", bars, marks)


def _bar(name: str, size: float, color: str, total: float) -> Bar:
    share = f"  ({size / total:.0%})" if total else ""
    return Bar(name, [(size, color)], describe_bytes(size) + share)


def _as_compiled(ledger: Json, key: str) -> list[tuple[float, str, str]]:
    """The mark of a number of the compiled step, if there is one."""
    if not (compiled := ledger["compiled"]):
        return []
    return [(compiled[key], COMPILED, f"compiled {describe_bytes(compiled[key])}")]


def _draw_panel(axes: Any, panel: _Panel, end: float) -> None:
    """Draws all bars stacked in the first line, with marks across, and each by itself below."""
    stacked = f"{panel.label}  {describe_bytes(panel.total)}" if panel.bars else panel.label
    first = Bar(stacked, [bar.parts[0] for bar in panel.bars], "")
    draw_bars(axes, [first, *panel.bars], end=end)
    axes.get_yticklabels()[0].set_fontweight("bold")
    scale_in_bytes(axes)
    for x, line, _ in panel.marks:
        if x <= end:
            color = RED if line == BOUND else INK
            axes.plot([x, x], [-0.52, 0.52], color=color, linestyle=line, linewidth=2)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    axes.annotate("     ".join(text for _, _, text in panel.marks), (0, 1), color=DARK, **above)


def _ends(longest: Sequence[float]) -> list[float]:
    """The ends of the scales: the same for all steps, unless some could not be seen then."""
    shown = [length for length in longest if length]
    if shown and max(shown) <= ONE_SCALE * min(shown):
        return [ROOM * max(shown)] * len(longest)
    return [ROOM * (length or 1.0) for length in longest]
