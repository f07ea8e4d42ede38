"""Writes a folder under a temporary name, as a draft, and then renames it to its final name.

A draft of `models/tuned` is `models/.tuned.NUMBER.partial`, and no two drafts have the same number.
The process that has locked `models/.tuned.lock` owns the draft, and no other process renames or
deletes this draft. A draft without an owner was left by a killed process; the next owner deletes
it.
"""

import contextlib
import datetime
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from manualpar.system.storage.bucket_path import AnyPath, BucketError, BucketPath
from manualpar.system.storage.untrusted import (
    NotAFileError,
    open_own_file,
    parse_object,
    write_file,
)

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


# -------------------------------------------------------------------------------------------------
# Locks a folder in a bucket, by an object that the server lets only one process create.
#
# Locks are numbered objects, `.lock-1`, `.lock-2`, and the highest number counts. A process that
# wants the folder creates the object with the next number. If two processes try at once, the
# server lets only one of them create the object (`If-None-Match` of S3, `ifGenerationMatch` of
# Google). The owner of a lock writes its object again every `BEAT_SECONDS`, and marks it as free
# at the end. If the object was not written for `LEASE_SECONDS`, by the clock of the waiting
# process, the owner is considered dead, and the next number may be created. So no process deletes
# an object on which another process relies, and the clocks of processes need not agree.
#
# If an owner was only cut off for this time, it finds the higher number after it is back: `check`
# raises an error before the owner writes anything else.


PREFIX = ".lock-"
BEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0
POLL_SECONDS = 0.5


class HeldError(Exception):
    """Another process has the lock; the message describes the process, and may be empty."""


@contextlib.contextmanager
def hold(
    folder: BucketPath, *, report: Callable[[str], None], remains: bool = True
) -> Iterator[Callable[[], None]]:
    """Locks a folder while the context lasts; yields a function `check`.

    `check` raises a `BucketError` if the lock was lost.

    Args:
      report: Called with a sentence if a lock is taken over, or if the server does not support
        this lock.
      remains: Whether the lock's object stays after the context, marked as free. If not, the object
        is deleted. Two other processes may then get locks at that moment; `check` raises an error
        in the process with the lower number. So inside the context, check once more that no other
        process has written the folder.

    Raises:
      HeldError: Another process has the lock.
      BucketError: The folder cannot be read or written.
    """
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "nonce": secrets.token_hex(8),
    }
    number = _acquire(folder, owner, report)
    lock, ended = folder / f"{PREFIX}{number}", threading.Event()
    renewed = [time.monotonic()]

    def check() -> None:
        if time.monotonic() - renewed[0] > LEASE_SECONDS or max(_numbers(folder)) > number:
            raise BucketError(
                f"{folder}: this run could not renew its lock for so long that another run may "
                "have taken the folder; nothing more is written there"
            )

    def renew() -> None:
        beat = 0
        while not ended.wait(BEAT_SECONDS):
            began, beat = time.monotonic(), beat + 1
            with contextlib.suppress(BucketError):  # If errors last long, `check` raises an error.
                write_file(lock, _text(owner, beat=beat))
                renewed[0] = began

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(BucketError):  # Then the lock expires after `LEASE_SECONDS`.
            if remains:
                write_file(lock, _text(owner, is_free=True))
            else:
                for each in _numbers(folder):
                    if 0 < each <= number:
                        (folder / f"{PREFIX}{each}").delete()


def _acquire(folder: BucketPath, owner: dict[str, Any], report: Callable[[str], None]) -> int:
    """Creates the next lock once the last lock is free or abandoned; returns the new number."""
    numbers = _numbers(folder)
    last = max(numbers)
    if last:
        lock = folder / f"{PREFIX}{last}"
        found = _read(lock)
        if not found.get("is_free") and not _is_dead(found):
            _wait_for_end(lock)
            report(f"{folder} is taken over from a run that has ended{_show(found)}")
    mine = folder / f"{PREFIX}{last + 1}"
    if not mine.create(_text(owner)):
        raise HeldError(_show(_read(mine)))
    # A server that supports this lock refuses to create the object a second time.
    if mine.create(_text(owner, is_second=True)):
        write_file(mine, _text(owner))
        report(
            f"{folder} is not locked, because its server lets a second request create an object "
            "that exists: make sure that no other run writes there"
        )
    for number in numbers:
        if 0 < number < last:
            (folder / f"{PREFIX}{number}").delete()
    return last + 1


def _wait_for_end(lock: BucketPath) -> None:
    """Waits `LEASE_SECONDS`; raises a `HeldError` if the owner writes the lock in this time."""
    found, until = _read(lock), time.monotonic() + LEASE_SECONDS
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        before, found = found, _read(lock)
        if found != before:
            if found.get("is_free"):
                return
            raise HeldError(_show(found))


def _numbers(folder: BucketPath) -> list[int]:
    """Returns the numbers of the existing locks, and 0 in addition."""
    names = (name.removeprefix(PREFIX) for name in folder.names() if name.startswith(PREFIX))
    return [0, *(int(name) for name in names if name.isdecimal())]


def _text(owner: dict[str, Any], **more: object) -> bytes:
    return json.dumps({**owner, **more}).encode()


def _read(lock: BucketPath) -> dict[str, Any]:
    try:
        return parse_object(lock.read_bytes())
    except FileNotFoundError:
        return {"is_free": True}  # The owner has deleted the lock.
    except BucketError:
        raise
    except ValueError:
        return {}  # An object with any other content counts as a lock too.


def _show(owner: dict[str, Any]) -> str:
    if not {"pid", "host", "since"} <= owner.keys():
        return ""
    return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _is_dead(owner: dict[str, Any]) -> bool:
    """Returns whether the owner was a process on this machine that has ended."""
    pid, machine = owner.get("pid"), owner.get("machine")
    if not machine or machine != _machine() or not isinstance(pid, int):
        return False
    return not Path(f"/proc/{pid}").exists()


def _machine() -> str:
    """Identifies this boot of the machine and its process id namespace; '' if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


# -------------------------------------------------------------------------------------------------
# Locks a file with `flock`.
#
# The kernel releases the lock when the process ends. So other processes can lock a file that a
# killed process left behind. Over NFS (version 4, or version 3 with its lock daemon) the lock is
# valid on all hosts. If a host crashes, the server keeps the host's lock for about 90 seconds.
# Programs that the process starts do not inherit the lock. Forked copies of the process close the
# file, because otherwise they would keep the lock after the process was killed.


LONGEST_OWNER = 4096
# The time after which a killed process has disappeared and its forked copies have closed the file.
DYING_SECONDS = 3.0
# The errors of file systems that do not support `flock`.
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


class FileLock(NamedTuple):
    """A lock that this process has.

    Attributes:
      is_locked: Whether the file system supports such locks.
      check: Checks the lock. If the file was deleted, creates and locks a new file; raises a
        `HeldError` if another process has already locked a new file.
    """

    is_locked: bool
    check: Callable[[], None]


@contextlib.contextmanager
def waiting_for(path: Path) -> Iterator[None]:
    """Waits until no other process has locked a file; locks it while the context lasts.

    Raises:
      OSError: The file cannot be opened, or its file system has no locks.
    """
    try:
        file = open_own_file(path)
    except NotAFileError as error:
        raise ValueError(f"{path} {error} to lock; delete it.") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def hold_file(
    path: Path, *, folder: Path, report: Callable[[str], None], remains: bool
) -> Iterator[FileLock]:
    """Locks a file while the context lasts.

    Args:
      path: The lock file, which is created if it does not exist.
      report: Called with a sentence if the file system has no locks.
      remains: Whether the file is kept at the end of the context, but emptied; if not, it is
        deleted.

    Raises:
      HeldError: Another process has the lock; the message names the process.
      OSError: The file cannot be opened or written, or is no regular file.
    """
    files: list[io.FileIO] = []

    def close() -> None:
        while files:
            files.pop().close()

    def check() -> None:
        if not files or not _is_same(files[0], path):
            close()
            _take(path, folder, files, report)

    os.register_at_fork(after_in_child=close)
    try:
        is_locked = _take(path, folder, files, report)
        try:
            yield FileLock(is_locked, check)
        finally:
            # A forked copy has closed the file, and so has `check` if the lock was lost.
            if files:
                with contextlib.suppress(OSError):
                    files[0].truncate(0)
                    if not remains and _is_same(files[0], path):
                        path.unlink()
    finally:
        close()


def _take(path: Path, folder: Path, files: list[io.FileIO], report: Callable[[str], None]) -> bool:
    """Opens and locks the file, and writes the owner into it; returns whether it is locked."""
    until = time.monotonic() + DYING_SECONDS
    while True:
        file = open_own_file(path)
        try:
            is_locked = _lock(file, folder, until, report)
        except BaseException:
            file.close()
            raise
        # The previous owner may have deleted the file after it was opened and before it was locked.
        if not is_locked or _is_same(file, path):
            break
        file.close()
    files.append(file)
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    file.truncate(0)
    file.write(json.dumps(owner).encode())
    return is_locked


def _lock(file: io.FileIO, folder: Path, until: float, report: Callable[[str], None]) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                raise HeldError(_owner(file)) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            report(
                f"{folder} is not locked, because its file system has no flock "
                f"({error.strerror}): make sure that no other run writes there"
            )
            return False


def _is_same(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def _owner(file: io.FileIO) -> str:
    try:
        owner = parse_object(os.pread(file.fileno(), LONGEST_OWNER, 0))
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (KeyError, OSError, ValueError):
        return ""
