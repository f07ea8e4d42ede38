"""Yields batches on the devices; Grain's threads read the batches ahead.

Training reads an endless stream of examples, see `manualpar.data.batches`. The example at position
`p` depends only on the seed and on `p`, and a batch consists of `B` consecutive examples. So a
batch does not depend on the number of processes, devices, or batches read ahead. The state of the
data is one number: the position after the last batch that was used. All batches are full, and no
example is dropped. A batch may have examples from the end of an epoch and from the beginning of the
next.

Evaluation reads each example once, in order.

The batches of a `BatchStream` are read in its own order, by the thread that trains.

The last batch of an evaluation or of a stream may be smaller. A `Batch` with a mask is padded.
Another batch stays as it is if the devices divide it, and otherwise has each example as often as
the devices need, so that each device gets as many. A loss and its gradient are means, so they are
those of the smaller batch. Metrics are sums, and have to be divided by `Batches.copies`. A step is
compiled once more for each such size.

A process reads only the rows of its own devices. It reads a row only once, even if several devices
store the row.

Grain's threads read the batches. Grain's worker processes would need parsed absl flags, and would
take seconds to start. They are worth it only if decoding is slow.

Symbol: `B` examples in a batch.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.checks.guarded_step import check_integers
from manualpar.core.state.train_state import Batch
from manualpar.data.dataset import Split
from manualpar.data.mixture import SLOTS, MixedSplit
from manualpar.data.user_data import BatchStream
from manualpar.errors import require


class Batches:
    """An iterator of batches on the devices; closing it ends the threads that read.

    Attributes:
      copies: How often the latest batch has each of its examples: 1, unless it is smaller than
        others, and cannot be divided.
    """

    def __init__(self, batches: Generator[tuple[Batch, int], None, None]) -> None:
        self._batches, self.copies = batches, 1

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch, self.copies = next(self._batches)
        return batch

    def close(self) -> None:
        """Ends the threads."""
        self._batches.close()


def train_batches(
    split: Split | BatchStream,
    *,
    seed: int,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    start_position: int = 0,
    prefetch: int = 2,
    multiple: int | None = None,
) -> Batches:
    """Returns endless batches for training, from any position of the stream.

    Args:
      split: The examples, of which there may be fewer than in a batch, or a stream of batches.
      seed: The seed of the order of examples, not negative.
      batch_size: `B`.
      sharding: The sharding of the batches, such as `program.batch_sharding`. Each process reads
        the rows of its own devices, as complete sequences, even if sequences are sharded too.
      start_position: The number of examples to skip. To continue after `n` batches of a call with
        start position `p`, use `p + n * batch_size`.
      prefetch: The number of batches that threads read ahead, at least 1. In addition, one batch
        waits on the devices.
      multiple: The number that has to divide the examples of a batch, such as devices times
        minibatches; by default `batch_size`.

    Returns:
      An iterator of batches of global arrays. Closing the iterator ends the threads.
    """
    if isinstance(split, BatchStream):
        is_whole = _rows(split.first) == batch_size
        batches = split.read_from(start_position // batch_size)
        return Batches(
            _place_each(batches, sharding, batch_size, multiple, may_be_smaller=is_whole)
        )
    order = order_of(split, seed)
    starts = range(start_position, sys.maxsize - batch_size, batch_size)
    return Batches(
        _read_ahead(
            lambda positions: _stack(split[index] for index in order(positions).tolist()),
            starts,
            sharding,
            prefetch,
        )
    )


def train_batch(split: Split, position: int, *, batch_size: int, seed: int) -> Batch:
    """Reads the `B` examples from a position of the stream of `train_batches`, as numpy arrays."""
    indices = order_of(split, seed)(position + np.arange(batch_size))
    return _stack(split[index] for index in indices.tolist())


def evaluation_batches(
    split: Split | BatchStream,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    *,
    max_batches: int = 0,
    prefetch: int = 2,
    multiple: int | None = None,
) -> Batches:
    """Returns batches that together contain each example once, in order.

    Args:
      split: The examples.
      batch_size: `B`.
      sharding: As in `train_batches`.
      max_batches: The largest number of batches; 0 for all.
      prefetch: As in `train_batches`.
      multiple: As in `train_batches`.

    Returns:
      An iterator of batches of global arrays. Closing the iterator ends the threads. The last batch
      may be padded with zeros, and the mask is 0 at the padding. Without a mask it may be smaller,
      or have each example `copies` times.
    """
    if isinstance(split, BatchStream):
        batches = itertools.islice(split.read_once(), max_batches or None)
        return Batches(_place_each(batches, sharding, batch_size, multiple, may_be_smaller=True))
    size, example = len(split), split[0]
    padding = jax.tree.map(np.zeros_like, example)
    full, rest = divmod(size, batch_size)
    if rest and _has_mask(example):
        full, rest = full + 1, 0
    wanted = max_batches or full + 1
    full_batches = _read_ahead(
        lambda indices: _stack(split[i] if i < size else padding for i in indices.tolist()),
        range(0, min(full, wanted) * batch_size, batch_size),
        sharding,
        prefetch,
    )
    if not rest or wanted <= full:
        return Batches(full_batches)
    copies = _copies(rest, multiple or batch_size)

    def with_rest() -> Generator[tuple[Batch, int], None, None]:
        with contextlib.closing(full_batches):
            yield from full_batches
        rows = rows_of_this_process(sharding, rest * copies)
        batch = _stack(split[full * batch_size + row % rest] for row in rows.tolist())
        yield place(batch, rows, sharding, rest * copies), copies

    return Batches(with_rest())


def _has_mask(example: Any) -> bool:
    return isinstance(example, Batch) and example.mask is not None


def _copies(num_examples: int, multiple: int) -> int:
    """Returns the least number of copies of a batch that makes it a multiple of `multiple`."""
    return multiple // math.gcd(num_examples, multiple)


def abstract_batch(split: Split | BatchStream, batch_size: int) -> Batch:
    """Returns the shapes and dtypes of a batch of `split`, as `jax.ShapeDtypeStruct`s."""
    if isinstance(split, BatchStream):
        shapes = lambda x: (batch_size, *x.shape[1:]) if x.ndim else ()  # noqa: E731
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(shapes(x), x.dtype), split.first)
    # Reads no example if possible, because a sequence may be too long for the memory. The memory is
    # checked later.
    example = getattr(split, "abstract_example", None) or split[0]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape), x.dtype), example)


def rows_of_this_process(sharding: jax.sharding.Sharding, num_rows: int) -> np.ndarray:
    """Returns the ascending numbers of the batch's rows that this process's devices store."""
    # Ignores a sharding of sequences, because a process reads complete sequences.
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    parts: Iterable[Any] = sharding.addressable_devices_indices_map((num_rows,)).values()
    return np.unique(np.concatenate([np.arange(num_rows)[part] for part in parts]))


def place(batch: Batch, rows: np.ndarray, sharding: jax.sharding.Sharding, num_rows: int) -> Batch:
    """Makes global arrays `[B, ...]` from numpy arrays with the rows of this process."""

    def place_leaf(array: np.ndarray) -> jax.Array:
        if not array.ndim:
            return jax.device_put(array, _replicated(sharding))

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(num_rows)
            first, last = np.searchsorted(rows, (start, stop))
            return array[(slice(first, last), *index[1:])]

        return jax.make_array_from_callback((num_rows, *array.shape[1:]), sharding, part)

    check_integers("data: batch", batch)
    return jax.tree.map(place_leaf, batch)


def _replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def _place_each(
    batches: Iterator[Any],
    sharding: jax.sharding.Sharding,
    batch_size: int,
    multiple: int | None,
    *,
    may_be_smaller: bool,
) -> Generator[tuple[Batch, int], None, None]:
    """Puts batches on the devices, which have all rows or only the rows of this process."""
    rows = rows_of_this_process(sharding, batch_size)
    # A process that reads only its own rows does not know whether others have as many.
    has_all_rows = len(rows) == batch_size
    for batch in batches:
        found = _rows(batch)
        has_all_rows = has_all_rows or found == batch_size
        if found < batch_size and has_all_rows and may_be_smaller:
            yield _place_smaller(batch, found, sharding, batch_size, multiple or batch_size)
            continue
        if found == batch_size:
            batch = jax.tree.map(lambda x: x[rows] if x.ndim else x, batch)
        elif found != len(rows):
            of_process = f", or the {len(rows)} of this process" if len(rows) < batch_size else ""
            raise ValueError(
                f"data: a batch has {found} rows, expected the batch size {batch_size}"
                f"{of_process}; drop the rows after the last full batch, or pad them and mask them."
            )
        yield place(batch, rows, sharding, batch_size), 1


def _place_smaller(
    batch: Any, found: int, sharding: jax.sharding.Sharding, batch_size: int, multiple: int
) -> tuple[Batch, int]:
    """Places a batch with fewer rows: padded if it has a mask, or with copies of its examples."""
    copies = 1 if _has_mask(batch) else _copies(found, multiple)
    size = batch_size if _has_mask(batch) else found * copies
    rows = rows_of_this_process(sharding, size)

    def fill(x: np.ndarray) -> np.ndarray:
        if not x.ndim:
            return x
        if _has_mask(batch):
            x = np.concatenate([x, np.zeros((size - found, *x.shape[1:]), x.dtype)])
        return x[rows % len(x)]

    return place(jax.tree.map(fill, batch), rows, sharding, size), copies


def _rows(batch: Any) -> int:
    """Returns the number of examples of a batch of a stream."""
    return next(len(x) for x in jax.tree.leaves(batch) if x.ndim)


def _stack(examples: Iterable[Batch]) -> Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def _read_ahead(
    read: Callable[[np.ndarray], Batch],
    starts: range,
    sharding: jax.sharding.Sharding,
    prefetch: int,
) -> Generator[tuple[Batch, int], None, None]:
    """Yields batches of consecutive positions; threads read the batches ahead.

    Each batch is put on the devices while the previous batch is used.
    """
    require("manualpar.data", "grain")
    import grain

    if not len(starts):
        return
    batch_size = starts.step
    rows = rows_of_this_process(sharding, batch_size)
    positions = grain.MapDataset.range(starts.start, starts.stop, batch_size)
    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    batches = iter(positions.map(lambda start: read(start + rows)).to_iter_dataset(options))
    waiting: list[Batch] = []
    try:
        for batch in batches:
            waiting.append(place(batch, rows, sharding, batch_size))
            if len(waiting) == 2:
                yield waiting.pop(0), 1
        yield from ((batch, 1) for batch in waiting)
    finally:
        batches.close()


# -------------------------------------------------------------------------------------------------
# The endless order in which training reads examples; the example at any position can be computed.
#
# For one split, the order is a sequence of permutations of the examples, one for each epoch.
#
# For a mixture, a table of `SLOTS` slots, which is repeated, gives the source of each position.
# The number of a source's slots is proportional to its weight. The `k`-th of its `n` slots is at a
# random place in the `k`-th of `n` equal parts of the table. So after any number of positions, the
# number of examples from a source differs by about one from its share. The position also
# determines how many examples of a source come before it. So each source has its own epochs: a
# small source may begin its tenth epoch while a large source is in its first epoch.
#
# The example at a position depends only on the seed and the position, and the time to compute it
# is the same for all positions. So the state of the data is one number, even for a mixture.


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
