"""Draws the results in `docs/measured`: a JSON file of a benchmark becomes an SVG beside it.

    python -m benchmarks.pictures                # all of them
    python -m benchmarks.pictures one_h200       # one of them

The JSON files are those that benchmarks write with `--json`. A picture shows a table of its file,
in the table's own words and figures. `one_step.json` is the ledger that `manualpar inspect` wrote,
without its lists of collectives.
"""

import argparse
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import Table
from manualpar.inspect.tables import describe_bytes
from manualpar.system.reports.pictures import (
    COMPUTING,
    GREY,
    MEMORY_COLORS,
    SENDING,
    Bar,
    add_legend,
    draw_bars,
    new_figure,
)
from manualpar.system.storage.untrusted import read_file, write_file

FOLDER = Path(__file__).parent.parent / "docs" / "measured"
MANUAL, AUTO, TUNED_AUTO, OTHER = COMPUTING, SENDING, "#B79CC9", GREY
INCHES_OF_A_BAR = 0.26


class Picture(NamedTuple):
    """A picture: its title, its bars, and what their colours stand for."""

    title: str
    bars: Sequence[Bar]
    colors: dict[str, str]


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of pictures; all if none is given")
    names = parser.parse_args(argv).names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PICTURES)}")
    for name in names:
        path = FOLDER / f"{name}.svg"
        write_file(path, draw(make_picture(name)))
        print(path)


def read_results(name: str) -> list[Table]:
    """Reads the tables of a file in `docs/measured`; a ledger is one table."""
    whole = json.loads(read_file(FOLDER / f"{name}.json"))
    if "tables" not in whole:
        return [_ledger_table(whole)]
    return [Table(**table) for table in whole["tables"]]


def _ledger_table(ledger: dict[str, Any]) -> Table:
    """Makes a table of a ledger: bytes of each reading of the step, in total and by their kind."""
    sent, held, compiled = ledger["bytes"], ledger["memory"], ledger["compiled"]
    purposes, sizes = sent["by_purpose"], {k: v for k, v in held.items() if k in MEMORY_COLORS}
    by_kind = {
        "gathered": purposes["gather_params"] + purposes["regather_params"],
        "gradients": purposes["scatter_gradients"],
    }
    rows: list[tuple[str, int, dict[str, int]]] = [
        ("sent: formula", ledger["predicted_bytes"]["total"], {}),
        ("sent: step as written", sent["total"], by_kind),
        ("sent: step as compiled", compiled["bytes"], {}),
        ("held: step as written", held["peak"], sizes),
        ("held: step as compiled", compiled["peak"], {}),
    ]
    cells = [
        [name, str(total), *(str(parts.get(x, 0)) for x in MEMORY_COLORS)]
        for name, total, parts in rows
    ]
    devices, elements = ledger["devices"], ledger["parts"]["trained"]["elements"]
    model = f"FSDP, {elements / 1e6:.0f}M parameters on {devices} devices"
    title = f"{model}: what each sends and holds in a step"
    return Table(title, ["reading", "total", *MEMORY_COLORS], cells)


def make_picture(name: str) -> Picture:
    """Makes the picture of a name in `PICTURES`."""
    tables = [table for source in SOURCES.get(name, (name,)) for table in read_results(source)]
    return PICTURES[name](tables)


def draw(picture: Picture) -> bytes:
    """Draws a picture as an SVG, whose text stays text; the same picture gives the same bytes."""
    import matplotlib

    size = (8.0, INCHES_OF_A_BAR * len(picture.bars) + 1.1)
    written = io.BytesIO()
    with new_figure("benchmarks.pictures", size, title=picture.title) as figure:
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": picture.title})
        axes = figure.subplots()
        draw_bars(axes, picture.bars)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        if len(picture.colors) > 1:
            add_legend(axes, picture.colors)
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def number(cell: str) -> float:
    """Reads the first number of a cell, such as 21.5 of `21.5 (1,065)`."""
    found = re.match(r"[+-]?[\d,]+(?:\.\d+)?", cell)
    if not found:
        raise ValueError(f"{cell!r} begins with no number")
    return float(found[0].replace(",", ""))


def column(table: Table, name: str) -> int:
    """Returns the position of the column that `name` names."""
    return table.columns.index(name)


def bars_of(
    cells: Iterable[tuple[str, str, str]], *, text: Callable[[str], str] = str
) -> list[Bar]:
    """Makes bars of (name, cell, colour); a bar is as long as its cell's first number."""
    return [Bar(name, [(number(cell), color)], text(cell)) for name, cell, color in cells]


def one_h200(tables: list[Table]) -> Picture:
    """Milliseconds of a training step on one H200."""
    (table,) = tables
    colors = {"plain jit": OTHER, "manual": MANUAL, "auto": AUTO, "PyTorch": "#E69F00"}
    rows = [row for row in table.rows if row[0] != "the first, again"]
    cells = (
        (row[0], row[1], next(colors[x] for x in colors if row[0].startswith(x))) for row in rows
    )
    return Picture("One H200: ms a step", bars_of(cells), colors)


def compiled_gpus(tables: list[Table]) -> Picture:
    """Estimated milliseconds of steps that were compiled for eight H100s."""
    table, _ = tables  # The second is of an older default.
    colors = {"auto, no options": AUTO, "auto, all options": TUNED_AUTO, "manual": MANUAL}
    cells = [
        (
            row[0].replace("`", "") if name in table.columns[2] else "",
            row[column(table, name)],
            color,
        )
        for row in table.rows
        if row[1] == "h100:8" and row[column(table, "auto, no options")]
        for name, color in colors.items()
    ]
    return Picture("Compiled for h100:8: ms a step, MiB of temporaries", bars_of(cells), colors)


def compiled_tpus(tables: list[Table]) -> Picture:
    """Steps that were compiled for TPUs, in multiples of mode `auto`."""
    (table,) = tables
    colors = {"manual": MANUAL, "manual, no options": "#8496B0"}
    cells = [
        (f"{row[0]}, {row[1]}" if row[2] == "manual" else "", row[-1], colors[row[2]])
        for row in table.rows
        if row[2] in colors
    ]
    return Picture(
        "Compiled for TPUs: a step's time divided by that of mode auto (auto is 1)",
        bars_of(cells, text=lambda cell: cell.split(",")[0]),
        colors,
    )


def step_time(tables: list[Table]) -> Picture:
    """Processor time of a step on simulated devices, in multiples of mode `manual`."""
    colors = {"manual": MANUAL, "auto": AUTO, "explicit": TUNED_AUTO, "notebook": "#8496B0"}
    cells = [
        (f"{table.title}, {row[0]}", row[column(table, "of manual's")], colors[row[0]])
        for table in tables
        for row in table.rows
        if row[0] in colors
    ]
    return Picture(
        "Eight simulated devices: processor time of a step divided by that of mode manual",
        bars_of(cells),
        {},
    )


def memory_and_collectives(tables: list[Table]) -> Picture:
    """State and temporaries of a step under every strategy, and what it sends."""
    (table,) = tables
    state, temporaries, sent = (column(table, x) for x in ("state", "temporaries", "sent"))
    colors = {
        "state": MEMORY_COLORS["parameters"],
        "temporaries": MEMORY_COLORS["activations"],
    }
    bars = [
        Bar(
            row[column(table, "strategy")],
            [
                (number(row[state]), colors["state"]),
                (number(row[temporaries]), colors["temporaries"]),
            ],
            f"{row[state]} + {row[temporaries]} MiB, sends {row[sent]} MiB",
        )
        for row in table.rows
    ]
    return Picture("A device's memory in a step, under each strategy", bars, colors)


def one_step(tables: list[Table]) -> Picture:
    """Bytes that a device sends and holds in a step: by formula, as written and as compiled."""
    (table,) = tables
    words = {"parameters": "weights", "gathered": "gathered weights"}
    bars: list[Bar] = []
    for row in table.rows:
        if row[0].startswith("held") and not any(bar.name == "" for bar in bars):
            bars.append(Bar("", [], ""))
        by_kind = dict(zip(table.columns[2:], map(number, row[2:]), strict=True))
        kinds = [(size, MEMORY_COLORS[kind]) for kind, size in by_kind.items() if size]
        text = describe_bytes(number(row[1]))
        bars.append(Bar(row[0], kinds or [(number(row[1]), OTHER)], text))
    colors = {words.get(kind, kind): color for kind, color in MEMORY_COLORS.items()}
    del colors["batch"]  # Too small to be seen.
    return Picture(table.title, bars, colors)


# The files of a picture that is drawn from several.
SOURCES = {"step_time": ("step_time", "step_time_lm")}
PICTURES: dict[str, Callable[[list[Table]], Picture]] = {
    drawn.__name__: drawn
    for drawn in (
        *(one_h200, compiled_gpus, compiled_tpus, step_time, memory_and_collectives),
        one_step,
    )
}


if __name__ == "__main__":
    main()
