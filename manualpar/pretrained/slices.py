"""Slices of tensors in files, as the shards that the devices of this process hold.

A slice that several devices have is read once. It is cast to the program's dtype as it is read. So
what a process holds besides its state is a few shards: those that are being read, one in each
thread.
"""

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from manualpar.pretrained.sources import Sources
from manualpar.pretrained.tensor_files import TensorFiles
from manualpar.pretrained.tensor_names import Piece
from manualpar.state_arrays import Leaf

THREADS = min(8, os.cpu_count() or 1)
# For each dim where it begins and ends.
Bounds = Sequence[tuple[int, int]]


class ShardReader:
    """Reads slices in threads and counts their bytes."""

    def __init__(self, files: TensorFiles) -> None:
        self._files, self.bytes_read, self._lock = files, 0, threading.Lock()

    def place(self, leaves: Sequence[Leaf], sources: Sources) -> dict[str, jax.Array]:
        """Puts the variables on the devices of this process."""
        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            parts = {
                (leaf.name, bounds): threads.submit(self._place, leaf, bounds, devices, sources)
                for leaf in leaves
                for bounds, devices in _devices_by_part(leaf).items()
            }
            try:
                for part in concurrent.futures.as_completed(parts.values()):
                    part.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        placed: dict[str, jax.Array] = {}
        for leaf in leaves:
            arrays = itertools.chain.from_iterable(
                part.result() for (name, _), part in parts.items() if name == leaf.name
            )
            placed[leaf.name] = jax.make_array_from_single_device_arrays(
                leaf.held_shape, leaf.abstract.sharding, list(arrays), dtype=leaf.dtype
            )
        return placed

    def _place(
        self, leaf: Leaf, bounds: Bounds, devices: list[jax.Device], sources: Sources
    ) -> list[jax.Array]:
        """Reads a part of a variable, and puts it on the devices that have it."""
        part = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
        for piece in sources.pieces[leaf.name]:
            stacked = len(piece.entry)
            inside = [
                start <= at < stop for at, (start, stop) in zip(piece.entry, bounds, strict=False)
            ]
            if not all(inside):
                continue
            entry = tuple(at - start for at, (start, _) in zip(piece.entry, bounds, strict=False))
            own = bounds[stacked:]
            self._read(piece, sources.shape_of(piece, leaf), own, part[entry] if entry else part)
        return jax.block_until_ready([jax.device_put(part, device) for device in devices])

    def _read(self, piece: Piece, sizes: Sequence[int], bounds: Bounds, part: np.ndarray) -> None:
        """Reads a slice of a piece, with these bounds of its dims, into a part of a variable."""
        # What is beyond the tensor is padding.
        bounds = [
            (start, min(stop, size)) for (start, stop), size in zip(bounds, sizes, strict=True)
        ]
        if any(start >= stop for start, stop in bounds):
            return
        for reads in _reads(piece, dict(zip(piece.dims, sizes, strict=True)), bounds):
            index = tuple(slice(start, stop) for start, stop, _ in reads)
            value = self._files.read(piece.tensor, index)
            with self._lock:
                self.bytes_read += value.nbytes
            spans = {name: span for _, _, inner in reads for name, span in inner.items()}
            value = value.astype(part.dtype, copy=False)
            value = value.reshape([stop - start for start, stop in spans.values()])
            value = value.transpose([list(spans).index(name) for name in piece.dims])
            place = tuple(
                slice(spans[name][0] - start, spans[name][1] - start)
                for name, (start, _) in zip(piece.dims, bounds, strict=True)
            )
            bits_of(part)[place] = bits_of(value)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits of numbers as integers; numpy moves bfloat16 itself far slower."""
    return x.view(f"u{x.dtype.itemsize}")


def _devices_by_part(leaf: Leaf) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """The devices of this process by the part of a variable that they hold."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    indices = leaf.abstract.sharding.addressable_devices_indices_map(leaf.held_shape)
    for device, index in indices.items():
        pairs = zip(index, leaf.held_shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in pairs)
        devices.setdefault(bounds, []).append(device)
    return devices


# A range of a tensor's dim, and the ranges of the dims that are merged in it, by name.
_Read = tuple[int, int, dict[str, tuple[int, int]]]


def _reads(piece: Piece, size_of: Mapping[str, int], bounds: Bounds) -> Iterator[tuple[_Read, ...]]:
    """The slices of a tensor that together are a slice of a parameter."""
    bounds_of = dict(zip(piece.dims, bounds, strict=True))
    return itertools.product(*(_ranges(names, size_of, bounds_of) for names in piece.merged))


def _ranges(
    names: Sequence[str], size_of: Mapping[str, int], bounds_of: Mapping[str, tuple[int, int]]
) -> list[_Read]:
    """The ranges of a merged dim: one if the inner dims are whole, else one an outer entry."""
    if not names:
        return [(0, 1, {})]
    outer, *inner = names
    start, stop = bounds_of[outer]
    size = 1
    for name in inner:
        size *= size_of[name]
    if all(bounds_of[name] == (0, size_of[name]) for name in inner):
        whole = {name: bounds_of[name] for name in inner}
        return [(start * size, stop * size, {outer: (start, stop), **whole})]
    return [
        (at * size + low, at * size + high, {outer: (at, at + 1), **spans})
        for at in range(start, stop)
        for low, high, spans in _ranges(inner, size_of, bounds_of)
    ]
