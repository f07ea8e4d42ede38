"""Finds config files by their names, and runs them.

The package brings the configs of its repository with it.

A config has a name, such as `fsdp_lm` or `plan/llama3_8b`, or is a file of one's own, such as
`my_config.py`. In the repository the package's configs are in `configs/`. A wheel has them in
`manualpar/configs/`.
"""

import ast
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import ml_collections

from manualpar.errors import UsageError, nearest

PACKAGE = Path(__file__).parents[1]


def config_folder() -> Path:
    """Returns the folder with the configs of the package."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def find_config(text: str) -> Path:
    """Returns the file of a config, given its name or a path that ends in `.py`.

    The file of a path may be missing; `load_config` refuses it.

    Raises:
      UsageError: There is no config of this name.
    """
    if Path(text).suffix:
        return Path(text)
    names = dict(named_configs())
    if text not in names:
        raise UsageError(
            f"--config={text}: there is no config of this name; the nearest one is "
            f"{nearest(text, names)!r}, and `manualpar configs` lists all. A file of your own ends "
            "in .py."
        )
    return names[text]


def named_configs() -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each config of the package, in the order of their names."""
    folder = config_folder()
    files = (path for path in folder.rglob("*.py") if path.name != "__init__.py")
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        yield path.relative_to(folder).with_suffix("").as_posix(), path


def first_sentence(path: Path) -> str:
    """Returns the first line of a config's docstring; the file is not executed."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def named_config(name: str) -> ml_collections.ConfigDict:
    """Returns the config of a name or file, as its `get_config()` returns it.

    A config that changes a few fields of another one begins with this, for example
    `named_config("fsdp_lm")`.

    Raises:
      UsageError: There is no config of this name, or see `run_config_file`.
    """
    return run_config_file(find_config(name))


def run_config_file(path: Path) -> ml_collections.ConfigDict:
    """Runs a config file, and returns what its `get_config()` returns.

    Raises:
      UsageError: The file does not exist, is not Python, raises an error, calls `exit()`, or has no
        `get_config()` that returns a `ConfigDict`.
    """

    def refused(why: str) -> UsageError:
        return UsageError(f"--config={path}: {why}.")

    try:
        is_file = path.is_file()
    except OSError as error:  # The name is too long, for example.
        raise refused(str(error.strerror)) from error
    if not is_file:
        raise refused("there is no such file; name one such as configs/fsdp.py")
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise refused("expected a Python file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.absolute().parent)
    if not path.is_relative_to(config_folder()) and folder not in sys.path:
        sys.path.append(folder)  # A config may import the modules beside it.
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except SyntaxError as error:
        raise refused(f"line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # Whatever the user's code raises.
        frames = traceback.extract_tb(error.__traceback__)
        line_numbers = [frame.lineno for frame in frames if frame.filename == spec.origin]
        where = f"line {line_numbers[-1]}: " if line_numbers else ""
        raise refused(
            f"{where}{type(error).__name__}: {one_line(error)}; expected a file whose get_config() "
            "returns the config"
        ) from error
    if not callable(get_config):
        raise refused("the file has no function get_config(), expected one")
    if not isinstance(config, ml_collections.ConfigDict):
        kind = type(config).__name__
        raise refused(f"get_config() returns a {kind}, expected an ml_collections.ConfigDict")
    return config


def one_line(value: object) -> str:
    """Returns the text of a value without line breaks."""
    return re.sub(r"\s*\n\s*", " ", str(value))
