"""Writes a folder under a temporary name, as a draft, and then renames it to its final name.

A draft of `models/tuned` is `models/.tuned.NUMBER.partial`, and no two drafts have the same number.
The process that has locked `models/.tuned.lock` owns the draft, and no other process renames or
deletes this draft. A draft without an owner was left by a killed process; the next owner deletes
it.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from manualpar.system.storage.bucket_path import AnyPath
from manualpar.system.storage.file_lock import hold_file
from manualpar.system.storage.lease import HeldError
from manualpar.system.storage.requests import BucketError

# The error numbers for a name that exists already, and for a full disk.
TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FolderError(OSError, ValueError):
    """A folder cannot be written; the message is a sentence.

    The class is also a `ValueError`, because commands print a `ValueError` as one sentence.
    """


@contextlib.contextmanager
def writing(function: str, folder: AnyPath) -> Iterator[None]:
    """Turns errors in writing a folder into errors whose message is a sentence.

    The message begins with the name of the calling function, `function`.

    Raises:
      ValueError: Another process is writing to the folder.
      FolderError: The folder cannot be written.
      BucketError: The folder is in a bucket, and cannot be written.
    """
    try:
        yield
    except (FolderError, BucketError):
        raise
    except HeldError as error:
        raise ValueError(
            f"{function}: {folder} is being written by another process{error}. Wait until it "
            "ends, or name another folder."
        ) from None
    except OSError as error:
        mend = "make room there, or name" if error.errno in FULL else "name"
        raise FolderError(
            f"{function}: {folder} cannot be written: {error.strerror or error}; {mend} another "
            "folder."
        ) from error


@contextlib.contextmanager
def draft_of(target: Path, *, number: str = "") -> Iterator[Path]:
    """Makes a draft of `target`; at the end of the context, deletes it if it was not published.

    Args:
      target: The folder to make, as an absolute path.
      number: The draft's number, see `new_number`; by default a new number.

    Raises:
      HeldError: Another process owns a draft of `target`.
      OSError: The draft cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    with hold_file(lock, folder=target, report=logging.warning, remains=False) as file_lock:
        if file_lock.is_locked:
            _delete_abandoned(target)
        draft = path_of_draft(target, number or new_number())
        draft.mkdir()
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def new_number() -> str:
    """Draws a random number for a draft, which no other draft has."""
    return secrets.token_hex(8)


def path_of_draft(target: Path, number: str) -> Path:
    """Returns the path of a draft of `target`."""
    return target.parent / f".{target.name}.{number}.partial"


def publish(draft: Path, target: Path) -> None:
    """Renames a draft, whose files are on the disk, to its target.

    Raises:
      FolderError: The target was created in the meantime.
      OSError: The draft cannot be renamed.
    """
    sync(draft)
    try:
        draft.rename(target)  # If `target` exists, this fails unless it is an empty folder.
    except OSError as error:
        if error.errno in TAKEN:
            raise FolderError(
                f"{target} was written by another process in the meantime, and is left as it is. "
                "Name another folder."
            ) from None
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_abandoned(target: Path) -> None:
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}\.partial")
    for path in list(target.parent.iterdir()):
        if name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
