"""A comparison as a picture: losses that lie on one another, and bars of what rows hold and send.

Matplotlib is used without pyplot, whose figures, backend and settings would be the whole process's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manualpar.extras import require
from manualpar.strategies import strategy_kinds
from manualpar.training.comparison import Row

DASHES = {
    "manual": (0, ()),
    "auto": (0, (5, 2)),
    "explicit": (0, (1, 1.4)),
    "auto-unconstrained": (0, (6, 1.5, 1, 1.5)),
}
MARKERS = {"manual": "o", "auto": "s", "explicit": "^", "auto-unconstrained": "D"}
INK, DARK, GREY, FAINT = "#222222", "#555555", "#B8BEC6", "#DDDDDD"
BAR = 0.7  # The width of a bar.


def draw_comparison(rows: Sequence[Row], path: Path) -> None:
    """Draws a comparison into a PNG file.

    Args:
      rows: The rows, the single device's last.
      path: The file.
    """
    require(path.name, "matplotlib")
    # Matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = max(6.4, 2.6 + 0.34 * len(rows))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(15, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.35, 1, 1), height_ratios=(2.2, 1))
    losses = figure.add_subplot(grid[0, 0])
    differences = figure.add_subplot(grid[1, 0], sharex=losses)
    memory = figure.add_subplot(grid[:, 1])
    sent = figure.add_subplot(grid[:, 2], sharey=memory)
    _draw_losses(losses, rows)
    _draw_differences(differences, rows)
    _draw_memory(memory, rows)
    _draw_bytes(sent, rows)
    for axes in (losses, differences, memory, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, colors=INK)
        axes.set_axisbelow(True)
    mesh = " x ".join(f"{axis}={size}" for axis, size in rows[0].mesh.items())
    figure.suptitle(
        f"One config under {len(rows) - 1} strategies and modes ({mesh})", fontsize=13, color=INK
    )
    figure.savefig(path, dpi=120)


def _style(row: Row, index: int, number: int) -> dict[str, Any]:
    """How a line is drawn: the first are wide, so that they can be seen under the last."""
    return {
        "color": strategy_kinds()[row.strategy].color,
        "linestyle": DASHES[row.mode],
        "linewidth": 1.2 + 4.0 * (number - 1 - index) / max(number - 1, 1),
        "label": row.name,
    }


def _draw_losses(axes: Any, rows: Sequence[Row]) -> None:
    """Draws the losses, each with a marker where the others have none."""
    *pairs, reference = rows
    steps = range(1, len(reference.losses) + 1)
    for index, row in enumerate(pairs):
        style = _style(row, index, len(pairs))
        axes.plot(
            steps,
            row.losses,
            marker=MARKERS[row.mode],
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            markevery=(index % len(steps), max(len(pairs), 1)),
            **style,
        )
    axes.plot(steps, reference.losses, color=INK, linewidth=0.8, label="one device")
    distance = max((row.largest_difference for row in pairs), default=0.0)
    title = f"Training loss, at most {distance:.1e} from that of one device"
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel("nats")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.tick_params(labelbottom=False)
    axes.legend(fontsize=8, ncols=2, frameon=False, handlelength=3.2)


def _draw_differences(axes: Any, rows: Sequence[Row]) -> None:
    """Draws how far the losses are from those of one device."""
    *pairs, reference = rows
    steps = range(1, len(reference.losses) + 1)
    for index, row in enumerate(pairs):
        style = _style(row, index, len(pairs)) | {"linewidth": 1.1}
        differences = [x - y for x, y in zip(row.losses, reference.losses, strict=True)]
        axes.plot(steps, differences, **style)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_title("Loss minus that of one device", fontsize=11, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("nats")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    axes.grid(color=FAINT, linewidth=0.6)


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    """Draws what a device holds."""
    places = range(len(rows))
    state = [row.state_bytes / 2**20 for row in rows]
    temporaries = [(row.temporary_bytes or 0) / 2**20 for row in rows]
    colors = [_color(row) for row in rows]
    axes.barh(places, state, color=colors, height=BAR)
    axes.barh(places, temporaries, left=state, color=GREY, height=BAR, label="temporaries")
    for place, x, y in zip(places, state, temporaries, strict=True):
        _write_behind(axes, x + y, place, f"{x:.2f} + {y:.2f}")
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.28)
    axes.set_title("Held on a device: state + temporaries", fontsize=11, loc="left")
    axes.set_xlabel("MiB")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)


def _draw_bytes(axes: Any, rows: Sequence[Row]) -> None:
    """Draws what a device sends, with what the formula says of it."""
    from matplotlib.patches import Patch

    places = range(len(rows))
    sent = [float(row.bytes_sent) / 2**20 for row in rows]
    formula = [float(row.formula_bytes or 0) / 2**20 for row in rows]
    for place, (row, x, predicted) in enumerate(zip(rows, sent, formula, strict=True)):
        color = _color(row)
        axes.barh(place, x, color=color if row.reading == "traced" else _pale(color), height=BAR)
        _write_behind(axes, max(x, predicted), place, f"{x:.2f}")
    mark = {"linestyle": "", "marker": "|", "markersize": 13, "markeredgewidth": 2.2, "color": INK}
    predicted_places = [place for place in places if rows[place].formula_bytes]
    marks = axes.plot([formula[place] for place in predicted_places], predicted_places, **mark)
    axes.tick_params(labelleft=False)
    axes.margins(x=0.16)
    axes.set_title("Sent by a device in a step", fontsize=11, loc="left")
    axes.set_xlabel("MiB")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    handles = [Patch(color=DARK), Patch(color=_pale(DARK)), *marks]
    axes.legend(
        handles,
        ["as traced", "as compiled", "formula"],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.07),
        ncols=3,
        fontsize=9,
        frameon=False,
    )


def _write_behind(axes: Any, x: float, y: float, text: str) -> None:
    """Writes a number behind the end of a bar."""
    axes.annotate(
        text,
        (x, y),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
    )


def _color(row: Row) -> str:
    kind = strategy_kinds().get(row.strategy)
    return kind.color if kind else INK  # Of one device.


def _label(row: Row) -> str:
    return row.name if row.strategy in strategy_kinds() else row.strategy


def _pale(color: str) -> str:
    """A colour `#RRGGBB` half way to white."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))
