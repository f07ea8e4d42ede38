"""The `.safetensors` files of a directory: finds the file of each tensor, and reads slices.

The files may come from a stranger. So an index may name only files in its own directory, a link may
not leave it (`manualpar.system.storage.untrusted.model_file`), sizes are bounded, the header of
every file is compared with the file's length, and nothing is unpickled. Only the headers and the
requested slices of tensors are read.

Files are read with `preadv` and not mapped into memory. So the bytes in the page cache do not count
as memory of the process, and if a file becomes shorter, the process gets an error and is not
killed.
"""

import functools
import json
import math
import os
import re
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from manualpar.errors import list_some, printable, require
from manualpar.models.pretrained.family import LARGEST
from manualpar.system.storage import BucketPath, GivenPath, copied_folder, user_cache, user_path
from manualpar.system.storage.untrusted import (
    MAX_HEADER_BYTES,
    create_file,
    model_file,
    open_tensors,
    read_model_object,
)

ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FILE_NAME = re.compile(r"[\w.=@+-]+\.safetensors")


class TensorFiles:
    """The tensors in the files of a directory.

    Attributes:
      shapes: Maps the name of each tensor to its shape.
      dtypes: Maps the name of each tensor to the name of its dtype, see `BytesInFile`.
      files: Maps the name of each tensor to the name of its file.
    """

    def __init__(self, directory: Path) -> None:
        """Opens all files and reads their headers."""
        require("load_hf", "safetensors")
        import safetensors

        self._directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self._places: dict[str, tuple[IO[bytes], BytesInFile]] = {}
        index, left = _read_index(directory), MAX_HEADER_BYTES
        for name in sorted(set(index.values())) if index else [ONE_FILE]:
            path = directory / name
            try:
                real = model_file(path, directory)
                file, length = open_tensors(real, most=left)
                weakref.finalize(self, file.close)
                left -= length
                # `safe_open` checks the header, and compares its sizes with the file's length.
                with safetensors.safe_open(real, framework="np", backend="pread"):
                    places = read_header(file)
            except FileNotFoundError:
                raise _no_files(directory, name) from None
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} {error}.") from None
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{path} is damaged or cut off ({printable(error)}), expected a complete "
                    ".safetensors file; fetch it again."
                ) from None
            for key, place in places.items():
                if key in self.files:
                    raise ValueError(
                        f"{directory}: {printable(key)} is in {self.files[key]} and in {name}, "
                        "expected it in only one of them."
                    )
                self._places[key] = file, place
                self.files[key] = name
                self.shapes[key], self.dtypes[key] = place.shape, place.dtype
        if index:
            _check_index(directory, index, self.files)

    def read(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor; `index` has one slice for each dim."""
        file, place = self._places[tensor]
        dtype = CODE_DTYPES.get(place.dtype, place.dtype)
        try:
            return read_slice(file.fileno(), place, index, jnp.dtype(dtype))
        except OSError as error:
            raise ValueError(
                f"{self._directory / self.files[tensor]} cannot be read ({error}): it changed "
                "while it was read, or its disk is failing."
            ) from None


def has_tensors(directory: Path) -> bool:
    """Returns whether a directory has any `.safetensors` files, even if some are missing."""
    return any(os.path.lexists(directory / name) for name in (ONE_FILE, INDEX_FILE))


def _read_index(directory: Path) -> Mapping[str, str]:
    """Reads the index, which names each tensor's file; `{}` if all tensors are in a single file."""
    path = directory / INDEX_FILE
    if not os.path.lexists(path):
        return {}
    if os.path.lexists(directory / ONE_FILE):
        warnings.warn(
            f"load_hf: {directory} has both {ONE_FILE} and {INDEX_FILE}: only {ONE_FILE} is read, "
            "as in transformers. Delete the file that does not belong to the model.",
            stacklevel=2,
        )
        return {}
    try:
        files = read_model_object(path, directory).get("weight_map")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} {error}; expected an index of .safetensors files.") from None
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path} has no weight_map, expected one that names the file of a tensor.")
    for tensor, name in files.items():
        # Without this check an index could name any file of this machine.
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(
                f"{path}: weight_map has {tensor!r} in {name!r}, expected the name of a "
                ".safetensors file in the same directory."
            )
    return files


def _no_files(directory: Path, name: str) -> ValueError:
    """Makes the error for a missing file; the message lists the files in the directory."""
    if name != ONE_FILE or (directory / INDEX_FILE).exists():
        return ValueError(
            f"{directory / name} is missing, but {INDEX_FILE} names it; expected all files of the "
            "model. Fetch it."
        )
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        return ValueError(
            f"{directory} has pickled weights ({', '.join(list_some(pickled))}) and no "
            ".safetensors files. They are not unpickled, because that would run any code in a "
            "file. Fetch the model's .safetensors files, or convert the weights if you trust them."
        )
    return ValueError(
        f"{directory} has neither {ONE_FILE} nor {INDEX_FILE}; expected the weights of a model."
    )


def _check_index(directory: Path, index: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Raises a `ValueError` if the index and the files have different tensors."""
    lines = [
        f"{tensor} is in {files.get(tensor, 'no file')}, but the index says {name}"
        for tensor, name in index.items()
        if files.get(tensor) != name
    ]
    lines += [
        f"{tensor} is in {files[tensor]}, but not in the index" for tensor in files.keys() - index
    ]
    if lines:
        raise ValueError(
            f"{directory / INDEX_FILE} is not the index of these files: "
            f"{'; '.join(list_some(lines))}. Fetch all files again, from one revision."
        )


# -------------------------------------------------------------------------------------------------
# The bytes of a `.safetensors` file: finds each tensor's place, and reads and writes slices.
#
# A file consists of eight bytes with the header's length, the header in JSON, and the tensors in
# row-major order without gaps. So the place of every slice is known in advance, and threads and
# processes can read and write slices of one file at the same time.


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
    with create_file(path) as file:
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
    data = value.reshape(-1).view(np.uint8).data
    size = len(data) // places.size
    for number, at in enumerate(places.tolist()):
        yield at, data[number * size : (number + 1) * size]


# -------------------------------------------------------------------------------------------------
# Decodes quantized tensors while they are read: MXFP4 of gpt-oss, and FP8 in blocks of DeepSeek.
#
# `DecodedFiles` shows the tensors that the codes and scales in files stand for, in bfloat16. A
# slice of a tensor reads only the blocks in which it lies. So a program never holds codes, and a
# decoded model is exported in bfloat16.
#
# - MXFP4 (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf):
# two
#   codes of 4 bits in each byte of `X_blocks` `[..., blocks, 16]`, and an exponent of 2 for each
#   block of 32 in `X_scales` `[..., blocks]`. The tensor `X` is the transposed of the decoded rows.
# - FP8 (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): `X.weight` in `float8_e4m3fn`,
#   and a factor for each block in `X.weight_scale_inv`.


DECODED = "bfloat16"
METHODS = ("mxfp4", "fp8")
BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
MXFP4_BLOCK = 32
# The values of the codes of MXFP4, which has one bit of mantissa.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([FP4, -FP4])
FP8, BYTES = "F8_E4M3", "U8"


class Quantization(NamedTuple):
    """How the weights in files are quantized.

    Attributes:
      method: One of `METHODS`; `""` if weights are plain numbers.
      block: The rows and columns of a block, for `"fp8"`.
    """

    method: str = ""
    block: tuple[int, int] = (128, 128)


def quantization_of(config: Mapping[str, Any]) -> Quantization:
    """Reads how a `config.json` says that weights are quantized."""
    found = config.get("quantization_config")
    if not found:
        return Quantization()
    if not isinstance(found, Mapping):
        raise ValueError(
            f"quantization_config is {printable(repr(found)):.100}, expected an object with "
            "quant_method. Take the config.json that the library wrote that quantized the model"
        )
    method = found.get("quant_method")
    if method not in METHODS:
        raise ValueError(
            f"quantization_config.quant_method is {printable(repr(method)):.100}, expected one of "
            f"{', '.join(map(repr, METHODS))}, whose codes are decoded on import. Dequantize the "
            "model with the library that quantized it"
        )
    block = found.get("weight_block_size", (128, 128))
    is_pair = isinstance(block, (list, tuple)) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size < LARGEST for size in block):
        raise ValueError(
            f"quantization_config.weight_block_size is {printable(repr(block)):.100}, expected the "
            "rows and columns of a block, such as [128, 128], because only blocks are decoded"
        )
    return Quantization(str(method), (block[0], block[1]))


class DecodedFiles(TensorFiles):
    """The tensors of a directory, decoded if the files have codes and scales.

    The attributes are those of `TensorFiles`; they show the decoded tensors.
    """

    def __init__(self, directory: Path, quantization: Quantization) -> None:
        """Opens all files."""
        super().__init__(directory)
        method, self._block = quantization
        # The shapes and dtypes in the files; `shapes` and `dtypes` show decoded tensors.
        self._stored, self._stored_dtypes = dict(self.shapes), dict(self.dtypes)
        self._sources: dict[str, tuple[str, str]] = {}  # Tensor -> its codes and its scales.
        for name, dtype in self._stored_dtypes.items():
            if method == "mxfp4" and name.endswith(BLOCKS):
                self._show_mxfp4(name, name.removesuffix(BLOCKS))
            elif method == "fp8" and dtype == FP8:
                self._show_fp8(name)

    def read(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, see `TensorFiles.read`; decodes it if it has codes."""
        if tensor not in self._sources:
            return super().read(tensor, index)
        codes, scales = self._sources[tensor]
        read = self._read_mxfp4 if codes.endswith(BLOCKS) else self._read_fp8
        # Products of codes and scales may overflow, which the check below finds.
        with np.errstate(over="ignore", invalid="ignore"):
            value = read(codes, scales, index)
        if not np.isfinite(value).all():
            raise ValueError(
                f"{self._directory / self.files[tensor]}: {printable(codes)} with the scales "
                f"{printable(scales)} stands for NaN or infinity, expected finite numbers; the "
                "files are damaged. Fetch them again."
            )
        return value

    def _show(self, name: str, codes: str, scales: str, shape: tuple[int, ...]) -> None:
        for source in (codes, scales):
            self.shapes.pop(source, None)
            self.dtypes.pop(source, None)
        self.shapes[name], self.dtypes[name] = shape, DECODED
        self.files[name] = self.files[codes]
        self._sources[name] = codes, scales

    def _show_mxfp4(self, codes: str, name: str) -> None:
        scales, shape, dtype = name + SCALES, self._stored[codes], self._stored_dtypes[codes]
        if dtype != BYTES or len(shape) != 4 or shape[-1] != MXFP4_BLOCK // 2:
            raise self._refuse(codes, f"{BYTES}[experts, rows, blocks, 16] of MXFP4")
        if name in self._stored:
            raise self._refuse(name, f"only its codes {printable(codes)}, or only the tensor")
        self._check(codes, scales, {BYTES}, shape[:-1])
        self._show(name, codes, scales, (shape[0], shape[2] * MXFP4_BLOCK, shape[1]))

    def _show_fp8(self, codes: str) -> None:
        scales, shape = codes + FACTORS, self._stored[codes]
        if len(shape) != 2:
            raise self._refuse(codes, f"{FP8}[rows, columns], because scales are those of blocks")
        grid = tuple(-(-size // by) for size, by in zip(shape, self._block, strict=True))
        self._check(codes, scales, {"float32", "bfloat16"}, grid)
        self._show(codes, codes, scales, shape)

    def _check(self, codes: str, scales: str, dtypes: set[str], shape: tuple[int, ...]) -> None:
        found = self._stored_dtypes.get(scales), self._stored.get(scales)
        if found[0] not in dtypes or found[1] != shape:
            raise ValueError(
                f"{self._directory / self.files[codes]}: {printable(codes)}, "
                f"{list(self._stored[codes])}, has the scales {printable(scales)}: {found[0]}"
                f"{list(found[1] or ())}, expected {' or '.join(sorted(dtypes))}{list(shape)}; the "
                "codes cannot be decoded. Fetch all files of the model again."
            )

    def _refuse(self, name: str, expected: str) -> ValueError:
        return ValueError(
            f"{self._directory / self.files[name]}: {printable(name)} is "
            f"{self._stored_dtypes[name]}{list(self._stored[name])}, expected {expected}; it "
            "cannot be decoded. Dequantize the model with the library that quantized it."
        )

    def _read_mxfp4(self, codes: str, scales: str, index: tuple[slice, ...]) -> np.ndarray:
        blocks = self._stored[codes][2]
        expert, features, row = index
        start, stop, step = features.indices(blocks * MXFP4_BLOCK)
        first, last = start // MXFP4_BLOCK, -(-stop // MXFP4_BLOCK)
        inside = expert, row, slice(first, last)
        byte = super().read(codes, (*inside, slice(0, MXFP4_BLOCK // 2)))
        exponent = super().read(scales, inside).astype(np.int32) - 127
        values = FP4_VALUES[np.stack([byte & 15, byte >> 4], axis=-1)]
        values = values.reshape(*byte.shape[:-1], MXFP4_BLOCK)
        values = np.ldexp(values, exponent[..., None]).reshape(*byte.shape[:2], -1)
        corner = first * MXFP4_BLOCK
        values = values[..., start - corner : stop - corner : step]
        return values.swapaxes(1, 2).astype(jnp.dtype(DECODED))

    def _read_fp8(self, codes: str, scales: str, index: tuple[slice, ...]) -> np.ndarray:
        value = super().read(codes, index).astype(np.float32)
        sizes = self._stored[codes]
        rows, columns = (
            np.arange(size)[part] // by
            for part, size, by in zip(index, sizes, self._block, strict=True)
        )
        every = tuple(slice(0, blocks) for blocks in self._stored[scales])
        factors = super().read(scales, every).astype(np.float32)
        return (value * factors[np.ix_(rows, columns)]).astype(jnp.dtype(DECODED))


def open_tensor_files(directory: Path, quantization: Quantization) -> TensorFiles:
    """Opens the tensors of a directory; decodes them if they are quantized."""
    return DecodedFiles(directory, quantization) if quantization.method else TensorFiles(directory)


# -------------------------------------------------------------------------------------------------
# Finds the directory of a model: a path on a disk, or a local copy of a directory in a bucket.
#
# Libraries that read weights and tokenizers need local files. So each machine copies the files
# from the bucket to the user's cache folder, a few megabytes at a time. If a file has changed in
# the bucket, it is copied again. The copy needs as much disk space as the files, and may be
# deleted at any time.


CONFIG_FILE = "config.json"
WEIGHTS = (".safetensors",)
# Suffixes of configs, indices, tokenizers and templates.
SMALL_FILES = (".json", ".jinja", ".model", ".txt")


def model_directory(directory: GivenPath, *, weights: bool = True) -> Path:
    """Returns the directory itself, or a copy of a directory in a bucket.

    Args:
      weights: Whether to copy the weights too.

    Raises:
      FolderError: The copy cannot be written.
    """
    path = user_path(directory)
    if not isinstance(path, BucketPath):
        return path
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(
            f"{path} has no {CONFIG_FILE}; expected the directory of a model, as save_pretrained "
            "of transformers writes it."
        )
    suffixes = SMALL_FILES + WEIGHTS if weights else SMALL_FILES

    def keep(name: str) -> bool:
        return "/" not in name and name.endswith(suffixes)

    return copied_folder(path, user_cache(), keep=keep)
