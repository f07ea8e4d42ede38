"""The bytes of a `.safetensors` file: finds each tensor's place, and reads and writes slices.

A file consists of eight bytes with the header's length, the header in JSON, and the tensors in
row-major order without gaps. So the place of every slice is known in advance, and threads and
processes can read and write slices of one file at the same time.
"""

import functools
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

# The supported dtypes, which are stored as plain numbers. Others are packed or need a scale.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# The dtypes of codes, which only `decoded_files` reads: name in files -> name in JAX.
CODE_DTYPES = {"U8": "uint8", "F8_E4M3": "float8_e4m3fn"}
# Held while entries between the entries of a slice are read and written back.
_WRITE_BETWEEN = threading.Lock()
CODES = {name: code for code, name in DTYPES.items()}


class BytesInFile(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
      start: The offset of the tensor's first byte.
      shape: The tensor's shape.
      dtype: The name of the tensor's dtype: numpy's name, or the file's name for a dtype that numpy
        lacks, such as `F8_E4M3`.
    """

    start: int
    shape: tuple[int, ...]
    dtype: str


def read_header(file: IO[bytes]) -> dict[str, BytesInFile]:
    """Reads each tensor's place from a file's header, which safetensors must have checked."""
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: BytesInFile(
            8 + length + entry["data_offsets"][0],
            tuple(entry["shape"]),
            DTYPES.get(entry["dtype"], entry["dtype"]),
        )
        for name, entry in header.items()
    }


def make_header(
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, BytesInFile]]:
    """Makes the bytes before a file's tensors; also returns the place of each tensor.

    Tensors with larger elements come first, so that every tensor is aligned to its element size.
    """
    # The library transformers loads only files whose header has the entry "format".
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        starts[name], end = end, end + dtype.itemsize * math.prod(shape)
        offsets = [starts[name], end]
        header[name] = {"dtype": CODES[dtype.name], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    places = {
        name: BytesInFile(first + starts[name], shape, dtype.name)
        for name, (dtype, shape) in tensors.items()
    }
    return len(text).to_bytes(8, "little") + text, places


def create_tensor_file(path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> None:
    """Creates a file in which all tensors are zero."""
    header, _ = make_header(tensors)
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values()]
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + sum(sizes))


def read_slice(
    file: int, place: BytesInFile, index: Sequence[slice], dtype: np.dtype | type
) -> np.ndarray:
    """Reads a part of a tensor; `index` has one slice for each dim, which may have a step.

    Raises:
      OSError: The file cannot be read, or ends before the end of the slice.
    """
    bounds = bounds_of(index, place.shape)
    value = np.empty([stop - start for start, stop in bounds], dtype)
    for at, part in _runs(place, bounds, value):
        while part:
            count = os.preadv(file, [part], at)
            if not count:
                raise OSError("it ends before its tensors do")
            part, at = part[count:], at + count
    return value[_steps(index)]


def write_slice(file: int, place: BytesInFile, index: Sequence[slice], value: np.ndarray) -> None:
    """Writes a contiguous array to a part of a tensor; `index` has one slice for each dim.

    A slice may have a step. Then the entries between its entries are read and written back, one
    thread at a time. No other process may write them.
    """
    if any(part.step not in (None, 1) for part in index):
        with _WRITE_BETWEEN:
            whole = tuple(slice(part.start, part.stop) for part in index)
            entries = read_slice(file, place, whole, value.dtype)
            entries[_steps(index)] = value
            write_slice(file, place, whole, entries)
        return
    for at, part in _runs(place, bounds_of(index, place.shape), value):
        while part:
            count = os.pwrite(file, part, at)
            part, at = part[count:], at + count


def _steps(index: Sequence[slice]) -> tuple[slice, ...]:
    return tuple(slice(None, None, part.step) for part in index)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the begin and the end of each dim of a slice."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _runs(
    place: BytesInFile, bounds: Sequence[tuple[int, int]], value: np.ndarray
) -> Iterator[tuple[int, memoryview]]:
    """Yields the parts of an array that are contiguous in the file, each with its offset there."""
    if not value.size:
        return
    shape = place.shape
    strides = [value.itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = [low * stride for (low, _), stride in zip(bounds, strides, strict=True)]
    # `run` is the last dim of which only a range is read. All later dims are read completely, so
    # one contiguous part covers the range of `run` and all later dims.
    run = max((dim for dim, size in enumerate(shape) if bounds[dim] != (0, size)), default=0)
    steps = [
        np.arange(high - low) * stride for (low, high), stride in zip(bounds, strides, strict=True)
    ][:run]
    places = functools.reduce(np.add.outer, steps, np.array(place.start + sum(starts))).ravel()
    data = memoryview(value.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    size = len(data) // places.size
    for number, at in enumerate(places.tolist()):
        yield at, data[number * size : (number + 1) * size]
