"""Ledgers as a picture: what each step sends, a bar for each purpose, and what it holds, stacked.

Bounds are marked where they are known: of what is sent the closed form, of what is held a budget's
limit, the memory of a chip, and what the compiled step holds. Matplotlib is used without pyplot,
whose figures, backend and settings would be the whole process's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.core.collectives import (
    CAST_SCOPE,
    COLLECTIONS_SCOPE,
    COUNT_SCOPE,
    EXAMPLES_SCOPE,
    GATHER_SCOPE,
    METRICS_SCOPE,
    NEW_PARAMS_SCOPE,
    NONFINITE_SCOPE,
    OPTIMIZER_SCOPE,
    REDUCE_SCOPE,
    REGATHER,
    SCATTER_SCOPE,
)
from manualpar.extras import require
from manualpar.inspect.scopes import TENSOR_PARALLEL
from manualpar.training.inspection_report import compiled_bytes, describe_fit, read_collectives
from manualpar.watching.progress import describe_bytes

# Okabe and Ito's colours, which those who see fewer of them tell apart: one for what parameters
# are gathered for, one for gradients, lighter and darker; what is small anyway is grey.
PURPOSE_COLORS = {
    GATHER_SCOPE: "#0072B2",
    REGATHER: "#56B4E9",
    NEW_PARAMS_SCOPE: "#56B4E9",
    SCATTER_SCOPE: "#D55E00",
    REDUCE_SCOPE: "#E69F00",
    CAST_SCOPE: "#E69F00",
    TENSOR_PARALLEL: "#009E73",
    EXAMPLES_SCOPE: "#009E73",
    OPTIMIZER_SCOPE: "#CC79A7",
    COLLECTIONS_SCOPE: "#8A929C",
    METRICS_SCOPE: "#8A929C",
    COUNT_SCOPE: "#8A929C",
    NONFINITE_SCOPE: "#8A929C",
}
MEMORY_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#CC79A7",
    "gathered": "#56B4E9",
    "activations": "#009E73",
    "batch": "#F0E442",
    "other": "#B8BEC6",
}
INK, DARK, GREY, FAINT, BOUND = "#222222", "#555555", "#8A929C", "#DDDDDD", "#B00020"
BAR = 0.72  # The width of a bar, of a line of the picture.
LINE = 0.33  # Inches.
ONE_SCALE = 12.0  # Beyond this ratio the smallest of steps would not be seen beside the largest.
NEAR = 2.5  # A bound that is further away is written, not drawn.

Json = Mapping[str, Any]


class Bound(NamedTuple):
    """How much memory there may be, and by whose word."""

    name: str
    size: int


class _Mark(NamedTuple):
    """A line across a stacked bar, and what is written of it."""

    x: float
    text: str
    style: str
    color: str = INK


def draw_ledgers(
    ledgers: Mapping[str, Json], path: Path, *, bounds: Mapping[str, Sequence[Bound]]
) -> None:
    """Draws ledgers into a PNG file.

    Args:
      ledgers: What was read of the step of each config, by its name.
      path: The file.
      bounds: For each, the bounds of its memory.
    """
    require(path.name, "matplotlib")
    # Matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    lines = [_num_lines(ledger) for ledger in ledgers.values()]
    height = LINE * sum(lines) + 0.85 * len(lines) + 1.2
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=(15, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(lines), 2, height_ratios=lines)
    sent_to, held_to = _ends(ledgers, bounds)
    for index, (name, ledger) in enumerate(ledgers.items()):
        sent = figure.add_subplot(grid[index, 0])
        held = figure.add_subplot(grid[index, 1])
        _draw_sent(sent, ledger, end=sent_to[name])
        _draw_held(held, ledger, bounds[name], end=held_to[name])
        mesh = " x ".join(f"{axis}={size:,}" for axis, size in ledger["mesh"].items())
        title = f"{name}: {ledger['name']}, {mesh}"
        sent.set_title(title, fontsize=11, loc="left", color=INK, fontweight="bold", pad=20)
        for axes in (sent, held):
            axes.set_ylim(lines[index] - 0.45, -0.65)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(labelsize=9, colors=INK, left=False)
            axes.set_axisbelow(True)
            axes.grid(axis="x", color=FAINT, linewidth=0.6)
    is_one_scale = len({*sent_to.values()}) == len({*held_to.values()}) == 1
    figure.suptitle(
        "Of a device in a step: what it sends (left), and what it holds at the peak (right)"
        + ("" if is_one_scale else "; mind the scales, which differ"),
        fontsize=13,
        color=INK,
    )
    marks: list[Any] = []
    if any(ledger["predicted_bytes"] for ledger in ledgers.values()):
        label = "by the closed form of the strategy"
        marks.append(Line2D([], [], color=INK, linewidth=2, linestyle="-", label=label))
    if any(ledger["compiled"] for ledger in ledgers.values()):
        marks.append(Line2D([], [], color=INK, linewidth=2, linestyle=":", label="as compiled"))
    if any(bounds.values()):
        marks.append(Line2D([], [], color=BOUND, linewidth=2, linestyle="--", label="bound"))
    figure.legend(
        handles=marks, loc="outside lower center", ncols=len(marks), fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=120)


def _draw_sent(axes: Any, ledger: Json, *, end: float) -> None:
    """Draws what is sent: all of it with the closed form, then by purpose."""
    rows = _by_purpose(ledger)
    bars = [(f"{name}  {times:,} ×", x, PURPOSE_COLORS.get(name, GREY)) for name, times, x in rows]
    predicted, compiled = ledger["predicted_bytes"], ledger["compiled"]
    marks = []
    if predicted:
        bound = "at most " if ledger["predicted_is_bound"] else ""
        text = f"closed form {bound}{describe_bytes(predicted['total'])}"
        marks.append(_Mark(predicted["total"], text, "-"))
    if compiled:
        sent = compiled_bytes(compiled)
        marks.append(_Mark(sent, f"compiled {describe_bytes(sent)}", ":"))
    _draw_bars(axes, "sent", bars, marks, end=end)


def _draw_held(axes: Any, ledger: Json, bounds: Sequence[Bound], *, end: float) -> None:
    """Draws what is held: all of it with what bounds it, then by class."""
    memory, compiled = ledger["memory"], ledger["compiled"]
    if memory is None:
        axes.text(0.01, 0.8, "memory: not known", transform=axes.transAxes, fontsize=9, color=DARK)
        axes.set_yticks([])
        return
    bars = [(name, memory[name], color) for name, color in MEMORY_COLORS.items() if memory[name]]
    marks = []
    if compiled:
        marks.append(_Mark(compiled["peak"], f"compiled {describe_bytes(compiled['peak'])}", ":"))
    for name, size in bounds:
        text = describe_fit(memory["peak"], name, size).removeprefix("memory: ")
        marks.append(_Mark(size, text, "--", BOUND))
    _draw_bars(axes, "held", bars, marks, end=end)


def _draw_bars(
    axes: Any,
    label: str,
    bars: Sequence[tuple[str, float, str]],
    marks: Sequence["_Mark"],
    *,
    end: float,
) -> None:
    """Draws bars stacked in the first line, with marks across, and each by itself below."""
    axes.set_xlim(0, end)
    total = sum(size for _, size, _ in bars)
    left = 0.0
    for place, (_, size, color) in enumerate(bars, start=1):
        axes.barh(0, size, left=left, color=color, height=BAR)
        axes.barh(place, size, color=color, height=BAR)
        left += size
        share = f"  ({size / total:.0%})" if total else ""
        _write_behind(axes, size, place, f"{describe_bytes(size)}{share}")
    for mark in marks:
        if mark.x <= end:  # One that is further away is written and not drawn.
            style = {"color": mark.color, "linestyle": mark.style}
            axes.plot([mark.x] * 2, [-0.52, 0.52], linewidth=2, **style)
    axes.annotate(
        "     ".join(mark.text for mark in marks),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=9,
        color=DARK,
    )
    first = f"{label}  {describe_bytes(total)}"
    axes.set_yticks(range(len(bars) + 1), [first, *(name for name, _, _ in bars)])
    axes.get_yticklabels()[0].set_fontweight("bold")
    _write_bytes_below(axes)


def _by_purpose(ledger: Json) -> list[tuple[str, int, float]]:
    """(purpose, times, bytes), most bytes first, whatever the axes."""
    totals: dict[str, tuple[int, float]] = {}
    for found in read_collectives(ledger):
        times, sent = totals.get(found["purpose"], (0, 0.0))
        totals[found["purpose"]] = (times + found["times"], sent + found["bytes"])
    rows = [(purpose, *amounts) for purpose, amounts in totals.items()]
    return sorted(rows, key=lambda row: -row[2])


def _ends(
    ledgers: Mapping[str, Json], bounds: Mapping[str, Sequence[Bound]]
) -> tuple[dict[str, float], dict[str, float]]:
    """How far the scales go, the one of what is sent and the one of what is held, for each config.

    They are the same for all, so that bars can be compared, unless some could not be seen then.
    """
    sent, held = {}, {}
    for name, ledger in ledgers.items():
        predicted, compiled, memory = (
            ledger[key] for key in ("predicted_bytes", "compiled", "memory")
        )
        sent[name] = max(
            sum(row[2] for row in _by_purpose(ledger)),
            predicted["total"] if predicted else 0,
            compiled_bytes(compiled) if compiled else 0,
        )
        peak = memory["peak"] if memory else 0
        near = [bound.size for bound in bounds[name] if bound.size <= NEAR * peak]
        held[name] = max([peak, compiled["peak"] if compiled else 0, *near])
    return _shared(sent, room=1.32), _shared(held, room=1.32)


def _shared(values: Mapping[str, float], *, room: float) -> dict[str, float]:
    """The ends of scales for values, with room for words behind them."""
    shown = [value for value in values.values() if value]
    if not shown:
        return dict.fromkeys(values, 1.0)
    if max(shown) <= ONE_SCALE * min(shown):
        return dict.fromkeys(values, room * max(shown))
    return {name: room * (value or 1.0) for name, value in values.items()}


def _num_lines(ledger: Json) -> int:
    """How many bars there are below one another."""
    classes = [size for name, size in (ledger["memory"] or {}).items() if size and name != "peak"]
    return 1 + max(len(_by_purpose(ledger)), len(classes), 1)


def _write_behind(axes: Any, x: float, y: float, text: str) -> None:
    """Writes behind the end of a bar."""
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
        linespacing=1.35,
    )


def _write_bytes_below(axes: Any) -> None:
    """Writes round numbers of bytes below an axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    end = axes.get_xlim()[1]
    step = 1.0
    while end / step > 5.5:  # 1, 2, 4, ... bytes: powers of two are round in KiB and in MiB.
        step *= 2
    axes.xaxis.set_major_locator(FixedLocator([step * i for i in range(int(end / step) + 1)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: describe_bytes(x) if x else "0"))
