"""A user's mistakes on a command line: one sentence, exit code 2, and no traceback."""

import argparse
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from manualpar.system.storage.untrusted import printable

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # Ctrl-C.
# It stands in what JAX notes about the traceback of an error that one of its functions passes on.
JAX_NOTE = "JAX_TRACEBACK_FILTERING"
OUR_FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "experiments")
LIBRARIES = tuple(
    map(Path, {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
)


class UsageError(Exception):
    """A command line that cannot be followed; the message is for the user."""


def describe_mistake(error: Exception) -> str:
    """An error in one sentence; the line too, if code that is not ours or a library's raised it."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if _is_inside(frame.filename, *OUR_FOLDERS):
            where = ""
        elif frame.filename[0] != "<" and not _is_inside(frame.filename, *LIBRARIES):
            where = f"{frame.filename}:{frame.lineno}, in {frame.name}"
    ours = [note for note in getattr(error, "__notes__", ()) if JAX_NOTE not in note]
    notes = "; ".join(filter(None, (*ours, where)))
    return f"{error} ({notes})" if notes else str(error)


def _is_inside(path: str, *folders: Path) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and ends with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(USAGE_EXIT_CODE, f"error: {message}\n")


def print_error(error: object) -> None:
    """Prints an error to standard error, without a traceback, unprintable characters escaped."""
    print("\n".join(map(printable, f"error: {error}".split("\n"))), file=sys.stderr)
