"""Writes the numbers of a step's ledger as a budget, into a TOML file that may hold other budgets.

`manualpar.inspect.step_ledger` explains ledgers, and `manualpar.inspect.budgets` explains budgets
and the file. The numbers of a traced step are the same on every machine and with every supported
version of jax and flax, so they are written exactly. The numbers of a compiled step vary, so their
limits are higher. For example, the temporaries of `configs/fsdp_lm.py` grew from 28.6 MiB with jax
0.10.0 to 32.7 MiB with jax 0.10.2.
"""

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping

from manualpar.inspect.budgets import (
    COMPILED,
    TOTALS,
    Budget,
    BudgetError,
    BudgetKey,
    amounts,
    matches,
    parse_budgets,
    quoted,
    whole,
)
from manualpar.inspect.ledger_difference import Json, sent_by

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
