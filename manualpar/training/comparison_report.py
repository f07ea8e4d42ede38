"""A comparison as a table, as Markdown and as JSON."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import rich.console
from rich import box
from rich.table import Table

from manualpar.training.comparison import Row
from manualpar.watching.screen import LOG_WIDTH

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


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of `HEADERS`."""
    others = sum(row.collectives.values()) - sum(row.collectives.get(kind, 0) for kind in KINDS)
    counts = [row.collectives.get(kind, 0) for kind in KINDS] + ([others] if others else [])
    bound = "≤ " if row.is_bound else ""
    return [
        row.name,
        f"{row.losses[-1]:.6f}",
        f"{row.difference:+.1e}",
        _kib(row.state_bytes),
        "-" if row.temporary_bytes is None else _kib(row.temporary_bytes),
        _kib(row.bytes_sent),
        "-" if row.formula_bytes is None else bound + _kib(row.formula_bytes),
        "/".join(map(str, counts)),
        f"{row.compile_seconds:.1f}",
        f"{row.step_ratio:.2f}",
    ]


def print_comparison(
    console: rich.console.Console, rows: Sequence[Row], *, repetitions: int
) -> None:
    """Prints the table, the single device below a line, and what must be known to read it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    is_wide = console.width >= LOG_WIDTH
    for header in HEADERS:
        justify: Literal["left", "right"] = "right" if header else "left"
        # In a narrow terminal words are broken: no digit is left out.
        table.add_column(
            header.replace(" ", "\n"), justify=justify, overflow="fold", no_wrap=is_wide
        )
    for row in rows[:-1]:
        table.add_row(*cells(row))
    table.add_section()
    table.add_row(*cells(rows[-1]))
    console.print(table)
    for note in footnotes(rows, repetitions=repetitions):
        console.print(note, markup=False, highlight=False)


def comparison_markdown(rows: Sequence[Row], *, repetitions: int) -> str:
    """Writes the table in Markdown, footnotes below it."""
    alignments = ["---:" if header else "---" for header in HEADERS]
    lines = [list(HEADERS), alignments, *map(cells, rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {note}" for note in footnotes(rows, repetitions=repetitions))
    return f"{table}\n\n{notes}\n"


def footnotes(rows: Sequence[Row], *, repetitions: int) -> list[str]:
    """What must be known to read the table."""
    device = jax.devices()[0]
    notes = [
        f"jax {jax.__version__}, {device.device_kind}. Loss: of the last of "
        f"{len(rows[0].losses)} steps, and its difference from that of one device. State: "
        "parameters and optimizer state. Temporaries: what the compiled step holds besides. Both "
        "on a device.",
        "Sent and collectives (all-gathers/reduce-scatters/all-reduces/others): of a device "
        "and step. In mode manual read from the traced program, which is what is written, metrics "
        "included; in the other modes from the compiled one, which is what XLA made of it for "
        "this backend.",
        "Formula: of parameters and gradients alone. ≤: at most that, for weights are gathered "
        "again only where the backward pass needs them. -: none, for XLA may send activations.",
        f"Step: the median over {repetitions} rounds, in each of which every row takes one step, "
        "of its time in parts of the first row's.",
    ]
    if device.platform == "cpu":
        notes[-1] += " Simulated devices share the cores of one machine: it is no speed-up."
    return notes


def comparison_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as plain values: numbers that are not finite are `null`."""
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rows": [_plain_row(row) for row in rows[:-1]],
        "one_device": _plain_row(rows[-1]),
    }


def _plain_row(row: Row) -> dict[str, Any]:
    """A row as plain values."""
    return {
        "strategy": row.strategy,
        "mode": row.mode,
        "mesh": dict(row.mesh),
        "losses": [_finite(loss) for loss in row.losses],
        "final_loss": _finite(row.losses[-1]),
        "difference": _finite(row.difference),
        "largest_difference": _finite(row.largest_difference),
        "state_bytes": row.state_bytes,
        "temporary_bytes": row.temporary_bytes,
        "bytes_sent": float(row.bytes_sent),
        "formula_bytes": None if row.formula_bytes is None else float(row.formula_bytes),
        "formula_is_bound": row.is_bound,
        "collectives": dict(row.collectives),
        "read_from": row.reading,
        "compile_seconds": row.compile_seconds,
        "step_seconds": row.step_seconds,
        "step_ratio": row.step_ratio,
    }


def _kib(size: int | Fraction) -> str:
    """Bytes in KiB."""
    return f"{float(size) / 1024:,.1f}"


def _finite(x: float) -> float | None:
    """A number as JSON has it."""
    return x if math.isfinite(x) else None
