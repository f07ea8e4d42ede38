"""The endless order in which training reads examples; the example at any position can be computed.

For one split, the order is a sequence of permutations of the examples, one for each epoch.

For a mixture, a table of `SLOTS` slots, which is repeated, gives the source of each position. The
number of a source's slots is proportional to its weight. The `k`-th of its `n` slots is at a random
place in the `k`-th of `n` equal parts of the table. So after any number of positions, the number of
examples from a source differs by about one from its share. The position also determines how many
examples of a source come before it. So each source has its own epochs: a small source may begin its
tenth epoch while a large source is in its first epoch.

The example at a position depends only on the seed and the position, and the time to compute it is
the same for all positions. So the state of the data is one number, even for a mixture.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from manualpar.data.dataset import Split
from manualpar.data.mixture import SLOTS, MixedSplit

# A function that maps ascending positions, `int64[N]`, to the numbers of the examples at these
# positions, `int64[N]`.
Order = Callable[[np.ndarray], np.ndarray]


def endless_order(num_examples: int, *seed: int) -> Order:
    """Makes the endless order of one split, with a new permutation for each epoch.

    Grain's own shuffle looks up one position at a time, which takes longer than reading a small
    example. The permutation of an epoch needs 8 bytes per example. The latest two permutations are
    kept in memory, because a batch may have examples of two epochs.
    """

    @functools.lru_cache(maxsize=2)
    def epoch_order(epoch: int) -> np.ndarray:
        return np.random.default_rng((*seed, epoch)).permutation(num_examples)

    def order(positions: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(positions, num_examples)
        parts = [epoch_order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    return order


def mixed_order(sizes: Sequence[int], shares: Sequence[int], seed: int) -> Order:
    """Makes the order of a mixture, whose examples are numbered source by source.

    Args:
      sizes: The number of examples in each source.
      shares: The number of slots for each source; the sum is `SLOTS`, see `shares_of`.
      seed: The seed of the order.
    """
    source_of, rank_of = _slots(shares, seed)
    orders = [endless_order(size, seed, number + 1) for number, size in enumerate(sizes)]
    starts = np.cumsum([0, *sizes])

    def order(positions: np.ndarray) -> np.ndarray:
        blocks, slots = np.divmod(positions, SLOTS)
        sources = source_of[slots]
        examples = np.empty(len(positions), np.int64)
        for source in np.unique(sources):
            mine = sources == source
            counts = blocks[mine] * shares[source] + rank_of[slots[mine]]
            examples[mine] = starts[source] + orders[source](counts)
        return examples

    return order


def order_of(split: Split, seed: int) -> Order:
    """Returns the order of a split: `mixed_order` for a mixture, otherwise `endless_order`."""
    if isinstance(split, MixedSplit):
        return _latest_order(tuple(map(len, split.parts)), tuple(split.shares), seed)
    return _latest_order((len(split),), None, seed)


@functools.lru_cache(maxsize=1)  # Kept, because `train_batch` needs the same order in each call.
def _latest_order(sizes: tuple[int, ...], shares: tuple[int, ...] | None, seed: int) -> Order:
    return endless_order(*sizes, seed) if shares is None else mixed_order(sizes, shares, seed)


def _slots(shares: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each slot its source, and its number among the source's slots, `int64[SLOTS]`."""
    rng = np.random.default_rng((seed, len(shares)))
    times = np.concatenate([(np.arange(n) + rng.random(n)) / n for n in shares])
    sources = np.repeat(np.arange(len(shares)), shares)
    ranks = np.concatenate([np.arange(n) for n in shares])
    by_time = np.argsort(times, kind="stable")
    return sources[by_time], ranks[by_time]
