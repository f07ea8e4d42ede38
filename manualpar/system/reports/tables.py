"""Formats numbers, and prints tables of numbers, in one style for all commands.

Numbers are shown with three digits and a unit; `None`, an unknown number, is shown as a dash. In a
table the columns of words come first, aligned to the left. The columns of numbers follow, aligned
to the right.
"""

from collections.abc import Callable, Sequence

import rich.console
from rich import box
from rich.table import Table
from rich.text import Text

from manualpar.errors import printable

UNKNOWN = "-"


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


def describe_count(number: float | None, devices: int = 1) -> str:
    """Formats `number / devices`, such as `1,024`."""
    return UNKNOWN if number is None else f"{number / devices:,.0f}"


def describe_share(part: float | None, whole: float = 1.0) -> str:
    """Formats `part / whole` as a percentage, such as `12.5%`."""
    return UNKNOWN if part is None or not whole else f"{part / whole:.1%}"


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
    """Prints paragraphs, wrapped to the width of the console."""
    for paragraph in paragraphs:
        console.print(paragraph, markup=False, highlight=False)


def print_table(
    console: rich.console.Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    words: int = 1,
    last: Sequence[str] = (),
    most: int | None = None,
) -> None:
    """Prints a title and, if there are rows, a table followed by an empty line.

    Args:
      console: The console to print on.
      headers: The names of the columns.
      rows: The cells.
      title: A line above the table.
      words: The number of leading columns with words; all other columns have numbers.
      last: A separate row below the other rows, such as their sum.
      most: The number of rows to show; `None` for all.
    """
    if title:
        console.print(Text(title, style="bold"), soft_wrap=True)
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for index, header in enumerate(headers):
        is_words = index < words
        # In a narrow terminal the cells are broken into lines, and no character is left out.
        table.add_column(Text(header), justify="left" if is_words else "right", overflow="fold")
    for row in rows[:most]:
        table.add_row(*map(Text, row))
    if last:
        table.add_section()
        table.add_row(*map(Text, last))
    console.print(table)
    if most is not None and len(rows) > most:
        print_line(console, f"and {len(rows) - most:,} more, which are in the files")
    console.print()
