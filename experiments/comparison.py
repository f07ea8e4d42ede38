"""A comparison as a table, as Markdown and as a picture.

A row is a dict as it is in `comparison.json`, see `experiments.compare`. The row of the single
device is the last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
from rich import box
from rich.table import Table

from manualpar.strategies import strategy_kinds
from manualpar.watching.screen import LOG_WIDTH

Row = dict[str, Any]

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
HEADERS = (
    "",
    "final loss",
    "minus one device",
    "state KiB",
    "tempor. KiB",
    "sent KiB/step",
    "formula KiB/step",
    "collectives",
    "compile s",
    "step ratio",
)
DASHES: dict[str, Any] = {
    "manual": (0, ()),
    "auto": (0, (5, 2)),
    "explicit": (0, (1, 1.4)),
    "auto-unconstrained": (0, (6, 1.5, 1, 1.5)),
}
INK, DARK, GREY, FAINT = "#222222", "#555555", "#B8BEC6", "#DDDDDD"
BAR_HEIGHT = 0.7
MIB = 2**20


def name(row: Row) -> str:
    """A row's strategy and mode, such as `fsdp auto`."""
    return f"{row['strategy']} {row['mode']}"


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of `HEADERS`."""
    counts = [row["collectives"].get(kind, 0) for kind in KINDS]
    if others := sum(row["collectives"].values()) - sum(counts):
        counts.append(others)
    return [
        name(row),
        f"{row['losses'][-1]:.6f}",
        f"{row['difference']:+.1e}",
        _kib(row["state_bytes"]),
        _kib(row["temporary_bytes"]),
        _kib(row["bytes_sent"]),
        ("≤ " if row["formula_is_bound"] else "") + _kib(row["formula_bytes"]),
        "/".join(map(str, counts)),
        f"{row['compile_seconds']:.1f}",
        f"{row['step_ratio']:.2f}",
    ]


def print_table(console: rich.console.Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints the table, the single device below a line, and the footnotes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for header in HEADERS:
        # In a narrow terminal words are broken, and no digit is left out.
        table.add_column(
            header.replace(" ", "\n"),
            justify="right" if header else "left",
            overflow="fold",
            no_wrap=console.width >= LOG_WIDTH,
        )
    for row in rows:
        table.add_row(*cells(row), end_section=row is rows[-2])
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table in Markdown, with the footnotes below it."""
    alignments = ["---:" if header else "---" for header in HEADERS]
    lines = [f"| {' | '.join(line)} |" for line in (HEADERS, alignments, *map(cells, rows))]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def footnotes(rows: Sequence[Row], *, repetitions: int) -> list[str]:
    """Explains the columns of the table."""
    device = jax.devices()[0]
    cpu = " Simulated devices share the cores of one machine, so that it is no speed-up."
    return [
        f"jax {jax.__version__}, {device.device_kind}. Loss: that of the last of "
        f"{len(rows[0]['losses'])} steps, and its difference from that of one device. State: "
        "parameters and optimizer state on a device. Temporaries: what the compiled step holds "
        "besides.",
        "Sent and collectives (all-gathers/reduce-scatters/all-reduces/others): by a device in a "
        "step. In mode manual they are read from the traced program, as it is written, metrics "
        "included; in the other modes from the compiled program, as XLA made it for this backend.",
        "Formula: for parameters and gradients alone. ≤: at most that, because weights are "
        "gathered again only where the backward pass needs them. -: none, because XLA may send "
        "activations.",
        f"Step: the median over {repetitions} rounds, in each of which every row takes one step, "
        f"of its time divided by that of the first row.{cpu if device.platform == 'cpu' else ''}",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the losses, and bars for what a device holds and sends, into a PNG file."""
    # An extra of its own. Without pyplot, whose settings would be those of the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(15, max(6.4, 2.6 + 0.34 * len(rows))), layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.35, 1, 1), height_ratios=(2.2, 1))
    losses = figure.add_subplot(grid[0, 0])
    differences = figure.add_subplot(grid[1, 0], sharex=losses)
    memory = figure.add_subplot(grid[:, 1])
    sent = figure.add_subplot(grid[:, 2], sharey=memory)
    _draw_losses(losses, differences, rows)
    _draw_memory(memory, rows)
    _draw_bytes(sent, rows)
    for axes in (losses, differences, memory, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, colors=INK)
        axes.set_axisbelow(True)
        is_bars = axes in (memory, sent)
        axes.grid(axis="x" if is_bars else "both", color=FAINT, linewidth=0.6)
    mesh = " x ".join(f"{axis}={size}" for axis, size in rows[0]["mesh"].items())
    figure.suptitle(f"One config under {len(rows) - 1} strategies and modes ({mesh})", color=INK)
    figure.savefig(path, dpi=120)


def _draw_losses(losses: Any, differences: Any, rows: Sequence[Row]) -> None:
    *pairs, reference = rows
    steps = range(1, len(reference["losses"]) + 1)
    for index, row in enumerate(pairs):
        style = {"color": _color(row), "linestyle": DASHES[row["mode"]]}
        # The first lines are wide, so that they can be seen under the last.
        width = 1.2 + 4.0 * (len(pairs) - 1 - index) / max(len(pairs) - 1, 1)
        losses.plot(steps, row["losses"], linewidth=width, label=name(row), **style)
        apart = [x - y for x, y in zip(row["losses"], reference["losses"], strict=True)]
        differences.plot(steps, apart, linewidth=1.1, **style)
    losses.plot(steps, reference["losses"], color=INK, linewidth=0.8, label="one device")
    differences.axhline(0, color=INK, linewidth=0.8)
    distance = max(row["largest_difference"] for row in pairs)
    title = f"Training loss, at most {distance:.1e} from that of one device"
    losses.set_title(title, fontsize=11, loc="left")
    losses.tick_params(labelbottom=False)
    losses.legend(fontsize=8, ncols=2, frameon=False, handlelength=3.2)
    differences.set_title("Loss minus that of one device", fontsize=11, loc="left")
    differences.set_xlabel("step")
    differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    for axes in (losses, differences):
        axes.set_ylabel("nats")


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        state, temporaries = row["state_bytes"] / MIB, (row["temporary_bytes"] or 0) / MIB
        axes.barh(y, state, color=_color(row), height=BAR_HEIGHT)
        axes.barh(y, temporaries, left=state, color=GREY, height=BAR_HEIGHT)
        _label(axes, state + temporaries, y, f"{state:.2f} + {temporaries:.2f}")
    *pairs, reference = rows
    axes.set_yticks(range(len(rows)), [*map(name, pairs), reference["strategy"]])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.28)
    axes.set_title("Held on a device: state + temporaries", fontsize=11, loc="left")
    axes.set_xlabel("MiB")


def _draw_bytes(axes: Any, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        sent, formula = row["bytes_sent"] / MIB, (row["formula_bytes"] or 0) / MIB
        color = _color(row) if row["read_from"] == "traced" else _pale(_color(row))
        axes.barh(y, sent, color=color, height=BAR_HEIGHT)
        if formula:
            axes.plot(formula, y, color=INK, marker="|", markersize=13, markeredgewidth=2.2)
        _label(axes, max(sent, formula), y, f"{sent:.2f}")
    axes.tick_params(labelleft=False)
    axes.margins(x=0.16)
    axes.set_title("Sent by a device in a step (|: the formula)", fontsize=11, loc="left")
    axes.set_xlabel("MiB")
    for label, color in (("as traced", DARK), ("as compiled", _pale(DARK))):
        axes.plot([], [], "s", color=color, label=label)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.07),
        ncols=2,
        fontsize=9,
        frameon=False,
    )


def _label(axes: Any, x: float, y: float, text: str) -> None:
    offset = {"xytext": (7, 0), "textcoords": "offset points"}
    axes.annotate(text, (x, y), va="center", fontsize=8.5, color=INK, **offset)


def _color(row: Row) -> str:
    kind = strategy_kinds().get(row["strategy"])
    return kind.color if kind else INK  # The single device.


def _pale(color: str) -> str:
    """A colour `#RRGGBB` half way to white."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


def _kib(size: float | None) -> str:
    return "-" if size is None else f"{size / 1024:,.1f}"
