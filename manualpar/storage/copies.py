"""Local copies of what lies in buckets, for libraries that read local files alone."""

import argparse
import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from manualpar.storage.bucket_path import (
    AnyPath,
    BucketPath,
    GivenPath,
    as_path,
    open_for_reading,
)

COPIED_BYTES = 1 << 24  # In memory at once.


def user_path(text: GivenPath) -> AnyPath:
    """The path that a user names, where `~` is the user's folder; see `as_path`."""
    path = as_path(text)
    return path if isinstance(path, BucketPath) else path.expanduser()


def path_flag(text: str) -> AnyPath:
    """The type of a flag of `argparse` that is a path, see `user_path`."""
    try:
        return user_path(text)
    except ValueError as error:  # argparse would repeat the path, which may hold a password.
        raise argparse.ArgumentTypeError(str(error)) from None


def local_path(text: GivenPath, name: str) -> Path:
    """A path on a disk; for others a `ValueError` that calls it `name`."""
    path = user_path(text)
    if isinstance(path, BucketPath):
        raise ValueError(
            f"{name} is {str(path)!r}, expected a path on a disk; copy it from there then."
        )
    return path


def copied_files(path: BucketPath, names: tuple[str, ...]) -> Path:
    """A local copy of a small file, or of a folder with files of those names.

    It lasts as long as the process.
    """
    folder = Path(tempfile.mkdtemp(prefix="copied-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for each in (path, *(path / name for name in names)):
        if each.is_file():
            (folder / each.name).write_bytes(each.read_bytes())
    copy = folder / path.name
    return copy if copy.exists() else folder


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manualpar"


def copied_folder(
    path: BucketPath, cache: Path, *, keep: Callable[[str], bool] = lambda name: True
) -> Path:
    """A local copy of a folder, made once for each state of its files; each is there whole.

    Args:
      path: The folder.
      cache: The folder of copies. Of the processes that ask it for one, one copies at a time.
      keep: Which files are copied, by their paths from the folder.
    """
    files = list(filter(keep, path.files()))
    versions = [(name, (path / name).version()[1]) for name in files]
    key = hashlib.blake2b(repr((str(path), versions)).encode(), digest_size=8).hexdigest()
    folder = cache / "buckets" / key
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in files:
            if not (folder / name).exists():
                draft = folder / f"{name}.draft"
                draft.parent.mkdir(parents=True, exist_ok=True)
                with open_for_reading(path / name) as source, draft.open("wb") as copy:
                    shutil.copyfileobj(source, copy, COPIED_BYTES)
                draft.replace(folder / name)
    return folder
