"""A budget held against a ledger: what is more than allowed, by how much, and which module to ask.

It reads what `Ledger.to_json` returns, so that a ledger that was written to a file will do. See
`manualpar.inspect.budget_file` for what a budget may hold.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from manualpar.core.collectives import REGATHER, SCOPES
from manualpar.inspect.budget_file import (
    COMPILED,
    Budget,
    BudgetError,
    Limit,
    nearest_name,
    quoted,
)
from manualpar.inspect.scopes import OTHER, TENSOR_PARALLEL

SLACK = 1.25  # A limit that is further above what is measured may as well be lowered.
NUM_NAMED = 3  # Modules that are named where no one of them is to blame.


@dataclasses.dataclass(frozen=True)
class Finding:
    """A limit held against a ledger.

    Attributes:
      budget: The name of the budget.
      limit: The limit.
      measured: What the ledger says.
      module: Of which module, for a limit on modules.
      offenders: Modules to look at, the first one first, each with why.
    """

    budget: str
    limit: Limit
    measured: int
    module: str = ""
    offenders: tuple[str, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether there is more than allowed."""
        return self.measured > self.limit.most

    @property
    def is_slack(self) -> bool:
        """Whether so much more is allowed that the limit would not notice a change."""
        return self.limit.most > SLACK * self.measured

    def sentence(self) -> str:
        """What is wrong, by how much, and where to look."""
        most, over = self.limit.most, self.measured - self.limit.most
        of = f": {name_module(self.module)} has" if self.limit.group == "modules" else " is"
        if not self.is_broken:
            of = f" of {name_module(self.module)}" if self.limit.group == "modules" else ""
            return (
                f"{self.budget}: {self.limit.key} allows {most:,}, {self.measured:,}{of} would do"
            )
        part = f" (+{over / most:.1%})" if most else ""
        where = f"; {'; '.join(self.offenders)}" if self.offenders else ""
        return (
            f"{self.budget}: {self.limit.key}{of} {self.measured:,}, expected at most {most:,}: "
            f"{over:,} too many{part}{where}."
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A budget held against a ledger.

    Attributes:
      broken: The limits that do not hold.
      slack: Those that hold by far.
      unchecked: The keys of those that say something of the compiled step, where nothing was
        compiled, or of memory, where it is not known.
    """

    broken: tuple[Finding, ...]
    slack: tuple[Finding, ...]
    unchecked: tuple[str, ...]


def check_budget(budget: Budget, ledger: Mapping[str, Any], source: object) -> Verdict:
    """Holds a budget against a ledger.

    Args:
      budget: The budget.
      ledger: What `Ledger.to_json` returns.
      source: The file that the budget comes from, for messages.

    Returns:
      What is broken, what has slack, and what could not be checked.

    Raises:
      BudgetError: The budget is for another number of devices, or limits a purpose, axes or a
        module that the ledger does not know.
    """
    devices = math.prod(ledger["mesh"].values())
    if budget.devices not in (None, devices):
        raise BudgetError(
            f"{source}: [{budget.name}] is for devices={budget.devices}, and the step is one for "
            f"{devices}; inspect it with --devices={budget.devices}."
        )
    measured = Measured(ledger)
    findings: list[Finding] = []
    unchecked = []
    for limit in budget.limits:
        if limit.group == "modules":
            findings += _check_modules(budget, limit, measured, source)
            continue
        amount = measured.total(limit.quantity)
        if limit.group:
            amounts = measured.by(limit.group, limit.quantity)
            _check_known(limit, measured.known(limit.group), f"{source}: [{budget.name}]")
            amount = amounts.get(limit.name, 0)
        if amount is None:
            unchecked.append(limit.key)
            continue
        finding = Finding(budget.name, limit, amount)
        if finding.is_broken:
            offenders = _offenders(budget, limit, measured)
            finding = dataclasses.replace(finding, offenders=offenders)
        findings.append(finding)
    return Verdict(
        broken=tuple(finding for finding in findings if finding.is_broken),
        slack=tuple(finding for finding in findings if finding.is_slack),
        unchecked=tuple(unchecked),
    )


class Measured:
    """What a ledger says, by what a budget may limit."""

    def __init__(self, ledger: Mapping[str, Any]) -> None:
        self._ledger = ledger
        self._collectives: list[Mapping[str, Any]] = ledger["collectives"]

    def total(self, quantity: str) -> int | None:
        """Of the whole step; `None` where it is not known."""
        compiled, memory = self._ledger["compiled"], self._ledger["memory"]
        if quantity in COMPILED and compiled is None:
            return None
        if quantity == "peak_memory":
            return None if memory is None else int(memory["peak"])
        if quantity == "temporaries":
            found = compiled["temporaries"]
            return None if found is None else int(found)  # Not every backend says.
        if quantity == "flops":
            return _whole(self._ledger["flops"]["total"])
        read = compiled if quantity in COMPILED else self._ledger
        if quantity.endswith("collectives"):
            return int(sum(read["counts"].values()))
        sent = read["bytes"]
        return _whole(sent["total"] if isinstance(sent, Mapping) else sent)

    def by(self, group: str, quantity: str, within: Limit | None = None) -> dict[str, int]:
        """By purpose, axes or module, of those collectives alone that another limit is about."""
        if quantity == "flops":
            return {name: _whole(x) for name, x in self._ledger["flops"]["by_module"].items()}
        collectives = self._collectives
        if quantity in COMPILED:  # XLA keeps names of most of them, if somebody has looked.
            collectives = [x for x in self._ledger["compiled"]["collectives"] if "module" in x]
        amounts: defaultdict[str, float] = defaultdict(float)
        for found in collectives:
            if within is None or _member(found, within.group) == within.name:
                amount = found["times" if quantity.endswith("collectives") else "bytes"]
                amounts[_member(found, group)] += amount
        return {name: _whole(amount) for name, amount in amounts.items()}

    def largest_memory(self) -> tuple[str, ...]:
        """The classes that most of the memory goes to, as the traced step has it."""
        classes = self._ledger["memory"] or {}
        return _most_of_it({name: size for name, size in classes.items() if name != "peak"})

    def known(self, group: str) -> set[str]:
        """The names that a limit may have."""
        names = {_member(found, group) for found in self._collectives}
        if group == "purposes":
            return names | {*SCOPES, REGATHER, TENSOR_PARALLEL, OTHER}
        if group == "axes":
            return names | set(self._ledger["mesh"])
        return names | set(self._ledger["flops"]["by_module"])


def _member(collective: Mapping[str, Any], group: str) -> str:
    """The purpose, the axes or the module of a collective in a ledger's JSON."""
    found = collective[{"purposes": "purpose", "axes": "axes", "modules": "module"}[group]]
    return found if isinstance(found, str) else ",".join(found)


def _check_modules(
    budget: Budget, limit: Limit, measured: Measured, source: object
) -> list[Finding]:
    """Holds a limit against each module that it is about."""
    known = measured.known("modules")
    matching = sorted(name for name in known if matches(limit.name, name))
    if not matching:
        _check_known(limit, known, f"{source}: [{budget.name}]")
    amounts = measured.by("modules", limit.quantity)
    findings = [
        Finding(budget.name, limit, amounts.get(module, 0), module=module) for module in matching
    ]
    broken = [finding for finding in findings if finding.is_broken]
    # Of modules that are alike the largest says how far the limit could come down.
    return broken or [max(findings, key=lambda finding: finding.measured)]


def _offenders(budget: Budget, limit: Limit, measured: Measured) -> tuple[str, ...]:
    """Which modules to look at: those beyond limits of their own, or else the largest."""
    quantity = limit.quantity
    if quantity in ("peak_memory", "temporaries"):
        return measured.largest_memory()
    amounts = measured.by("modules", quantity, within=limit if limit.group else None)
    own = [x for x in budget.limits if (x.group, x.quantity) == ("modules", quantity)]
    everywhere = measured.by("modules", quantity) if own else {}
    to_blame = []
    for module, amount in _largest_first(amounts):
        mosts = [x.most for x in own if matches(x.name, module)]
        if mosts and everywhere[module] > min(mosts):
            to_blame.append(f"{name_module(module)} {amount:,} (over its own limit)")
        elif own and not mosts:
            to_blame.append(f"{name_module(module)} {amount:,} (without a limit of its own)")
    if to_blame:
        left_out = len(to_blame) - NUM_NAMED
        more = f" and {left_out} more" if left_out > 0 else ""
        return (f"look at {', '.join(to_blame[:NUM_NAMED])}{more}",)
    return _most_of_it(amounts)


def _most_of_it(amounts: Mapping[str, int]) -> tuple[str, ...]:
    """The largest of some amounts by name."""
    largest = _largest_first(amounts)[:NUM_NAMED]
    named = ", ".join(f"{name_module(name)} {amount:,}" for name, amount in largest)
    return (f"most of it: {named}",) if named else ()


def _largest_first(amounts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Those that are more than nothing, by name."""
    found = [(name, amount) for name, amount in amounts.items() if amount]
    return sorted(found, key=lambda item: (-item[1], item[0]))


def _check_known(limit: Limit, known: set[str], where: str) -> None:
    """Refuses a limit on what the ledger does not know."""
    if limit.name not in known:
        what = {"purposes": "purpose", "axes": "axis", "modules": "module"}[limit.group]
        near = f"; the nearest one is {quoted(nearest_name(limit.name, known))}" if known else ""
        raise BudgetError(
            f"{where} {limit.key}: the step has no {what} {quoted(limit.name)}{near}."
        )


def name_module(module: str) -> str:
    """A module's path for people."""
    return module or "(no module)"


def matches(glob: str, module: str) -> bool:
    """Whether a module's path is one that a glob means, where only `**` goes beyond a slash."""
    parts = re.split(r"(\*\*|\*|\?)", glob)
    wild = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return bool(re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), module))


def _whole(x: float) -> int:
    """A whole number; a part of a byte counts as one, lest what is measured break its own limit."""
    return math.ceil(x - 1e-6)
