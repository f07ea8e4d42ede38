"""Finds data files in a bucket, and reads ranges of them.

Nothing from a bucket is copied to a disk unless the config names a cache.
"""

import glob
import hashlib
import os
from collections.abc import Iterator

import numpy as np

from manualpar.data.dataset import DamagedDataError
from manualpar.system.storage import AnyPath, BucketPath, ContentError, Version


def find_in_bucket(
    path: BucketPath, suffixes: tuple[str, ...]
) -> Iterator[tuple[BucketPath, str, int]]:
    """Yields the path, name and size of each file that a path in a bucket stands for.

    The path is a file, a folder or a glob. A name is relative to the last folder before the first
    `*`, `?` or `[`. In a folder, only files with one of the suffixes are found; if `suffixes` is
    empty, all files. Hidden files are found only if a component of the pattern begins with a dot.
    """
    magic = [number for number, part in enumerate(path.parts) if glob.has_magic(part)]
    if magic:
        root = BucketPath(path.scheme, path.bucket, "/".join(path.parts[: magic[0]]))
        takes_hidden = any(part.startswith(".") for part in path.parts[magic[0] :])
        for found, size in path.glob().items():
            name = str(found.relative_to(root))
            if takes_hidden or not _is_hidden(name):
                yield found, name, size
        return
    if path.key and path.is_file():
        yield path, path.name, path.size()
        return
    for name, size in path.files().items():
        if not _is_hidden(name) and name.endswith(suffixes or ""):
            yield path / name, name, size


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def state_of(path: AnyPath) -> tuple[int, int]:
    """Returns the size of a file, and a number that changes if the content of the file changes."""
    if isinstance(path, BucketPath):
        version = path.version()
        digest = hashlib.blake2b(version.tag.encode(), digest_size=8).digest()
        return version.size, int.from_bytes(digest, "big") >> 1
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


class BucketArray:
    """An array that is stored in an object of a bucket; only requested slices are read."""

    def __init__(self, path: BucketPath, dtype: str) -> None:
        """Opens the object in its current version; all slices are read from this version."""
        self._path, self._dtype, self._version = path, np.dtype(dtype), path.version()
        self._length = self._version.size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._length)
        start, stop = start * self._dtype.itemsize, stop * self._dtype.itemsize
        return np.frombuffer(read_range(self._path, start, stop, self._version), self._dtype)


def read_range(path: BucketPath, start: int, stop: int, version: Version | None = None) -> bytes:
    """Reads the bytes `start` to `stop` of an object; `version=None` accepts any version.

    Raises:
      DamagedDataError: The object can no longer be read, has become shorter, or has another
        version.
    """
    try:
        data = path.read_bytes(start, stop, version=version)
    except ContentError as error:
        raise DamagedDataError(
            f"{error}; do not change the files of a corpus during a run."
        ) from None
    except OSError as error:
        raise DamagedDataError(f"{error}; the file could be read when the run began.") from None
    if len(data) != stop - start:
        raise DamagedDataError(
            f"{path} is shorter than when the run began; do not change the files "
            "of a corpus during a run."
        )
    return data
