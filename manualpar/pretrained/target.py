"""Where a model is exported to: a folder on a disk, or in a bucket, that is whole when it counts.

On a disk all files are written into a folder beside the one that was asked for, and that gets its
name at the end. In a bucket nothing can be renamed. There each file is written to a disk, put and
deleted; `config.json` comes last, and without one a folder is no model. An object `.unfinished` is
there from before the first file until after the last, so that the files of an export that was
killed are told from somebody else's, and go with the next one.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from manualpar.pretrained.directory import CONFIG_FILE
from manualpar.pretrained.tensor_bytes import sync
from manualpar.storage import AnyPath, BucketPath

UNFINISHED = ".unfinished"


class Target(Protocol):
    """A folder to make. Process 0 alone calls `begin` and `finish`.

    Attributes:
      path: The folder.
      folder: Where all processes see the files while they are written; `None` in a bucket.
    """

    path: AnyPath
    folder: Path | None

    def check_free(self) -> None:
        """Raises a `ValueError` if there is something in the way."""

    def begin(self) -> None:
        """Makes room, before any process writes a file."""

    def file(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """Within, a file on a disk to write; afterwards it is where it belongs."""

    def finish(self) -> None:
        """Makes the folder count, after all files."""


def open_target(path: AnyPath) -> Target:
    """The folder at a path; nothing is created."""
    return BucketTarget(path) if isinstance(path, BucketPath) else DiskTarget(path)


class DiskTarget:
    """A folder on a file system that all processes share."""

    def __init__(self, path: Path) -> None:
        self.path: AnyPath = path
        self._target, whole = path, path.absolute()
        self._partial = whole.parent / f".{whole.name}.partial"
        self.folder: Path | None = self._partial

    def check_free(self) -> None:
        """See `Target`."""
        target = self._target
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise ValueError(f"export_hf: {target} is no directory, expected none or an empty one.")
        if target.is_dir() and any(target.iterdir()):
            raise _not_empty(target)

    def begin(self) -> None:
        """See `Target`."""
        shutil.rmtree(self._partial, ignore_errors=True)  # Of an export that was killed.
        self._partial.mkdir(parents=True)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """See `Target`."""
        yield self._partial / name
        sync(self._partial / name)

    def finish(self) -> None:
        """See `Target`."""
        sync(self._partial)
        if self._target.exists():
            self._target.rmdir()  # It is empty.
        self._partial.rename(self._target)
        sync(self._target.absolute().parent)


class BucketTarget:
    """A folder in a bucket."""

    def __init__(self, path: BucketPath) -> None:
        self.path: AnyPath = path
        self.folder: Path | None = None
        self._target = path

    def check_free(self) -> None:
        """See `Target`."""
        names = self._target.names()
        if names and UNFINISHED not in names:
            raise _not_empty(self._target)

    def begin(self) -> None:
        """See `Target`."""
        (self._target / UNFINISHED).write_bytes(b"")
        for name in (CONFIG_FILE, *self._target.files()):
            if name != UNFINISHED:
                (self._target / name).delete()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """See `Target`."""
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            yield Path(folder) / name
            (self._target / name).upload(Path(folder) / name)

    def finish(self) -> None:
        """See `Target`."""
        (self._target / UNFINISHED).delete()


def _not_empty(target: AnyPath) -> ValueError:
    return ValueError(
        f"export_hf: {target} is not empty, expected a new directory: files of two models would be "
        "in it. Name another one, or delete what is there."
    )
