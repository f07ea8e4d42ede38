"""Exchanges facts between processes, so that all processes make the same decisions.

Processes on a shared file system may not see the same checkpoints at the same time. These functions
are collective: every process calls them in the same order, from the thread that also runs the
training steps. A different order in one process would cause a deadlock.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from manualpar.system.cluster.cluster import Cluster
from manualpar.system.storage import FolderError

JSON = Any
# Longer values are sent by a collective, because the hub refuses messages of more than a MiB.
MOST_SHARED_CHARACTERS = 2**18


def gather(value: JSON) -> list[JSON]:
    """Gathers a JSON value of each process, in the order of the processes.

    Every process receives the values of all, so the bytes grow with the square of their number.
    The other functions of this module do not have this cost.

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
    """Returns process 0's value in every process.

    Communication:
      Two small all-reduces over all devices; none with one process.
    """
    return _broadcast_from(0, value)


def gather_in_first(cluster: Cluster, value: JSON) -> list[JSON]:
    """Gathers a JSON value of each process in process 0; elsewhere the list may be empty.

    The hub sends the values, so their bytes grow with the number of processes, and not with its
    square. Only if a value is too long for the hub, all values are gathered in all processes.

    Communication:
      The communication of `any_process`, and for a long value that of `gather`.
    """
    text = json.dumps(value)
    if any_process(len(text) > MOST_SHARED_CHARACTERS):
        return gather(value)
    wants = range(cluster.num_processes) if cluster.is_main else []
    texts = cluster.share({"text": text}, wants)
    return [json.loads(texts[process]["text"]) for process in sorted(texts)]


def any_process(condition: bool) -> bool:
    """Returns whether a condition holds in any process.

    Communication:
      A small all-reduce over all devices; none with one process.
    """
    return _first_with(condition) is not None


def first_failure(failure: str) -> str:
    """Returns the failure of the first failed process, or `''`.

    Communication:
      A small all-reduce over all devices, and two more after a failure; none with one process.
    """
    failed = _first_with(bool(failure))
    return "" if failed is None else _broadcast_from(failed, failure)


def _broadcast_from(process: int, value: JSON) -> JSON:
    """Returns the value of one process in every process."""
    text = json.dumps(value)
    if jax.process_count() == 1:
        return json.loads(text)
    encoded = np.frombuffer(text.encode(), np.uint8)
    is_source = jax.process_index() == process
    length = multihost_utils.broadcast_one_to_all(np.array(encoded.size, np.int32), is_source)
    sent = encoded if is_source else np.zeros(int(length), np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(sent, is_source)))


def _first_with(condition: bool) -> int | None:
    """Returns the first process in which a condition holds; `None` if there is none."""
    count = jax.process_count()
    own = jax.process_index() if condition else count
    if count > 1:
        # All devices take part. XLA:CPU runs a program of a process's only device at once, beside
        # collectives of earlier programs on all devices, and then gloo mixes up their messages.
        devices = np.array(jax.devices()).reshape(count, jax.local_device_count())
        mesh = Mesh(devices, ("processes", "devices"))
        values = jax.make_array_from_process_local_data(
            NamedSharding(mesh, PartitionSpec("processes")), np.array([own], np.int32), (count,)
        )
        minimum = _minimum(NamedSharding(mesh, PartitionSpec()))(values)
        own = int(minimum.addressable_data(0))
    return own if own < count else None


@functools.cache
def _minimum(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Makes the program that finds the smallest of the processes' values."""
    return jax.jit(jnp.min, out_shardings=sharding)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raises an error in all processes if one process has an error, so that none waits forever.

    Communication:
      The communication of `first_failure`, at the end of the context.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        failed = _first_with(True)
        assert failed is not None
        _broadcast_from(failed, [str(error), isinstance(error, OSError)])
        raise
    if (failed := _first_with(False)) is not None:
        failure, is_of_files = _broadcast_from(failed, None)
        raise FolderError(failure) if is_of_files else ValueError(failure)
