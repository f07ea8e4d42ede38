"""Budgets: upper limits for the bytes and operations of a step, in a file under version control.

A ledger (`manualpar.inspect.step_ledger`) holds the numbers of a step: what it sends, computes and
holds. A budget holds some numbers of an older ledger as limits. `check_budget` compares a newer
ledger with these limits. A number above its limit is an error. The file is TOML with a table for
each program. Every number is an upper limit for one device in one step:

    [fsdp]
    devices = 8                  # a step on another number of devices is an error
    bytes = 3_022_180            # sent by the traced step; "2.9 MiB" is allowed, too
    collectives = 53             # run by the traced step
    flops = 40_000_000
    peak_memory = "1 MiB"        # the sum of all classes in `manualpar.inspect.memory`
    temporaries = 900_000        # of the compiled step, like the next two limits
    compiled_bytes = 3_100_000
    compiled_collectives = 60

    [fsdp.purposes]
    gather_params = {bytes = 1_100_000, collectives = 20}

    [fsdp.axes]
    data = {bytes = 3_022_180}   # "replica,data" for a tuple of axes

    [fsdp.modules]
    "layers_*/mlp" = {bytes = 600_000, flops = 9_000_000}

    [fsdp.dtypes]
    bfloat16 = {flops = 900_000} # a product that falls back from float8 exceeds it

The name of a module is a glob: `*` stands for anything but a slash, `**` for anything. The limit
holds for each module that matches, not for their sum. No key is required. An unknown key is an
error. A name that matches nothing in the step is an error too, because its limit could never be
exceeded.
"""

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.core.tracing.scopes import REGATHER, SCOPES
from manualpar.errors import UsageError, suggest
from manualpar.inspect.ledger_difference import (
    LOW_PRECISION,
    NOTHING,
    Json,
    flops_by_dtype,
    name_module,
    sent_by,
    totals,
)
from manualpar.inspect.scope_parsing import OTHER

__all__ = [
    "Budget",
    "BudgetError",
    "Verdict",
    "budget_for",
    "budget_text",
    "check_budget",
    "parse_budgets",
    "parse_size",
    "read_budgets",
    "replace_budget",
]

# Name of a limit on the whole step -> name of the limited number in the totals of a ledger.
TOTALS = {
    "bytes": "bytes sent",
    "collectives": "collectives",
    "flops": "FLOPs",
    "peak_memory": "memory: peak",
    "temporaries": "compiled: temporaries",
    "compiled_bytes": "compiled: bytes sent",
    "compiled_collectives": "compiled: collectives",
}
COMPILED = ("temporaries", "compiled_bytes", "compiled_collectives")
# Group of limits in a budget -> the quantities that a limit of this group may name.
QUANTITIES = {
    "purposes": ("bytes", "collectives"),
    "axes": ("bytes", "collectives"),
    "modules": ("bytes", "collectives", "flops"),
    "dtypes": ("flops",),
}
# The dtypes that a budget may limit, although a step has no product in them.
DTYPES = ("float8", "int8", "bfloat16", "float16", "float32", "float64")
# Group -> the field of a collective, in a ledger's JSON, by which the group adds up collectives.
FIELDS = {"purposes": "purpose", "axes": "axes", "modules": "module"}
IN_BYTES = ("bytes", "peak_memory", "temporaries", "compiled_bytes")
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SLACK = 1.25  # A limit above this multiple of the measured number is reported as loose.
NUM_NAMED = 3  # A message names at most this many modules or classes of memory.


class BudgetError(UsageError, ValueError):
    """An unreadable budget, or a budget that does not fit the ledger."""


class BudgetKey(NamedTuple):
    """The place of a number in a budget, below the name of the program.

    Attributes:
      group: `"purposes"`, `"axes"`, `"modules"`, `"dtypes"`, or `""` for the whole step.
      name: The purpose, the axes, the modules or the dtype; `""` for the whole step.
      quantity: A key of `TOTALS`, or one of `QUANTITIES[group]`.
    """

    group: str
    name: str
    quantity: str

    def __str__(self) -> str:
        inside = [self.group, quoted(self.name)] if self.group else []
        return ".".join([*inside, self.quantity])

    def limits(self, measured: "BudgetKey") -> bool:
        """Returns whether a limit with this key applies to the number whose key is `measured`."""
        if (self.group, self.quantity) != (measured.group, measured.quantity):
            return False
        if self.group == "modules":
            return matches(self.name, measured.name)
        return self.name == measured.name


class Budget(NamedTuple):
    """Upper limits for a program's numbers on `devices` devices (`None`: on any number)."""

    name: str
    devices: int | None
    limits: Mapping[BudgetKey, int]

    def most(self, quantity: str) -> int | None:
        """Returns a quantity's limit for the whole step; `None` if there is no such limit."""
        return self.limits.get(BudgetKey("", "", quantity))


class Verdict(NamedTuple):
    """The result of checking a ledger against a budget.

    Attributes:
      broken: A sentence for each limit that is exceeded.
      slack: A sentence for each limit above `SLACK` times the measured number. Such a limit is too
        high to notice a change.
      unchecked: The keys of limits on numbers that the ledger lacks, because nothing was compiled
        or the memory is unknown.
    """

    broken: tuple[str, ...]
    slack: tuple[str, ...]
    unchecked: tuple[str, ...]


def read_budgets(path: Path) -> dict[str, Budget]:
    """Reads a file of budgets; raises a `BudgetError` if something in it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BudgetError(f"{path}: {error.strerror or error}.") from error
    return parse_budgets(text, path)


def parse_budgets(text: str, source: object) -> dict[str, Budget]:
    """Parses the text of a budget file; `source` is the file's name in messages of errors."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BudgetError(f"{source}: {error}.") from error
    budgets = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BudgetError(
                f"{source}: {name} = {table!r} is outside of a table, expected it below the name "
                "of a program such as [fsdp]."
            )
        where = f"{source}: [{name}]"
        devices = table.pop("devices", None)
        if devices is not None and (type(devices) is not int or devices < 1):
            raise BudgetError(f"{where} devices is {devices!r}, expected a number of devices.")
        budgets[name] = Budget(name, devices, dict(_read_limits(table, where)))
    return budgets


def budget_for(budgets: Mapping[str, Budget], name: str, source: object) -> Budget:
    """Returns the budget of the program `name`; raises a `BudgetError` if `source` has none."""
    if name not in budgets:
        near = suggest(name, budgets, show="[{}]".format)
        raise BudgetError(f"{source} has no budget [{name}]{near}. Write one with --write_budget.")
    return budgets[name]


def check_budget(budget: Budget, ledger: Json, source: object) -> Verdict:
    """Checks the `Ledger.to_json` of a step against a budget; `source` is the budget's file.

    Raises:
      BudgetError: The budget is for another number of devices, or limits a purpose, axes or a
        module that the step does not have.
    """
    devices, where = math.prod(ledger["mesh"].values()), f"{source}: [{budget.name}]"
    if budget.devices not in (None, devices):
        raise BudgetError(
            f"{where} is for devices={budget.devices}, but the step is for {devices}; inspect the "
            f"step with --devices={budget.devices}."
        )
    measured = amounts(ledger)
    broken, slack, unchecked = [], [], []
    for key, most in budget.limits.items():
        found = sorted((each.name, n) for each, n in measured.items() if key.limits(each))
        over = [(name, amount) for name, amount in found if amount > most]
        broken += [_too_many(budget, key, name, amount, ledger) for name, amount in over]
        if not found and key.group:
            raise BudgetError(f"{where} {key}: {_no_such_name(key, measured)}")
        if not found:
            unchecked.append(str(key))
        elif not over:
            # A limit holds for each matching module, so the largest number decides.
            name, amount = max(found, key=lambda item: item[1])
            of = f" of {name_module(name)}" if key.group == "modules" else ""
            if most > SLACK * amount:
                slack.append(f"{budget.name}: {key} allows {most:,}, measured {amount:,}{of}")
    return Verdict(tuple(broken), tuple(slack), tuple(unchecked))


def amounts(ledger: Json) -> dict[BudgetKey, int]:
    """Returns a ledger's numbers by their keys in a budget.

    A known purpose, mesh axis or module without collectives has 0 bytes and 0 collectives. Numbers
    of the whole step that the ledger lacks are left out.
    """
    numbers = totals(ledger)
    found = {BudgetKey("", "", key): whole(numbers[x]) for key, x in TOTALS.items() if x in numbers}
    flops = ledger["flops"]["by_module"]
    of_dtypes = dict.fromkeys(DTYPES, 0) | flops_by_dtype(ledger)
    found |= {BudgetKey("dtypes", name, "flops"): whole(n) for name, n in of_dtypes.items()}
    purposes = (*SCOPES, REGATHER, OTHER)
    known = {"purposes": purposes, "axes": tuple(ledger["mesh"]), "modules": tuple(flops)}
    for group, field in FIELDS.items():
        sums = sent_by(ledger["collectives"], field)
        # First the names that have collectives, then the known names that have none.
        for (name,) in dict.fromkeys([*sums, *((name,) for name in known[group])]):
            sent = sums.get((name,), NOTHING)
            found[BudgetKey(group, name, "bytes")] = whole(sent.bytes)
            found[BudgetKey(group, name, "collectives")] = sent.times
            if group == "modules":
                found[BudgetKey(group, name, "flops")] = whole(flops.get(name, 0))
    return found


def parse_size(text: str) -> int | None:
    """Parses a size such as `"1.5 MiB"` into bytes, rounded down; `None` for other texts."""
    found = re.fullmatch(rf"\s*([\d_]+(?:\.\d+)?)\s*({'|'.join(UNITS)})\s*", text)
    return math.floor(float(found[1]) * UNITS[found[2]]) if found else None


def matches(glob: str, module: str) -> bool:
    """Returns whether a glob matches the path of a module; only `**` matches slashes."""
    parts = re.split(r"(\*\*|\*|\?)", glob)
    wild = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return bool(re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), module))


def quoted(name: str) -> str:
    """Quotes a name for use as a key of TOML, if needed."""
    return name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'


def whole(amount: float) -> int:
    """Rounds up to an integer, because a limit that is rounded down would be exceeded."""
    return math.ceil(amount - 1e-6)


def _read_limits(table: Mapping[str, Any], where: str) -> Iterator[tuple[BudgetKey, int]]:
    for key, value in table.items():
        if key not in QUANTITIES:
            _check_key(key, ("devices", *TOTALS, *QUANTITIES), where)
            yield BudgetKey("", "", key), _read_amount(key, value, f"{where} {key}")
            continue
        for name, limits in _read_table(value, f"{where} {key}").items():
            inside = f"{where} {key}.{quoted(name)}"
            for quantity, most in _read_table(limits, inside).items():
                _check_key(quantity, QUANTITIES[key], inside)
                yield (
                    BudgetKey(key, name, quantity),
                    _read_amount(quantity, most, f"{inside}.{quantity}"),
                )


def _read_table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BudgetError(f"{where} is {value!r}, expected a table such as {{bytes = 1_000}}.")
    return value


def _read_amount(quantity: str, value: Any, where: str) -> int:
    size = parse_size(value) if isinstance(value, str) and quantity in IN_BYTES else value
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        expected = "an integer, at least 0"
        expected += ", or a size such as '1.5 MiB'" if quantity in IN_BYTES else ""
        raise BudgetError(f"{where} is {value!r}, expected {expected}.")
    return size


def _check_key(key: str, known: tuple[str, ...], where: str) -> None:
    if key not in known:
        raise BudgetError(
            f"{where} {key} is not a known key, expected one of {', '.join(known)}"
            f"{suggest(key, known, show=str)}."
        )


def _too_many(budget: Budget, key: BudgetKey, name: str, amount: int, ledger: Json) -> str:
    """Returns the sentence about an exceeded limit: by how much, and which modules to look at."""
    most, more = budget.limits[key], amount - budget.limits[key]
    part = f" (+{more / most:.1%})" if most else ""
    verb, where = " is", _offenders(budget, key, ledger)
    if key.group == "modules":
        verb, where = f": {name_module(name)} has", ""
    return (
        f"{budget.name}: {key}{verb} {amount:,}, expected at most {most:,}: {more:,} too many"
        f"{part}{where}."
    )


def _no_such_name(key: BudgetKey, measured: Iterable[BudgetKey]) -> str:
    kinds = {"purposes": "purpose", "axes": "axis", "modules": "module", "dtypes": "dtype"}
    kind = kinds[key.group]
    known = {found.name for found in measured if found.group == key.group}
    return f"the step has no {kind} {quoted(key.name)}{suggest(key.name, known, show=quoted)}."


def _offenders(budget: Budget, limit: BudgetKey, ledger: Json) -> str:
    """Returns the end of the sentence about an exceeded limit: where the amount comes from.

    For memory it names the largest classes of memory. For other quantities it names the modules
    above their own limits and the modules without limits. If there are none, it names the modules
    with the largest amounts.
    """
    if limit.quantity in ("peak_memory", "temporaries"):
        classes = ledger["memory"] or {}
        return _most_of_it({name: size for name, size in classes.items() if name != "peak"})
    is_compiled = limit.quantity in COMPILED
    collectives = (ledger["compiled"] if is_compiled else ledger)["collectives"]
    if is_compiled:  # Compiled collectives have no field `axes`.
        collectives = [{**x, "axes": ""} for x in collectives if "module" in x]
    if limit.group == "dtypes":
        return _most_of_it(ledger["flops"]["by_dtype"].get(limit.name, {}))
    if limit.group:
        collectives = [x for x in collectives if x[FIELDS[limit.group]] == limit.name]
    quantity = limit.quantity.removeprefix("compiled_")
    by_module = _of_modules(amounts({**ledger, "collectives": collectives}), quantity)
    module_limits = {} if is_compiled else _of_modules(budget.limits, quantity)
    everywhere = _of_modules(amounts(ledger), quantity)
    to_blame = []
    for module, amount in _largest_first(by_module):
        mosts = [most for glob, most in module_limits.items() if matches(glob, module)]
        if mosts and everywhere[module] > min(mosts):
            to_blame.append(f"{name_module(module)} {amount:,} (over its own limit)")
        elif module_limits and not mosts:
            to_blame.append(f"{name_module(module)} {amount:,} (without a limit of its own)")
    if not to_blame:
        return _most_of_it(by_module)
    left_out = len(to_blame) - NUM_NAMED
    more = f" and {left_out} more" if left_out > 0 else ""
    return f"; look at {', '.join(to_blame[:NUM_NAMED])}{more}"


def _of_modules(numbers: Mapping[BudgetKey, int], quantity: str) -> dict[str, int]:
    """Returns one quantity of each module, by the module's name."""
    return {key.name: n for key, n in numbers.items() if key[::2] == ("modules", quantity)}


def _most_of_it(by_name: Mapping[str, int]) -> str:
    largest = _largest_first(by_name)[:NUM_NAMED]
    named = ", ".join(f"{name_module(name)} {amount:,}" for name, amount in largest)
    return f"; most of it: {named}" if named else ""


def _largest_first(by_name: Mapping[str, int]) -> list[tuple[str, int]]:
    found = [(name, amount) for name, amount in by_name.items() if amount]
    return sorted(found, key=lambda item: (-item[1], item[0]))


# -------------------------------------------------------------------------------------------------
# Writes the numbers of a step's ledger as a budget, into a TOML file that may hold other budgets.
#
# `manualpar.inspect.step_ledger` explains ledgers, and `manualpar.inspect.budgets` explains
# budgets and the file. The numbers of a traced step are the same on every machine and with every
# supported version of jax and flax, so they are written exactly. The numbers of a compiled step
# vary, so their limits are higher. For example, the temporaries of `configs/fsdp_lm.py` grew from
# 28.6 MiB with jax 0.10.0 to 32.7 MiB with jax 0.10.2.


COMPILED_ROOM = 1.2  # A limit on a compiled step is the measured number times this.
ROUNDED_TO = 1024  # A limit on bytes of a compiled step is rounded up to a multiple of this.

# Matches the `[name]` line of a TOML table, with the empty lines and comments above this line.
_HEADER = re.compile(r"((?:^[ \t]*(?:#.*)?\n)*^[ \t]*\[.*\n?)", re.MULTILINE)


def budget_text(name: str, ledger: Json, earlier: Budget | None = None) -> str:
    """Returns the budget of the program `name` as TOML, with the numbers of a ledger as limits.

    The budget limits the totals of the traced step, the bytes and collectives of each purpose, and
    the bytes of each tuple of axes and of each module. Modules whose names differ only in a number,
    such as the layers of a model, share a line if they send the same number of bytes.

    If the step was compiled, the budget also limits the compiled step's temporaries. It limits the
    compiled step's bytes and collectives in two cases: the compiler inserts all collectives, or the
    `earlier` budget limits them. If the step was not compiled, the budget keeps the limits that
    `earlier` has for the compiled step.
    """
    measured = amounts(ledger)
    lines = [f"[{quoted(name)}]", f"devices = {math.prod(ledger['mesh'].values())}"]
    for quantity in TOTALS:
        amount = measured.get(BudgetKey("", "", quantity))
        before = earlier.most(quantity) if earlier else None
        if quantity not in COMPILED:
            lines += [] if amount is None else [f"{quantity} = {amount:_}"]
        elif amount is None:
            kept = f"{quantity} = {before or 0:_}  # as in the earlier budget"
            lines += [] if before is None else [kept]
        elif quantity == "temporaries" or not ledger["collectives"] or before is not None:
            unit = 1 if quantity == "compiled_collectives" else ROUNDED_TO
            room = math.ceil(amount * COMPILED_ROOM / unit) * unit
            lines.append(f"{quantity} = {room:_}  # measured, plus {COMPILED_ROOM - 1:.0%}")
    collectives = ledger["collectives"]
    by_module = {key.name: x for key, x in measured.items() if key[0::2] == ("modules", "bytes")}
    tables = {
        "purposes": [
            (purpose, f"bytes = {whole(sent.bytes):_}, collectives = {sent.times:_}")
            for (purpose,), sent in sorted(sent_by(collectives, "purpose").items())
        ],
        "axes": [
            (axes, f"bytes = {whole(sent.bytes):_}")
            for (axes,), sent in sent_by(collectives, "axes").items()
        ],
        "modules": [(glob, f"bytes = {sent:_}") for glob, sent in _globs(by_module) if sent],
    }
    of_dtypes = flops_by_dtype(ledger)
    if of_dtypes.keys() & LOW_PRECISION:  # Otherwise nothing can fall back to a wider dtype.
        wider = sorted(of_dtypes.keys() - LOW_PRECISION)
        tables["dtypes"] = [(name, f"flops = {whole(of_dtypes[name]):_}") for name in wider]
    for group, table in tables.items():
        lines += ["", f"[{quoted(name)}.{group}]"] if table else []
        lines += [f"{quoted(member)} = {{{limits}}}" for member, limits in table]
    return "\n".join(lines) + "\n"


def replace_budget(text: str, name: str, budget: str) -> str:
    """Replaces the budget of the program `name` in the text of a budget file.

    `budget` is the result of `budget_text`. It is added at the end if the file has no budget of
    `name`. The budgets of other programs stay, and so do all comments above budgets.

    Raises:
      BudgetError: The earlier budget cannot be replaced line by line, for example because it is an
        inline table.
    """
    first, *tables = _HEADER.split(text)
    pieces, is_placed = [first], False
    for header, body in zip(tables[::2], tables[1::2], strict=True):
        if name not in tomllib.loads(header):
            pieces.append(header + body)
        elif not is_placed:
            above = header.splitlines(keepends=True)[:-1]
            pieces.append("".join(above) + budget)
            is_placed = True
    if not is_placed:
        pieces.append(budget)
    stripped = [piece.strip("\n") for piece in pieces]
    changed = "\n\n".join(piece for piece in stripped if piece) + "\n"
    try:
        parse_budgets(changed, name)
    except BudgetError as error:
        raise BudgetError(
            f"the budget of {name} cannot be replaced line by line ({error}); remove it by hand "
            "first."
        ) from error
    return changed


def _globs(by_module: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yields (glob, amount) pairs; modules with equal amounts and similar names share a glob.

    Names are similar if they differ only in numbers.
    """
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for module in by_module:
        alike[re.sub(r"\d+", "*", module)].add(module)
    for glob, modules in sorted(alike.items()):
        amounts_of_glob = {by_module[module] for module in modules}
        # If the amounts differ or the glob also matches other modules, each module gets a line.
        is_exact = modules == {module for module in by_module if matches(glob, module)}
        if len(amounts_of_glob) == 1 and is_exact and len(modules) > 1:
            yield glob, amounts_of_glob.pop()
        else:
            yield from ((module, by_module[module]) for module in sorted(modules))
