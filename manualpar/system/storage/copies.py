"""Local copies of files in buckets, for libraries that read only local files."""

import argparse
import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from manualpar.system.storage.bucket_path import (
    AnyPath,
    BucketPath,
    GivenPath,
    as_path,
    open_for_reading,
)
from manualpar.system.storage.requests import ContentError, twice
from manualpar.system.storage.services import Version

COPIED_BYTES = 1 << 24  # In memory at once.
NAME_BYTES = 255  # The longest name that file systems take.


def user_path(text: GivenPath) -> AnyPath:
    """Parses a user's path like `as_path`, and expands `~` to the user's folder."""
    path = as_path(text)
    return path if isinstance(path, BucketPath) else path.expanduser()


def path_flag(text: str) -> AnyPath:
    """Parses a path in a flag of `argparse` (its `type`), see `user_path`."""
    try:
        return user_path(text)
    except ValueError as error:  # argparse would repeat the path, which may hold a password.
        raise argparse.ArgumentTypeError(str(error)) from None


def local_path(text: GivenPath, name: str) -> Path:
    """Returns a path on a disk; refuses other paths with a `ValueError` that calls it `name`."""
    path = user_path(text)
    if isinstance(path, BucketPath):
        raise ValueError(
            f"{name} is {str(path)!r}, expected a path on a disk; copy the result to the bucket."
        )
    return path


def copied_files(path: BucketPath, names: tuple[str, ...]) -> Path:
    """Copies a small file, or a folder's files of the given names, to a disk; returns the copy.

    The copy lasts as long as the process.

    Raises:
      ContentError: The files change while they are copied.
    """
    temporary = Path(tempfile.mkdtemp(prefix="copied-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    copy = temporary / _address(path)

    def copy_all() -> None:
        versions = _versions((path, *(path / name for name in names)))
        for each, version in versions.items():
            target = copy if each == path else copy / each.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(each.read_bytes(version=version))
        _check_same(versions, _versions(versions))

    twice(copy_all)
    copy.parent.mkdir(parents=True, exist_ok=True)
    return copy


def user_cache() -> Path:
    """Returns the user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manualpar"


def copied_folder(
    path: BucketPath, cache: Path, *, keep: Callable[[str], bool] = lambda name: True
) -> Path:
    """Copies a folder once for each state of its files; returns the complete copy.

    Every file is read in the version that it has at the beginning, and no file may have another
    version at the end. So no copy holds files of two states. If the folder changes meanwhile, it is
    copied once more. The path of the copy contains the folder's address, because messages about
    files show the path.

    Args:
      path: The folder.
      cache: The folder of copies. Only one process copies into it at a time.
      keep: Returns whether to copy a file; called with the file's path relative to the folder.

    Raises:
      ContentError: The folder changes again while it is copied, or the server sends other content
        than it lists.
    """

    def versions() -> dict[BucketPath, Version]:
        return _versions(path / name for name in filter(keep, path.files()))

    def copy() -> Path:
        files = versions()
        state = [(str(file.relative_to(path)), version.tag) for file, version in files.items()]
        key = hashlib.blake2b(repr((str(path), state)).encode(), digest_size=8).hexdigest()
        folder = cache / "buckets" / key / _address(path)
        folder.mkdir(parents=True, exist_ok=True)
        with open(cache / "buckets" / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, version in files.items():
                _copy(file, version, folder / file.relative_to(path))
        _check_same(files, versions())
        return folder

    return twice(copy)


def _copy(file: BucketPath, version: Version, copy: Path) -> None:
    """Copies an object, unless the copy exists."""
    if copy.exists() and copy.stat().st_size == version.size:
        return
    draft = copy.with_name(f"{copy.name}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_for_reading(file, version=version) as source, draft.open("wb") as target:
            shutil.copyfileobj(source, target, COPIED_BYTES)
        draft.replace(copy)
    finally:
        draft.unlink(missing_ok=True)


def _versions(files: Iterable[BucketPath]) -> dict[BucketPath, Version]:
    """Returns the versions of the files that exist."""
    found = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.version()
    return found


def _check_same(before: dict[BucketPath, Version], now: dict[BucketPath, Version]) -> None:
    """Refuses files that have changed while they were copied."""
    if changed := [file for file in before | now if before.get(file) != now.get(file)]:
        raise ContentError(
            f"{changed[0]} changed while its folder was copied: wait until no process writes there"
        )


def _address(path: BucketPath) -> Path:
    """Returns the address as a relative path of folders, `s3:/bucket/key`."""
    parts = (f"{path.scheme}:", path.bucket, *path.parts)
    return Path(*(os.fsdecode(part.encode()[:NAME_BYTES]) for part in parts))
