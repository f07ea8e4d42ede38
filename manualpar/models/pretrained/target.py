"""Where a model is exported to: a folder on a disk, or in a bucket, that is whole when it counts.

One process owns the folder while it is written, and another export to it is refused. On a disk all
files are written into a draft, see `manualpar.system.storage.drafts`, that gets the folder's name
at the end. In a bucket nothing can be renamed. There each file is written to a disk, put and
deleted; `config.json` comes last, and without one a folder is no model. An object `.unfinished` is
there from before the first file until after the last, so that the files of an export that was
killed are told from somebody else's, and go with the next one. It holds the number of its export:
one that was cut off for so long that another one took over finds a different number, or none.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from absl import logging

from manualpar.models.pretrained.directory import CONFIG_FILE
from manualpar.system.storage import (
    LOCK_PREFIX,
    AnyPath,
    BucketError,
    BucketPath,
    Version,
    draft_of,
    hold,
    path_of_draft,
    publish,
    sync,
    writing,
)

UNFINISHED = ".unfinished"


class ExportTarget(Protocol):
    """A folder to make. Only process 0 calls `owned` and `finish`.

    Attributes:
      path: The folder.
      folder: Where all processes see the files while they are written; `None` in a bucket.
    """

    path: AnyPath
    folder: Path | None

    def check_free(self) -> None:
        """Raises a `ValueError` if there is something in the way."""

    def owned(self) -> contextlib.AbstractContextManager[None]:
        """Makes room, and keeps other exports out while the context lasts."""

    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Yields the path of a local file to write, and moves the file to its place afterwards."""

    def check_files(self) -> None:
        """Raises a `BucketError` if a file of this process has been replaced since it was put."""

    def finish(self) -> None:
        """Makes the folder count, after all files."""


def open_target(path: AnyPath, number: str) -> ExportTarget:
    """Opens the folder at a path as the target of a numbered export; creates nothing."""
    if isinstance(path, BucketPath):
        return BucketTarget(path, number)
    return DiskTarget(path, number)


class DiskTarget:
    """A folder on a file system that all processes share."""

    def __init__(self, path: Path, number: str) -> None:
        self.path: AnyPath = path
        self._target, self._number = path, number
        self._draft = path_of_draft(path.absolute(), number)
        self.folder: Path | None = self._draft

    def check_free(self) -> None:
        """Implements `ExportTarget`."""
        target = self._target
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise ValueError(f"export_hf: {target} is no directory, expected none or an empty one.")
        if target.is_dir() and any(target.iterdir()):
            raise _not_empty(target)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Implements `ExportTarget`."""
        with draft_of(self._target.absolute(), number=self._number):
            self.check_free()  # Another export may have ended since it was asked first.
            yield

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Implements `ExportTarget`."""
        yield self._draft / name
        sync(self._draft / name)

    def check_files(self) -> None:
        """Implements `ExportTarget`."""

    def finish(self) -> None:
        """Implements `ExportTarget`."""
        publish(self._draft, self._target.absolute())


class BucketTarget:
    """A folder in a bucket."""

    def __init__(self, path: BucketPath, number: str) -> None:
        self.path: AnyPath = path
        self.folder: Path | None = None
        self._target, self._number = path, number.encode()
        self._check_lock: Callable[[], None] | None = None  # Process 0 has it.
        self._versions: dict[str, Version] = {}

    def check_free(self) -> None:
        """Implements `ExportTarget`."""
        names = [name for name in self._target.names() if not name.startswith(LOCK_PREFIX)]
        if names and UNFINISHED not in names:
            raise _not_empty(self._target)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Implements `ExportTarget`."""
        with hold(self._target, report=logging.warning, remains=False) as self._check_lock:
            self.check_free()  # Another export may have ended since it was asked first.
            (self._target / UNFINISHED).write_bytes(self._number)
            for name in (CONFIG_FILE, *self._target.files()):
                if name != UNFINISHED and not name.startswith(LOCK_PREFIX):
                    (self._target / name).delete()
            yield

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Implements `ExportTarget`."""
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            with writing("export_hf", Path(folder)):
                yield Path(folder) / name
            self._check_owned()
            (self._target / name).upload(Path(folder) / name)
        self._versions[name] = (self._target / name).version()

    def check_files(self) -> None:
        """Implements `ExportTarget`."""
        for name, version in self._versions.items():
            try:
                found = (self._target / name).version()
            except FileNotFoundError:
                found = None
            if found != version:
                raise _taken_over(self._target)

    def finish(self) -> None:
        """Implements `ExportTarget`."""
        self._check_owned()
        (self._target / UNFINISHED).delete()

    def _check_owned(self) -> None:
        """Raises a `BucketError` if another export has taken over."""
        if self._check_lock is not None:
            self._check_lock()
        try:
            number = (self._target / UNFINISHED).read_bytes()
        except FileNotFoundError:
            number = b""
        if number != self._number:
            raise _taken_over(self._target)


def _not_empty(target: AnyPath) -> ValueError:
    return ValueError(
        f"export_hf: {target} is not empty, expected a new directory: files of two models would be "
        "in it. Name another one, or delete what is there."
    )


def _taken_over(target: BucketPath) -> BucketError:
    return BucketError(
        f"export_hf: {target} was written by another export in the meantime, because this one "
        "was cut off or its server locks nothing; this one has not succeeded, export again"
    )
