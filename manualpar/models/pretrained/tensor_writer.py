"""Writes tensors from shards: every process writes the slices that its devices store.

The header of a file gives the place of each tensor, so that processes write without waiting for
each other. If several devices store a shard, only the first of them writes it. In addition to its
state, a process needs memory for one band of a tensor (a range of rows, see `slices.BAND`) in each
thread. On an accelerator, each thread also needs a copy on the host: `BOX_BYTES`, or one shard if a
shard is larger.
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

# The platform whose devices use the host's memory.
ON_HOST = "cpu"


class Tensor(NamedTuple):
    """A tensor to write, or the part of a tensor that a variable contains.

    Attributes:
      name: The tensor's name.
      shape: The tensor's shape.
      sizes: The sizes of the variable's dims, without padding and without the dims that stack
        several tensors.
      dtype: The dtype in the file.
      leaf: The name of the variable that contains the tensor.
      piece: The tensor's place in the variable, and how the dims of both correspond.
    """

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype
    leaf: str
    piece: TensorPiece

    @property
    def nbytes(self) -> int:
        """The bytes of the variable's part of the tensor in a file."""
        return int(np.prod(self.sizes, dtype=np.int64)) * self.dtype.itemsize


# Maps the name of each file to its tensors.
Files = Mapping[str, Sequence[Tensor]]


def create_files(folder: Path, files: Files) -> None:
    """Writes the header of every file; only one process calls it."""
    for name, tensors in files.items():
        create_tensor_file(folder / name, _kinds(tensors))


def write_tensors(folder: Path, files: Files, arrays: Mapping[str, jax.Array]) -> None:
    """Writes the shards of this process's devices, and waits until they are on the disk.

    Args:
      folder: The folder of the files, which already have their headers.
      files: The tensors of each file.
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
    """Writes the slices of a tensor that no other process writes: shards with replica number 0."""
    shards = _own_shards(tensor, x)
    for box, inside in join_bounds(shards, BOX_BYTES // tensor.dtype.itemsize):
        parts = {bounds: _to_host(*shards[bounds]) for bounds in inside}
        for part in slices_of(tensor.piece, tensor.sizes, box):
            value = np.empty([len(range(of.stop)[of]) for of in part.where], tensor.dtype)
            for bounds, shard in parts.items():
                both = common(bounds, part.bounds)
                if not is_empty(both):
                    out = part.turned(value)[within(both, part.bounds)]
                    copy_turned(out, shard[within(both, bounds)])
            with path.open("r+b", buffering=0) as file:
                write_slice(file.fileno(), place, part.where, value)


def _own_shards(tensor: Tensor, x: jax.Array) -> dict[Bounds, tuple[jax.Array, tuple[Any, ...]]]:
    """Returns the shards that this process writes, by their bounds in the tensor without padding.

    With each shard it returns the index of the tensor's entry along the dims that stack tensors.
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
        return np.asarray(x)[index]  # A view of the shard's memory.
    # Copies the array first, because an array caches its values on the host and would keep them.
    return np.asarray(x[index].copy())
