"""Locks a file with `flock`.

The kernel releases the lock when the process ends. So other processes can lock a file that a killed
process left behind. Over NFS (version 4, or version 3 with its lock daemon) the lock is valid on
all hosts. If a host crashes, the server keeps the host's lock for about 90 seconds. Programs that
the process starts do not inherit the lock. Forked copies of the process close the file, because
otherwise they would keep the lock after the process was killed.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from manualpar.system.storage.lease import HeldError
from manualpar.system.storage.untrusted import NotAFileError, kind_of, parse_object

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
def hold_file(
    path: Path, *, folder: Path, report: Callable[[str], None], remains: bool
) -> Iterator[FileLock]:
    """Locks a file while the context lasts.

    Args:
      path: The lock file, which is created if it does not exist.
      folder: The folder that the lock protects, for messages.
      report: Called with a sentence if the file system has no locks.
      remains: Whether the file is kept at the end of the context, but emptied; if not, it is
        deleted.

    Raises:
      HeldError: Another process has the lock; the message names the process.
      OSError: The file cannot be opened or written, or is no regular file.
    """
    descriptors: list[int] = []

    def close() -> None:
        while descriptors:
            os.close(descriptors.pop())

    def check() -> None:
        if not descriptors or not _is_same(descriptors[0], path):
            close()
            _take(path, folder, descriptors, report)

    os.register_at_fork(after_in_child=close)
    try:
        is_locked = _take(path, folder, descriptors, report)
        try:
            yield FileLock(is_locked, check)
        finally:
            # A forked copy has closed the descriptor, and so has `check` if the lock was lost.
            if descriptors:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptors[0], 0)
                    if not remains and _is_same(descriptors[0], path):
                        path.unlink()
    finally:
        close()


def _take(path: Path, folder: Path, descriptors: list[int], report: Callable[[str], None]) -> bool:
    """Opens and locks the file, and writes the owner into it; returns whether it is locked."""
    until = time.monotonic() + DYING_SECONDS
    while True:
        if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode):
            raise NotAFileError(f"is {kind_of(mode)}, expected a file")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            is_locked = _lock(descriptor, folder, until, report)
        except BaseException:
            os.close(descriptor)
            raise
        # The previous owner may have deleted the file after it was opened and before it was locked.
        if not is_locked or _is_same(descriptor, path):
            break
        os.close(descriptor)
    descriptors.append(descriptor)
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner).encode())
    return is_locked


def _lock(descriptor: int, folder: Path, until: float, report: Callable[[str], None]) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                raise HeldError(_owner(descriptor)) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            report(
                f"{folder} is not locked, because its file system has no flock "
                f"({error.strerror}): make sure that no other run writes there"
            )
            return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _owner(descriptor: int) -> str:
    try:
        owner = parse_object(os.pread(descriptor, LONGEST_OWNER, 0))
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (KeyError, OSError, ValueError):
        return ""
