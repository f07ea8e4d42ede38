"""Budgets: the most that a step may send, hold and compute, in a file that is checked in.

A budget turns a ledger into a test. The file is TOML with a table for each program, every number
the most allowed on one device in one step:

    [fsdp]
    devices = 8                  # what the numbers are for; another number is refused
    bytes = 3_022_180            # sent, as the traced step has it; "2.9 MiB" means as much
    collectives = 53             # run, likewise
    flops = 40_000_000
    peak_memory = "1 MiB"        # of all classes together, see `manualpar.inspect.memory`
    temporaries = 900_000        # of the compiled step, likewise the next two
    compiled_bytes = 3_100_000
    compiled_collectives = 60

    [fsdp.purposes]
    gather_params = {bytes = 1_100_000, collectives = 20}

    [fsdp.axes]
    data = {bytes = 3_022_180}   # "replica,data" for a tuple of axes

    [fsdp.modules]
    "layers_*/mlp" = {bytes = 600_000, flops = 9_000_000}

The name of a module is a glob: `*` stands for anything but a slash, `**` for anything, and the
limit is that of each module that it matches, not of their sum. No key is required. A key that is
not known, and a module that matches nothing, is an error: a limit on what is not there holds
nothing.

What the traced step sends depends on no machine. What a compiler makes of it does, and changes with
its version, so that what is compiled deserves some room in a budget.
"""

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COMPILED = ("temporaries", "compiled_bytes", "compiled_collectives")
TOTALS = ("bytes", "collectives", "flops", "peak_memory", *COMPILED)
GROUPS: Mapping[str, tuple[str, ...]] = {
    "purposes": ("bytes", "collectives"),
    "axes": ("bytes", "collectives"),
    "modules": ("bytes", "collectives", "flops"),
}
IN_BYTES = ("bytes", "peak_memory", "temporaries", "compiled_bytes")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class BudgetError(ValueError):
    """A budget that cannot be read, or does not fit what it is held against."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """One line of a budget.

    Attributes:
      group: `"purposes"`, `"axes"`, `"modules"`, or `""` for the whole step.
      name: Which purpose, axes or modules; `""` for the whole step.
      quantity: What is limited, one of `TOTALS` or of `GROUPS[group]`.
      most: The most that is allowed.
    """

    group: str
    name: str
    quantity: str
    most: int

    @property
    def key(self) -> str:
        """Where it stands in the file, below the program's name."""
        inside = [self.group, quoted(self.name)] if self.group else []
        return ".".join([*inside, self.quantity])


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a program may send, hold and compute.

    Attributes:
      name: Of the program, as in the file.
      devices: How many devices it is for; `None` for any number.
      limits: Its lines.
    """

    name: str
    devices: int | None
    limits: tuple[Limit, ...]

    def most(self, quantity: str) -> int | None:
        """The limit of the whole step; `None` if there is none."""
        of_step = {limit.quantity: limit.most for limit in self.limits if not limit.group}
        return of_step.get(quantity)


def read_budgets(path: Path) -> dict[str, Budget]:
    """Reads a file of budgets.

    Args:
      path: The TOML file.

    Returns:
      The budgets by name.

    Raises:
      BudgetError: There is no such file, it is not TOML, or holds what is not a budget; the message
        names the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BudgetError(f"{path}: {error.strerror or error}.") from error
    return parse_budgets(text, path)


def parse_budgets(text: str, source: object) -> dict[str, Budget]:
    """Reads the text of a file of budgets, see `read_budgets`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BudgetError(f"{source}: {error}.") from error
    budgets = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BudgetError(
                f"{source}: {name} = {table!r} stands outside of a table, expected it below the "
                f"name of a program such as [fsdp]."
            )
        budgets[name] = _read_budget(name, table, f"{source}: [{name}]")
    return budgets


def budget_for(budgets: Mapping[str, Budget], name: str, source: object) -> Budget:
    """The budget of a program.

    Raises:
      BudgetError: There is none; the message has the nearest name.
    """
    if name not in budgets:
        nearest = f"; the nearest one is [{nearest_name(name, budgets)}]" if budgets else ""
        raise BudgetError(
            f"{source} has no budget [{name}]{nearest}. Write one with --write_budget."
        )
    return budgets[name]


def parse_size(text: str) -> int | None:
    """The bytes of `"1.5 MiB"`, whole ones; `None` if that is no size."""
    found = re.fullmatch(rf"\s*([\d_]+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", text)
    return math.floor(float(found[1]) * UNITS[found[2]]) if found else None


def _read_budget(name: str, table: Mapping[str, Any], where: str) -> Budget:
    """A program's table."""
    limits, devices = [], None
    for key, value in table.items():
        if key == "devices":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BudgetError(f"{where} devices is {value!r}, expected a number of devices.")
            devices = value
        elif key in GROUPS:
            limits += _read_group(key, value, where)
        else:
            _check_key(key, ("devices", *TOTALS, *GROUPS), where)
            limits.append(Limit("", "", key, _read_amount(key, value, f"{where} {key}")))
    return Budget(name, devices, tuple(limits))


def _read_group(group: str, table: Any, where: str) -> list[Limit]:
    """The limits of a group, each name with a table of its own."""
    example = ", expected a table such as {bytes = 1_000}."
    if not isinstance(table, dict):
        raise BudgetError(f"{where} {group} is {table!r}{example}")
    limits = []
    for name, amounts in table.items():
        inside = f"{where} {group}.{quoted(name)}"
        if not isinstance(amounts, dict):
            raise BudgetError(f"{inside} is {amounts!r}{example}")
        for key, value in amounts.items():
            _check_key(key, GROUPS[group], inside)
            amount = _read_amount(key, value, f"{inside}.{key}")
            limits.append(Limit(group, name, key, amount))
    return limits


def _read_amount(quantity: str, value: Any, where: str) -> int:
    """The most that a line allows."""
    size = parse_size(value) if isinstance(value, str) and quantity in IN_BYTES else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        expected = "an integer, at least 0"
        expected += ", or a size such as '1.5 MiB'" if quantity in IN_BYTES else ""
        raise BudgetError(f"{where} is {value!r}, expected {expected}.")
    return size


def _check_key(key: str, known: Iterable[str], where: str) -> None:
    """Refuses a key that means nothing."""
    if key not in (known := tuple(known)):
        raise BudgetError(
            f"{where} {key} is not a known key, expected one of {', '.join(known)}; the nearest "
            f"one is {nearest_name(key, known)}."
        )


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name most like this one."""
    return max(sorted(known), key=lambda x: difflib.SequenceMatcher(None, name, x).ratio())


def quoted(name: str) -> str:
    """A name as TOML wants it in a key."""
    return name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
