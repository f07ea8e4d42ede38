"""Writes files so that they are complete even if the process is killed at any moment.

A killed process loses its buffers, and a full disk may store only a part of a write. So lines are
appended without a buffer, and a file is replaced by renaming a new file over it. A process can
write to an open file even after the file was deleted. So before each line, the path is checked. An
error's message is one sentence.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manualpar.system.storage import AnyPath, BucketError
from manualpar.system.storage.untrusted import NotAFileError, create_file


class WriteError(ValueError):
    """Results cannot be written, for example to a full disk; the message is a sentence."""


def why_unwritable(folder: Path) -> str:
    """Returns why a folder can be neither written to nor created; `""` if it can. Creates nothing.

    A reason names the folder or its parent, such as `/data may not be written to`.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is a file, not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} may not be written to"


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
    """Replaces a file; if the process is killed, the file has its old or its new content.

    If the path is a link, the link is replaced, not followed. Raises a `WriteError` if the file
    cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    with explained(path):
        # The text may contain file names that are not valid Unicode.
        data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
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


class LineFile:
    """A file to which JSON lines are appended without a buffer, each completely or not at all.

    Every method raises a `WriteError` if the file cannot be written. `append` and `sync` also raise
    a `WriteError` if the file was deleted or replaced. If it was deleted and its folder still
    exists, its content is first written again, so that no lines are lost.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; if a killed process left the last line unfinished, ends it."""
        self._path = path
        with explained(path):
            if path.is_fifo():
                raise NotAFileError("is a FIFO, expected a file")  # Opening a FIFO would wait.
            self._file = path.open("a+b", buffering=0)
            if size := self._file.seek(0, os.SEEK_END):
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":
                    self._file.write(b"\n")

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line; if the disk cannot store the complete line, writes nothing."""
        data = json.dumps(record, allow_nan=False).encode() + b"\n"
        self._check_in_place()
        with explained(self._path):
            before = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):  # Only the first error is reported.
                    self._file.truncate(before)
                raise

    def sync(self) -> int:
        """Waits until all lines are on the disk; returns the file's size in bytes."""
        self._check_in_place()
        with explained(self._path):
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Closes the file. There is no buffer to write."""
        self._file.close()

    def _check_in_place(self) -> None:
        with explained(self._path):
            opened = os.fstat(self._file.fileno())
        try:
            check_in_place(self._path, opened)
        except WriteError:
            if self._path.parent.is_dir() and not os.path.lexists(self._path):
                self._file.seek(0)
                replace_file(self._path, self._file.read())
            raise
