"""Locks a workdir, so that only one run at a time writes there.

The lock is on the file `.lock`, see `manualpar.system.storage.file_lock`. Process 0 takes it for
all processes of a run. Reading a workdir needs no lock.
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
    """Keeps other runs out of a folder while the context lasts; creates the folder if needed.

    If the file system has no locks, it calls `report` and locks nothing. In a bucket it takes a
    lease, see `manualpar.system.storage.lease`.

    It yields a function that checks the lock. In a bucket the function raises an error if the lease
    was lost. In a folder it locks a new file if the locked file was deleted, and raises a
    `WriteError` if another run has locked the new file first.

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
