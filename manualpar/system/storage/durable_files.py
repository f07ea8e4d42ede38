"""Writes files so that they are complete even if the process is killed at any moment.

A killed process loses its buffers, and a full disk may store only a part of a write. So lines are
appended without a buffer, and a file is replaced by renaming a new file over it. A process can
write to an open file even after the file was deleted or cut by somebody. So before each line, the
path and the file's size are checked. An error's message is one sentence.
"""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manualpar.system.storage import AnyPath, BucketError
from manualpar.system.storage.untrusted import COPIED_BYTES, create_file, open_own_file


class WriteError(ValueError):
    """Results cannot be written, for example to a full disk; the message is a sentence."""


def why_unwritable(folder: Path) -> str:
    """Returns why a folder can be neither written to nor created; `""` if it can.

    A file without a name is tried, because permissions do not show all, as in `/proc`; nothing is
    left behind. A reason names the folder or its parent, such as `/data may not be written to`.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there} may not be written to ({error.strerror})"


def check_writable(folder: Path, flag: str) -> None:
    """Raises a `ValueError` that names `flag` if a folder for results cannot be written to."""
    if reason := why_unwritable(folder):
        to = "" if reason.startswith(f"{folder} ") else f" to {folder}"
        raise ValueError(
            f"the results cannot be written{to}: {reason}; name another folder with {flag}."
        )


@contextlib.contextmanager
def explained(path: AnyPath) -> Iterator[None]:
    """Turns an `OSError` into a `WriteError` that names the file."""
    try:
        yield
    except BucketError as error:
        raise WriteError(f"the results cannot be written: {error}.") from error
    except OSError as error:
        mend = "name another folder with --workdir"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "make room there, or name another folder with --workdir"
        raise WriteError(
            f"the results cannot be written: {path}: {error.strerror or error}; {mend}."
        ) from error


def replace_file(path: Path, text: str | bytes) -> None:
    """Replaces a file, see `put_file`; raises a `WriteError` if the file cannot be written."""
    with explained(path):
        # The text may contain file names that are not valid Unicode.
        put_file(path, text.encode(errors="backslashreplace") if isinstance(text, str) else text)


def put_file(path: Path, data: bytes) -> None:
    """Replaces a file; if the process is killed, the file has its old or its new content.

    If the path is a link, the link is replaced, not followed. Raises an `OSError` if the file
    cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    with create_file(draft) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def is_in_place(path: Path, opened: os.stat_result) -> bool:
    """Returns whether a path still leads to the file that was opened there."""
    try:
        return os.path.samestat(os.stat(path), opened)
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_in_place(path: Path, opened: os.stat_result) -> None:
    """Raises a `WriteError` if a path no longer leads to the file that was opened there."""
    with explained(path):
        if is_in_place(path, opened):
            return
        event = "was replaced by another file" if os.path.lexists(path) else "was deleted"
        mend = "start the same command again to go on from the latest checkpoint"
        if not path.parent.is_dir():
            event, mend = "was deleted with its folder", "name another folder with --workdir"
    raise WriteError(
        f"the results cannot be written: {path} {event} while this run was writing to it; {mend}."
    )


class AppendedFile:
    """A file to which records are appended without a buffer, each completely or not at all.

    Every method raises a `WriteError` if the file cannot be written. `write`, `sync` and `cut` also
    raise a `WriteError` if the file was deleted or replaced, and `write` and `sync` if its size has
    changed. If `write` or `sync` finds that the file was deleted, and its folder still exists, its
    content is first written again, so that nothing is lost.

    Attributes:
      size: The bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file, which may be neither a link nor have several names."""
        self._path = path
        with explained(path):
            self._file = open_own_file(path, appends=True)
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    @property
    def sha256(self) -> str:
        """The hash of what was found in the file and written to it since."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Appends a record; if the disk cannot store the complete record, appends nothing."""
        self._check_as_left()
        with explained(self._path):
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):  # Only the first error is reported.
                    self._file.truncate(self.size)
                raise
        self._take(data)

    def sync(self) -> None:
        """Waits until all records are on the disk."""
        self._check_as_left()
        with explained(self._path):
            os.fsync(self._file.fileno())

    def cut(self, size: int) -> None:
        """Cuts off all bytes after the first `size`, if there are so many."""
        check_in_place(self._path, self._opened())
        with explained(self._path):
            if os.fstat(self._file.fileno()).st_size > size:
                self._file.truncate(size)
        self._begin()

    def close(self) -> None:
        """Closes the file. There is no buffer to write."""
        with explained(self._path):
            self._file.close()

    def _begin(self) -> None:
        """Finds the size and the hash of the file."""
        self.size, self._hash = 0, hashlib.sha256()
        with explained(self._path):
            self._file.seek(0)
            while data := self._file.read(COPIED_BYTES):
                self._take(data)

    def _take(self, data: bytes) -> None:
        self.size += len(data)
        self._hash.update(data)

    def _opened(self) -> os.stat_result:
        with explained(self._path):
            return os.fstat(self._file.fileno())

    def _check_as_left(self) -> None:
        """Raises a `WriteError` if somebody has deleted, replaced, cut or extended the file."""
        opened = self._opened()
        try:
            check_in_place(self._path, opened)
        except WriteError:
            if self._path.parent.is_dir() and not os.path.lexists(self._path):
                self._file.seek(0)
                replace_file(self._path, self._file.read())
            raise
        if opened.st_size != self.size:
            raise WriteError(
                f"the results cannot be written: {self._path} has {opened.st_size:,} bytes, "
                f"expected {self.size:,}, because somebody has changed it while this run was "
                "writing to it; start the same command again to go on from the latest checkpoint."
            )


class LineFile(AppendedFile):
    """A file of JSON lines; if a killed process left its last line unfinished, ends this line."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a line, see `write`."""
        self.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _begin(self) -> None:
        super()._begin()
        with explained(self._path):
            self._file.seek(max(self.size - 1, 0))
            is_unfinished = self._file.read(1) not in (b"", b"\n")
        if is_unfinished:
            self.write(b"\n")
