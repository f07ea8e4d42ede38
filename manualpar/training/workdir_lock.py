"""One run at a time in a workdir: a lock on `.lock`, which the kernel releases with its process.

The lock is `flock`'s. It ends with the process, however that ends, so a file that remains keeps
nobody out. Over NFS (version 4, or 3 with its lock daemon) it holds for all hosts; if a host
crashes, the server keeps it for about 90 seconds. Programs that the run starts do not inherit it,
and forked copies of the process close it, because they would keep it after the run was killed.

Process 0 takes it for all processes of a run. Reading a workdir takes no lock.
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

from manualpar.storage import AnyPath, BucketPath, HeldError, hold
from manualpar.untrusted import NotAFileError, kind_of, parse_object
from manualpar.usage import UsageError
from manualpar.watching.durable_files import WriteError, explained, is_in_place

LOCK_FILE = ".lock"
LONGEST_OWNER = 4096
# The time that a killed process may take to disappear, and a copy of it to close the file.
DYING_SECONDS = 3.0
# The errors of file systems that have no such locks.
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def lock_workdir(
    workdir: AnyPath, *, report: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Keeps other runs out of a folder, which is created if need be, while the context lasts.

    If the file system has no locks, `report` is told so, and nothing is locked. In a bucket there
    is a lease, see `manualpar.storage.lease`. What it yields raises an error if that was lost. If
    somebody has deleted the file of a lock, it takes the lock of a new one, and raises a
    `WriteError` if another run was faster.

    Raises:
      UsageError: Another run has the lock; the message says which.
      WriteError: The file cannot be written.
    """
    if isinstance(workdir, BucketPath):
        try:
            with hold(workdir, report=report) as check_lease:
                yield check_lease
        except HeldError as error:
            raise _in_use(workdir, str(error)) from None
        return
    path = workdir / LOCK_FILE
    held: list[int] = []

    def take() -> None:
        with explained(path):
            if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode):
                raise NotAFileError(f"is {kind_of(mode)}, expected a file")
            held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666))
            try:
                _lock(held[-1], workdir, report)
            except BaseException:
                close()
                raise

    def check() -> None:
        if held and is_in_place(path, os.fstat(held[-1])):
            return
        close()
        try:
            take()
        except UsageError as error:
            raise WriteError(f"{path} was deleted while this run had its lock: {error}") from error

    def close() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=close)
    try:
        with explained(path):
            workdir.mkdir(parents=True, exist_ok=True)
        take()
        try:
            yield check
        finally:
            if held:  # Otherwise this is a copy of the process, and the lock is not its own.
                with contextlib.suppress(OSError):
                    os.ftruncate(held[-1], 0)
    finally:
        close()


def _lock(descriptor: int, workdir: Path, report: Callable[[str], None]) -> None:
    """Locks an open file, and writes into it who has it."""
    until = time.monotonic() + DYING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise _in_use(workdir, _owner(descriptor)) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            report(
                f"{workdir} is not locked, because its file system has no flock "
                f"({error.strerror}): make sure that no other run writes there"
            )
            break
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner).encode())


def _in_use(workdir: AnyPath, owner: str) -> UsageError:
    return UsageError(
        f"--workdir={workdir} is in use by another run{owner}; wait until it ends, end it, or name "
        "another folder."
    )


def _owner(descriptor: int) -> str:
    try:
        owner = parse_object(os.pread(descriptor, LONGEST_OWNER, 0))
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (KeyError, OSError, ValueError):
        return ""
