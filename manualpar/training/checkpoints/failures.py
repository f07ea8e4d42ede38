"""Turns an error of saving or restoring into a sentence with the reason and the remedy.

Orbax and tensorstore raise many types of errors: an `OSError`, a `ValueError` with the text of a
C++ status, a bare `Exception`. This package turns them all into `CheckpointError`, except errors
about wrong arguments.
"""

import errno
import os

from manualpar.system.cluster.failure_detector import causes
from manualpar.system.storage import AnyPath, BucketError

MEANINGS: dict[int, str] = {
    errno.ENOSPC: "the disk is full: make room there, or choose another workdir",
    errno.EDQUOT: "the disk quota is used up: make room there, or choose another workdir",
    errno.EROFS: "the file system is read-only: choose a workdir that can be written to",
    errno.EACCES: "permission denied: choose a workdir that you may write to, or change its mode",
    errno.EPERM: "permission denied: choose a workdir that you may write to, or change its mode",
    errno.EFBIG: "a file is larger than allowed: raise the limit (`ulimit -f`), or choose another "
    "file system",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another workdir",
    errno.EIO: "the disk reports an input/output error: it may be failing; choose another one",
}


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message gives the reason and the remedy."""


def explain_failure(error: BaseException) -> str:
    """Explains an error of the operating system; for another error, gives type and first line.

    The function searches the causes of the error and their texts too, because tensorstore names an
    error of the operating system only in a text.
    """
    for cause in causes(error):
        if isinstance(cause, BucketError):
            return str(cause)
        number = getattr(cause, "errno", None)
        if number in MEANINGS:
            return MEANINGS[number]
        for number, meaning in MEANINGS.items():
            if os.strerror(number) in str(cause):
                return meaning
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


def cannot_write(path: AnyPath, error: BaseException) -> CheckpointError:
    """Makes the error to raise for a checkpoint that was not saved."""
    if any(isinstance(cause, TimeoutError) for cause in causes(error)):
        return CheckpointError(
            f"checkpoint {path} was not saved: it was not written in time; check that all "
            "processes can write there, or raise the limit for a slow disk: seconds= of "
            "Checkpoints, which in a run follows from config.watch.stall_seconds."
        )
    return CheckpointError(f"checkpoint {path} was not saved: {explain_failure(error)}.")
