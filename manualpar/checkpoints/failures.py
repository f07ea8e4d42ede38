"""What goes wrong with a checkpoint, in a sentence that says what to do about it.

The libraries below raise what they happen to: an `OSError`, a `ValueError` with the text of a C++
status, a bare `Exception`. A `CheckpointError` is the only one that leaves this package, besides
the `ValueError` and `TypeError` for wrong arguments.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

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
    """A checkpoint could not be written or read; the message says which, why and how to go on."""


def explain(error: BaseException) -> str:
    """What an error of the libraries below means.

    Args:
      error: The error. Those it was raised from are looked at too, and its text, since tensorstore
        has the operating system's error only there.

    Returns:
      The meaning of the first error known; otherwise the error's type and the first line of its
      text.
    """
    for cause in _causes(error):
        number = getattr(cause, "errno", None)
        if number in MEANINGS:
            return MEANINGS[number]
        for number, meaning in MEANINGS.items():
            if os.strerror(number) in str(cause):
                return meaning
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"


def cannot_write(path: Path, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that was not saved."""
    return CheckpointError(f"checkpoint {path} was not saved: {explain(error)}.")


def cannot_list(folder: Path, error: BaseException) -> CheckpointError:
    """The error for a folder that can't be looked into."""
    return CheckpointError(f"checkpoints in {folder} can't be listed: {explain(error)}.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was raised from or during, each once."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or any(current is other for other in seen):
            continue
        seen.append(current)
        yield current
        pending += [current.__context__, current.__cause__]
