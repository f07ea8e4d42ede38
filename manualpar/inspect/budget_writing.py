"""A budget written from what a ledger measures, into a file that may hold others.

What the traced step says is written as it is: it is the same on every machine, and the same with
the oldest versions of jax and flax that this package runs with as with today's. What is compiled
is given some room: from jax 0.10.0 to 0.10.2 the temporaries of `configs/fsdp_lm.py` grew from 28.6
to 32.7 MiB.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from manualpar.inspect.budget import Measured, matches
from manualpar.inspect.budget_file import COMPILED, Budget, BudgetError, parse_budgets, quoted

COMPILED_ROOM = 1.2
ROUNDED_TO = 1024  # Bytes of what is compiled.


def budget_text(name: str, ledger: Mapping[str, Any], earlier: Budget | None = None) -> str:
    """Writes what is measured as a budget.

    Args:
      name: The program's name in the file.
      ledger: What `Ledger.to_json` returns.
      earlier: The budget that it takes the place of. Its limits on what is compiled stay as they
        are where nothing was compiled.

    Returns:
      The tables of the program, in TOML: all totals that are known, and the bytes and collectives
      of every purpose, the bytes of every axis and of every module. Modules that differ in a number
      alone, as the layers of a model do, share a line if they send the same. What the compiled step
      sends is written where the compiler is who writes collectives, or if it was limited before.
    """
    measured = Measured(ledger)
    key = quoted(name)
    lines = [f"[{key}]", f"devices = {math.prod(ledger['mesh'].values())}"]
    for quantity in ("bytes", "collectives", "flops", "peak_memory"):
        if (amount := measured.total(quantity)) is not None:
            lines.append(f"{quantity} = {amount:_}")
    lines += _compiled_lines(ledger, measured, earlier)
    counts = measured.by("purposes", "collectives")
    sent = measured.by("purposes", "bytes")
    purposes = {
        purpose: f"{{bytes = {sent[purpose]:_}, collectives = {counts[purpose]:_}}}"
        for purpose in sorted(sent)
    }
    axes = {axes: f"{{bytes = {sent:_}}}" for axes, sent in measured.by("axes", "bytes").items()}
    by_module = measured.by("modules", "bytes")
    modules = {
        glob: f"{{bytes = {sent:_}}}"
        for glob, sent in _globs(by_module, measured.known("modules")).items()
    }
    for group, table in (("purposes", purposes), ("axes", axes), ("modules", modules)):
        if table:
            lines += ["", f"[{key}.{group}]"]
            lines += [f"{quoted(member)} = {amounts}" for member, amounts in table.items()]
    return "\n".join(lines) + "\n"


def _compiled_lines(
    ledger: Mapping[str, Any], measured: Measured, earlier: Budget | None
) -> Iterator[str]:
    """The limits on what is compiled."""
    for quantity in COMPILED:
        amount = measured.total(quantity)
        before = earlier.most(quantity) if earlier else None
        is_wanted = quantity == "temporaries" or not ledger["collectives"]
        if amount is not None and (is_wanted or before is not None):
            unit = 1 if quantity == "compiled_collectives" else ROUNDED_TO
            room = math.ceil(amount * COMPILED_ROOM / unit) * unit
            yield f"{quantity} = {room:_}  # as compiled, and {COMPILED_ROOM - 1:.0%}"
        elif amount is None and before is not None:
            yield f"{quantity} = {before:_}  # as before: nothing was compiled"


def replace_budget(text: str, name: str, budget: str) -> str:
    """Puts a program's budget into the text of a file, in the place of the one it had.

    Args:
      text: The file as it is; `""` for a new one.
      name: The program's name in the file.
      budget: See `budget_text`.

    Returns:
      The file with that budget; other budgets and the comments above them are as they were.

    Raises:
      BudgetError: The program's budget stands there in a form that is not replaced by lines, such
        as one inline table.
    """
    blocks = _blocks(text)
    own = [i for i, (owner, _) in enumerate(blocks) if owner == name]
    if not own:
        separator = "\n" if text.strip() else ""
        changed = text.rstrip("\n") + ("\n" if text.strip() else "") + separator + budget
    else:
        # Comments above the first table are about the whole of it, and a person's.
        above = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*", blocks[own[0]][1])
        blocks[own[0]] = (name, (above[0] if above else "") + budget)
        kept = [block for i, (_, block) in enumerate(blocks) if i not in own[1:]]
        changed = "".join(_separated(kept))
    try:
        parse_budgets(changed, name)
    except BudgetError as error:
        raise BudgetError(
            f"the budget of {name} cannot be replaced in a file like this ({error}); remove it "
            "by hand first."
        ) from error
    return changed


def _globs(amounts: Mapping[str, int], known: set[str]) -> dict[str, int]:
    """The amounts by module, modules that are alike together."""
    alike: defaultdict[str, set[str]] = defaultdict(set)
    for module in known:
        alike[re.sub(r"\d+", "*", module)].add(module)
    globs = {}
    for glob, modules in sorted(alike.items()):
        found = {amounts.get(module, 0) for module in modules}
        reached = {module for module in known if matches(glob, module)}
        # Where the stars reach further than the numbers, or amounts differ, each stands for itself.
        if len(found) == 1 and reached == modules and len(modules) > 1:
            globs[glob] = found.pop()
        else:
            globs |= {module: amounts[module] for module in sorted(modules) if module in amounts}
    return {glob: amount for glob, amount in globs.items() if amount}


def _blocks(text: str) -> list[tuple[str, str]]:
    """The text in pieces, each with the name of the program whose table it is.

    A comment above a table belongs to it, not to the one before. The first piece has no name.
    """
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines(keepends=True):
        header = re.match(r"\s*\[\s*(?:\"([^\"]*)\"|([\w-]+))\s*[.\]]", line)
        if header:
            above = blocks[-1][1]
            start = len(above)
            while start and re.match(r"\s*(#.*)?$", above[start - 1]):
                start -= 1
            blocks[-1] = (blocks[-1][0], above[:start])
            blocks.append((header[1] if header[1] is not None else header[2], above[start:]))
        blocks[-1][1].append(line)
    return [(name, "".join(lines)) for name, lines in blocks]


def _separated(blocks: list[str]) -> list[str]:
    """Pieces with an empty line between any two."""
    kept = [block for block in blocks if block]
    return [
        block if i == 0 or block.startswith("\n") else f"\n{block}" for i, block in enumerate(kept)
    ]
