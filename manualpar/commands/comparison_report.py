"""Shows a comparison of strategies as a table, as Markdown and as a picture.

A row is a dict with the measurements of a program, see `Trial.row` in
`compare_command`. The last row is the program on a single device.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console

from manualpar.strategies import strategy_kinds
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import Bar
from manualpar.system.reports.tables import (
    UNKNOWN,
    Column,
    describe_bytes,
    markdown_table,
    print_table,
    print_wrapped,
)

Row = dict[str, Any]

PICTURE = "comparison.png"
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
DASHES: dict[str, Any] = {
    "manual": (0, ()),
    "auto": (0, (5, 2)),
    "explicit": (0, (1, 1.4)),
    "auto-unconstrained": (0, (6, 1.5, 1, 1.5)),
}


def name(row: Row) -> str:
    """Returns a row's strategy and mode, such as `fsdp auto`."""
    return f"{row['strategy']} {row['mode']}"


def _counts(row: Row) -> str:
    counts = [row["collectives"].get(kind, 0) for kind in KINDS]
    if others := sum(row["collectives"].values()) - sum(counts):
        counts.append(others)
    return "/".join(map(str, counts))


def _kib(size: float | None) -> str:
    return UNKNOWN if size is None else f"{size / 1024:,.1f}"


COLUMNS: Sequence[Column[Row]] = (
    Column("", name),
    Column("final loss", lambda row: row["losses"][-1], "{:.6f}".format),
    Column("minus one device", "difference", "{:+.1e}".format),
    Column("state KiB", "state_bytes", _kib),
    Column("tempor. KiB", "temporary_bytes", _kib),
    Column("sent KiB", "bytes_sent", _kib),
    Column(
        "formula KiB",
        lambda row: "≤ " * row["formula_is_bound"] + _kib(row["formula_bytes"]),
        str,
    ),
    Column("calls", _counts, str),
    Column("compile s", "compile_seconds", "{:.1f}".format),
    Column("step ratio", "step_ratio", "{:.2f}".format),
)


def print_rows(console: rich.console.Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Prints the table and the footnotes; a line separates the row of the single device."""
    *pairs, reference = rows
    columns = [dataclasses.replace(x, name=x.name.replace(" ", "\n")) for x in COLUMNS]
    print_table(console, columns, pairs, last=reference)
    print_wrapped(console, *notes)


def markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Formats the table in Markdown, with the footnotes below it."""
    return "\n".join([markdown_table(COLUMNS, rows), "", *(f"- {note}" for note in notes), ""])


def footnotes(rows: Sequence[Row], *, repetitions: int) -> list[str]:
    """Returns footnotes that explain the columns of the table."""
    device = jax.devices()[0]
    cpu = " Simulated devices share the cores of one machine, so this shows no speed-up."
    return [
        f"jax {jax.__version__}, {device.device_kind}. Loss: the loss of the last of "
        f"{len(rows[0]['losses'])} steps, and its difference from the loss on one device. State: "
        "parameters and optimizer state on a device. Temporaries: the memory that the compiled "
        "step needs in addition.",
        "Sent, and calls of collectives (all-gathers/reduce-scatters/all-reduces/others): per "
        "device and step. In mode manual they are read from the traced program, including metrics. "
        "In the other modes they are read from the program that XLA compiled for this backend.",
        "Formula: the predicted bytes for parameters and gradients, and in mode manual also for "
        "split layers. ≤: an upper bound, because weights are gathered again only if the backward "
        "pass needs them. -: no formula, because XLA may send activations.",
        f"Step: the time of a step divided by the first row's time, as a median over {repetitions} "
        f"rounds. In a round every row makes one step.{cpu if device.platform == 'cpu' else ''}",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the losses, and bars for a device's memory and sent bytes, into a PNG file."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in rows[0]["mesh"].items())
    title = f"One config under {len(rows) - 1} strategies and modes ({mesh})"
    size = (15, max(6.4, 2.6 + 0.34 * len(rows)))
    with pictures.saved_figure(path, size, title=title) as figure:
        grid = figure.add_gridspec(2, 3, width_ratios=(1.35, 1, 1), height_ratios=(2.2, 1))
        losses = figure.add_subplot(grid[0, 0])
        _draw_losses(losses, figure.add_subplot(grid[1, 0], sharex=losses), rows)
        _draw_memory(figure.add_subplot(grid[:, 1]), rows)
        _draw_bytes(figure.add_subplot(grid[:, 2]), rows)


def _draw_losses(losses: Any, differences: Any, rows: Sequence[Row]) -> None:
    *pairs, reference = rows
    steps = range(1, len(reference["losses"]) + 1)
    for index, row in enumerate(pairs):
        style = {"color": _color(row), "linestyle": DASHES[row["mode"]]}
        # Earlier lines are wider, so that they stay visible under the later lines.
        width = 1.2 + 4.0 * (len(pairs) - 1 - index) / max(len(pairs) - 1, 1)
        losses.plot(steps, row["losses"], linewidth=width, label=name(row), **style)
        apart = [x - y for x, y in zip(row["losses"], reference["losses"], strict=True)]
        differences.plot(steps, apart, linewidth=1.1, **style)
    losses.plot(steps, reference["losses"], color=pictures.INK, linewidth=0.8, label="one device")
    differences.axhline(0, color=pictures.INK, linewidth=0.8)
    distance = max(row["largest_difference"] for row in pairs)
    losses.set_title(f"Training loss, at most {distance:.1e} from the loss on one device")
    losses.tick_params(labelbottom=False)
    losses.legend(fontsize=8, ncols=2, handlelength=3.2)
    differences.set_title("Loss minus the loss on one device")
    pictures.count_steps(differences)
    differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (losses, differences):
        axes.set_ylabel("nats")


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    bars = []
    for row in rows:
        state, temporaries = row["state_bytes"], row["temporary_bytes"] or 0
        label = name(row) if row is not rows[-1] else row["strategy"]
        text = f"{describe_bytes(state)} + {describe_bytes(temporaries)}"
        bars.append(Bar(label, [(state, _color(row)), (temporaries, pictures.GREY)], text))
    pictures.draw_bars_of_bytes(axes, bars, title="Memory of a device: state + temporaries")


def _draw_bytes(axes: Any, rows: Sequence[Row]) -> None:
    bars = []
    for y, row in enumerate(rows):
        sent, formula = row["bytes_sent"], row["formula_bytes"] or 0
        color = _color(row) if row["read_from"] == "traced" else _pale(_color(row))
        # An invisible part of the bar, up to the formula's value, puts the text to the right of
        # the line that marks this value.
        parts = [(sent, color), (max(formula - sent, 0), "none")]
        bars.append(Bar("", parts, describe_bytes(sent)))
        if formula:
            mark = {"marker": "|", "markersize": 13, "markeredgewidth": 2.2}
            axes.plot(formula, y, color=pictures.INK, **mark)
    title = "Bytes that a device sends in a step (|: the formula)"
    pictures.draw_bars_of_bytes(axes, bars, title=title)
    pictures.add_legend(axes, {"as traced": pictures.DARK, "as compiled": _pale(pictures.DARK)})


def _color(row: Row) -> str:
    kind = strategy_kinds().get(row["strategy"])
    return kind.color if kind else pictures.INK  # The row of the single device has no strategy.


def _pale(color: str) -> str:
    """Returns the colour halfway between `#RRGGBB` and white."""
    return "#" + "".join(f"{(int(color[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))
