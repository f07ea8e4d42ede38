"""The target of an export: a folder on a disk or in a bucket that never shows an incomplete model.

One process locks the folder during the export, so that another export to the same folder is
refused. On a disk all files are written to a draft, a folder that gets its final name at the end,
see `manualpar.system.storage.drafts`.

Objects in a bucket cannot be renamed. Each file is written to a local disk, uploaded, and deleted
locally. `config.json` is uploaded last, because a folder without `config.json` is no model. The
object `.unfinished` exists during the upload. So after a killed export, it shows the next export
that the files must be deleted. `.unfinished` contains the number of the export. If an export loses
its connection for long, another export may take over. The first export then finds another number in
`.unfinished`, or no such object.
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
    """A folder to create. Only process 0 calls `owned` and `finish`.

    Attributes:
      path: The folder.
      folder: The draft to which all processes write the files; `None` in a bucket.
    """

    path: AnyPath
    folder: Path | None

    def check_free(self) -> None:
        """Raises a `ValueError` if the folder contains other files, or is not a folder."""

    def owned(self) -> contextlib.AbstractContextManager[None]:
        """Locks the folder during a context; first deletes the files of an unfinished export."""

    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Yields the path of a local file to write, and stores the file when the context ends."""

    def check_files(self) -> None:
        """Raises a `BucketError` if a file that this process uploaded has been replaced."""

    def finish(self) -> None:
        """Marks the folder as complete, after all files have been written."""


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
            raise ValueError(
                f"export_hf: {target} is no directory, expected a new path or an empty directory."
            )
        if target.is_dir() and any(target.iterdir()):
            raise _not_empty(target)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Implements `ExportTarget`."""
        with draft_of(self._target.absolute(), number=self._number):
            self.check_free()  # Another export may have ended after the first check.
            yield

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Implements `ExportTarget`."""
        (self._draft / name).parent.mkdir(exist_ok=True)
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
        self._check_lock: Callable[[], None] | None = None  # Set only in process 0.
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
            self.check_free()  # Another export may have ended after the first check.
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
                (Path(folder) / name).parent.mkdir(exist_ok=True)
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
        f"export_hf: {target} is not empty, expected a new directory, because it would contain the "
        "files of two models. Name another directory, or delete its files."
    )


def _taken_over(target: BucketPath) -> BucketError:
    return BucketError(
        f"export_hf: another export has written {target} in the meantime, because this export lost "
        "its connection or the server does not lock; this export has failed, export again"
    )
