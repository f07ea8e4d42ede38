"""Exchanges facts between processes, so that all processes make the same decisions.

Processes on a shared file system may not see the same checkpoints at the same time. These functions
are collective: every process calls them in the same order, from the thread that also runs the
training steps. A different order in one process would cause a deadlock.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from manualpar.system.storage import FolderError

JSON = Any


def gather(value: JSON) -> list[JSON]:
    """Gathers a JSON value of each process, in the order of the processes.

    Communication:
      Two small all-gathers over all devices; none with one process.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(encoded.size, np.int32))
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


def from_first(value: JSON) -> JSON:
    """Returns process 0's value in every process; communicates like `gather`."""
    return gather(value)[0]


def first_failure(failure: str) -> str:
    """Returns the failure of the first failed process, or `''`; communicates like `gather`."""
    return next(filter(None, gather(failure)), "")


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raises an error in all processes if one process has an error, so that none waits forever.

    Communication:
      The communication of `gather`, at the end of the context.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        gather([str(error), isinstance(error, OSError)])
        raise
    for failure, is_of_files in filter(None, gather(None)):
        raise FolderError(failure) if is_of_files else ValueError(failure)
