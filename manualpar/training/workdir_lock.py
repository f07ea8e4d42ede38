"""One run at a time in a workdir: a lock on `.lock`, which the kernel takes back from the dead.

The lock is `flock`'s. It belongs to the open file, so it ends with the process, however that ends,
and a file that remains keeps nobody out. Over NFS (version 4, or 3 with its lock daemon) Linux asks
the server for it, so that it holds for all hosts; a host that falls keeps it there until its lease
runs out, about 90 seconds later. Programs that are started by the run do not inherit it, and
copies of the process let go of it: they would keep it after the run has been killed.

Process 0 takes it for all processes of a run. Whoever only reads a workdir takes none.
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

from manualpar.training.command_line import UsageError
from manualpar.untrusted import NotAFileError, kind_of, parse_object
from manualpar.watching.durable_files import explained

LOCK_FILE = ".lock"
LONGEST_OWNER = 4096
# How long a process that was killed may take to be gone, and a copy of it to let go.
DYING_SECONDS = 3.0
# What a file system says that has no such locks.
UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@contextlib.contextmanager
def lock_workdir(workdir: Path, *, report: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a folder, which is created if need be, while the context lasts.

    Args:
      workdir: The folder.
      report: Is told in a sentence if the file system has no locks; the context is then entered
        without one.

    Raises:
      UsageError: Another run has the lock; the message says which.
      WriteError: The file cannot be written.
    """
    path = workdir / LOCK_FILE
    with explained(path):
        workdir.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode):
            raise NotAFileError(f"is {kind_of(mode)}, expected a file")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    held = [descriptor]

    def let_go() -> None:
        while held:
            os.close(held.pop())

    os.register_at_fork(after_in_child=let_go)
    try:
        with explained(path):
            _lock(descriptor, workdir, report)
        try:
            yield
        finally:
            if held:  # Otherwise this is a copy of the process, and the file is not its own.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
    finally:
        let_go()


def _lock(descriptor: int, workdir: Path, report: Callable[[str], None]) -> None:
    """Locks an open file and writes into it whose it is."""
    until = time.monotonic() + DYING_SECONDS
    try:
        while not _try_to_lock(descriptor):
            if time.monotonic() >= until:
                raise UsageError(
                    f"--workdir={workdir} is in use by another run{_owner(descriptor)}; wait until "
                    "it ends, end it, or name another folder."
                )
            time.sleep(0.05)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        report(
            f"{workdir} is not locked, because its file system has no flock ({error.strerror}): "
            "make sure that no other run writes there"
        )
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner).encode())


def _try_to_lock(descriptor: int) -> bool:
    """Locks an open file, unless somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(descriptor: int) -> str:
    """Who has the lock, as far as the file says."""
    try:
        owner = parse_object(os.pread(descriptor, LONGEST_OWNER, 0))
        return f": process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (KeyError, OSError, ValueError):
        return ""
