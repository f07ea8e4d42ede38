"""Times blocks in turn, and estimates the ratios of their times.

Other work on the machine slows down all programs for a moment. So short blocks of each program
follow each other in rounds, in the opposite order in every second round, and only ratios within a
round count. The result is the median of the ratios with an interval. The interval depends only on
the order of the ratios: for any distribution it contains the true median in at least 95 of 100
cases.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

OUTSIDE = 0.025  # The probability that the true median is below the interval; the same above it.

# Runs the given number of steps and returns their seconds.
Block = Callable[[int], float]


class Estimate(NamedTuple):
    """A median with its confidence interval.

    Attributes:
      median: The median.
      low: The lower end of the interval.
      high: The upper end.
    """

    median: float
    low: float
    high: float

    def show(self, text: Callable[[float], str]) -> str:
        """Formats the median and the interval; `text` formats each number."""
        return f"{text(self.median)} ({text(self.low)} to {text(self.high)})"


def estimate(values: Iterable[float]) -> Estimate:
    """Returns the median of values, and its interval.

    Args:
      values: At least one value. With fewer than six values the interval, from the least to the
        greatest value, contains the true median in fewer than 95 of 100 cases: 94 for five values,
        then 88, 75, 50, and 0 for one value.

    Returns:
      The median and the interval.
    """
    ordered = sorted(values)
    count = len(ordered)
    # The number of values below the true median is distributed like the heads of fair coins.
    left_out, tail = 0, 0.5**count
    while tail <= OUTSIDE:
        left_out += 1
        tail += math.comb(count, left_out) * 0.5**count
    end = max(left_out - 1, 0)
    return Estimate(statistics.median(ordered), ordered[end], ordered[count - 1 - end])


def take_turns(blocks: Mapping[str, Block], *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Times blocks in turn.

    Args:
      blocks: The blocks to time, by name.
      steps: The number of steps in a block.
      rounds: The number of blocks of each name, after a first block that is not counted.

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
    """Returns the times divided by the base's times in the same rounds."""
    return [x / y for x, y in zip(seconds, base, strict=True)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Makes the lines of a Markdown table; the first column is text, the others are numbers."""
    alignments = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, alignments, *rows)]
