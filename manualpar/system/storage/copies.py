"""Local copies of files in buckets, for libraries that read only local files."""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from manualpar.system.storage.bucket_path import (
    AnyPath,
    BucketError,
    BucketPath,
    ContentError,
    GivenPath,
    Version,
    as_path,
    open_for_reading,
    twice,
)
from manualpar.system.storage.drafts import FolderError, waiting_for
from manualpar.system.storage.untrusted import COPIED_BYTES, MAX_BYTES, create_file, write_file

NAME_BYTES = 255  # The longest file name that file systems allow.


def user_path(text: GivenPath) -> AnyPath:
    """Parses a path that a user gives, as `as_path` does, and expands `~` to the home folder."""
    path = as_path(text)
    return path if isinstance(path, BucketPath) else _expand(path)


def _expand(path: Path) -> Path:
    """Replaces `~` by the home folder; raises a `ValueError` if the folder is not known."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path}: the home folder is not known, expected a path without ~, or HOME in the "
            "environment."
        ) from None


def local_path(text: GivenPath, name: str) -> Path:
    """Returns a path on a disk; for other paths, raises a `ValueError` that contains `name`."""
    path = user_path(text)
    if isinstance(path, BucketPath):
        raise ValueError(
            f"{name} is {str(path)!r}, expected a path on a disk; copy the result to the bucket."
        )
    return path


def copied_files(path: BucketPath, names: tuple[str, ...]) -> Path:
    """Copies a small file, or the files of a folder with the given paths, to a temporary folder.

    Returns the path of the copy, which is deleted when the process ends.

    Raises:
      ContentError: The files change while they are copied.
    """
    temporary = Path(tempfile.mkdtemp(prefix="copied-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    copy = temporary / _address(path)

    def copy_all() -> None:
        versions = _versions((path, *(path / name for name in names)))
        for each, version in versions.items():
            target = copy if each == path else copy / each.relative_to(path)
            if version.size > MAX_BYTES:
                raise ValueError(
                    f"{each} has {version.size:,} bytes, expected at most {MAX_BYTES:,} of a small "
                    "file."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, each.read_bytes(version=version))
        _check_same(versions, _versions(versions))

    twice(copy_all)
    copy.parent.mkdir(parents=True, exist_ok=True)
    return copy


def user_cache() -> Path:
    """Returns the user's cache folder; raises a `ValueError` if the home folder is not known."""
    return _expand(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "manualpar"


@contextlib.contextmanager
def writing_cache(folder: Path, setting: str = "XDG_CACHE_HOME") -> Iterator[None]:
    """Turns an `OSError` of a cache into a `FolderError`; `setting` is what chooses the folder."""
    try:
        yield
    except (BucketError, FolderError):
        raise
    except OSError as error:
        raise FolderError(
            f"the cache {folder} cannot be written to ({error.strerror or error}); set {setting} "
            "to a folder with room for the files."
        ) from error


def copied_folder(
    path: BucketPath,
    cache: Path,
    *,
    keep: Callable[[str], bool] = lambda name: True,
    setting: str = "XDG_CACHE_HOME",
) -> Path:
    """Copies a folder to a cache, unless the cache has a copy with the same versions of the files.

    Every file is read in the version that it has at the beginning, and all versions are compared
    again at the end. So no copy mixes old and new files. If the folder changes during the copy, it
    is copied once more. The path of the copy contains the folder's address, because messages about
    files show the path. Returns the path of the complete copy.

    Args:
      cache: The folder of all copies. Only one process at a time copies to it.
      keep: Returns whether to copy a file; called with the file's path relative to the folder.
      setting: The name of the setting that chooses `cache`, for messages.

    Raises:
      ContentError: The folder changes during the second copy too, or a file's content does not
        match the server's list.
      FolderError: The cache cannot be written to.
    """

    def versions() -> dict[BucketPath, Version]:
        return _versions(path / name for name in filter(keep, path.files()))

    def copy() -> Path:
        files = versions()
        state = [(str(file.relative_to(path)), version.tag) for file, version in files.items()]
        key = hashlib.blake2b(repr((str(path), state)).encode(), digest_size=8).hexdigest()
        folder = cache / "buckets" / key / _address(path)
        with writing_cache(cache, setting), contextlib.ExitStack() as stack:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(waiting_for(cache / "buckets" / f"{key}.lock"))
            for file, version in files.items():
                _copy(file, version, folder / file.relative_to(path))
        _check_same(files, versions())
        return folder

    return twice(copy)


def _copy(file: BucketPath, version: Version, copy: Path) -> None:
    """Copies an object to a local file, unless this file exists with the size of the object."""
    if copy.exists() and copy.stat().st_size == version.size:
        return
    draft = copy.with_name(f"{copy.name}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open_for_reading(file, version=version) as source, create_file(draft) as target:
            shutil.copyfileobj(source, target, COPIED_BYTES)
        draft.replace(copy)
    finally:
        draft.unlink(missing_ok=True)


def _versions(files: Iterable[BucketPath]) -> dict[BucketPath, Version]:
    """Returns the current versions of those files that exist."""
    found = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.version()
    return found


def _check_same(before: dict[BucketPath, Version], now: dict[BucketPath, Version]) -> None:
    """Raises a `ContentError` if files have changed since `before`."""
    if changed := [file for file in before | now if before.get(file) != now.get(file)]:
        raise ContentError(
            f"{changed[0]} changed while its folder was copied: wait until no process writes there"
        )


def _address(path: BucketPath) -> Path:
    """Returns the address of a path as a relative local path: `s3:/bucket/key`."""
    parts = (f"{path.scheme}:", path.bucket, *path.parts)
    return Path(*(os.fsdecode(part.encode()[:NAME_BYTES]) for part in parts))
