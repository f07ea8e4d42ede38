"""Errors that are meant for the user: wrong command lines, and packages that are not installed.

A user's mistake on a command line is one sentence, exit code 2, and no traceback.

`import manualpar` needs none of the optional packages, which an extra brings: `pip install
'manualpar[train]'`. A module that needs some calls `require` before it imports them, so that the
error for a missing one is a sentence that says how to install it.
"""

import argparse
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

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


def printable(text: object) -> str:
    """A text of one line with unprintable characters escaped: they could rule a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


# The extra that brings a module, and the name of its distribution.
MODULES = {
    "grain": ("train", "grain"),
    "ml_collections": ("train", "ml-collections"),
    "orbax": ("train", "orbax-checkpoint"),
    "rich": ("train", "rich"),
    "tensorboardX": ("train", "tensorboardX"),
    "sklearn": ("examples", "scikit-learn"),
    "tokenizers": ("examples", "tokenizers"),
    "safetensors": ("pretrained", "safetensors"),
    "array_record": ("data", "array-record"),
    "jinja2": ("data", "jinja2"),
    "pyarrow": ("data", "pyarrow"),
    "gcsfs": ("buckets", "gcsfs"),
    "s3fs": ("buckets", "s3fs"),
    "lm_eval": ("evaluate", "lm-eval"),
    "nbformat": ("docs", "nbformat"),
    "matplotlib": ("plots", "matplotlib"),
}
TRAIN = tuple(module for module, (extra, _) in MODULES.items() if extra == "train")


class MissingExtraError(ImportError, ValueError):
    """A package is not installed; the message names the extra that brings it.

    It is a `ValueError` as well because commands show those as one sentence.
    """


def require(user: str, *modules: str) -> None:
    """Checks that optional modules are installed, without importing them.

    Args:
      user: The subject of the sentence, which needs the modules.
      *modules: Names from `MODULES`, all of one extra.

    Raises:
      MissingExtraError: One is not installed.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        packages = " and ".join(MODULES[module][1] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{user} needs {packages}, which {verb} not installed: "
            f"pip install 'manualpar[{MODULES[missing[0]][0]}]'"
        )
