"""Parses and runs the command lines of train, compare, inspect and plan: flags and configs.

A command declares its flags in a `Syntax`. `--config` names a Python file with `get_config()`, and
`--config.<field>=<value>` sets a field, through `ml_collections.config_flags`. If a command has
several configs, the field is set in all of them. A user's mistake raises a `UsageError`: the
command prints one sentence and ends with exit code 2. A bug in this package is shown with its
traceback.
"""

import contextlib
import dataclasses
import functools
import json
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
import rich.console
from absl import flags as absl_flags
from absl import logging
from ml_collections import config_flags

from manualpar.commands.help_text import help_text
from manualpar.errors import (
    INTERRUPTED_EXIT_CODE,
    USAGE_EXIT_CODE,
    UsageError,
    describe_mistake,
    nearest,
    print_error,
)
from manualpar.system.reports.tables import print_line
from manualpar.system.storage import AnyPath, BucketPath, as_path
from manualpar.training.checkpoints.compatibility import REMOVED
from manualpar.training.config import FIELDS, flatten_config, load_config
from manualpar.training.imported_model import fill_from_hf
from manualpar.training.monitoring.progress import make_console
from manualpar.training.monitoring.run_files import create_numbered_folder

CONFIG_HELP = "The file to take the config from, a Python file with get_config()."
NO_CONFIG = "--config has no value, expected a file such as configs/fsdp.py."
OVERRIDE = re.compile(r"--?(no)?config\.")
EXPECTED: Mapping[type, str] = {
    int: "an integer without point or exponent",
    float: "a number",
    bool: "true or false",
    tuple: "a tuple of pairs such as (('embed', None), ('mlp', 'data'))",
    ml_collections.ConfigDict: "a dict",
}
EXAMPLES: Mapping[str, str] = {
    "parallel.mesh": """--config.parallel.mesh="{'replica': 2, 'data': -1}\"""",
    "optimizer.arguments": """--config.optimizer.arguments="{'nesterov': True}\"""",
    "schedule.arguments": """--config.schedule.arguments="{'alpha': 0.1}\"""",
}


class Flag(NamedTuple):
    """A flag of a command: its help, the type of its value, and its default."""

    help: str
    kind: type = str
    default: Any = None
    in_buckets: bool = False  # Whether a path may begin with s3:// or gs://.


WORKDIR = Flag(
    "Folder of the run, by default a new runs/<name of the config>/<next number>. If it holds a "
    "checkpoint, the run resumes from it.",
    Path,
)


class NamedConfig(NamedTuple):
    """A config, with overrides applied but not checked yet, and a name for its results."""

    name: str
    path: Path
    config: Any


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """A parsed command line: the configs, and `flags`, which has an attribute for each flag."""

    configs: tuple[NamedConfig, ...]
    flags: types.SimpleNamespace

    @property
    def config(self) -> Any:
        """The config of a command for which only one config may be given."""
        return self.configs[0].config

    @property
    def config_path(self) -> Path:
        """The file from which `config` was loaded."""
        return self.configs[0].path


class Syntax(NamedTuple):
    """The flags of a command, in addition to `--config` and `--config.<field>`.

    Attributes:
      flags: The flags by name.
      takes_several: Whether `--config` may be given several times.
      refused: Flags that only other commands have, each with the reason why it is refused here.
      refine: Checks the flags' values, and may change them; raises `UsageError` for a mistake.
    """

    flags: Mapping[str, Flag]
    takes_several: bool = False
    refused: Mapping[str, str] = types.MappingProxyType({})
    refine: Callable[[CommandLine], None] = lambda line: None


TRAINING = Syntax(
    {
        "workdir": WORKDIR._replace(in_buckets=True),
        "devices": Flag(
            "The number of CPU devices to simulate; by default 8 if there is only a CPU.", int
        ),
        "coordinator_address": Flag(
            "Host:port of process 0, if several processes train together and the environment does "
            "not say so. With auto, JAX finds the address, the number and the id."
        ),
        "num_processes": Flag(
            "The number of processes that train together, with --coordinator_address.", int
        ),
        "process_id": Flag("This process's number, from 0, with --coordinator_address.", int),
        "force": Flag(
            "Starts even if the run does not fit into memory or simulates very many devices.",
            bool,
            False,
        ),
    }
)


def flags_parser(
    description: str, default_config: Path, syntax: Syntax = TRAINING
) -> Callable[[list[str]], CommandLine]:
    """Makes the parser for `absl.app.run`; `--help` prints `description` and then the flags.

    The parser ends the process with code 0 after `--help`. After a mistake it prints a sentence and
    ends the process with code 2.
    """

    def parse_or_end(argv: list[str]) -> CommandLine:
        if {"--help", "-help", "-h", "--helpshort"} & set(argv):
            helps = {name: flag.help for name, flag in syntax.flags.items()}
            print(help_text(description, default_config, {"config": CONFIG_HELP} | helps))
            sys.exit(0)
        try:
            return parse_command_line(
                argv, default_config=default_config, syntax=syntax, flag_values=absl_flags.FLAGS
            )
        except UsageError as error:
            print_error(error)
            sys.exit(USAGE_EXIT_CODE)

    return parse_or_end


def parse_command_line(
    argv: Sequence[str],
    *,
    default_config: Path,
    syntax: Syntax = TRAINING,
    flag_values: absl_flags.FlagValues | None = None,
) -> CommandLine:
    """Parses a command line; raises `UsageError` for a mistake.

    `argv` begins with the program's name. The flags are defined in `flag_values`, by default in a
    new object.
    """
    flags = syntax.flags
    flag_values = absl_flags.FlagValues() if flag_values is None else flag_values
    absl_flags.DEFINE_multi_string("config", [], CONFIG_HELP, flag_values=flag_values)
    define = {int: absl_flags.DEFINE_integer, bool: absl_flags.DEFINE_boolean}
    for name, flag in flags.items():
        define_flag: Any = define.get(flag.kind, absl_flags.DEFINE_string)
        define_flag(name, flag.default, flag.help, flag_values=flag_values)
    flag_values.set_gnu_getopt()  # Allows `--config.seed 1` in addition to `--config.seed=1`.
    if argv[-1] in ("--config", "-config"):
        raise UsageError(NO_CONFIG)
    with _explained(lambda name: (flags[name].kind, "") if name in flags else None):
        _, *overrides = flag_values(list(argv), known_only=True)
    _check_overrides(overrides, syntax)
    paths: list[str] = flag_values.config or [str(default_config)]
    if not all(paths):
        raise UsageError(NO_CONFIG)
    if len(paths) > 1 and not syntax.takes_several:
        raise UsageError("--config is given twice, expected once.")
    values: dict[str, Any] = {name: flag_values[name].value for name in flags}
    for name, value in values.items():
        if isinstance(value, str) and "\0" in value:
            raise UsageError(f"--{name}={value!r}: expected a value without NUL characters.")
        if flags[name].kind is Path:
            values[name] = _path(name, value, flags[name]) if value else None
    if values.get("devices") is not None and values["devices"] < 1:
        raise UsageError(f"--devices={values['devices']}: expected at least 1 device to simulate.")
    line = CommandLine(_load_configs(paths, overrides), types.SimpleNamespace(**values))
    syntax.refine(line)
    return line


def _path(name: str, value: str, flag: Flag) -> AnyPath:
    try:
        path = as_path(value)
    except ValueError as error:
        raise UsageError(f"--{name}: {error}") from None
    if isinstance(path, BucketPath) and not flag.in_buckets:
        raise UsageError(f"--{name}={path}: expected a path on a disk.")
    return path


def _check_overrides(arguments: list[str], syntax: Syntax) -> None:
    """Refuses arguments that are neither `--config.<field>` nor the value of such a flag."""
    takes_value = False
    for argument in arguments:
        is_override = OVERRIDE.match(argument)
        if not is_override and re.match(r"--?[a-zA-Z_]", argument):
            name = argument.lstrip("-").split("=")[0]
            if name in syntax.refused:
                raise UsageError(f"--{name} is not a flag of this command: {syntax.refused[name]}.")
            near = nearest(name, {*syntax.flags, "config"})
            raise UsageError(f"--{name} is not a known flag; the nearest one is --{near}.")
        if not is_override and not takes_value:
            raise UsageError(
                f"{argument!r} is not understood, expected flags such as --config.seed=1."
            )
        takes_value = bool(is_override) and "=" not in argument


def _load_configs(paths: Sequence[str], overrides: list[str]) -> tuple[NamedConfig, ...]:
    """Loads every config and applies all overrides to each of them."""
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise UsageError(f"--config={twice[0]} is given twice, expected each file once.")
    stems = Counter(Path(path).stem for path in paths)
    configs: list[NamedConfig] = []
    for text in paths:
        path = Path(text)
        # If two files have the same name, their results are named after the folder and the file.
        parts = path.with_suffix("").parts[-2 if stems[path.stem] > 1 else -1 :]
        try:
            configs.append(NamedConfig("-".join(parts), path, _load_with(path, overrides)))
        except UsageError as error:
            of = "" if text in str(error) or len(paths) == 1 else f"{text}: "
            raise UsageError(f"{of}{error}") from error
    names = Counter(each.name for each in configs)
    if clashes := [name for name, count in names.items() if count > 1]:
        raise UsageError(
            f"two configs have the name {clashes[0]!r}, so their results would have the same name; "
            "inspect them one at a time."
        )
    return tuple(configs)


def _load_with(path: Path, overrides: list[str]) -> ml_collections.ConfigDict:
    """Loads a config and applies the overrides to it."""
    config = load_config(path)
    _check_fields(config, overrides)
    arguments = ["", *overrides]
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)

    def kind_of(name: str) -> tuple[type, str]:
        default = functools.reduce(lambda group, key: group[key], name.split(".")[1:], config)
        if isinstance(default, ml_collections.ConfigDict):
            field = FIELDS.get(name.removeprefix("config."))
            words = field.expectation() if field else "a dict such as {'data': -1}"
            return type(default), words.removeprefix("a dict")
        example = f" such as {default!r}" if type(default) in (int, float) else ""
        return type(default), example

    with _explained(kind_of):
        values(arguments)
    overridden = [
        argument.split("=")[0].split(".", 1)[1] for argument in overrides if "." in argument
    ]
    with users_mistakes():
        return fill_from_hf(values.config, given=overridden)


def _check_fields(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> None:
    """Refuses an argument `--config.<field>` if the config has no such field."""
    values = flatten_config(config)
    groups = {name.rsplit(".", depth)[0] for name in values for depth in range(name.count(".") + 1)}
    dicts = {name: value for name, value in values.items() if isinstance(value, dict)}
    entries = {f"{name}.{key}" for name, entry in dicts.items() for key in entry}
    for argument in filter(OVERRIDE.match, overrides):
        field = argument.split("=")[0].split(".", 1)[1]
        if field in REMOVED and field not in values:
            raise UsageError(f"{argument}: {field} was removed: {REMOVED[field][1]}; leave it out.")
        if field not in groups | entries:
            near = nearest(field, values.keys() | entries)
            mend = ""
            if (name := field.rpartition(".")[0]) in dicts:
                mend = f"; to change the entries, set the complete dict, as in {EXAMPLES[name]}"
            raise UsageError(
                f"{argument}: the config has no field {field!r}; the nearest one is "
                f"--config.{near}{mend}."
            )


@contextlib.contextmanager
def _explained(kind_of: Callable[[str], tuple[type, str] | None]) -> Iterator[None]:
    """Turns absl's errors into `UsageError`s.

    `kind_of` returns the type of a flag's value and an example, by the flag's name.
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


def answer(work: Callable[[rich.console.Console], Path]) -> int:
    """Runs a command that writes a folder of results; prints how long that took, and the folder.

    `work` returns the folder, and raises a `UsageError` for a user's mistake. On Ctrl-C it may
    raise a `KeyboardInterrupt` whose argument is a text about the files written so far.

    Returns:
      The exit code.
    """
    started = time.perf_counter()
    quiet_absl()
    console = make_console()
    try:
        results = work(console)
    except UsageError as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt as error:
        print_error(f"interrupted; {str(error) or 'nothing was written'}")
        return INTERRUPTED_EXIT_CODE
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {results}")
    return 0


def quiet_absl() -> None:
    """Hides JAX's messages about missing backends, which absl prints by default."""
    logging.set_verbosity(logging.WARNING)


@contextlib.contextmanager
def users_mistakes(where: str = "") -> Iterator[None]:
    """Turns a `ValueError` in this context into a `UsageError`; its message begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{where}{describe_mistake(error)}") from error


@contextlib.contextmanager
def results_folder(folder: Path | None, parent: Path, *, flag: str = "--workdir") -> Iterator[Path]:
    """Creates a folder for results: `folder`, or if `folder` is `None` a numbered one in `parent`.

    Raises:
      UsageError: The folder cannot be created, or code in the context cannot write to it.
    """
    try:
        folder = folder or create_numbered_folder(parent)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with {flag}."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes a value to a file as indented JSON."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
