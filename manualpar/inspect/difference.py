"""Two ledgers of the same step, or of two that do the same: what one sends that the other does not.

Collectives are told apart by what people call them: purpose, module, kind and axes. Where both have
such, what may differ is how often they run, what they carry, and the bytes that come of it. Read
are the plain values of `Ledger.to_json`, so that one of the two may lie in a file.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

What = Literal["added", "removed", "changed"]


@dataclasses.dataclass(frozen=True)
class Sent:
    """The collectives of a ledger with one purpose, module, kind and axes.

    Attributes:
      times: How often a step runs one of them.
      bytes: What a device sends for them in a step.
      dtypes: What is on the wire, sorted.
      shapes: The operands' shapes on a device, sorted.
    """

    times: int
    bytes: float
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Changed:
    """Collectives that are not the same in both.

    Attributes:
      what: Whether only the new ledger has them, only the old one, or both have others.
      purpose: What they are for.
      module: Of which module.
      kind: Which collective.
      axes: The mesh axes, joined with commas.
      before: What they were; `None` if added.
      after: What they are; `None` if removed.
    """

    what: What
    purpose: str
    module: str
    kind: str
    axes: str
    before: Sent | None
    after: Sent | None

    @property
    def bytes_more(self) -> float:
        """The bytes that a device sends for them in a step, less those it sent before."""
        return (self.after.bytes if self.after else 0) - (self.before.bytes if self.before else 0)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A number that both have.

    Attributes:
      name: What it is.
      before: What it was; `None` if it was not known.
      after: What it is; `None` if it is not known.
      is_bytes: Whether it is one of bytes.
    """

    name: str
    before: float | None
    after: float | None
    is_bytes: bool


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is different in a ledger.

    Attributes:
      collectives: The collectives, those whose bytes differ most first.
      deltas: The numbers that either has, the same ones too.
    """

    collectives: tuple[Changed, ...]
    deltas: tuple[Delta, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the two ledgers say the same."""
        return not self.collectives and all(delta.before == delta.after for delta in self.deltas)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compares two ledgers.

    Args:
      before: What `Ledger.to_json` returned of the old one.
      after: Of the new one.

    Returns:
      What is different.
    """
    old, new = _by_name(before), _by_name(after)
    changed = []
    for name in dict.fromkeys([*new, *old]):
        was, now = old.get(name), new.get(name)
        if was != now:
            what: What = "added" if was is None else "removed" if now is None else "changed"
            changed.append(Changed(what, *name, was, now))
    changed.sort(key=lambda change: -abs(change.bytes_more))
    old_numbers, new_numbers = _numbers(before), _numbers(after)
    deltas = [
        Delta(name, old_numbers.get(name), new_numbers.get(name), is_bytes=_is_bytes(name))
        for name in dict.fromkeys([*old_numbers, *new_numbers])
    ]
    return Difference(tuple(changed), tuple(deltas))


def _by_name(ledger: Mapping[str, Any]) -> dict[tuple[str, str, str, str], Sent]:
    """The collectives by purpose, module, kind and axes."""
    alike: defaultdict[tuple[str, str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for found in ledger["collectives"]:
        axes = found["axes"] if isinstance(found["axes"], str) else ",".join(found["axes"])
        alike[found["purpose"], found["module"], found["kind"], axes].append(found)
    return {
        name: Sent(
            times=sum(found["times"] for found in group),
            # Exact: parts of bytes would add up differently in another order.
            bytes=float(sum(Fraction(found["bytes"]) for found in group)),
            dtypes=tuple(sorted({found["dtype"] for found in group})),
            shapes=tuple(sorted({tuple(found["shape"]) for found in group})),
        )
        for name, group in alike.items()
    }


def _numbers(ledger: Mapping[str, Any]) -> dict[str, float]:
    """The totals of a ledger by name, as far as they are known."""
    numbers: dict[str, float | None] = {
        "bytes sent": ledger["bytes"]["total"],
        "collectives": sum(ledger["counts"].values()),
        "FLOPs": ledger["flops"]["total"],
    }
    numbers |= {f"FLOPs {phase}": flops for phase, flops in ledger["flops"]["by_phase"].items()}
    numbers |= {f"memory: {name}": size for name, size in (ledger["memory"] or {}).items()}
    if compiled := ledger["compiled"]:
        sent = compiled["bytes"]
        numbers |= {
            "compiled: bytes sent": sent["total"] if isinstance(sent, Mapping) else sent,
            "compiled: collectives": sum(compiled["counts"].values()),
            "compiled: temporaries": compiled["temporaries"],
            "compiled: peak": compiled["peak"],
        }
    return {name: number for name, number in numbers.items() if number is not None}


def _is_bytes(name: str) -> bool:
    """Whether a number of this name is one of bytes."""
    return not name.startswith("FLOPs") and not name.endswith("collectives")
