"""Parses and runs the command lines of train, compare, inspect and plan: flags and configs.

A command declares its flags in a `Syntax`, and `manualpar.system.reports.flags` parses them.
`--config` names a Python file with `get_config()`, and `--config.<field>=<value>` sets a field,
through `ml_collections.config_flags`. If a command has several configs, the field is set in all of
them. `translate_fields` describes the short forms. A user's mistake raises a `UsageError`: the
command prints one sentence and ends with exit code 2. A bug in this package is shown with its
traceback.
"""

import contextlib
import dataclasses
import functools
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_collections
from absl import app
from absl import flags as absl_flags
from ml_collections import config_flags

from manualpar.commands.results import users_mistakes
from manualpar.errors import (
    USAGE_EXIT_CODE,
    UsageError,
    print_error,
    suggest,
)
from manualpar.strategies import Field, strategy_kinds
from manualpar.system.cluster import WAIT_SECONDS
from manualpar.system.reports.flags import EXPECTED as EXPECTED_OF_FLAGS
from manualpar.system.reports.flags import (
    HELP,
    Flag,
    explained,
    naming_typed,
    read_flags,
    refuse_flag,
    translate,
)
from manualpar.system.reports.help_text import fill, list_flags, print_help, wrap_text
from manualpar.training.checkpoints.compatibility import REMOVED
from manualpar.training.config import (
    ALL_FIELDS,
    fields_of,
    find_config,
    flatten_config,
    load_config,
)
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS
from manualpar.training.imported_model import fill_from_hf

# -------------------------------------------------------------------------------------------------
# The text of `--help` of the commands that take a config: their flags, and the config's fields.


GENERAL = "General"
# Group of fields -> its heading, in the order of the text. Other groups come last.
HEADINGS: Mapping[str, str] = {
    "model": "Model",
    "data": "Data",
    "optimizer": "Optimizer",
    "schedule": "Learning rate after the warm-up",
    "training": "Training and evaluation",
    "parallel": "Parallelism",
    "checkpoint": "Checkpoints",
    "sample": "Text that is generated at the end",
    "watch": "Lost and stalled processes",
    "debug": "Debugging",
}
ABOUT_FIELDS = (
    "Fields of {name}, with the values that they have there. --GROUP.FIELD=VALUE sets a field. The "
    "brackets contain the allowed values, and the default for a config file without the field. "
    "With the name of a config, as in `fsdp_lm --help`, its fields are shown."
)


def config_help(
    description: str, path: Path, *, flags: Mapping[str, str], added: Mapping[str, Field]
) -> str:
    """Returns the text of `--help`.

    Args:
      flags: The help of each flag of the command.
      added: The fields that only the configs of this command have.
    """
    config = load_config(path)
    values, fields = flatten_config(config), {**fields_of(config), **added}
    blocks = [wrap_text(description), f"Flags:\n{list_flags(flags)}"]
    blocks.append(fill(ABOUT_FIELDS.format(name=path.name)))
    for heading, names in _grouped(values, fields).items():
        lines = [_describe(name, values[name], fields.get(name)) for name in names]
        blocks.append("\n".join([f"{heading}:", *lines]))
    return "\n\n".join(blocks)


def _grouped(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, list[str]]:
    """Returns the names of the fields of each heading, in the order of the table of fields."""
    strategy = str(values.get("parallel.strategy"))
    unused = _fields_of_other_strategies(strategy)
    others = f"Parallelism, only for other strategies than {strategy}"
    headings = [GENERAL, *HEADINGS.values()]
    headings.insert(headings.index(HEADINGS["parallel"]) + 1, others)
    found: dict[str, list[str]] = {heading: [] for heading in headings}
    order = {name: number for number, name in enumerate(fields)}
    for name in sorted(values, key=lambda name: order.get(name, len(order))):
        group = name.rpartition(".")[0]
        heading = HEADINGS.get(group, group) or GENERAL
        found.setdefault(others if name in unused else heading, []).append(name)
    return {heading: names for heading, names in found.items() if names}


def _fields_of_other_strategies(strategy: str) -> set[str]:
    """Returns the fields that only other strategies have; none if there is no such strategy."""
    kinds = strategy_kinds()
    if strategy not in kinds:
        return set()
    fields = {name for kind in kinds.values() for name in kind.fields}
    return {f"parallel.{name}" for name in fields - kinds[strategy].fields.keys()}


def _describe(name: str, value: Any, field: Field | None) -> str:
    """Returns the lines about a field: as a flag with its value, then meaning, values, default."""
    text = str(value)
    if not text or set(text) & set(" '(){}*!;&|<>$`#~"):
        text = '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$"))
    lines = [fill(f"--{name}={text}", "  ", hanging=" " * 6)]
    if field is not None:
        default = "no default" if field.default is None else f"default {field.default!r}"
        lines.append(fill(f"{field.meaning} [{field.expectation()}; {default}]", " " * 6))
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# Loads a config with the fields that a command line sets, through `ml_collections.config_flags`.
#
# A field that the config lacks, and a value of another type, raise a `UsageError` of one sentence.


OVERRIDE = re.compile(r"--?(no)?config\.")
EXPECTED: Mapping[type, str] = {
    **EXPECTED_OF_FLAGS,
    tuple: "a tuple of pairs such as (('embed', None), ('mlp', 'data'))",
    ml_collections.ConfigDict: "a dict",
}
EXAMPLES: Mapping[str, str] = {
    "parallel.mesh": """--config.parallel.mesh="{'replica': 2, 'data': -1}\"""",
    "optimizer.arguments": """--config.optimizer.arguments="{'nesterov': True}\"""",
    "schedule.arguments": """--config.schedule.arguments="{'alpha': 0.1}\"""",
}


def load_with(path: Path, overrides: list[str]) -> ml_collections.ConfigDict:
    """Loads a config and applies overrides, such as `--config.seed=1`, to it."""
    config = load_config(path)
    _check_fields(config, overrides)
    arguments = ["", *overrides]
    values = absl_flags.FlagValues()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)

    def expected(name: str) -> str | None:
        default = functools.reduce(lambda group, key: group[key], name.split(".")[1:], config)
        if (words := EXPECTED.get(type(default))) is None:
            return None
        if isinstance(default, ml_collections.ConfigDict):
            field = FIELDS.get(name.removeprefix("config."))
            return field.expectation() if field else f"{words} such as {{'data': -1}}"
        return f"{words} such as {default!r}" if type(default) in (int, float) else words

    with explained(expected):
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
            mend = suggest(field, values, show="--config.{}".format, otherwise=ALL_FIELDS)
            if (name := field.rpartition(".")[0]) in dicts:
                mend = f"; to change the entries, set the complete dict, as in {EXAMPLES[name]}"
            raise UsageError(f"{argument}: the config has no field {field!r}{mend}.")


# -------------------------------------------------------------------------------------------------
# Translates the arguments that people type into the flags that absl and `config_flags` define.
#
# manualpar train fsdp_lm --num-processes=2 --model.num_layers=4 --mesh=data=4,model=2
#
# becomes
#
#     --config=fsdp_lm --num_processes=2 --config.model.num_layers=4
#     --config.parallel.mesh={'data': 4, 'model': 2}
#
# Dashes and underscores in a flag's name mean the same. A name with a dot is a field of the
# config, and so are the fields that are in no group. Everything else stays as it is.


MESH = "mesh"
MESH_HELP = "The mesh: its axes with their sizes, such as data=4,model=2; -1 for all other devices."
# Fields of a config that are in no group, such as `seed`.
UNGROUPED = frozenset(name for name in FIELDS if "." not in name)


def translate_fields(
    arguments: Sequence[str], syntax: "Syntax", *, typed: dict[str, str] | None = None
) -> list[str]:
    """Translates the arguments of a command, without the program's name.

    Arguments before the first flag are values of `syntax.positional`. Only `config` may have
    several. `typed` gets the name that was typed for each translated flag, for messages.
    """
    given, first = list(arguments), list[str]()
    while given and not given[0].startswith("-"):
        first.append(f"--{syntax.positional}={given.pop(0)}")
        if syntax.positional != "config":  # A field has one value; the command refuses more.
            break

    def others(name: str, value: str, rest: Iterator[str]) -> tuple[str, str] | None:
        if name == MESH:
            mesh = parse_mesh(value[1:] if value else next(rest, ""))
            return "--config.parallel.mesh", f"={mesh}"
        return (f"--config.{name}", value) if name in syntax.fields or _is_field(name) else None

    return first + translate(
        given, syntax.flags, renamed=syntax.renamed, others=others, typed=typed
    )


@contextlib.contextmanager
def _naming_fields(typed: Mapping[str, str]) -> Iterator[None]:
    """Names flags as they were typed, and fields in the short form unless a long one was typed."""
    try:
        with naming_typed(typed):
            yield
    except UsageError as error:
        message = str(error)
        if not any(name.lstrip("-").startswith("config.") for name in typed.values()):
            message = re.sub(r"(?<![\w-])--config\.(?=\w)", "--", message)
        raise UsageError(message) from error


def _is_field(name: str) -> bool:
    group = name.split(".")[0]
    return name in UNGROUPED or ("." in name and group not in ("config", "noconfig"))


def parse_mesh(text: str) -> dict[str, int]:
    """Parses the value of `--mesh`, such as `data=4,model=2`."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not re.fullmatch(r"-?\d+", size) or axis in mesh:
            raise UsageError(f"--mesh={text}: expected axes such as data=4,model=2.")
        mesh[axis] = int(size)
    return mesh


# -------------------------------------------------------------------------------------------------


CONFIG_HELP = (
    "The config: a name, such as fsdp_lm (`manualpar configs` lists them), or a Python file with "
    "get_config()."
)
DEFAULT_CONFIG = "fsdp"  # The name of a config, not of a strategy.
NO_CONFIG = (
    "--config has no value, expected a name such as fsdp_lm, or a file such as my_config.py."
)
_MODEL_FIELDS = tuple(name for fields in MODEL_FIELDS.values() for name in fields)
WORKDIR = Flag(
    "Folder of the run, by default a new runs/<name of the config>/<next number>. If it holds a "
    "checkpoint, the run resumes from it.",
    Path,
)


WAIT = Flag(
    "The seconds to wait until all processes have connected to process 0.",
    float,
    WAIT_SECONDS,
    value="SECONDS",
)
OUTPUT = Flag("Folder of the results, by default a new numbered folder in runs/.", Path)


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
      renamed: Old names of flags, each with its new name.
      positional: The flag that arguments before the first flag are values of.
      refine: Checks the flags' values, and may change them; raises `UsageError` for a mistake.
      fields: The fields that only the configs of this command have.
    """

    flags: Mapping[str, Flag]
    takes_several: bool = False
    refused: Mapping[str, str] = types.MappingProxyType({})
    renamed: Mapping[str, str] = types.MappingProxyType({})
    positional: str = "config"
    refine: Callable[[CommandLine], None] = lambda line: None
    fields: Mapping[str, Field] = types.MappingProxyType({})


TRAINING = Syntax(
    {
        "workdir": WORKDIR._replace(in_buckets=True),
        "devices": Flag(
            "The number of CPU devices to simulate; by default 8 if there is only a CPU.", int
        ),
        "coordinator_address": Flag(
            "Host:port of process 0, if several processes train together and neither environment "
            "variables nor a cluster manager such as Slurm give it. With auto, JAX finds this "
            "address, --num-processes and --process-id."
        ),
        "num_processes": Flag(
            "The number of processes that train together, with --coordinator-address.", int
        ),
        "process_id": Flag("This process's number, from 0, with --coordinator-address.", int),
        "wait": WAIT,
        "force": Flag(
            "Starts even if the run does not fit into memory or simulates very many devices.",
            bool,
            False,
        ),
    }
)


def run_absl(
    work: Callable[[CommandLine], int],
    argv: Sequence[str],
    usage: str,
    default_config: str,
    syntax: Syntax = TRAINING,
) -> NoReturn:
    """Parses a command line with `flags_parser`, runs the command, and ends the process.

    Args:
      work: Runs a parsed command line; returns the exit code.
      argv: The command line, the program's name first.
      usage: The first lines of `--help`; `{program}` in it stands for the program's name.
    """
    parser = flags_parser(usage.replace("{program}", argv[0]), default_config, syntax)
    app.run(work, argv=list(argv), flags_parser=parser)


def flags_parser(
    description: str, default_config: str | Path, syntax: Syntax = TRAINING
) -> Callable[[list[str]], CommandLine]:
    """Makes the parser for `absl.app.run`; `--help` prints `description` and then the flags.

    The parser ends the process with code 0 after `--help`. After a mistake it prints a sentence and
    ends the process with code 2.
    """

    def parse_or_end(argv: list[str]) -> CommandLine:
        try:
            if HELP & set(argv):
                print_help(command_help(description, argv, default_config, syntax))
                sys.exit(0)
            return parse_command_line(
                argv, default_config=default_config, syntax=syntax, flag_values=absl_flags.FLAGS
            )
        except UsageError as error:
            print_error(error)
            sys.exit(USAGE_EXIT_CODE)

    return parse_or_end


def command_help(
    description: str, argv: Sequence[str], default_config: str | Path, syntax: Syntax
) -> str:
    """Returns the text of `--help`, with the fields of the config that the command line names."""
    arguments = [argument for argument in argv[1:] if argument not in HELP]
    given = translate_fields(arguments, syntax)
    path = str(default_config)
    for argument, value in zip(given, [*given, ""][1:], strict=True):
        name, equals, attached = argument.partition("=")
        if name in ("--config", "-config"):
            path = attached if equals else value
            break
    flags = {"--config=NAME": CONFIG_HELP, "--mesh=AXIS=SIZE,...": MESH_HELP}
    flags |= {flag.form(name): flag.explain() for name, flag in syntax.flags.items()}
    if not path:
        raise UsageError(NO_CONFIG)
    return config_help(description, find_config(path), flags=flags, added=syntax.fields)


def parse_command_line(
    argv: Sequence[str],
    *,
    default_config: str | Path,
    syntax: Syntax = TRAINING,
    flag_values: absl_flags.FlagValues | None = None,
) -> CommandLine:
    """Parses a command line; raises `UsageError` for a mistake.

    `argv` begins with the program's name. The flags are defined in `flag_values`, by default in a
    new object.
    """
    typed: dict[str, str] = {}
    arguments = translate_fields(argv[1:], syntax, typed=typed)
    with _naming_fields(typed):
        return _parse([*argv[:1], *arguments], default_config, syntax, flag_values)


def _parse(
    argv: Sequence[str],
    default_config: str | Path,
    syntax: Syntax,
    flag_values: absl_flags.FlagValues | None,
) -> CommandLine:
    """Parses translated arguments, see `parse_command_line`."""
    flags = syntax.flags
    flag_values = absl_flags.FlagValues() if flag_values is None else flag_values
    absl_flags.DEFINE_multi_string("config", [], CONFIG_HELP, flag_values=flag_values)
    if argv[-1] in ("--config", "-config"):
        raise UsageError(NO_CONFIG)
    values, overrides = read_flags(argv, flags, flag_values)
    _check_overrides(overrides, syntax)
    paths: list[str] = flag_values.config or [str(default_config)]
    if not all(paths):
        raise UsageError(NO_CONFIG)
    if len(paths) > 1 and not syntax.takes_several:
        raise UsageError("--config is given twice, expected once.")
    if values.get("devices") is not None and values["devices"] < 1:
        raise UsageError(f"--devices={values['devices']}: expected at least 1 device to simulate.")
    wait = values.get("wait", 1.0)
    if not (math.isfinite(wait) and wait > 0):
        raise UsageError(f"--wait={wait}: expected a positive number of seconds.")
    line = CommandLine(_load_configs(paths, overrides), types.SimpleNamespace(**values))
    syntax.refine(line)
    return line


def _check_overrides(arguments: list[str], syntax: Syntax) -> None:
    """Refuses arguments that are neither `--config.<field>` nor the value of such a flag."""
    takes_value = False
    for argument in arguments:
        is_override = OVERRIDE.match(argument)
        if not is_override and re.match(r"--?[a-zA-Z_]", argument):
            name = argument.lstrip("-").split("=")[0]
            if name in syntax.refused:
                raise UsageError(f"--{name} is not a flag of this command: {syntax.refused[name]}.")
            fields = (*FIELDS, *_MODEL_FIELDS, *syntax.fields)
            refuse_flag(argument, syntax.flags, MESH, "config", *fields)
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
        path = find_config(text)
        # If two files have the same name, their results are named after the folder and the file.
        parts = path.with_suffix("").parts[-2 if stems[path.stem] > 1 else -1 :]
        try:
            configs.append(NamedConfig("-".join(parts), path, load_with(path, overrides)))
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
