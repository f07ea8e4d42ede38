"""Batches on the devices, read ahead by Grain's threads.

Training draws from an endless stream in which every epoch is a new permutation of the split, one
after the other. What stands at position `p` of it depends on the seed and on `p` alone, and a batch
is the next B of them: neither its content nor its order depends on how many processes and devices
read it, nor on how far ahead they read. So the whole state of the data is one number, the position
after the last batch that was handed out. All batches are full and no example is dropped: one may
hold the end of an epoch and the start of the next.

Evaluation takes each example once, in order, and pads the last batch.

B is the number of examples in a batch. Threads do all the reading ahead; Grain's worker processes
want parsed flags and seconds to start, which only heavy decoding is worth.
"""

import functools
import sys
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Self

import jax
import numpy as np

from manualpar.data.dataset import Split
from manualpar.data.packing import TokenSplit
from manualpar.data.placement import place, rows_of_this_process
from manualpar.extras import require
from manualpar.train_state import Batch


class TrainBatches(Iterator[Batch]):
    """Training batches without end; close it, or use it in a `with`, to stop reading ahead.

    Attributes:
      position: Examples of the stream before the batch that comes next. A `train_batches` that
        starts there goes on as this one would.
    """

    def __init__(
        self, batches: Generator[Batch, None, None], *, start_position: int, batch_size: int
    ) -> None:
        """Counts from `start_position` on."""
        self._batches = batches
        self._batch_size = batch_size
        self.position = start_position

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.position += self._batch_size
        return batch

    def close(self) -> None:
        """Ends the threads; no batch can be had any more."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def train_batches(
    split: Split,
    *,
    seed: int,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    start_position: int = 0,
    prefetch: int = 2,
) -> TrainBatches:
    """Batches to train on, from any position of the stream.

    Args:
      split: What to draw from; it may be smaller than a batch.
      seed: What the epochs' orders are drawn from, not negative.
      batch_size: B.
      sharding: How the batches' leaves lie, their leading dimension split at most: such as
        `program.batch_sharding`. Each process reads the rows of its own devices.
      start_position: Examples to leave out: the `position` of the `TrainBatches` to go on from.
      prefetch: Batches that threads read ahead, at least 1. One more waits on the devices.

    Returns:
      The batches, of global arrays.
    """
    rows = rows_of_this_process(sharding, batch_size)
    order = _EndlessOrder(len(split), seed)
    batches = _read_ahead(
        lambda start: _stack([split[index] for index in order.at(start + rows)]),
        range(start_position, sys.maxsize - batch_size, batch_size),
        lambda batch: place(batch, sharding, batch_size),
        prefetch=prefetch,
    )
    return TrainBatches(batches, start_position=start_position, batch_size=batch_size)


def train_batch(split: Split, position: int, *, batch_size: int, seed: int) -> Batch:
    """The batch at a position of the stream of `train_batches`, all of it, as numpy arrays."""
    indices = _EndlessOrder(len(split), seed).at(position + np.arange(batch_size))
    return _stack([split[index] for index in indices])


def evaluation_batches(
    split: Split,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    *,
    max_batches: int = 0,
    prefetch: int = 2,
) -> Generator[Batch, None, None]:
    """Batches that together hold each example once, in order.

    Args:
      split: What to go through.
      batch_size: B.
      sharding: As in `train_batches`.
      max_batches: How many at most; 0 for all.
      prefetch: As in `train_batches`.

    Returns:
      Batches of global arrays; closing the iterator ends the threads. In the last batch zeros may
      fill up what is missing, and for them the mask is 0.
    """
    rows = rows_of_this_process(sharding, batch_size)
    nothing = jax.tree.map(np.zeros_like, split[0])
    starts = range(
        0, num_evaluation_batches(split, batch_size, max_batches) * batch_size, batch_size
    )

    def read(start: int) -> Batch:
        indices = (start + rows).tolist()
        return _stack([split[index] if index < len(split) else nothing for index in indices])

    return _read_ahead(
        read, starts, lambda batch: place(batch, sharding, batch_size), prefetch=prefetch
    )


def num_evaluation_batches(split: Split, batch_size: int, max_batches: int = 0) -> int:
    """How many batches `evaluation_batches` yields."""
    num_batches = -(-len(split) // batch_size)
    return min(num_batches, max_batches or num_batches)


def abstract_batch(split: Split, batch_size: int) -> Batch:
    """The shapes and dtypes of all batches of `split`, as `jax.ShapeDtypeStruct`s."""

    def leaf(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *array.shape), array.dtype)

    # A sequence of a thousand million tokens need not be read to be found too long.
    example = split.abstract_example if isinstance(split, TokenSplit) else split[0]
    return jax.tree.map(leaf, example)


class _EndlessOrder:
    """Which example stands where in the stream.

    Grain's own shuffle looks up one position at a time, which for small examples takes longer than
    reading them. An epoch's order takes 8 bytes an example; the latest two are kept, for a batch
    may be in both.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        self._num_examples = num_examples
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_examples)
        )

    def at(self, positions: np.ndarray) -> list[int]:
        """The numbers of the examples at some positions, which ascend."""
        epochs, places = np.divmod(positions, self._num_examples)
        parts = [self._order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return [int(index) for index in np.concatenate(parts)]


def _stack(examples: list[Batch]) -> Batch:
    """Examples as a batch."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def _read_ahead(
    read: Callable[[int], Batch],
    starts: range,
    put: Callable[[Batch], Batch],
    *,
    prefetch: int,
) -> Generator[Batch, None, None]:
    """Batches read by threads, each put on the devices while the one before is being used."""
    require("manualpar.data", "grain")
    import grain

    indices = grain.MapDataset.range(starts.start, starts.stop, starts.step)
    options = grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)
    batches = iter(indices.map(read).to_iter_dataset(options))
    waiting: Batch | None = None
    try:
        for batch in batches:
            placed = put(batch)
            if waiting is not None:
                yield waiting
            waiting = placed
        if waiting is not None:
            yield waiting
    finally:
        batches.close()
