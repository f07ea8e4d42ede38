"""What a value on one device is to the value of the whole sequence, and how arithmetic changes it.

The positions of a sequence are divided over `C` devices. A value of the program is one of these:

- *same*: on every device that of the whole sequence,
- *split*: a device has the entries of its positions,
- *sum*: the devices' values add up to that of the whole sequence,
- *own*: something of the device, such as its key; it says nothing about the sequence,
- *zero*: a constant that is all of these.

Values may be scaled: with a *power* `p` they are `C**p` times as large. So the number of a device's
positions is the same everywhere, with power -1. And a mean of equally many positions on each device
is a sum with power 1. Something may also be divided by a *count*, a sum that differs between
devices: the mean of the valid positions. Multiplied by the count it is linear again. A sum that is
kept from being 0 before it divides is *guarded*, and the comparison for that is a *test*. What only
one of the traces has stands *alone*; it may be used in the scope of context parallelism.

Invariant: no operation gives one of these without being known to do so on every device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from manualpar.core.checks.shard_operations import Reason, refuse

ValueKind = Literal["same", "split", "sum", "own", "zero", "guarded", "test", "alone"]
# The split dim of an array, which may be merged of several: entries before, positions of a device,
# entries behind. `None` where all layouts fit, because a constant was broadcast.
Layout = tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class SplitValue:
    """What a device's value is to the whole one.

    Attributes:
      kind: See above.
      power: How often it is `C` times as large.
      layout: Where the positions of a split value are in their dim.
      count: The number of the value that it is divided by, or that is guarded or tested.
      is_integral: Whether it is made of whole numbers.
      is_nonzero: Of a test, whether it asks if the count is not 0.
    """

    kind: ValueKind = "same"
    power: int = 0
    layout: Layout = None
    count: int | None = None
    is_integral: bool = False
    is_nonzero: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a function may be applied to it that is not linear."""
        return self.kind in ("same", "split", "own", "zero") and not self.power and not self.count

    @property
    def what(self) -> str:
        """The value in words."""
        if self.kind == "guarded" or self.kind == "test":
            return "a count of a device's positions"
        if self.count is not None:
            return "a mean over a device's valid positions"
        if self.kind == "sum":
            whole = "a mean over" if self.power == 1 else "a part of a sum over"
            return f"{whole} positions, before the devices' parts are put together"
        if self.power:
            return "a number that is made of how many positions a device has"
        words = {
            "alone": "what is not there on one device",
            "own": "a device's own index or key",
            "split": "what is split",
        }
        return words.get(self.kind, "what is whole")

    @property
    def reason(self) -> Reason:
        """Why an operation that does not take it is wrong."""
        is_number = self.kind in ("alone", "own", "same") and self.count is None
        return "constant" if is_number else "sum"


def merged_layout(name: str, values: Sequence[SplitValue]) -> Layout:
    """The layout that all split values have."""
    found = {value.layout for value in values if value.kind == "split"} - {None}
    if len(found) > 1:
        refuse(f"applies {name} to positions in different orders", "reshape")
    return next(iter(found), None)


def multiplied(
    name: str, values: tuple[SplitValue, SplitValue], numbers: tuple[int, int]
) -> SplitValue:
    """The product of two values, or their contraction over what is not split."""
    x, y = values
    for mean, other, number in ((x, y, numbers[1]), (y, x, numbers[0])):
        is_count = other.kind == "sum" and other.count is None and mean.count == number
        if mean.kind == "sum" and is_count:
            return SplitValue("sum", x.power + y.power)
    if {x.kind, y.kind} & {"guarded", "test"}:
        refuse(f"applies {name} to a count of a device's positions", "sum")
    if "zero" in (x.kind, y.kind):
        return SplitValue("zero")
    kinds = {x.kind, y.kind}
    if "own" in kinds and kinds <= {"own", "same"}:
        return SplitValue("own")
    if "alone" in kinds:
        refuse(f"applies {name} to {SplitValue('alone').what}", "constant")
    is_quadratic = x.kind == y.kind == "sum" or kinds == {"sum", "split"}
    if is_quadratic or None not in (x.count, y.count):
        refuse(f"applies {name} to {(x if x.kind == 'sum' else y).what}", "sum")
    kind = next(kind for kind in ("split", "sum", "own", "same") if kind in kinds)
    count = y.count if x.count is None else x.count
    return SplitValue(kind, x.power + y.power, merged_layout(name, (x, y)), count)


def divided(
    name: str, x: SplitValue, y: SplitValue, number_of_y: int, *, is_scalar: bool
) -> SplitValue:
    """The quotient of two values; `is_scalar` says that `y` is one number."""
    if y.kind in ("sum", "guarded"):
        is_mean = y.kind == "sum" and y.count is not None
        if is_mean or not is_scalar or x.count is not None or x.kind == "own":
            refuse(f"divides by {y.what}", "sum")
        number = y.count if y.kind == "guarded" else number_of_y
        return dataclasses.replace(x, power=x.power - y.power, count=number, is_integral=False)
    if y.count is not None or y.kind == "test":
        refuse(f"divides by {y.what}", "sum")
    inverse = dataclasses.replace(y, power=-y.power)
    return multiplied(name, (x, inverse), (0, 0))


def added(name: str, values: Sequence[SplitValue]) -> SplitValue:
    """The sum of values, what is chosen among them, or their concatenation."""
    values = [value for value in values if value.kind != "zero"] or list(values[:1])
    result = values[0]
    for value in values[1:]:
        result = _added(name, result, value)
    return result


def _added(name: str, x: SplitValue, y: SplitValue) -> SplitValue:
    kinds = {x.kind, y.kind}
    if "own" in kinds and kinds <= {"own", "same"}:
        return SplitValue("own")
    if kinds <= {"same", "split"} and (x.power, x.count) == (y.power, y.count):
        kind: ValueKind = "split" if "split" in kinds else "same"
        return SplitValue(kind, x.power, merged_layout(name, (x, y)), x.count)
    if kinds <= {"same", "sum"} and "sum" in kinds:
        total, other = (x, y) if x.kind == "sum" else (y, x)
        if other.kind == "sum" and (x.power, x.count) == (y.power, y.count):
            return x
        # What is the same everywhere is also the mean of the devices' values.
        shift = 1 if total.count is None else 0
        if other.kind == "same" and other.count is None and other.power + shift == total.power:
            return total
    worst, other = (x, y) if not x.is_plain or x.kind == "own" else (y, x)
    return refuse(f"applies {name} to {worst.what} and to {other.what}", worst.reason)


def is_mean(value: SplitValue, count: SplitValue, number: int) -> bool:
    """Whether the mean of the devices' values, weighted by their counts, is that of the sequence.

    `number` is that of the count.
    """
    if value.count is not None:
        return value.kind == "sum" and value.count == number and not value.power
    if value.kind == "sum":  # Equally many positions on each device.
        return value.power == 1 and count.kind in ("same", "zero")
    return value.kind == "zero" or (value.kind == "same" and not value.power)


def power_of_sum(value: SplitValue) -> int | None:
    """The power of a value as a sum over the devices; `None` if it is no such sum."""
    if value.count is not None or value.kind not in ("same", "sum"):
        return None
    return value.power + (value.kind == "same")
