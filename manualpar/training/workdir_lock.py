"""Locks a workdir, so that only one run at a time writes there.

The lock is on the file `.lock`, see `manualpar.system.storage.file_lock`. Process 0 acquires the
lock for all processes of a run. Reading a workdir needs no lock.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from manualpar.errors import UsageError
from manualpar.system.storage import AnyPath, BucketPath, HeldError, hold, hold_file
from manualpar.system.storage.durable_files import WriteError, explained

LOCK_FILE = ".lock"


@contextlib.contextmanager
def lock_workdir(
    workdir: AnyPath, *, report: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Locks a folder against other runs while the context lasts; creates the folder if needed.

    If the file system does not support locks, `report` is called with a sentence and nothing is
    locked. In a bucket, the lock is a lease, see `manualpar.system.storage.lease`.

    The context yields a function that checks the lock. In a bucket, this function raises an error
    if the lease was lost. On a disk, if the lock file was deleted, the function creates and locks a
    new file; it raises a `WriteError` if another run has locked the new file first.

    Raises:
      UsageError: Another run has the lock; the message names the run.
      WriteError: The file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(workdir, BucketPath):
                check = stack.enter_context(hold(workdir, report=report))
            else:
                check = stack.enter_context(_held(workdir, report))
        except HeldError as error:
            raise _in_use(workdir, error) from None
        yield check


@contextlib.contextmanager
def _held(workdir: Path, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    path = workdir / LOCK_FILE
    with contextlib.ExitStack() as stack:
        with explained(path):
            workdir.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(hold_file(path, folder=workdir, report=report, remains=True))

        def check() -> None:
            try:
                with explained(path):
                    held.check()
            except HeldError as error:
                raise WriteError(
                    f"{path} was deleted while this run had its lock: {_in_use(workdir, error)}"
                ) from None

        yield check


def _in_use(workdir: AnyPath, error: HeldError) -> UsageError:
    return UsageError(
        f"--workdir={workdir} is in use by another run{error}; wait until it ends, end it, or name "
        "another folder."
    )
