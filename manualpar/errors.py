"""Errors that are meant for the user: wrong command lines, and packages that are not installed.

A command answers a user's mistake with one sentence and exit code 2, without a traceback.

`import manualpar` needs none of the optional packages. Extras install these packages: `pip install
'manualpar[train]'`. A module that needs optional packages calls `require` before it imports them.
Then the error for a missing package is a sentence that says how to install the package.
"""

import contextlib
import difflib
import importlib.util
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FILES_EXIT_CODE",
    "INTERRUPTED_EXIT_CODE",
    "MODULES",
    "TRAIN",
    "UNREADY_EXIT_CODE",
    "USAGE_EXIT_CODE",
    "MissingExtraError",
    "UsageError",
    "check_choice",
    "describe_mistake",
    "list_some",
    "naming_arguments",
    "print_error",
    "printable",
    "require",
    "suggest",
]

USAGE_EXIT_CODE = 2
FILES_EXIT_CODE = 6  # A file cannot be read or written, see `training.exit_codes`.
UNREADY_EXIT_CODE = 7  # `manualpar doctor --cluster`: a run on these hosts would be refused.
INTERRUPTED_EXIT_CODE = 130  # Ctrl-C.
LISTED = 5  # The maximum number of differences that an error lists.
# JAX adds a note about the shortened traceback to errors. The note contains this word.
JAX_NOTE = "JAX_TRACEBACK_FILTERING"
# From this ratio of `difflib` on, two names are near each other: `pd` and `dp`, not `zz` and `dp`.
NEAR = 0.5
OUR_FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "experiments")
# An argument in a message: its name, and a value if it has one.
_ARGUMENT = re.compile(r"`(\w+)((?:=[^`]*)?)`")
LIBRARIES = tuple(
    map(Path, {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
)


class UsageError(Exception):
    """A mistake on a command line; the message is for the user."""


def describe_mistake(error: Exception) -> str:
    """Describes an error in one sentence; names the user's line that raised it, if any."""
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


def suggest(
    name: str, known: Iterable[str], *, show: Callable[[str], str] = repr, otherwise: str = ""
) -> str:
    """Writes a clause with the name in `known` that is most like `name`.

    Names are compared by their last dotted part, and as a whole if the parts before it differ. The
    clause is such as `"; the nearest one is 'fsdp'"`, where `show` formats the name. If no name is
    near, it is `otherwise`.
    """

    def likeness(candidate: str) -> float:
        (group, _, last), (other, _, part) = given.rpartition("."), candidate.rpartition(".")
        pairs = [(last, part)] + ([(given, candidate)] if group != other else [])
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    given = str(name)  # A key of a user's dict may be a number.
    near = max(sorted(known), key=likeness, default=None)
    if near is None or likeness(near) < NEAR:
        return otherwise
    return f"; the nearest one is {show(near)}"


def check_choice(builder: str, field: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is not among the choices."""
    if isinstance(value, bool) is not isinstance(choices[0], bool) or value not in choices:
        raise ValueError(
            f"{builder}: {field}={value!r}, expected one of {', '.join(map(repr, choices))}."
        )


@contextlib.contextmanager
def naming_arguments(names: Mapping[str, str]) -> Iterator[None]:
    """Names in an error's message what the user has set, in place of a function's arguments.

    A context manager. Messages have the names of arguments in backticks, also with a value:
    `path`, `path='x'`. `names` has the user's name for each argument, such as `config.data.path`.
    """

    def rename(text: str) -> str:
        return _ARGUMENT.sub(lambda x: f"{names[x[1]]}{x[2]}" if x[1] in names else x[0], text)

    try:
        yield
    except ValueError as error:
        if len(error.args) == 1:  # A `UnicodeError` has more.
            error.args = (rename(str(error)),)
            if isinstance(error, ImportError):
                error.msg = error.args[0]
        if notes := getattr(error, "__notes__", []):
            error.__notes__ = list(map(rename, notes))
        raise


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` that understands the names of the last release.

    `names` maps each old name to the name that the module has now. An old name gives the same
    object, with a `DeprecationWarning` that names the new one.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = f"{module}.{name} is {names[name]} now; the old name goes with the next release."
        warnings.warn(now, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find


def print_error(error: object) -> None:
    """Prints an error to standard error without a traceback; escapes unprintable characters."""
    print("\n".join(map(printable, f"error: {error}".split("\n"))), file=sys.stderr)


def printable(text: object) -> str:
    """Escapes unprintable characters in a line of text, because they could control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def list_some(lines: Iterable[str]) -> list[str]:
    """Returns the first `LISTED` lines; if there are more, also a line with the number of the rest.

    Lines are escaped, because they may contain names from untrusted files.
    """
    lines = list(lines)
    rest = len(lines) - LISTED
    return [*map(printable, lines[:LISTED]), *([f"and {rest} more"] if rest > 0 else [])]


# Module -> the extra that installs the module, and the name of its distribution on PyPI.
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
    """A package is not installed; the message names the extra that installs it.

    The class inherits from `ValueError` because commands show a `ValueError` as one sentence.
    """


def require(user: str, *modules: str) -> None:
    """Checks that optional modules are installed, without importing them.

    Args:
      user: The feature or command that needs the modules; the error's message begins with it.
      *modules: Names from `MODULES`, all of one extra.

    Raises:
      MissingExtraError: One of the modules is not installed.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        packages = " and ".join(MODULES[module][1] for module in missing)
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"{user} needs {packages}, which {verb} not installed: "
            f"pip install 'manualpar[{MODULES[missing[0]][0]}]'"
        )
