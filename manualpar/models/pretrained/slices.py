"""Reads slices of tensors from files, and puts them as shards on the devices of this process.

A slice that several devices store is read once. Adjacent shards of a variable are read together as
one box, because their contiguous rows in the file are then longer. The host transposes and casts a
tensor in bands of limited size. So in addition to its state, a process needs memory for one box in
each thread that reads: `BOX_BYTES`, or one shard if a shard is larger.
"""

import concurrent.futures
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from manualpar.core.program.state_arrays import Leaf
from manualpar.models.pretrained.tensor_files import TensorFiles, bounds_of
from manualpar.models.pretrained.tensor_names import TensorPiece
from manualpar.models.pretrained.tensor_sources import Sources

THREADS = min(8, os.cpu_count() or 1)
BOX_BYTES = 256 << 20
# The most elements of a tensor that are read and transposed at a time, unless a row has more.
BAND = 1 << 20
# The size of a block of `copy_turned`: along the dim that is contiguous in the source, and along
# the dim that is contiguous in the destination.
BLOCK = 1024, 16
# A box of an array: the pair (begin, end) for each dim.
Bounds = tuple[tuple[int, int], ...]


class ShardReader:
    """Reads slices of tensors in several threads, and counts the bytes read."""

    def __init__(
        self, files: TensorFiles, *, report: Callable[[int], None] = lambda bytes_read: None
    ) -> None:
        """Makes a reader, which calls `report` with the bytes read so far, in any thread."""
        self._files, self.bytes_read, self._lock = files, 0, threading.Lock()
        self._report = report

    def place(self, leaves: Sequence[Leaf], sources: Sources) -> dict[str, jax.Array]:
        """Reads variables from the files, and shards them over the devices of this process."""
        with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
            boxes = {}
            for leaf in leaves:
                parts = _devices_by_part(leaf)
                boxes[leaf.name] = [
                    threads.submit(
                        self._place, leaf, box, {of: parts[of] for of in inside}, sources
                    )
                    for box, inside in join_bounds(parts, BOX_BYTES // leaf.dtype.itemsize)
                ]
            finish(threads, itertools.chain(*boxes.values()))
        return {
            leaf.name: jax.make_array_from_single_device_arrays(
                leaf.padded_shape,
                leaf.abstract.sharding,
                [array for box in boxes[leaf.name] for array in box.result()],
                dtype=leaf.dtype,
            )
            for leaf in leaves
        }

    def _place(
        self,
        leaf: Leaf,
        box: Bounds,
        devices_of: Mapping[Bounds, Sequence[jax.Device]],
        sources: Sources,
    ) -> list[jax.Array]:
        """Reads a box of a variable, and puts each shard in the box on its devices."""
        whole = np.zeros([stop - start for start, stop in box], leaf.dtype)
        for piece, entry in _pieces_within(leaf, box, sources):
            sizes, stacked = sources.shape_of(piece, leaf), len(piece.entry)
            self._read(piece, sizes, box[stacked:], whole[entry])
        return jax.block_until_ready(
            [
                jax.device_put(whole[within(part, box)], device)
                for part, devices in devices_of.items()
                for device in devices
            ]
        )

    def _read(self, piece: TensorPiece, sizes: Sequence[int], box: Bounds, out: np.ndarray) -> None:
        """Reads a box of a piece into `out`; `sizes` is the piece's shape without padding."""
        for part in slices_of(piece, sizes, unpadded(box, sizes)):
            value = self._files.read(piece.tensor, part.where)
            with self._lock:
                self.bytes_read += value.nbytes
                self._report(self.bytes_read)
            copy_turned(out[within(part.bounds, box)], part.turned(value))


def bytes_to_read(leaves: Iterable[Leaf], sources: Sources) -> int:
    """Returns the bytes of tensors that `ShardReader.place` reads for variables."""
    total = 0
    for leaf in leaves:
        for part in _devices_by_part(leaf):
            for piece, _ in _pieces_within(leaf, part, sources):
                box = unpadded(part[len(piece.entry) :], sources.shape_of(piece, leaf))
                itemsize = jax.numpy.dtype(sources.files.dtypes[piece.tensor]).itemsize
                total += 0 if is_empty(box) else _volume(box) * itemsize
    return total


def _pieces_within(
    leaf: Leaf, box: Bounds, sources: Sources
) -> Iterator[tuple[TensorPiece, tuple[Any, ...]]]:
    """Yields the tensors of a variable that are in a box of it, and their index in the box."""
    for piece in sources.pieces[leaf.name]:
        if (entry := entry_within(piece.entry, box)) is not None:
            yield piece, entry


def finish(threads: concurrent.futures.Executor, jobs: Iterable[concurrent.futures.Future]) -> None:
    """Waits for all jobs; after a failure it cancels the jobs that have not begun."""
    try:
        for job in concurrent.futures.as_completed(jobs):
            job.result()
    except BaseException:
        threads.shutdown(cancel_futures=True)
        raise


def copy_turned(out: np.ndarray, value: np.ndarray) -> None:
    """Copies `value` to `out`, which may have another memory layout, and casts the elements.

    If the layouts differ, NumPy walks through one array in the order of its memory, and jumps in
    the other array for each element. So the copy runs in blocks that fit into the cache. The bits
    are copied as integers, because NumPy copies bfloat16 far slower than integers.
    """
    out, value = out.squeeze(), value.squeeze()
    order = sorted(range(out.ndim), key=lambda dim: -out.strides[dim])
    out, value = out.transpose(order), value.transpose(order)
    steps = list(out.shape)
    fastest = min(range(out.ndim), key=lambda dim: value.strides[dim], default=0)
    if fastest < out.ndim - 1:
        steps[fastest], steps[-1] = BLOCK
    corners = (range(0, size, step) for size, step in zip(out.shape, steps, strict=True))
    for corner in itertools.product(*corners):
        block: Any = *(slice(at, at + step) for at, step in zip(corner, steps, strict=True)), ...
        bits_of(out[block])[...] = bits_of(value[block].astype(out.dtype, copy=False))


def bits_of(x: np.ndarray) -> np.ndarray:
    """Returns a view of an array with its bits as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def join_bounds(parts: Iterable[Bounds], most: int) -> list[tuple[Bounds, list[Bounds]]]:
    """Joins adjacent disjoint parts into boxes of at most `most` elements.

    Returns:
      The boxes, each with the parts in it. A part of more than `most` elements is a box by itself.
    """
    boxes: list[tuple[Bounds, list[Bounds]]] = []
    for part in sorted(parts):
        if boxes:
            box, inside = boxes[-1]
            hull = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(box, part, strict=True))
            if _volume(hull) <= most and _volume(hull) == _volume(box) + _volume(part):
                boxes[-1] = hull, [*inside, part]
                continue
        boxes.append((part, [part]))
    return boxes


def _volume(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def entry_within(entry: Sequence[int], box: Bounds) -> tuple[Any, ...] | None:
    """Converts an index along the leading dims to an index in a box; `None` if it is outside."""
    leading = box[: len(entry)]
    if not all(start <= at < stop for at, (start, stop) in zip(entry, leading, strict=True)):
        return None
    return *(at - start for at, (start, _) in zip(entry, leading, strict=True)), ...


def within(bounds: Bounds, box: Bounds) -> tuple[slice, ...]:
    """Converts bounds in an array to slices of a box in the array."""
    return tuple(
        slice(start - corner, stop - corner)
        for (start, stop), (corner, _) in zip(bounds, box, strict=True)
    )


def common(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Bounds:
    """Intersects two boxes; the result may be empty."""
    pairs = zip(a, b, strict=True)
    return tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in pairs)


def unpadded(box: Bounds, sizes: Sequence[int]) -> Bounds:
    """Returns the part of a box without padding, which begins after `sizes`; it may be empty."""
    return common(box, [(0, size) for size in sizes])


def is_empty(box: Bounds) -> bool:
    """Returns whether a dim of the box ends where it begins, or before."""
    return any(start >= stop for start, stop in box)


def _devices_by_part(leaf: Leaf) -> dict[Bounds, list[jax.Device]]:
    """Returns each shard of a variable with the devices of this process that store the shard."""
    devices: dict[Bounds, list[jax.Device]] = {}
    indices = leaf.abstract.sharding.addressable_devices_indices_map(leaf.padded_shape)
    for device, index in indices.items():
        devices.setdefault(bounds_of(index, leaf.padded_shape), []).append(device)
    return devices


class Slice(NamedTuple):
    """A slice of a tensor, and the box of a parameter that it contains.

    Attributes:
      where: The slice of the tensor.
      bounds: The box, with the dims of the parameter.
      split: The sizes of the box's dims, in the order in which the tensor stores these dims. A
        merged dim of the tensor counts as several dims.
      order: The position of each of the parameter's dims in `split`, and of dims that only the
        tensor has.
      others: The number of dims that only the tensor has, with one entry each.
    """

    where: tuple[slice, ...]
    bounds: Bounds
    split: tuple[int, ...]
    order: tuple[int, ...]
    others: int = 0

    def turned(self, value: np.ndarray) -> np.ndarray:
        """Returns a view of `value`, the content of the slice, with the dims of the parameter."""
        turned = value.reshape(self.split).transpose(self.order)
        index: Any = (..., *[0] * self.others)
        return turned[index] if self.others else turned


# (begin, end, step, ranges): entries of a tensor's dim; `ranges` has the range of each merged dim.
_Read = tuple[int, int, int, dict[str, tuple[int, int]]]


def slices_of(piece: TensorPiece, sizes: Sequence[int], box: Bounds) -> Iterator[Slice]:
    """Computes the slices of a tensor that together contain a box of a parameter."""
    if is_empty(box):
        return
    outermost = next((name for name in itertools.chain(*piece.merged) if name in piece.dims), None)
    if outermost is not None and _volume(box) > BAND:
        dim = piece.dims.index(outermost)
        start, stop = box[dim]
        rows = max(1, BAND * (stop - start) // _volume(box))
        if rows < stop - start:
            for at in range(start, stop, rows):
                band = *box[:dim], (at, min(at + rows, stop)), *box[dim + 1 :]
                yield from slices_of(piece, sizes, band)
            return
    size_of = dict(zip(piece.dims, sizes, strict=True))
    box_of = dict(zip(piece.dims, box, strict=True))
    first: dict[str, int] = dict.fromkeys(piece.dims, 0)
    dims, alone = piece.dims, ""
    if piece.within:
        shared, begin, size_of[shared] = piece.within
        low, high = box_of.get(shared, (0, 1))
        box_of[shared] = low + begin, high + begin
        if shared in first:
            first[shared] = begin
        else:
            dims, alone = (*dims, shared), shared
    of_dims = (_ranges(names, size_of, box_of, alone) for names in piece.merged)
    for reads in itertools.product(*of_dims):
        spans = {name: span for *_, inner in reads for name, span in inner.items()}
        yield Slice(
            tuple(slice(start, stop, step) for start, stop, step, _ in reads),
            tuple((spans[x][0] - begin, spans[x][1] - begin) for x, begin in first.items()),
            tuple(stop - start for start, stop in spans.values()),
            tuple(list(spans).index(name) for name in dims),
            len(dims) - len(piece.dims),
        )


def _ranges(
    names: Sequence[str],
    size_of: Mapping[str, int],
    bounds_of: Mapping[str, tuple[int, int]],
    alone: str = "",
) -> list[_Read]:
    """Computes the ranges of a merged dim that contain the bounds of the dims in it.

    There is one range if the bounds cover all inner dims; otherwise at least one for each entry of
    the outermost dim. If `alone`, the dim that only the tensor has, is the innermost, the ranges
    have steps. Other dims have none: the entries between may belong to other processes.
    """
    if not names:
        return [(0, 1, 1, {})]
    if len(names) > 1 and names[-1] == alone:
        step, (entry, _) = size_of[alone], bounds_of[alone]
        return [
            (start * step + entry, stop * step, step, {**spans, alone: bounds_of[alone]})
            for start, stop, _, spans in _ranges(names[:-1], size_of, bounds_of)
        ]
    outer, *inner = names
    start, stop = bounds_of[outer]
    size = 1
    for name in inner:
        size *= size_of[name]
    if all(bounds_of[name] == (0, size_of[name]) for name in inner):
        whole = {name: bounds_of[name] for name in inner}
        return [(start * size, stop * size, 1, {outer: (start, stop), **whole})]
    return [
        (at * size + low, at * size + high, 1, {outer: (at, at + 1), **spans})
        for at in range(start, stop)
        for low, high, _, spans in _ranges(inner, size_of, bounds_of)
    ]
