"""Files that are whole whenever the process ends, and whose errors are a sentence.

A killed process loses what it has buffered, and a full disk can take half of what it is given. So
lines are appended without a buffer, and what replaces a file is written beside it and renamed.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from manualpar.untrusted import NotAFileError, create_file


class WriteError(ValueError):
    """The results cannot be written: a full disk, a read-only folder. One sentence for the user."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an error of the system's into a sentence that names the file.

    Args:
      path: What is written to.

    Raises:
      WriteError: There was an `OSError`.
    """
    try:
        yield
    except OSError as error:
        mend = "name another folder with --workdir"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "make room there, or name another folder with --workdir"
        raise WriteError(
            f"the results cannot be written: {path}: {error.strerror or error}; {mend}."
        ) from error


def replace_file(path: Path, text: str | bytes) -> None:
    """Writes a whole file, which has the old content or the new one whenever the process ends.

    A link of that name is replaced, not followed.

    Raises:
      WriteError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.draft")
    with explained(path):
        # The names of files need not be Unicode.
        data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
        with create_file(draft) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


class LineFile:
    """A file of JSON lines to append to. It is not buffered, and a line is in it whole or not."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it.

        Raises:
          WriteError: It cannot be written.
        """
        self._path = path
        with explained(path):
            if path.is_fifo():
                raise NotAFileError("is a FIFO, expected a file")  # Opening it would wait.
            self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a line, or nothing where the disk does not take all of it.

        Raises:
          WriteError: The disk did not.
        """
        data = json.dumps(record, allow_nan=False).encode() + b"\n"
        with explained(self._path):
            before = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):  # What there is to say is said by the first.
                    self._file.truncate(before)
                raise

    def sync(self) -> int:
        """Has the disk take everything.

        Returns:
          The size in bytes, the end of a line.

        Raises:
          WriteError: The disk does not.
        """
        with explained(self._path):
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Closes it; there is nothing left to write."""
        self._file.close()
