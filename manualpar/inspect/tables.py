"""Formats numbers, and makes tables of them, in one style for all commands.

Numbers are shown with three digits and a unit; `None`, an unknown number, is shown as a dash. A
report is a list of columns and a list of rows. The same columns make a table on a console, a table
that compares a few rows side by side, and a table in Markdown. Words are aligned to the left,
numbers to the right.
"""

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import rich.console
from rich import box
from rich.text import Text

from manualpar.errors import printable
from manualpar.inspect.state_layout import FittedTable

__all__ = [
    "UNKNOWN",
    "TableColumn",
    "describe_bytes",
    "describe_count",
    "describe_difference",
    "describe_flops",
    "describe_seconds",
    "describe_share",
    "markdown_table",
    "print_line",
    "print_side_by_side",
    "print_table",
    "print_wrapped",
    "share_of",
    "text_columns",
]

Row = TypeVar("Row")

UNKNOWN = "-"


@dataclasses.dataclass(frozen=True)
class TableColumn(Generic[Row]):
    """A column of a table.

    Attributes:
      name: The name above the column.
      value: How to read the value from a row: a function of the row, an index, the name of an
        attribute, or a key if rows are dicts. A missing key gives `None`.
      describe: Formats a number, or other text that is aligned to the right; `None` for words.
      is_optional: Whether a table leaves the column out if its values are all `None` or 0.
      is_summed: Whether the separate last row of a table, such as a sum, has a text in this column.
    """

    name: str
    value: Callable[[Row], Any] | str | int
    describe: Callable[[Any], str] | None = None
    _: dataclasses.KW_ONLY
    is_optional: bool = False
    is_summed: bool = True

    def cell(self, row: Row) -> str:
        """Returns the text of a row; a dash for `None`."""
        value = self._read(row)
        return UNKNOWN if value is None else (self.describe or str)(value)

    def is_shown(self, rows: Sequence[Row]) -> bool:
        """Returns whether a table of the rows has the column."""
        return not self.is_optional or any(map(self._read, rows))

    def _read(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        if isinstance(self.value, int):
            return row[self.value]
        return row.get(self.value) if isinstance(row, Mapping) else getattr(row, self.value)


def text_columns(names: Sequence[str], *, words: int = 1) -> list[TableColumn[Any]]:
    """Returns columns for rows that are sequences of texts.

    The first `words` columns are aligned to the left, and the others to the right, like numbers.
    """
    return [TableColumn(name, i, None if i < words else str) for i, name in enumerate(names)]


def describe_bytes(size: float | None) -> str:
    """Formats a number of bytes, such as `1.95 MiB`."""
    return _three_digits(size, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


def describe_flops(flops: float | None) -> str:
    """Formats a number of floating-point operations, such as `3.33 GFLOP`."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
    return "0" if flops == 0 else _three_digits(flops, units, 1000)


def describe_seconds(seconds: float | None) -> str:
    """Formats a time, such as `1.2 ms`."""
    return _three_digits(None if seconds is None else seconds * 1e6, ("µs", "ms", "s"), 1000)


def describe_count(number: float | None) -> str:
    """Formats a whole number, such as `1,024`."""
    return UNKNOWN if number is None else f"{number:,.0f}"


def describe_share(part: float | None, whole: float = 1.0) -> str:
    """Formats `part / whole` as a percentage, such as `12.5%`."""
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


def share_of(whole: float) -> Callable[[float | None], str]:
    """Returns a function that formats a part as a percentage of `whole`."""
    return functools.partial(describe_share, whole=whole)


def describe_difference(more: float, describe: Callable[[float], str]) -> str:
    """Formats a difference with its sign, such as `+1 KiB`, or `=` if it is 0."""
    return f"{'+' if more > 0 else '-'}{describe(abs(more))}" if more else "="


def _three_digits(value: float | None, units: Sequence[str], step: int) -> str:
    if value is None:
        return UNKNOWN
    index = 0
    while abs(value) >= 999.5 and index < len(units) - 1:
        value, index = value / step, index + 1
    return f"{value:.3g} {units[index]}"


def print_line(console: rich.console.Console, text: str) -> None:
    """Prints a line without markup, colours or wrapping, so that paths are not broken.

    Unprintable characters are escaped, because the names of files may contain them.
    """
    shown = "\n".join(printable(line.expandtabs()) for line in text.split("\n"))
    console.print(shown, markup=False, highlight=False, soft_wrap=True)


def print_wrapped(console: rich.console.Console, *paragraphs: str) -> None:
    """Prints paragraphs, wrapped between words to the width of the console."""
    for paragraph in paragraphs:
        lines = textwrap.wrap(
            paragraph, console.width, break_long_words=False, break_on_hyphens=False
        )
        print_line(console, "\n".join(lines))


def print_table(
    console: rich.console.Console,
    columns: Sequence[TableColumn[Row]],
    rows: Sequence[Row],
    *,
    title: str = "",
    last: Row | None = None,
    most: int | None = None,
) -> None:
    """Prints a title and, if there are rows, a table followed by an empty line.

    In a narrow terminal, cells are wrapped between words. If the words are too long, the table is
    wider than the terminal, so that names can be searched.

    Args:
      console: Where to print.
      columns: The columns, from left to right.
      rows: The rows; without rows nothing but the title is printed.
      title: A line above the table; `""` for none.
      last: A separate row below the other rows, such as their sum.
      most: The number of rows to show; `None` for all.
    """
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    if not rows:
        return
    table = FittedTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    columns = [column for column in columns if column.is_shown(rows)]
    for column in columns:
        justify: Any = "right" if column.describe else "left"
        table.add_column(Text(column.name), justify=justify, overflow="fold")
    for row in rows[:most]:
        table.add_row(*(Text(column.cell(row)) for column in columns))
    if last is not None:
        table.add_section()
        table.add_row(*(Text(x.cell(last) if x.is_summed else "") for x in columns))
    console.print(table, soft_wrap=True)
    if most is not None and len(rows) > most:
        print_line(console, f"and {len(rows) - most:,} more, which are in the files")
    console.print()


def print_side_by_side(
    console: rich.console.Console,
    columns: Sequence[TableColumn[Row]],
    rows: Sequence[Row],
    *,
    names: Sequence[str],
    title: str = "",
) -> None:
    """Prints a transposed table: a line for each column, and a column for each row.

    `names` are the headings of the rows.
    """
    lines = [(x.name, *map(x.cell, rows)) for x in columns if x.is_shown(rows)]
    print_table(console, text_columns(["", *names]), lines, title=title)


def markdown_table(columns: Sequence[TableColumn[Row]], rows: Sequence[Row]) -> str:
    """Formats a table in Markdown, without a newline at its end."""
    columns = [column for column in columns if column.is_shown(rows)]
    names = [column.name for column in columns]
    alignments = ["---:" if column.describe else "---" for column in columns]
    cells = [[column.cell(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, alignments, *cells))
