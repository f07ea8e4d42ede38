"""The `.safetensors` files of a directory: finds the file of each tensor, and reads slices.

The files may come from a stranger. So an index may name only files in its own directory, sizes are
bounded, the header of every file is compared with the file's length, and nothing is unpickled. Only
the headers and the requested slices of tensors are read.

Files are read with `preadv` and not mapped into memory. So the bytes in the page cache do not count
as memory of the process, and if a file becomes shorter, the process gets an error and is not
killed.
"""

import re
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import jax.numpy as jnp
import numpy as np

from manualpar.core.state.state_arrays import list_some
from manualpar.errors import printable, require
from manualpar.models.pretrained.tensor_bytes import (
    CODE_DTYPES,
    BytesInFile,
    read_header,
    read_slice,
)
from manualpar.system.storage.untrusted import MAX_HEADER_BYTES, open_tensors, read_object

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
        """Opens all files and reads their headers.

        Raises:
          ValueError: There are no files; a file is damaged, pickled or missing; or the index and
            the files have different tensors.
        """
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
                file, length = open_tensors(path, most=left)
                weakref.finalize(self, file.close)
                left -= length
                # `safe_open` checks the header, and compares its sizes with the file's length.
                with safetensors.safe_open(path, framework="np", backend="pread"):
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
        """Reads a part of a tensor; `index` has one slice for each dim.

        Raises:
          ValueError: The file cannot be read.
        """
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
    return (directory / ONE_FILE).exists() or (directory / INDEX_FILE).exists()


def _read_index(directory: Path) -> Mapping[str, str]:
    """Reads the index, which names each tensor's file; `{}` if all tensors are in a single file."""
    path = directory / INDEX_FILE
    if not path.exists():
        return {}
    if (directory / ONE_FILE).exists():
        warnings.warn(
            f"load_hf: {directory} has both {ONE_FILE} and {INDEX_FILE}: only {ONE_FILE} is read, "
            "as in transformers. Delete the file that does not belong to the model.",
            stacklevel=2,
        )
        return {}
    try:
        files = read_object(path, follow_links=True).get("weight_map")
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
