"""The command line of an experiment: its flags, and its mistakes answered in one sentence.

`--config` names a file with `get_config()`, and `--config.<field>=<value>` sets a field of it,
through `ml_collections.config_flags`. What a user got wrong ends with exit code 2 and no traceback;
what we got wrong keeps its traceback.
"""

import dataclasses
import functools
import importlib.util
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from manualpar.checkpoints.compatibility import REMOVED
from manualpar.training.config import flatten_config, nearest, one_line

FLAGS_HELP = {
    "config": "The file to take the config from, a Python file with get_config().",
    "workdir": "Folder of the run, by default a new runs/<name of the config>/<next number>; one "
    "that holds a checkpoint goes on from it.",
    "devices": "How many CPU devices to simulate, by default 8 where the CPU is all there is.",
    "coordinator_address": "Host:port of process 0, where several processes train together and "
    "nothing in the environment says so; auto has jax find all three.",
    "num_processes": "How many processes train together, with --coordinator_address.",
    "process_id": "Which of them this is, from 0, with --coordinator_address.",
    "force": "Starts what does not fit into memory, and more devices than one would simulate.",
}
INTEGERS = ("devices", "num_processes", "process_id")
EXPECTED: Mapping[type, str] = {
    int: "an integer without point or exponent",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple of pairs such as (('embed', None), ('mlp', 'data'))",
    ml_collections.ConfigDict: "a dict such as {'data': -1}",
}


class UsageError(Exception):
    """A command line that cannot be followed; the message is for the user."""


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
      config: The config, overrides applied, locked and not yet checked.
      config_path: The file it comes from.
      workdir: Where results go; `None` leaves it to the experiment.
      devices: How many CPU devices to simulate; `None` leaves it to the machine.
      coordinator_address: Where process 0 listens; `None` leaves it to the environment.
      num_processes: How many processes there are, likewise.
      process_id: Which of them this is, likewise.
      force: Whether to start what does not fit into memory.
    """

    config: Any
    config_path: Path
    workdir: Path | None
    devices: int | None
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    force: bool = False


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


class _LoadedConfig(flags.ArgumentParser):
    """Hands over a config loaded before, so that its mistakes are not taken for a flag's."""

    def __init__(self, config: ml_collections.ConfigDict) -> None:
        self._config = config

    def parse(self, path: str) -> ml_collections.ConfigDict:
        """The config, whatever the path."""
        del path
        return self._config


def parse_command_line(
    argv: Sequence[str], *, default_config: Path, flag_values: flags.FlagValues | None = None
) -> CommandLine:
    """Understands a command line.

    Args:
      argv: The arguments, the program's name first.
      default_config: What `--config` is where it is not given.
      flag_values: Where to define the flags, by default where nobody else sees them.

    Returns:
      What it asks for.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    flag_values = flags.FlagValues() if flag_values is None else flag_values
    arguments = list(argv)
    config_path, overrides = _find_config(arguments, default_config)
    config = load_config(config_path)
    _check_overrides(config, overrides)

    config_flags.DEFINE_config_file(
        "config", None, FLAGS_HELP["config"], flag_values=flag_values, sys_argv=arguments
    )
    flag_values["config"].parser = _LoadedConfig(config)
    for name in ("workdir", "coordinator_address"):
        flags.DEFINE_string(name, None, FLAGS_HELP[name], flag_values=flag_values)
    for name in INTEGERS:
        flags.DEFINE_integer(name, None, FLAGS_HELP[name], flag_values=flag_values)
    flags.DEFINE_boolean("force", False, FLAGS_HELP["force"], flag_values=flag_values)
    try:
        _, *rest = flag_values(arguments)
    except flags.UnrecognizedFlagError as error:
        suggestion = nearest(error.flagname, FLAGS_HELP)
        raise UsageError(
            f"--{error.flagname} is not a known flag; the nearest one is --{suggestion}."
        ) from error
    except flags.IllegalFlagValueError as error:
        raise UsageError(_explain_value(error, config)) from error
    except flags.Error as error:
        raise UsageError(f"{error}.") from error
    if rest:
        raise UsageError(f"{rest[0]!r} is not understood, expected flags such as --workdir=DIR.")
    devices: int | None = flag_values.devices
    if devices is not None and devices < 1:
        raise UsageError(f"--devices={devices}: expected at least 1 device to simulate.")
    for name in ("workdir", "coordinator_address"):
        if "\0" in (flag_values[name].value or ""):
            raise UsageError(f"--{name}={flag_values[name].value!r}: expected no NUL in it.")
    return CommandLine(
        config=flag_values.config,
        config_path=config_path,
        workdir=Path(flag_values.workdir) if flag_values.workdir else None,
        devices=devices,
        coordinator_address=flag_values.coordinator_address,
        num_processes=flag_values.num_processes,
        process_id=flag_values.process_id,
        force=flag_values.force,
    )


def _find_config(arguments: list[str], default_config: Path) -> tuple[Path, list[str]]:
    """Finds the config's path, which is added to `arguments` if need be, and the overrides."""
    named = [i for i, argument in enumerate(arguments) if re.match(r"--?config(=|$)", argument)]
    overrides = [
        i for i, argument in enumerate(arguments) if re.match(r"--?(no)?config\.", argument)
    ]
    if len(named) > 1:
        raise UsageError("--config is given twice, expected once.")
    if not named:
        arguments.insert(1, f"--config={default_config}")
        return default_config, [arguments[i + 1] for i in overrides]
    if overrides and overrides[0] < named[0]:
        raise UsageError(f"{arguments[overrides[0]]} comes before --config; give --config first.")
    path = "".join(arguments[named[0]].split("=", 1)[1:] or arguments[named[0] + 1 :][:1])
    if not path:
        raise UsageError("--config has no value, expected a file such as configs/fsdp.py.")
    return Path(path), [arguments[i] for i in overrides]


def _check_overrides(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> None:
    """Refuses arguments `--config.<field>` whose field the config does not have."""
    values = flatten_config(config)
    groups = {name.rsplit(".", depth)[0] for name in values for depth in range(name.count(".") + 1)}
    parallel = config.get("parallel")
    mesh = parallel.get("mesh") if isinstance(parallel, ml_collections.ConfigDict) else None
    axes = mesh if isinstance(mesh, ml_collections.ConfigDict) else ()
    mesh_sizes = {f"parallel.mesh.{axis}" for axis in axes}
    for argument in overrides:
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


def _explain_value(error: flags.IllegalFlagValueError, config: ml_collections.ConfigDict) -> str:
    """Says what was expected instead of the value that `error` is about."""
    message = str(error).splitlines()[0]
    found = re.match(r"flag (--([\w.]+)=.*?): ", message)
    if not found:
        return f"{message}."
    argument, name = found.groups()
    if name in INTEGERS:
        return f"{argument}: expected {EXPECTED[int]}."
    default = functools.reduce(lambda group, key: group[key], name.split(".")[1:], config)
    if type(default) not in EXPECTED:
        return f"{message}."
    example = f" such as {default!r}" if type(default) in (int, float) else ""
    return f"{argument}: expected {EXPECTED[type(default)]}{example}."
