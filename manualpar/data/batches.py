"""Batches on the devices, read ahead by Grain's threads.

Training draws from an endless stream: permutations of the split, a new one for each epoch, one
after the other. The example at position `p` depends on the seed and on `p` alone, and a batch is
the next `B` of them. So neither its content nor its order depends on how many processes and devices
read it, nor on how far ahead they read, and the whole state of the data is one number: the position
after the last batch that was used. All batches are full and no example is dropped: one batch
may hold the end of an epoch and the start of the next.

Evaluation takes each example once, in order, and pads the last batch.

A process reads the rows that its own devices hold, each once, even if several of them hold it. The
sharding says which; the number of processes does not matter.

Symbol: `B` examples in a batch. Threads do all the reading ahead, because Grain's worker processes
need parsed flags and seconds to start, which only heavy decoding is worth.
"""

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping

import jax
import numpy as np

from manualpar.data.dataset import Split, TokenSplit
from manualpar.extras import require
from manualpar.train_state import Batch


def train_batches(
    split: Split,
    *,
    seed: int,
    batch_size: int,
    sharding: jax.sharding.Sharding,
    start_position: int = 0,
    prefetch: int = 2,
) -> Generator[Batch, None, None]:
    """Batches to train on without end, from any position of the stream.

    Args:
      split: The examples; there may be fewer than in a batch.
      seed: The seed of the epochs' orders, not negative.
      batch_size: `B`.
      sharding: How the batches' leaves lie, with at most their leading dimension split, such as
        `program.batch_sharding`. Each process reads the rows of its own devices.
      start_position: Examples to leave out. After `n` batches that start at `p`, a call with
        `p + n * batch_size` goes on as this one would.
      prefetch: Batches that threads read ahead, at least 1. One more waits on the devices.

    Returns:
      Batches of global arrays; closing the iterator ends the threads.
    """
    rows = rows_of_this_process(sharding, batch_size)
    order = _EndlessOrder(len(split), seed)
    return _read_ahead(
        lambda start: _stack([split[index] for index in order.at(start + rows)]),
        range(start_position, sys.maxsize - batch_size, batch_size),
        lambda batch: place(batch, sharding, batch_size),
        prefetch=prefetch,
    )


def train_batch(split: Split, position: int, *, batch_size: int, seed: int) -> Batch:
    """The whole batch at a position of the stream of `train_batches`, as numpy arrays."""
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
      split: The examples.
      batch_size: `B`.
      sharding: As in `train_batches`.
      max_batches: The largest number of batches; 0 for all.
      prefetch: As in `train_batches`.

    Returns:
      Batches of global arrays; closing the iterator ends the threads. Zeros may fill up the last
      batch, and their mask is 0.
    """
    rows = rows_of_this_process(sharding, batch_size)
    padding = jax.tree.map(np.zeros_like, split[0])
    num_batches = -(-len(split) // batch_size)
    num_batches = min(num_batches, max_batches or num_batches)

    def read(start: int) -> Batch:
        indices = (start + rows).tolist()
        return _stack([split[index] if index < len(split) else padding for index in indices])

    return _read_ahead(
        read,
        range(0, num_batches * batch_size, batch_size),
        lambda batch: place(batch, sharding, batch_size),
        prefetch=prefetch,
    )


def abstract_batch(split: Split, batch_size: int) -> Batch:
    """The shapes and dtypes of all batches of `split`, as `jax.ShapeDtypeStruct`s."""

    def leaf(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *array.shape), array.dtype)

    # A sequence that is too long is refused before a thousand million tokens of it are read.
    example = split.abstract_example if isinstance(split, TokenSplit) else split[0]
    return jax.tree.map(leaf, example)


def rows_to_read(slices: Mapping[int, Iterable[slice]], process: int, num_rows: int) -> np.ndarray:
    """The numbers of the rows that `process` reads, ascending.

    `slices` are the rows that the devices of each process hold, `num_rows` is `B`. If the rows of
    two processes overlap without being the same, or are not equally many, each process reads all
    rows, because JAX accepts nothing less then.
    """
    rows = {
        owner: frozenset(row for part in parts for row in range(*part.indices(num_rows)))
        for owner, parts in slices.items()
    }
    distinct = set(rows.values())
    apart = sum(map(len, distinct)) == len(frozenset().union(*distinct))
    if apart and len(set(map(len, distinct))) == 1:
        return np.array(sorted(rows[process]), np.int64)
    return np.arange(num_rows)


def rows_of_this_process(sharding: jax.sharding.Sharding, num_rows: int) -> np.ndarray:
    """The rows that this process reads of a batch that will lie as `sharding` says."""
    slices: dict[int, list[slice]] = {}
    device: jax.Device
    for device, index in sharding.devices_indices_map((num_rows,)).items():
        slices.setdefault(device.process_index, []).append(index[0])
    return rows_to_read(slices, jax.process_index(), num_rows)


def place(batch: Batch, sharding: jax.sharding.Sharding, num_rows: int) -> Batch:
    """Makes global arrays `[B, ...]` of the rows that each process has read, as numpy arrays."""

    def place_leaf(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, array, (num_rows, *array.shape[1:]))

    return jax.tree.map(place_leaf, batch)


class _EndlessOrder:
    """Which example stands where in the stream.

    Grain's own shuffle looks up one position at a time, which takes longer than reading small
    examples. An epoch's order takes 8 bytes an example. The latest two are kept, because a batch
    may be in both.
    """

    def __init__(self, num_examples: int, seed: int) -> None:
        self._num_examples = num_examples
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_examples)
        )

    def at(self, positions: np.ndarray) -> list[int]:
        """The numbers of the examples at ascending positions."""
        epochs, places = np.divmod(positions, self._num_examples)
        parts = [self._order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return [int(index) for index in np.concatenate(parts)]


def _stack(examples: list[Batch]) -> Batch:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *examples)


def _read_ahead(
    read: Callable[[int], Batch],
    starts: range,
    put: Callable[[Batch], Batch],
    *,
    prefetch: int,
) -> Generator[Batch, None, None]:
    """Batches that threads read, each put on the devices while the one before is used."""
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
