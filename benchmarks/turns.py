"""Times blocks in turn, and estimates the ratios of their times.

A block is a number of steps of one program. Other work on the machine slows down all programs for a
moment. So in each round every program runs one short block; every second round has the opposite
order. Only ratios of times within a round are used. The result is the median of the ratios with an
interval. The ends of the interval are two of the sorted ratios. Whatever the distribution of the
ratios, the interval contains the true median in at least 95 of 100 cases.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

OUTSIDE = 0.025  # The largest probability that the true median is below the interval, or above.

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
      values: At least one value. With fewer than six values the interval goes from the least to the
        greatest value, and contains the true median in fewer than 95 of 100 cases: 94 with five
        values, 88 with four, 75 with three, 50 with two, and 0 with one.

    Returns:
      The median and the interval.
    """
    ordered = sorted(values)
    count = len(ordered)
    # Each value is below the true median with probability 1/2, so their number is binomial.
    left_out, tail = 0, 0.5**count
    while tail <= OUTSIDE:
        left_out += 1
        tail += math.comb(count, left_out) * 0.5**count
    end = max(left_out - 1, 0)
    return Estimate(statistics.median(ordered), ordered[end], ordered[count - 1 - end])


def take_turns(blocks: Mapping[str, Block], *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Times blocks in turn.

    Args:
      blocks: Functions that run a block of steps and return its seconds, by name.
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
    """Returns `seconds` divided by `base`, round by round."""
    return [x / y for x, y in zip(seconds, base, strict=True)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Makes the lines of a Markdown table; the first column is text, the others are numbers."""
    alignments = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, alignments, *rows)]
