"""Tensors written out of shards: every process writes the slices that its own devices hold.

The header of a file says where each tensor stands, so that no process waits for another or sends
it anything. Of a shard that several devices hold, the first writes its slice. So a process holds,
in each thread, a band of a tensor besides its state, and of an accelerator's memory at most
`BOX_BYTES` of a tensor, or what one device has of it.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from manualpar.models.pretrained.slices import (
    BOX_BYTES,
    THREADS,
    Bounds,
    common,
    copy_turned,
    entry_within,
    finish,
    is_empty,
    join_bounds,
    slices_of,
    within,
)
from manualpar.models.pretrained.tensor_bytes import (
    BytesInFile,
    bounds_of,
    create_tensor_file,
    make_header,
    write_slice,
)
from manualpar.models.pretrained.tensor_names import TensorPiece
from manualpar.system.storage import sync

# Devices whose memory is the host's.
ON_HOST = "cpu"


class Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
      name: Its name.
      shape: Its shape.
      sizes: The sizes of the parameter's dims that are in it, in their order.
      dtype: The dtype that it is written in.
      leaf: The name of the variable that it is a part of.
      piece: Which part of it, and how the dims go together.
    """

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype
    leaf: str
    piece: TensorPiece

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


# The tensors of each file.
Files = Mapping[str, Sequence[Tensor]]


def create_files(folder: Path, files: Files) -> None:
    """Writes the header of every file; one process does it for all."""
    for name, tensors in files.items():
        create_tensor_file(folder / name, _kinds(tensors))


def write_tensors(folder: Path, files: Files, arrays: Mapping[str, jax.Array]) -> None:
    """Writes what the devices of this process hold, and waits until it is on the disk.

    Args:
      folder: Where the files are, with their headers.
      files: The tensors of each.
      arrays: The variables, by name.

    Raises:
      OSError: A file cannot be written.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        jobs = []
        for name, tensors in files.items():
            _, places = make_header(_kinds(tensors))
            for tensor in tensors:
                task = folder / name, places[tensor.name], tensor, arrays[tensor.leaf]
                jobs.append(threads.submit(_write, *task))
        finish(threads, jobs)
        finish(threads, [threads.submit(sync, folder / name) for name in files])


def _kinds(tensors: Sequence[Tensor]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


def _write(path: Path, place: BytesInFile, tensor: Tensor, x: jax.Array) -> None:
    """Writes the slices of a tensor that this process has the first copy of."""
    shards = _own_shards(tensor, x)
    for box, inside in join_bounds(shards, BOX_BYTES // tensor.dtype.itemsize):
        parts = {bounds: _to_host(*shards[bounds]) for bounds in inside}
        for part in slices_of(tensor.piece, tensor.sizes, box):
            value = np.empty([of.stop - of.start for of in part.where], tensor.dtype)
            for bounds, shard in parts.items():
                both = common(bounds, part.bounds)
                if not is_empty(both):
                    out = part.turned(value)[within(both, part.bounds)]
                    copy_turned(out, shard[within(both, bounds)])
            with path.open("r+b", buffering=0) as file:
                write_slice(file.fileno(), place, part.where, value)


def _own_shards(tensor: Tensor, x: jax.Array) -> dict[Bounds, tuple[jax.Array, tuple[Any, ...]]]:
    """Returns the shards that this process writes, each with the index of the tensor's entry.

    Their bounds are the tensor's bounds in it, without padding.
    """
    entry = tensor.piece.entry
    own = {}
    for shard in x.addressable_shards:
        held = bounds_of(shard.index, x.shape)
        index = entry_within(entry, held)
        bounds = common(held[len(entry) :], [(0, size) for size in tensor.sizes])
        if shard.replica_id == 0 and index is not None and not is_empty(bounds):
            own[bounds] = shard.data, index
    return own


def _to_host(x: jax.Array, index: tuple[Any, ...]) -> np.ndarray:
    if next(iter(x.devices())).platform == ON_HOST:
        return np.asarray(x)[index]  # A view of its memory.
    # Of a copy, because an array keeps what was brought to the host.
    return np.asarray(x[index].copy())
