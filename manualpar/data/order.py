"""The order in which training takes examples: endless, and known at any position.

Of one split: a permutation of its examples, and then another, one for each epoch.

Of a mixture: a table of `SLOTS` slots, which repeats, says which source a position belongs to. Each
source has as many slots as its weight says. The `k`-th of its `n` slots lies at a random place of
the `k`-th of `n` equal parts of the table. So after any number of positions each source has been
taken as often as its weight says, but for about one example for each source. Because a source's
slots are counted, the position also says how many of its examples have come before. So each source
has its own epochs: a small one begins again and again while a large one is in its first.

What stands at a position depends on the seed and the position alone, and costs the same wherever it
is. So the state of the data is one number, of a mixture too.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from manualpar.data.dataset import Split
from manualpar.data.mixture import SLOTS, MixedSplit

# From ascending positions `int64[N]` to the numbers of examples `int64[N]`.
Order = Callable[[np.ndarray], np.ndarray]


def endless_order(num_examples: int, *seed: int) -> Order:
    """Permutations of examples without end, a new one for each epoch.

    Grain's own shuffle looks up one position at a time, which takes longer than reading small
    examples. An epoch's order takes 8 bytes an example. The latest two are kept, because a batch
    may be in both.
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
    """Makes the order of a mixture, whose examples are numbered source after source.

    Args:
      sizes: The number of examples of each source.
      shares: How many of `SLOTS` slots each source has; see `shares_of`.
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
    """Returns a split's order if it defines one, and else permutations of its examples."""
    if isinstance(split, MixedSplit):
        return mixed_order([len(part) for part in split.parts], split.shares, seed)
    return endless_order(len(split), seed)


def _slots(shares: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each slot's source, and how many earlier slots have it; `int64[SLOTS]`."""
    rng = np.random.default_rng((seed, len(shares)))
    times = np.concatenate([(np.arange(n) + rng.random(n)) / n for n in shares])
    sources = np.repeat(np.arange(len(shares)), shares)
    ranks = np.concatenate([np.arange(n) for n in shares])
    by_time = np.argsort(times, kind="stable")
    return sources[by_time], ranks[by_time]
