"""Paths in buckets, `s3://bucket/key` and `gs://bucket/key`, with the methods of `pathlib.Path`.

A bucket maps keys to objects. There are no folders, no renaming and no appending: an object appears
complete, in one request, or not at all. In this package a folder means all keys with a common
prefix, so a folder exists as soon as it has an object. Lists show all earlier writes.

Requests go through fsspec, with s3fs or gcsfs. These two packages read the credentials and the
address of the server from the environment; there is no other way to set them.

An object may change while it is read, and a server may send wrong bytes. So all requests of a read
name the same `Version`, and the answers are compared with this version.
"""

import dataclasses
import functools
import glob
import io
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

from manualpar.system.storage.requests import ENDPOINTS, BucketError, ContentError, request, twice
from manualpar.system.storage.services import (
    MODULES,
    Version,
    file_system,
    list_page,
    read_part,
    version_of,
)

T = TypeVar("T")

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# The fewest bytes that a `BucketFile` requests at once.
BLOCK_BYTES = 1 << 20
# A large file is uploaded in parts of this size, ten parts at a time.
UPLOADED_BYTES = 1 << 24
# A list counts as endless if it has more than `MOST_PAGES` pages (of up to a thousand objects
# each), or more than `MOST_EMPTY_PAGES` pages without new objects in a row.
MOST_PAGES, MOST_EMPTY_PAGES = 10_000, 100


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """A path in a bucket. Its methods raise `FileNotFoundError` or `BucketError`.

    The class has no `__fspath__`, so that functions of `os` refuse it. Otherwise they could create
    a local folder `s3:`.
    """

    scheme: str
    bucket: str
    key: str = ""  # Parts separated by single slashes; '' for the bucket itself.

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
        """The folder that contains this path; the parent of a bucket is the bucket itself."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0])

    def relative_to(self, folder: "BucketPath") -> PurePosixPath:
        """Returns this path relative to a folder that contains it."""
        if (folder.scheme, folder.bucket) != (self.scheme, self.bucket):
            raise ValueError(f"{self} is not below {folder}.")
        return PurePosixPath(self.key).relative_to(folder.key)

    def read_bytes(
        self, start: int = 0, stop: int | None = None, *, version: Version | None = None
    ) -> bytes:
        """Reads the object, or its bytes from `start` to `stop`.

        Args:
          start: The first byte.
          stop: The byte after the last byte; `None`, or a number beyond the end, means the end.
          version: The version to read, a result of `version`. By default the current version,
            which needs an extra request unless `stop` is given.

        Raises:
          ContentError: The object now has another version, or the server has twice sent bytes that
            were not requested.
        """

        def read() -> bytes:
            now = self.version() if version is None and stop is None else version
            end = now.size if now and (stop is None or stop > now.size) else stop
            assert end is not None, "without a version there is a stop"
            return b"" if end <= start else self._read_part(start, end, now)

        return twice(read)

    def write_bytes(self, data: bytes) -> None:
        """Writes the object, or replaces it; readers see the complete old or new content."""
        self._ask(lambda files: files.pipe_file(self._address, data))

    def upload(self, path: Path) -> None:
        """Uploads a local file of any size as the object; see `write_bytes`."""
        self._ask(lambda files: files.put_file(str(path), self._address, chunksize=UPLOADED_BYTES))

    def create(self, data: bytes) -> bool:
        """Creates the object unless it exists; returns whether the call created it."""
        try:
            self._ask(lambda files: files.pipe_file(self._address, data, mode="create"))
        except FileExistsError:
            # The request may have been repeated although its first attempt succeeded.
            return self.read_bytes() == data
        return True

    def size(self) -> int:
        """Returns the size of the object in bytes."""
        return self.version().size

    def version(self) -> Version:
        """Returns the current version of the object: its size, tag and generation."""
        found = self._ask(lambda files: files.info(self._address))
        if found["type"] != "file":
            raise FileNotFoundError(f"{self} does not exist")
        return version_of(found)

    def is_file(self) -> bool:
        """Returns whether there is an object with this key."""
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Returns whether there are objects below this path."""
        return bool(self.names())

    def exists(self) -> bool:
        """Returns whether the path is a file or a folder."""
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """Returns the names of files and folders in this folder; `[]` if it does not exist."""
        sizes, folders = self._list(self._prefix, delimiter="/")
        found = (key.removeprefix(self._prefix).rstrip("/") for key in (*sizes, *folders))
        # An object whose key is the prefix itself is in the list with an empty name.
        return sorted(filter(None, found))

    def files(self) -> dict[str, int]:
        """Returns the size of each object below this folder, by its path relative to the folder."""
        sizes, _ = self._list(self._prefix)
        return {
            key.removeprefix(self._prefix): size
            for key, size in sorted(sizes.items())
            if not key.endswith("/")
        }

    def glob(self) -> dict["BucketPath", int]:
        """Finds the objects that match this path as a glob (`*`, `?`, `[]`, `**`), with sizes."""
        file_system(self.scheme)  # Reports a missing package.
        from fsspec.utils import glob_translate

        parts, folders = self.parts, [""]
        while len(parts) > 1 and "**" not in parts[0]:
            part, *rest = parts
            if glob.has_magic(part):
                matches = re.compile(glob_translate(part)).match
                below = [key for folder in folders for key in self._list(folder, delimiter="/")[1]]
                folders = [key for key in below if matches(key.rstrip("/").rpartition("/")[2])]
            else:
                folders = [f"{folder}{part}/" for folder in folders]
            parts = tuple(rest)
        delimiter = "" if "**" in parts[0] else "/"
        matches = re.compile(glob_translate(self.key)).match
        return {
            dataclasses.replace(self, key=key): size
            for folder in folders
            for key, size in sorted(self._list(folder, delimiter=delimiter)[0].items())
            if matches(key) and not key.endswith("/")
        }

    def copy_to(self, other: "BucketPath") -> None:
        """Copies the object to `other` on the server; replaces an existing object there."""
        self._ask(lambda files: files.cp_file(self._address, other._address))

    def delete(self) -> None:
        """Deletes the object, if there is one."""
        try:
            self._ask(lambda files: files.rm_file(self._address))
        except FileNotFoundError:
            return

    def delete_files(self, first: str = "") -> None:
        """Deletes all objects below this folder; deletes the object `first` before all others."""
        if first:
            (self / first).delete()
        if names := list(self.files()):
            addresses = [f"{self._address}/{name}" for name in names]
            self._ask(lambda files: files.rm(addresses))

    @property
    def _address(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket

    @property
    def _prefix(self) -> str:
        """The prefix of all keys below this path."""
        return f"{self.key}/" if self.key else ""

    def _ask(self, action: Callable[[Any], T]) -> T:
        files = file_system(self.scheme)  # Not in `request`, which would retry a missing package.
        return request(self, lambda: action(files))

    def _read_part(self, start: int, stop: int, version: Version | None) -> bytes:
        limits = None if version and (start, stop) == (0, version.size) else (start, stop)

        ask = functools.partial(
            read_part, self.scheme, self.bucket, self.key, limits=limits, version=version
        )
        try:
            part = request(self, ask)
        except FileNotFoundError:
            if version is None:
                raise
            raise ContentError(f"{self} changed or was deleted after reading began") from None
        if limits and not part.is_range:
            raise BucketError(
                f"{self}: the server answers a request for {stop - start} bytes with the whole "
                f"object, expected a server that supports ranges: check {ENDPOINTS[self.scheme]}"
            )
        if version and version.tag and part.tag not in ("", version.tag):
            raise ContentError(f"{self} changed after reading began (its ETag is another one)")
        end = stop if part.size is None or version else min(stop, part.size)
        if part.length != end - start:
            raise ContentError(
                f"{self}: the server sent {part.length} bytes, expected {end - start}: check the "
                f"object, and {ENDPOINTS[self.scheme]}"
            )
        return part.data

    def _list(self, prefix: str, *, delimiter: str = "") -> tuple[dict[str, int], list[str]]:
        """Returns the sizes of objects with a prefix, by key, and with a delimiter the folders.

        Raises:
          BucketError: The list cannot be read, or does not end.
        """
        sizes: dict[str, int] = {}
        folders: dict[str, None] = {}
        token, tokens, empty = "", {""}, 0
        for _ in range(MOST_PAGES):
            ask = functools.partial(
                list_page, self.scheme, self.bucket, prefix, delimiter=delimiter, token=token
            )
            page, before = request(self, ask), len(sizes) + len(folders)
            sizes |= page.sizes
            folders |= dict.fromkeys(page.folders)
            if page.is_last:
                return sizes, list(folders)
            empty = 0 if len(sizes) + len(folders) > before else empty + 1
            token = page.next_token
            if token in tokens or empty > MOST_EMPTY_PAGES:
                break
            tokens.add(token)
        raise BucketError(
            f"{self}: the server's list of objects does not end (after {len(tokens)} pages with "
            f"{len(sizes) + len(folders)} names the server says that there are more): check "
            f"{ENDPOINTS[self.scheme]}"
        )


AnyPath = Path | BucketPath
GivenPath = str | os.PathLike[str] | BucketPath  # The types of a path that callers may pass.


def as_path(text: GivenPath) -> AnyPath:
    """Parses a text into a local path or a path in a bucket.

    Raises:
      ValueError: The text has a scheme other than `s3` or `gs`, names no bucket, or contains a
        password. The message does not repeat the text.
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
            f"a path begins with {scheme}://, which is not supported; expected s3://, gs:// or a "
            "local path."
        )
    if not BUCKET.fullmatch(bucket):
        raise ValueError(
            f"a path on {scheme}:// does not begin with the name of a bucket, expected "
            f"{scheme}://BUCKET/KEY. Write no user and no password into a path: credentials come "
            "from the environment."
        )
    if ".." in key.split("/") or not rest.isprintable():
        raise ValueError(f"a path on {scheme}://{bucket} contains '..' or unprintable characters.")
    return BucketPath(scheme, bucket, "/".join(part for part in key.split("/") if part))


class BucketFile(io.RawIOBase):
    """A file interface to an object, for reading from any position; each read requests a range.

    All reads use the version that was current when the file was opened.
    """

    def __init__(self, path: BucketPath, version: Version | None = None) -> None:
        """Opens the object in a given version, by default in its current version."""
        super().__init__()
        self._path, self._version, self._position = path, version or path.version(), 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to another position, and returns the new position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._version.size}[
            whence
        ]
        if start + offset < 0:
            raise ValueError(f"seek to {start + offset}, expected at least 0.")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer as far as possible; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        stop = self._position + len(view)
        data = self._path.read_bytes(self._position, stop, version=self._version)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_for_reading(path: AnyPath, *, version: Version | None = None) -> BinaryIO:
    """Opens a file, local or in a bucket, to be read from any position.

    Args:
      path: The file.
      version: The version to read of a file in a bucket; by default the current version.
    """
    if isinstance(path, BucketPath):
        return io.BufferedReader(BucketFile(path, version), BLOCK_BYTES)
    return open(path, "rb")
