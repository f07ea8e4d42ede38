"""A table for narrow terminals, whose cells are broken only between words.

rich breaks words if a table does not fit, and then names in it cannot be searched.
"""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

WORDS_OF_NUMBER = 3  # Such as `≤ 6.98 MiB`.
NARROW = 100
NO_PADDING = (0, 0, 0, 0)


class FittedTable(Table):
    """A rich table that wraps its cells between words.

    In a narrow terminal there is less space between columns. Short cells that are aligned to the
    right are numbers, which are wrapped only if nothing else helps.

    If the words are too long even so, the table is wider than the terminal. Print it with
    `console.print(table, soft_wrap=True)`: otherwise a console cuts off longer lines. So without
    `soft_wrap` the table breaks words if it is too wide.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the table with the widths that fit."""
        padding = self.padding
        try:
            unlimited = options.update_width(2**16)
            while options.max_width < NARROW and self.padding != NO_PADDING:
                if self._fit(console, unlimited) <= options.max_width:
                    break
                top, right, bottom, left = self.padding
                self.padding = (top, max(right - 1, 0), bottom, max(left - 1, 0))
            total = self._fit(console, options)
            if total > options.max_width:
                total = self._fit(console, options, wraps_numbers=True)
            if total > options.max_width and options.no_wrap:
                total = self._fit(console, options)
            if total > options.max_width and not options.no_wrap:
                self._set_widths([None] * len(self.columns))
            else:
                options = options.update_width(max(total, options.max_width))
            yield from super().__rich_console__(console, options)
        finally:
            self.padding = padding
            self._set_widths([None] * len(self.columns))

    def _fit(
        self, console: Console, options: ConsoleOptions, *, wraps_numbers: bool = False
    ) -> int:
        """Sets the widths of the columns; returns the width of the table."""
        self._set_widths([None] * len(self.columns))
        unlimited = options.update_width(2**16)
        kept = 0 if wraps_numbers else WORDS_OF_NUMBER
        measured = [_measure(column, console, unlimited, kept=kept) for column in self.columns]
        natural = [column.maximum for column in measured]
        between = console.measure(self, options=unlimited).maximum - sum(natural)
        least = [column.minimum for column in measured]
        widths = fit_widths(natural, least, options.max_width - between)
        self._set_widths(widths)
        return sum(widths) + between

    def _set_widths(self, widths: Sequence[int | None]) -> None:
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width


def fit_widths(natural: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Reduces widths until their sum is at most `total`, the largest width first.

    Args:
      natural: The widths without a limit.
      least: The smallest widths. If their sum is above `total`, they are the result.
      total: The largest sum.
    """
    widths = list(natural)
    while sum(widths) > total:
        shrinkable = [i for i, width in enumerate(widths) if width > least[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths


def _measure(
    column: Column, console: Console, options: ConsoleOptions, *, kept: int
) -> Measurement:
    """Measures a column: the width of its longest line, and of the longest text to keep whole.

    Words are kept whole, and numbers of at most `kept` words.
    """
    header = Measurement.get(console, options, column.header)
    least, natural = [header.minimum], [header.maximum]
    for cell in column.cells:
        measured = Measurement.get(console, options, cell)
        is_number = column.justify == "right" and len(str(cell).split()) <= kept
        least.append(measured.maximum if is_number else measured.minimum)
        natural.append(measured.maximum)
    return Measurement(max(least), max(natural))
