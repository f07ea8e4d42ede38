"""The command lines of train, compare, inspect and plan: flags, configs, and how they are answered.

A command declares its flags in a `Syntax`. `--config` names a file with
`get_config()`, and `--config.<field>=<value>` sets a field, through `ml_collections.config_flags`.
A command that takes several configs sets it in all of them. A user's mistake ends with exit code 2,
one sentence and no traceback; a mistake of ours keeps its traceback.
"""

import contextlib
import dataclasses
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console
from absl import flags as absl_flags
from absl import logging

from manualpar.training.config import flatten_config, nearest
from manualpar.training.config_files import (
    CONFIG_HELP,
    OVERRIDE,
    NamedConfig,
    explained,
    load_config,
    load_configs,
)
from manualpar.usage import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, UsageError, print_error
from manualpar.watching.screen import make_console, print_line
from manualpar.watching.writers import CONFIG_FILE, create_numbered_folder


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
      help: Its line in `--help`.
      kind: The type of its value: `str`, `Path`, `int` or `bool`.
      default: Its value where it is not given.
    """

    help: str
    kind: type = str
    default: Any = None


WORKDIR = Flag(
    "Folder of the run, by default a new runs/<name of the config>/<next number>; one that holds a "
    "checkpoint goes on from it.",
    Path,
)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What a command line asks for.

    Attributes:
      configs: The configs; a command that takes one has one.
      flags: The value of every flag of the command, an attribute each.
    """

    configs: tuple[NamedConfig, ...]
    flags: types.SimpleNamespace

    @property
    def config(self) -> Any:
        """The config of a command that takes one."""
        return self.configs[0].config

    @property
    def config_path(self) -> Path:
        """The file that it comes from."""
        return self.configs[0].path


class Syntax(NamedTuple):
    """The flags of a command besides `--config` and `--config.<field>`.

    Attributes:
      flags: The flags by name.
      takes_several: Whether `--config` may be given several times.
      refused: Flags of other commands that mean nothing here, each with the reason.
      refine: Checks the values of the flags, and may replace them; a mistake is a `UsageError`.
    """

    flags: Mapping[str, Flag]
    takes_several: bool = False
    refused: Mapping[str, str] = types.MappingProxyType({})
    refine: Callable[[CommandLine], None] = lambda line: None


TRAINING = Syntax(
    {
        "workdir": WORKDIR,
        "devices": Flag(
            "How many CPU devices to simulate, by default 8 where the CPU is all there is.", int
        ),
        "coordinator_address": Flag(
            "Host:port of process 0, where several processes train together and nothing in the "
            "environment says so; auto has jax find all three."
        ),
        "num_processes": Flag(
            "How many processes train together, with --coordinator_address.", int
        ),
        "process_id": Flag("Which of them this is, from 0, with --coordinator_address.", int),
        "force": Flag(
            "Starts what does not fit into memory, and more devices than one would simulate.",
            bool,
            False,
        ),
    }
)


def parse_command_line(
    argv: Sequence[str],
    *,
    default_config: Path,
    syntax: Syntax = TRAINING,
    flag_values: absl_flags.FlagValues | None = None,
) -> CommandLine:
    """Parses a command line.

    Args:
      argv: The arguments, the program's name first.
      default_config: The config where `--config` is not given.
      syntax: The flags.
      flag_values: Where to define the flags, by default where nobody else sees them.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    flags = syntax.flags
    flag_values = absl_flags.FlagValues() if flag_values is None else flag_values
    absl_flags.DEFINE_multi_string("config", [], CONFIG_HELP, flag_values=flag_values)
    define = {int: absl_flags.DEFINE_integer, bool: absl_flags.DEFINE_boolean}
    for name, flag in flags.items():
        define_flag: Any = define.get(flag.kind, absl_flags.DEFINE_string)
        define_flag(name, flag.default, flag.help, flag_values=flag_values)
    flag_values.set_gnu_getopt()  # The value of an override may be an argument of its own.
    no_value = "--config has no value, expected a file such as configs/fsdp.py."
    if argv[-1] in ("--config", "-config"):
        raise UsageError(no_value)
    kinds = {name: (flag.kind, "") for name, flag in flags.items()}
    with explained(kinds.get):
        _, *rest = flag_values(list(argv), known_only=True)
    overrides = _check_overrides(rest, syntax)
    paths: list[str] = flag_values.config or [str(default_config)]
    if not all(paths):
        raise UsageError(no_value)
    if len(paths) > 1 and not syntax.takes_several:
        raise UsageError("--config is given twice, expected once.")
    values: dict[str, Any] = {name: flag_values[name].value for name in flags}
    for name, value in values.items():
        if isinstance(value, str) and "\0" in value:
            raise UsageError(f"--{name}={value!r}: expected no NUL in it.")
        if flags[name].kind is Path:
            values[name] = Path(value) if value else None
    if values.get("devices") is not None and values["devices"] < 1:
        raise UsageError(f"--devices={values['devices']}: expected at least 1 device to simulate.")
    line = CommandLine(load_configs(paths, overrides), types.SimpleNamespace(**values))
    syntax.refine(line)
    return line


def flags_parser(
    description: str, default_config: Path, syntax: Syntax = TRAINING
) -> Callable[[list[str]], CommandLine]:
    """Makes the parser that `absl.app.run` takes.

    Args:
      description: What `--help` shows first.
      default_config: The config where `--config` is not given.
      syntax: The flags.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process: with code 0
      for `--help`, with code 2 and a sentence for a mistake.
    """

    def parse_or_end(argv: list[str]) -> CommandLine:
        if {"--help", "-help", "-h", "--helpshort"} & set(argv):
            print(_help_text(description, default_config, syntax.flags))
            sys.exit(0)
        try:
            return parse_command_line(
                argv, default_config=default_config, syntax=syntax, flag_values=absl_flags.FLAGS
            )
        except UsageError as error:
            print_error(error)
            sys.exit(USAGE_EXIT_CODE)

    return parse_or_end


def answer(work: Callable[[rich.console.Console], Path]) -> int:
    """Runs a command that leaves a folder of results, and says how long it took and where they are.

    Args:
      work: Does what the command line asks for; returns the folder. A mistake of the user's is a
        `UsageError`. On Ctrl-C the argument of a `KeyboardInterrupt`, if it has one, says what was
        written.

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
    """Hides jax's notes on the backends that it does not find, which absl shows by default."""
    logging.set_verbosity(logging.WARNING)


@contextlib.contextmanager
def users_mistakes() -> Iterator[None]:
    """Within, a `ValueError` is about what the user asked for."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def open_results(line: CommandLine, parent: Path) -> Path:
    """Creates the folder that `--workdir` names, or the next of `parent`, and stores the config.

    Raises:
      UsageError: It cannot be written to.
    """
    try:
        workdir: Path = line.flags.workdir or create_numbered_folder(parent)
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / CONFIG_FILE, line.config.to_dict())
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --workdir."
        ) from error
    return workdir


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that people read too."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _check_overrides(arguments: list[str], syntax: Syntax) -> list[str]:
    """Refuses what neither overrides a field nor is the value of an override."""
    takes_value = False
    for argument in arguments:
        is_override = OVERRIDE.match(argument)
        if not is_override and re.match(r"--?[a-zA-Z_]", argument):
            name = argument.lstrip("-").split("=")[0]
            if name in syntax.refused:
                raise UsageError(f"--{name} means nothing here: {syntax.refused[name]}.")
            near = nearest(name, {*syntax.flags, "config"})
            raise UsageError(f"--{name} is not a known flag; the nearest one is --{near}.")
        if not is_override and not takes_value:
            raise UsageError(
                f"{argument!r} is not understood, expected flags such as --config.seed=1."
            )
        takes_value = bool(is_override) and "=" not in argument
    return arguments


def _help_text(description: str, default_config: Path, flags: Mapping[str, Flag]) -> str:
    """What `--help` prints: the flags, and the fields of the default config."""
    helps = {"config": CONFIG_HELP} | {name: flag.help for name, flag in flags.items()}
    fields = flatten_config(load_config(default_config))
    return "\n".join(
        [
            description.strip(),
            "",
            "Flags:",
            *(f"  --{name:20s}  {text}" for name, text in helps.items()),
            "",
            f"Fields of {default_config.name}, each a flag --config.<field>=<value>:",
            *(f"  {name:31s}  {value or repr(value)}" for name, value in fields.items()),
        ]
    )
