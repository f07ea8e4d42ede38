"""Ledgers as a picture: for each step the bytes that it sends, by purpose, and that it holds.

Lines mark what the bytes can be compared with: the closed form of the strategy, the compiled step,
and bounds such as the memory of a chip. Matplotlib is used without pyplot, because the figures,
backend and settings of pyplot belong to the whole process.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.extras import require
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
from manualpar.watching.screen import describe_bytes

# The colours of Okabe and Ito, which colour-blind people can tell apart. Blue is for parameters,
# orange for gradients; purposes that are not named here send little and are grey.
BLUE, SKY, RED = "#0072B2", "#56B4E9", "#D55E00"
ORANGE, GREEN, PINK = "#E69F00", "#009E73", "#CC79A7"
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
MEMORY_COLORS = {
    "parameters": BLUE,
    "gradients": RED,
    "optimizer": PINK,
    "gathered": SKY,
    "activations": GREEN,
    "batch": "#F0E442",
    "other": "#B8BEC6",
}
INK, DARK, GREY, FAINT, BOUND = "#222222", "#555555", "#8A929C", "#DDDDDD", "#B00020"
BAR = 0.72  # The width of a bar, as a part of the height of a line.
LINE = 0.33  # The height of a line in inches.
ROOM = 1.32  # The length of an axis, as a multiple of the longest bar: words stand behind bars.
ONE_SCALE = 12.0  # Beyond this ratio the smallest step could not be seen on one scale.
NEAR = 2.5  # A bound that is this many times larger is written, not drawn.
LABELS: Mapping[Any, str] = {
    "-": "by the closed form of the strategy",
    ":": "as compiled",
    "--": "bound",
}


class Bound(NamedTuple):
    """A limit on memory, and what it is called."""

    name: str
    size: int


class _Mark(NamedTuple):
    """A line across a bar, with its text; the style is one of `LABELS`."""

    x: float
    text: str
    style: str


class _Panel(NamedTuple):
    """One half of a ledger's picture: bars with their names, bytes and colours, and marks."""

    label: str
    bars: list[tuple[str, float, str]]
    marks: list[_Mark]

    @property
    def total(self) -> float:
        return sum(size for _, size, _ in self.bars)

    @property
    def longest(self) -> float:
        near = [mark.x for mark in self.marks if mark.style != "--" or mark.x <= NEAR * self.total]
        return max([self.total, *near])


def draw_ledgers(
    ledgers: Mapping[str, Json], path: Path, *, bounds: Mapping[str, Sequence[Bound]]
) -> None:
    """Draws ledgers into a PNG file.

    Args:
      ledgers: The JSON of each config's step, by the name of the config.
      path: The file.
      bounds: The bounds of the memory of each step.
    """
    require(path.name, "matplotlib")
    # Matplotlib takes a second to import.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    columns = (
        [_sent(ledger) for ledger in ledgers.values()],
        [_held(ledger, bounds[name]) for name, ledger in ledgers.items()],
    )
    lines = [
        1 + max(len(sent.bars), len(held.bars), 1) for sent, held in zip(*columns, strict=True)
    ]
    size = (15, LINE * sum(lines) + 0.85 * len(lines) + 1.2)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=size, layout=layout, facecolor="white")
    grid = figure.add_gridspec(len(lines), 2, height_ratios=lines)
    is_one_scale = True
    for column, panels in enumerate(columns):
        ends = _ends([panel.longest for panel in panels])
        is_one_scale &= len(set(ends)) == 1
        for row, (panel, end) in enumerate(zip(panels, ends, strict=True)):
            axes = figure.add_subplot(grid[row, column])
            _draw_panel(axes, panel, end)
            axes.set_ylim(lines[row] - 0.45, -0.65)
    for row, (name, ledger) in enumerate(ledgers.items()):
        mesh = " x ".join(f"{axis}={size:,}" for axis, size in ledger["mesh"].items())
        title = f"{name}: {ledger['name']}, {mesh}"
        style: Any = {"fontsize": 11, "loc": "left", "color": INK, "fontweight": "bold", "pad": 20}
        figure.axes[row].set_title(title, **style)
    figure.suptitle(
        "Of a device in a step: what it sends (left), and what it holds at the peak (right)"
        + ("" if is_one_scale else "; mind the scales, which differ"),
        fontsize=13,
        color=INK,
    )
    styles = {mark.style for panels in columns for panel in panels for mark in panel.marks}
    handles = [
        Line2D([], [], color=_color(style), linewidth=2, linestyle=style, label=label)
        for style, label in LABELS.items()
        if style in styles
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(LABELS),
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def _sent(ledger: Json) -> _Panel:
    """What a step sends by purpose, the most bytes first."""
    sums = sent_by(read_collectives(ledger), "purpose")
    bars = [
        (f"{purpose}  {sent.times:,} ×", sent.bytes, PURPOSE_COLORS.get(purpose, GREY))
        for (purpose,), sent in sorted(sums.items(), key=lambda item: -item[1].bytes)
    ]
    marks = []
    if predicted := ledger["predicted_bytes"]:
        bound = "at most " if ledger["predicted_is_bound"] else ""
        text = f"closed form {bound}{describe_bytes(predicted['total'])}"
        marks.append(_Mark(predicted["total"], text, "-"))
    if compiled := ledger["compiled"]:
        sent_bytes = compiled["bytes"]
        marks.append(_Mark(sent_bytes, f"compiled {describe_bytes(sent_bytes)}", ":"))
    return _Panel("sent", bars, marks)


def _held(ledger: Json, bounds: Sequence[Bound]) -> _Panel:
    """What a step holds at its peak by class."""
    memory, compiled, marks = ledger["memory"], ledger["compiled"], []
    if memory is None:
        return _Panel("memory: not known", [], [])
    bars = [(name, memory[name], color) for name, color in MEMORY_COLORS.items() if memory[name]]
    if compiled:
        marks.append(_Mark(compiled["peak"], f"compiled {describe_bytes(compiled['peak'])}", ":"))
    for name, size in bounds:
        text = describe_fit(memory["peak"], name, size)
        marks.append(_Mark(size, text, "--"))
    return _Panel("held", bars, marks)


def _draw_panel(axes: Any, panel: _Panel, end: float) -> None:
    """Draws all bars stacked in the first line, with marks across, and each by itself below."""
    axes.set_xlim(0, end)
    left = 0.0
    for line, (_, size, color) in enumerate(panel.bars, start=1):
        axes.barh(0, size, left=left, color=color, height=BAR)
        axes.barh(line, size, color=color, height=BAR)
        left += size
        share = f"  ({size / panel.total:.0%})" if panel.total else ""
        apart = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        text = f"{describe_bytes(size)}{share}"
        axes.annotate(text, (size, line), fontsize=8.5, color=INK, **apart)
    for mark in panel.marks:
        if mark.x <= end:
            style = {"color": _color(mark.style), "linestyle": mark.style, "linewidth": 2}
            axes.plot([mark.x] * 2, [-0.52, 0.52], **style)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    words = "     ".join(mark.text for mark in panel.marks)
    axes.annotate(words, (0, 1), fontsize=9, color=DARK, **above)
    first = f"{panel.label}  {describe_bytes(panel.total)}" if panel.bars else panel.label
    axes.set_yticks(range(len(panel.bars) + 1), [first, *(name for name, _, _ in panel.bars)])
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK, left=False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    step = 1.0
    while end / step > 5.5:  # Powers of two, because they are round numbers of KiB and of MiB.
        step *= 2
    ticks = [step * i for i in range(int(end / step) + 1)]
    axes.set_xticks(ticks, [describe_bytes(tick) if tick else "0" for tick in ticks])


def _ends(longest: Sequence[float]) -> list[float]:
    """The ends of the scales: the same for all steps, unless some could not be seen then."""
    shown = [length for length in longest if length]
    if shown and max(shown) <= ONE_SCALE * min(shown):
        return [ROOM * max(shown)] * len(longest)
    return [ROOM * (length or 1.0) for length in longest]


def _color(style: str) -> str:
    return BOUND if style == "--" else INK
