"""Which rows of a batch a process reads, and how what it has read becomes a global array.

A process reads the rows that its own devices hold, each once, however many of them hold it. The
sharding says which those are; the number of processes is never asked for.

B is the number of examples in the batch.
"""

from collections.abc import Iterable, Mapping

import jax
import numpy as np

from manualpar.train_state import Batch


def rows_to_read(slices: Mapping[int, Iterable[slice]], process: int, num_rows: int) -> np.ndarray:
    """The rows that one process reads.

    Args:
      slices: For each process, which rows its devices hold.
      process: Which process.
      num_rows: B.

    Returns:
      Row numbers, ascending. Where the rows of two processes overlap without being the same, or
      are not equally many, they are all: in such a case JAX takes nothing less.
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
    """The rows of a batch that this process reads, if the batch is to lie as `sharding` says."""
    slices: dict[int, list[slice]] = {}
    device: jax.Device
    for device, index in sharding.devices_indices_map((num_rows,)).items():
        slices.setdefault(device.process_index, []).append(index[0])
    return rows_to_read(slices, jax.process_index(), num_rows)


def place(batch: Batch, sharding: jax.sharding.Sharding, num_rows: int) -> Batch:
    """Makes global arrays of the rows that each process has read.

    Args:
      batch: Numpy arrays with the rows of `rows_of_this_process`.
      sharding: How the leaves are to lie.
      num_rows: B.

    Returns:
      The batch, `[B, ...]`.
    """

    def place_leaf(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, array, (num_rows, *array.shape[1:]))

    return jax.tree.map(place_leaf, batch)
