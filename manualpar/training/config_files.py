"""Config files, and `--config.<field>=<value>`: loaded, set, and mistakes told in one sentence.

`ml_collections.config_flags` reads the values, by the types of the fields they replace.
"""

import contextlib
import functools
import importlib.util
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
from absl import flags as absl_flags
from ml_collections import config_flags

from manualpar.checkpoints.compatibility import REMOVED
from manualpar.training.config import flatten_config, nearest, one_line
from manualpar.usage import UsageError

CONFIG_HELP = "The file to take the config from, a Python file with get_config()."
OVERRIDE = re.compile(r"--?(no)?config\.")
EXPECTED: Mapping[type, str] = {
    int: "an integer without point or exponent",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple of pairs such as (('embed', None), ('mlp', 'data'))",
    ml_collections.ConfigDict: "a dict such as {'data': -1}",
}


class NamedConfig(NamedTuple):
    """A config, its overrides applied, locked and not yet checked.

    Attributes:
      name: What it is called in files and tables.
      path: The file it comes from.
      config: The `ConfigDict`.
    """

    name: str
    path: Path
    config: Any


def load_config(path: Path) -> ml_collections.ConfigDict:
    """Runs a config file and returns the config of its `get_config()`, locked.

    Raises:
      UsageError: There is no such file, it is not Python, it raises an error or asks to exit, or it
        has no `get_config()` that returns a `ConfigDict`.
    """
    try:
        is_file = path.is_file()
    except OSError as error:  # The name is too long, for example.
        raise UsageError(f"--config={path}: {error.strerror}.") from error
    if not is_file:
        raise UsageError(
            f"--config={path}: there is no such file; name one such as configs/fsdp.py."
        )
    spec = importlib.util.spec_from_file_location("config_file", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--config={path}: expected a Python file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except SyntaxError as error:
        raise UsageError(f"--config={path}: line {error.lineno}: {error.msg}.") from error
    except (Exception, SystemExit) as error:  # Whatever the user's code raises.
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == spec.origin]
        where = f"line {own[-1]}: " if own else ""
        raise UsageError(
            f"--config={path}: {where}{type(error).__name__}: {one_line(error)}; expected a file "
            "whose get_config() returns the config."
        ) from error
    if not callable(get_config):
        raise UsageError(f"--config={path}: the file has no function get_config(), expected one.")
    if not isinstance(config, ml_collections.ConfigDict):
        raise UsageError(
            f"--config={path}: get_config() returns a {type(config).__name__}, expected an "
            "ml_collections.ConfigDict."
        )
    return config.lock()


def load_configs(paths: Sequence[str], overrides: list[str]) -> tuple[NamedConfig, ...]:
    """Loads every config and sets the same fields in all."""
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise UsageError(f"--config={twice[0]} is given twice, expected each file once.")
    stems = Counter(Path(path).stem for path in paths)
    configs: list[NamedConfig] = []
    for text in paths:
        path = Path(text)
        # Files of one name are told apart by their folders.
        parts = path.with_suffix("").parts[-2 if stems[path.stem] > 1 else -1 :]
        try:
            configs.append(NamedConfig("-".join(parts), path, _load_with(path, overrides)))
        except UsageError as error:
            of = "" if text in str(error) or len(paths) == 1 else f"{text}: "
            raise UsageError(f"{of}{error}") from error
    names = Counter(each.name for each in configs)
    if clashes := [name for name, count in names.items() if count > 1]:
        raise UsageError(
            f"two configs would be called {clashes[0]!r}, which results are named after; inspect "
            "them one at a time."
        )
    return tuple(configs)


def _load_with(path: Path, overrides: list[str]) -> ml_collections.ConfigDict:
    """Loads a config and sets fields of it."""
    config = load_config(path)
    _check_fields(config, overrides)
    arguments = ["", *overrides]
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)

    def kind_of(name: str) -> tuple[type, str]:
        default = functools.reduce(lambda group, key: group[key], name.split(".")[1:], config)
        example = f" such as {default!r}" if type(default) in (int, float) else ""
        return type(default), example

    with explained(kind_of):
        values(arguments)
    loaded: ml_collections.ConfigDict = values.config
    return loaded


def _check_fields(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> None:
    """Refuses arguments `--config.<field>` whose field the config does not have."""
    values = flatten_config(config)
    groups = {name.rsplit(".", depth)[0] for name in values for depth in range(name.count(".") + 1)}
    parallel = config.get("parallel")
    mesh = parallel.get("mesh") if isinstance(parallel, ml_collections.ConfigDict) else None
    axes = mesh if isinstance(mesh, ml_collections.ConfigDict) else ()
    mesh_sizes = {f"parallel.mesh.{axis}" for axis in axes}
    for argument in filter(OVERRIDE.match, overrides):
        field = argument.split("=")[0].split(".", 1)[1]
        if field in REMOVED and field not in values:
            raise UsageError(f"{argument}: {field} was removed: {REMOVED[field][1]}; leave it out.")
        if field not in groups | mesh_sizes:
            near = nearest(field, values.keys() | mesh_sizes)
            mend = ""
            if field.startswith("parallel.mesh."):
                mend = (
                    ", and another mesh is set as a whole, as by "
                    """--config.parallel.mesh="{'replica': 2, 'data': -1}\""""
                )
            raise UsageError(
                f"{argument}: the config has no field {field!r}; the nearest one is "
                f"--config.{near}{mend}."
            )


@contextlib.contextmanager
def explained(kind_of: Callable[[str], tuple[type, str] | None]) -> Iterator[None]:
    """Turns absl's errors into sentences.

    Args:
      kind_of: The type of a flag, by its name, and an example to add.
    """
    try:
        yield
    except absl_flags.IllegalFlagValueError as error:
        message = str(error).splitlines()[0]
        found = re.match(r"flag (--([\w.]+)=.*?): ", message)
        kind, example = (found and kind_of(found[2])) or (None, "")
        if found and kind is not None and kind in EXPECTED:
            message = f"{found[1]}: expected {EXPECTED[kind]}{example}"
        raise UsageError(f"{message}.") from error
    except absl_flags.Error as error:
        raise UsageError(f"{error}.") from error
