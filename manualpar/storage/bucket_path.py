"""Paths in buckets, `s3://bucket/key` and `gs://bucket/key`, with the methods of `pathlib.Path`.

A bucket holds objects by key. There are no folders, no renaming and no appending: an object appears
whole, in one request, or not at all. A folder is a way to speak of keys that begin alike, so it is
there as soon as something is in it. Lists show what was written before.

Requests go through fsspec, with s3fs or gcsfs. Credentials and the address of the server come from
the environment, as these two read it, and nowhere is there another way to give them.
"""

import dataclasses
import io
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

from manualpar.extras import require
from manualpar.storage.requests import request

T = TypeVar("T")

MODULES = {"s3": "s3fs", "gs": "gcsfs"}
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# A reader gets at least so many bytes at once.
BLOCK_BYTES = 1 << 20
# A large file is sent in parts of this size, ten at once.
UPLOADED_BYTES = 1 << 24
CONNECT_SECONDS, READ_SECONDS = 10, 60


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """A path in a bucket. Its methods raise `FileNotFoundError` or `BucketError`.

    It has no `__fspath__`, so functions of `os` refuse it instead of making a folder `s3:`.
    """

    scheme: str
    bucket: str
    key: str = ""  # Parts between single slashes; '' is the bucket itself.

    def __str__(self) -> str:
        return f"{self.scheme}://{self._address}"

    def __truediv__(self, other: str | PurePosixPath) -> Self:
        parts = [*self.parts, *PurePosixPath(other).parts]
        if ".." in parts or "/" in parts:
            raise ValueError(f"{str(other)!r}, expected a path below {self}.")
        return dataclasses.replace(self, key="/".join(parts))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the key."""
        return tuple(self.key.split("/")) if self.key else ()

    @property
    def name(self) -> str:
        """The last part of the key; '' for the bucket itself."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder that it is in; the bucket is its own."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def relative_to(self, folder: "BucketPath") -> PurePosixPath:
        """The path from a folder above it."""
        if (folder.scheme, folder.bucket) != (self.scheme, self.bucket):
            raise ValueError(f"{self} is not below {folder}.")
        return PurePosixPath(self.key).relative_to(folder.key)

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """The object, or its bytes from `start` to `stop`."""
        if stop is not None and stop <= start:
            return b""
        part = {} if stop is None and not start else {"start": start, "end": stop}
        data: bytes = self._ask(lambda files: files.cat_file(self._address, **part))
        return data

    def write_bytes(self, data: bytes) -> None:
        """Puts an object in place of the one of that name, which has one content or the other."""
        self._ask(lambda files: files.pipe_file(self._address, data))

    def upload(self, path: Path) -> None:
        """Puts a file of a disk, of any size, as `write_bytes` puts bytes."""
        self._ask(lambda files: files.put_file(str(path), self._address, chunksize=UPLOADED_BYTES))

    def create(self, data: bytes) -> bool:
        """Puts an object if there is none of that name; returns whether it is this one."""
        try:
            self._ask(lambda files: files.pipe_file(self._address, data, mode="create"))
        except FileExistsError:
            # A request that was repeated may have succeeded the first time.
            return self.read_bytes() == data
        return True

    def size(self) -> int:
        """The size of the object in bytes."""
        return self.version()[0]

    def version(self) -> tuple[int, str]:
        """The size of the object, and a text that is another one when its content is."""
        found = self._ask(lambda files: files.info(self._address))
        if found["type"] != "file":
            raise FileNotFoundError(f"{self} does not exist")
        return int(found["size"]), str(found.get("ETag") or found.get("etag"))

    def is_file(self) -> bool:
        """Whether there is an object of that name."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return bool(self.names())

    def exists(self) -> bool:
        """Whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """The names of files and folders in a folder; none if it is not there."""
        try:
            found = self._ask(lambda files: files.ls(self._address, detail=False))
        except FileNotFoundError:
            return []
        # An object of the folder's own name lists itself.
        below = f"{self._address}/"
        inside = (entry.rstrip("/") for entry in found if entry.startswith(below))
        return sorted(entry.removeprefix(below) for entry in inside if len(entry) > len(below))

    def files(self) -> dict[str, int]:
        """The sizes of all objects below a folder, by their paths from it."""
        try:
            found = self._ask(lambda files: files.find(self._address, detail=True))
        except FileNotFoundError:
            return {}
        below = f"{self._address}/"
        return {
            name.removeprefix(below): int(entry["size"])
            for name, entry in sorted(found.items())
            if name.startswith(below) and not name.endswith("/")
        }

    def glob(self) -> dict["BucketPath", int]:
        """The sizes of objects whose paths match this one as a pattern of `*`, `?`, `[]`, `**`."""
        found = self._ask(lambda files: files.glob(self._address, detail=True))
        return {
            dataclasses.replace(self, key=name.partition("/")[2]): int(entry["size"])
            for name, entry in sorted(found.items())
            if entry["type"] == "file" and not name.endswith("/")
        }

    def copy_to(self, other: "BucketPath") -> None:
        """Copies the object within the buckets, in place of one of that name."""
        self._ask(lambda files: files.cp_file(self._address, other._address))

    def delete(self) -> None:
        """Deletes the object, if there is one."""
        try:
            self._ask(lambda files: files.rm_file(self._address))
        except FileNotFoundError:
            return

    def delete_files(self, first: str = "") -> None:
        """Deletes everything below a folder; the object of the name `first` before all others."""
        if first:
            (self / first).delete()
        if names := list(self.files()):
            addresses = [f"{self._address}/{name}" for name in names]
            self._ask(lambda files: files.rm(addresses))

    @property
    def _address(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    def _ask(self, action: Callable[[Any], T]) -> T:
        files = self._files  # What is not installed is not tried again.
        return request(self, lambda: action(files))

    @property
    def _files(self) -> Any:
        """The file system of fsspec, which keeps one object for each set of options."""
        require(f"{self.scheme}://", MODULES[self.scheme])
        import fsspec

        # A list that was kept would not show what other processes have written since.
        options: dict[str, Any] = {"use_listings_cache": False}
        if self.scheme == "s3":
            options["config_kwargs"] = {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"total_max_attempts": 1},
            }
        files = fsspec.filesystem(self.scheme, **options)
        files.retries = 1  # `request` repeats, and says so.
        return files


AnyPath = Path | BucketPath
GivenPath = str | os.PathLike[str] | BucketPath  # As callers name one.


def as_path(text: GivenPath) -> AnyPath:
    """The local path, or the path in a bucket, that a text names.

    Raises:
      ValueError: It is of another scheme than `s3` or `gs`, names no bucket, or holds a password;
        the message does not repeat it.
    """
    if isinstance(text, BucketPath):
        return text
    found = SCHEME.fullmatch(os.fspath(text))
    if not found:
        return Path(text)
    scheme, rest = found[1], found[2]
    bucket, _, key = rest.partition("/")
    if scheme not in MODULES:
        raise ValueError(
            f"a path of the scheme {scheme}:// is not understood, expected s3://, gs:// or a local "
            "path."
        )
    if not BUCKET.fullmatch(bucket):
        raise ValueError(
            f"a path on {scheme}:// does not begin with the name of a bucket, expected "
            f"{scheme}://BUCKET/KEY. Users and passwords do not belong into a path: credentials "
            "come from the environment."
        )
    if ".." in key.split("/") or not rest.isprintable():
        raise ValueError(f"a path on {scheme}://{bucket} holds '..' or what cannot be printed.")
    return BucketPath(scheme, bucket, "/".join(part for part in key.split("/") if part))


class BucketFile(io.RawIOBase):
    """An object as a file that is read, by ranges and from any place."""

    def __init__(self, path: BucketPath) -> None:
        """Asks for the size of the object."""
        super().__init__()
        self._path, self._size, self._position = path, path.size(), 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to another place, and returns it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}, expected at least 0.")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads as much as a buffer takes; returns how much."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._size)
        data = self._path.read_bytes(self._position, stop)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_for_reading(path: AnyPath) -> BinaryIO:
    """Opens a file, local or in a bucket, to be read from any place."""
    if isinstance(path, BucketPath):
        return io.BufferedReader(BucketFile(path), BLOCK_BYTES)
    return open(path, "rb")
