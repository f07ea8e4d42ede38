"""The command line of `experiments.inspect`: several configs, and what to do with their ledgers.

`--config` may be given several times. What `--config.<field>=<value>` sets is set in all of them,
wherever it stands; each is understood by `manualpar.training.command_line`, one config at a time.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from manualpar.inspect.budgets import parse_size
from manualpar.training.command_line import UsageError, parse_command_line
from manualpar.training.config import nearest
from manualpar.training.main import ending_parser

MOST_COMPILED = 64
INSPECT_FLAGS_HELP = {
    "config": "A file to take a config from, a Python file with get_config(); may be given several "
    "times.",
    "config.<field>": "A value for a field of every config.",
    "devices": "How many devices a step is for, by default those there are (8 simulated ones where "
    "the CPU is all there is).",
    "compile": "Whether to compile the steps too, for simulated CPU devices if --devices is given; "
    f"by default, up to {MOST_COMPILED} devices. --nocompile needs no devices, however many.",
    "output": "Folder of the results, by default a new runs/inspect/<next number>.",
    "against": "A ledger written before, or a folder of them, to show the difference to.",
    "budget": "A TOML file with the most that each config may send, hold and compute.",
    "write_budget": "Writes what is measured into the file that --budget names.",
    "memory": "What a device has, such as 16GiB, or the name of a chip such as v5p: marked in the "
    "picture.",
}
STRINGS = ("output", "against", "budget", "memory")

ChipMemory = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Named:
    """A config and what it is called in files and tables."""

    name: str
    path: Path
    config: Any


@dataclasses.dataclass(frozen=True)
class InspectCommand:
    """What a command line asks for.

    Attributes:
      configs: The configs, overrides applied, not yet checked.
      devices: How many devices the steps are for; `None`: those there are.
      compile: Whether to compile.
      output: Where results go; `None`: to a new folder.
      against: A ledger written before, or a folder of them.
      budget: The file of the budgets.
      write_budget: Whether to write them instead of holding the ledgers against them.
      memory: The bytes that a device has, as far as they are known.
      memory_name: What to call that: the chip's name, or `device`.
    """

    configs: tuple[Named, ...]
    devices: int | None
    compile: bool
    output: Path | None = None
    against: Path | None = None
    budget: Path | None = None
    write_budget: bool = False
    memory: int | None = None
    memory_name: str = ""


def inspect_flags_parser(
    description: str, default_config: Path, *, chip_memory: ChipMemory
) -> Callable[[list[str]], InspectCommand]:
    """Makes the parser that `absl.app.run` takes, see `manualpar.training.main.flags_parser`.

    Args:
      description: What `--help` shows first.
      default_config: The config where `--config` is not given.
      chip_memory: The bytes that a chip of a name has; raises `ValueError` for what is no name.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process.
    """
    lines = [f"  --{name:16s}  {text}" for name, text in INSPECT_FLAGS_HELP.items()]
    return ending_parser(
        lambda argv: parse_inspect_command(
            argv, default_config=default_config, chip_memory=chip_memory, flag_values=flags.FLAGS
        ),
        help_text=lambda: "\n".join([description.strip(), "", "Flags:", *lines]),
    )


def parse_inspect_command(
    argv: Sequence[str],
    *,
    default_config: Path,
    chip_memory: ChipMemory,
    flag_values: flags.FlagValues | None = None,
) -> InspectCommand:
    """Understands a command line.

    Args:
      argv: The arguments, the program's name first.
      default_config: The config where `--config` is not given.
      chip_memory: See `inspect_flags_parser`.
      flag_values: Where to define the flags, by default where nobody else sees them.

    Returns:
      What it asks for.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    flag_values = flags.FlagValues() if flag_values is None else flag_values
    help_of = INSPECT_FLAGS_HELP
    flags.DEFINE_multi_string("config", [], help_of["config"], flag_values=flag_values)
    flags.DEFINE_integer("devices", None, help_of["devices"], flag_values=flag_values)
    for name in STRINGS:
        flags.DEFINE_string(name, None, help_of[name], flag_values=flag_values)
    flags.DEFINE_boolean("compile", None, help_of["compile"], flag_values=flag_values)
    flags.DEFINE_boolean("write_budget", False, help_of["write_budget"], flag_values=flag_values)
    flag_values.set_gnu_getopt()  # An override's value may be an argument of its own.
    try:
        _, *rest = flag_values(list(argv), known_only=True)
    except flags.IllegalFlagValueError as error:
        found = re.match(r"flag (--(\w+)=.*?): ", str(error))
        if found and found[2] == "devices":
            raise UsageError(f"{found[1]}: expected an integer.") from error
        raise UsageError(f"{str(error).splitlines()[0]}.") from error
    except flags.Error as error:
        raise UsageError(f"{error}.") from error
    overrides = _check_rest(rest)
    devices: int | None = flag_values.devices
    if devices is not None and devices < 1:
        raise UsageError(f"--devices={devices}: expected at least 1 device.")
    if flag_values.write_budget and not flag_values.budget:
        raise UsageError(
            "--write_budget needs the name of the file, as in --budget=configs/budgets.toml "
            "--write_budget."
        )
    memory, memory_name = _read_memory(flag_values.memory, chip_memory)
    paths = {
        name: Path(str(flag_values[name].value)) if flag_values[name].value else None
        for name in ("output", "against", "budget")
    }
    compiles = flag_values.compile
    return InspectCommand(
        configs=_load(flag_values.config or [str(default_config)], overrides),
        devices=devices,
        compile=(devices or 1) <= MOST_COMPILED if compiles is None else compiles,
        output=paths["output"],
        against=paths["against"],
        budget=paths["budget"],
        write_budget=flag_values.write_budget,
        memory=memory,
        memory_name=memory_name,
    )


def _check_rest(arguments: list[str]) -> list[str]:
    """Refuses what is no override of a config's field."""
    takes_value = False
    for argument in arguments:
        is_override = re.match(r"--?(no)?config\.", argument)
        if not is_override and re.match(r"--?[a-zA-Z_]", argument):
            name = argument.lstrip("-").split("=")[0]
            suggestion = nearest(name, INSPECT_FLAGS_HELP.keys() - {"config.<field>"})
            raise UsageError(f"--{name} is not a known flag; the nearest one is --{suggestion}.")
        if not is_override and not takes_value:
            raise UsageError(f"{argument!r} is not understood, expected flags such as --devices=8.")
        takes_value = bool(is_override) and "=" not in argument
    return arguments


def _load(paths: Sequence[str], overrides: list[str]) -> tuple[Named, ...]:
    """Loads each config, with the same values set in all."""
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise UsageError(f"--config={twice[0]} is given twice, expected each file once.")
    stems = Counter(Path(path).stem for path in paths)
    configs: list[Named] = []
    for text in paths:
        path = Path(text)
        # Files of one name are told apart by their folders.
        parts = path.with_suffix("").parts[-2 if stems[path.stem] > 1 else -1 :]
        try:
            arguments = ["inspect", f"--config={text}", *overrides]
            command = parse_command_line(arguments, default_config=path)
        except UsageError as error:
            of = "" if text in str(error) or len(paths) == 1 else f"{text}: "
            raise UsageError(f"{of}{error}") from error
        configs.append(Named("-".join(parts), path, command.config))
    if clashes := [name for name, n in Counter(each.name for each in configs).items() if n > 1]:
        raise UsageError(
            f"two configs would be called {clashes[0]!r}, which results are named after; inspect "
            "them one at a time."
        )
    return tuple(configs)


def _read_memory(text: str | None, chip_memory: ChipMemory) -> tuple[int | None, str]:
    """What a device has, and what to call it."""
    if text is None:
        return None, ""
    if size := parse_size(text):
        return size, "device"
    try:
        return chip_memory(text), text
    except ValueError as error:
        raise UsageError(
            f"--memory={text}: expected a size such as 16GiB, or a chip: {error}"
        ) from error
