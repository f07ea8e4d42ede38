"""The flags of `experiments.inspect`, and what they ask for."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from absl import flags as absl_flags

from manualpar.inspect.budgets import parse_size
from manualpar.training.command_line import Flag, flags_parser, parse_command_line
from manualpar.training.config_files import NamedConfig
from manualpar.usage import UsageError

MOST_COMPILED = 64
INSPECT_FLAGS: Mapping[str, Flag] = {
    "devices": Flag(
        "How many devices a step is for, by default those there are (8 simulated ones where the "
        "CPU is all there is).",
        int,
    ),
    "compile": Flag(
        "Whether to compile the steps too, for simulated CPU devices if --devices is given; by "
        f"default, up to {MOST_COMPILED} devices. --nocompile needs no devices, however many.",
        bool,
    ),
    "output": Flag("Folder of the results, by default a new runs/inspect/<next number>.", Path),
    "against": Flag(
        "A ledger written before, or a folder of them, to show the difference to.", Path
    ),
    "budget": Flag("A TOML file with the most that each config may send, hold and compute.", Path),
    "write_budget": Flag("Writes what is measured into the file that --budget names.", bool, False),
    "memory": Flag(
        "What a device has, such as 16GiB, or the name of a chip such as v5p: marked in the "
        "picture."
    ),
}

ChipMemory = Callable[[str], int]


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

    configs: tuple[NamedConfig, ...]
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
    """Makes the parser that `absl.app.run` takes, see `command_line.flags_parser`.

    Args:
      description: What `--help` shows first.
      default_config: The config where `--config` is not given.
      chip_memory: The bytes that a chip of a name has; raises `ValueError` for an unknown name.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process.
    """
    parse = functools.partial(parse_inspect_command, chip_memory=chip_memory)
    return flags_parser(description, default_config, flags=INSPECT_FLAGS, parse=parse)


def parse_inspect_command(
    argv: Sequence[str],
    *,
    default_config: Path,
    chip_memory: ChipMemory,
    flag_values: absl_flags.FlagValues | None = None,
) -> InspectCommand:
    """Parses a command line with one or several configs, see `parse_command_line`.

    Raises:
      UsageError: It cannot be followed; the message is one sentence that says why.
    """
    line = parse_command_line(
        argv,
        default_config=default_config,
        flags=INSPECT_FLAGS,
        takes_several=True,
        flag_values=flag_values,
    )
    given = line.flags
    if given.write_budget and not given.budget:
        raise UsageError(
            "--write_budget needs the name of the file, as in --budget=configs/budgets.toml "
            "--write_budget."
        )
    memory, memory_name = _read_memory(given.memory, chip_memory)
    return InspectCommand(
        configs=line.configs,
        devices=given.devices,
        compile=(given.devices or 1) <= MOST_COMPILED if given.compile is None else given.compile,
        output=given.output,
        against=given.against,
        budget=given.budget,
        write_budget=given.write_budget,
        memory=memory,
        memory_name=memory_name,
    )


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
