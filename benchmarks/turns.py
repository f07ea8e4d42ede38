"""Things timed in turn, and ratios of what they took.

What else a machine does slows down a moment and not a thing. So short blocks of every thing follow
each other in rounds, every second round the other way about, and what is kept is the ratio within a
round. Of the ratios the median counts, with an interval that rests on their order alone: whatever
their distribution, it holds the true median in at least 95 of 100 cases.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

OUTSIDE = 0.025  # The chance allowed for the true median to lie below the interval, or above it.

# Takes so many steps and returns how many seconds they took.
Block = Callable[[int], float]


class Estimate(NamedTuple):
    """A median and how far it can be trusted.

    Attributes:
      median: The median.
      low: The lower end of the interval.
      high: The upper end.
    """

    median: float
    low: float
    high: float

    def show(self, text: Callable[[float], str]) -> str:
        """The median and the interval, each number as `text` writes it."""
        return f"{text(self.median)} ({text(self.low)} to {text(self.high)})"


def estimate(values: Iterable[float]) -> Estimate:
    """The median of values, and the interval for it.

    Args:
      values: At least one. With fewer than six the interval, from the least to the greatest, holds
        the median in fewer than 95 of 100 cases: in 94, 88, 75, 50 and none for five to one.

    Returns:
      Both.
    """
    ordered = sorted(values)
    count = len(ordered)
    # How many of them lie below the true median is as many heads as so many coins show.
    left_out, tail = 0, 0.5**count
    while tail <= OUTSIDE:
        left_out += 1
        tail += math.comb(count, left_out) * 0.5**count
    end = max(left_out - 1, 0)
    return Estimate(statistics.median(ordered), ordered[end], ordered[count - 1 - end])


def take_turns(blocks: Mapping[str, Block], *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Times blocks in turn.

    Args:
      blocks: What to time, by name.
      steps: How many steps a block takes.
      rounds: How many blocks of each; one before them is not counted.

    Returns:
      The seconds of each block, by name.
    """
    for block in blocks.values():
        block(steps)
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for number in range(rounds):
        for name in list(blocks) if number % 2 == 0 else reversed(list(blocks)):
            seconds[name].append(blocks[name](steps))
    return seconds


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """What things took in parts of what others did in the same rounds."""
    return [x / y for x, y in zip(seconds, base, strict=True)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, a line each; the first column is text, the others are numbers."""
    alignments = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, alignments, *rows)]
