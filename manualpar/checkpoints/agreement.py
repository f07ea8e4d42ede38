"""Several processes come to the same conclusion.

Whether a checkpoint is whole, and which one is the newest, each process could answer for itself,
and on a shared file system not all at once the same. These functions let all know what each found.
They are collective: every process calls them, in the same order, from the thread that also runs the
training steps, since another order on another process would be a deadlock.
"""

import json
from typing import Any

import jax
import numpy as np

JSON = Any


def gather(value: JSON) -> list[JSON]:
    """The value that each process has, in the order of the processes.

    Args:
      value: This process's, anything that JSON can hold.

    Returns:
      One value for each process, as JSON gives them back; the same list in every process.

    Communication:
      Two small all-gathers over all devices; none with one process.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    from jax.experimental import multihost_utils

    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(encoded.size, np.int32))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def from_first(value: JSON) -> JSON:
    """Process 0's value, in every process; see `gather`."""
    return gather(value)[0]


def first_failure(failure: str) -> str:
    """The first failure that any process has, `''` if all are well; see `gather`."""
    return next(filter(None, gather(failure)), "")
