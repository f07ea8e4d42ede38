"""Computes sums over a ledger's collectives, and the differences between two ledgers.

A ledger (`manualpar.inspect.step_ledger`) holds the collectives, FLOPs and memory of a step. The
functions take the result of `Ledger.to_json`, because one of the two ledgers often comes from a
file. `totals` returns the numbers of the whole step. `sent_by` adds up collectives with the same
purpose, module, or other field. A budget (`manualpar.inspect.budgets`) limits the same numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = [
    "LOW_PRECISION",
    "NAMES",
    "NOTHING",
    "Difference",
    "Json",
    "Sent",
    "bytes_more",
    "compare_ledgers",
    "flops_by_dtype",
    "name_module",
    "sent_by",
    "totals",
]

Json = Mapping[str, Any]


class Sent(NamedTuple):
    """The sums over a group of a ledger's collectives, see `sent_by`.

    Attributes:
      times: How many collectives of the group a step runs.
      bytes: The bytes that a device sends for the group in a step.
      dtypes: The dtypes that are sent, sorted; empty for compiled collectives.
      shapes: The shapes of the operands on a device, sorted; empty for compiled collectives.
    """

    times: int
    bytes: float
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


NOTHING = Sent(0, 0.0)
# Collectives of two ledgers are compared if they have the same values of these fields.
NAMES = ("purpose", "module", "kind", "axes")


class Difference(NamedTuple):
    """How a ledger differs from an older one.

    Attributes:
      collectives: The groups of collectives whose sums differ. A key is the group's values of the
        fields `NAMES`, and a value is its sums (before, after), `NOTHING` for a ledger without the
        group. The group with the largest difference in bytes is first.
      totals: Every number of the whole step, by its name: (before, after). The two may be equal,
        and `None` stands for a ledger that lacks the number.
    """

    collectives: Mapping[tuple[str, ...], tuple[Sent, Sent]]
    totals: Mapping[str, tuple[float | None, float | None]]

    @property
    def is_empty(self) -> bool:
        """Whether the two ledgers agree."""
        return not self.collectives and all(old == new for old, new in self.totals.values())


def compare_ledgers(before: Json, after: Json) -> Difference:
    """Compares an old ledger with a new one."""
    old, new = (sent_by(ledger["collectives"], *NAMES) for ledger in (before, after))
    sums = {x: (old.get(x, NOTHING), new.get(x, NOTHING)) for x in dict.fromkeys([*new, *old])}
    changed = [(names, pair) for names, pair in sums.items() if pair[0] != pair[1]]
    changed.sort(key=lambda change: -abs(bytes_more(*change[1])))
    was, now = totals(before), totals(after)
    pairs = {name: (was.get(name), now.get(name)) for name in dict.fromkeys([*was, *now])}
    return Difference(dict(changed), pairs)


def bytes_more(before: Sent, after: Sent) -> float:
    """Returns the bytes that a device sends in the new ledger, minus the bytes in the old one."""
    return after.bytes - before.bytes


def sent_by(collectives: Iterable[Json], *names: str) -> dict[tuple[str, ...], Sent]:
    """Adds up collectives, traced or compiled, in groups by their fields `names`.

    Returns:
      The sums of each group by the values of these fields, in the order of first appearance.
    """
    alike: defaultdict[tuple[str, ...], list[Json]] = defaultdict(list)
    for collective in collectives:
        alike[tuple(collective[name] for name in names)].append(collective)
    return {
        values: Sent(
            times=sum(collective["times"] for collective in group),
            # Fractions, because a sum of floats depends on the order.
            bytes=float(sum(Fraction(collective["bytes"]) for collective in group)),
            dtypes=tuple(
                sorted({collective["dtype"] for collective in group if "dtype" in collective})
            ),
            shapes=tuple(
                sorted(
                    {tuple(collective["shape"]) for collective in group if "shape" in collective}
                )
            ),
        )
        for values, group in alike.items()
    }


# The dtypes of quantized products.
LOW_PRECISION = frozenset({"float8", "int8"})


def flops_by_dtype(ledger: Json) -> dict[str, int]:
    """Returns the operations of a step's products in each dtype; none for an old ledger."""
    by_dtype = ledger["flops"].get("by_dtype", {})
    return {dtype: sum(modules.values()) for dtype, modules in by_dtype.items()}


def totals(ledger: Json) -> dict[str, float]:
    """Returns the numbers of the whole step by name, without numbers that the ledger lacks."""
    numbers: dict[str, float | None] = {
        "bytes sent": ledger["bytes"]["total"],
        "collectives": sum(ledger["counts"].values()),
        "FLOPs": ledger["flops"]["total"],
    }
    numbers |= {f"FLOPs {phase}": flops for phase, flops in ledger["flops"]["by_phase"].items()}
    numbers |= {f"memory: {name}": size for name, size in (ledger["memory"] or {}).items()}
    if compiled := ledger["compiled"]:
        numbers |= {
            "compiled: bytes sent": compiled["bytes"],
            "compiled: collectives": sum(compiled["counts"].values()),
            "compiled: temporaries": compiled["temporaries"],
            "compiled: peak": compiled["peak"],
        }
    return {name: number for name, number in numbers.items() if number is not None}


def name_module(module: str) -> str:
    """Returns the path of a module for a message; `(no module)` for `""`."""
    return module or "(no module)"
