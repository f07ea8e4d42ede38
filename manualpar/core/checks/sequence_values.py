"""Tracks through arithmetic how a device's value relates to the value of the whole sequence.

The positions of a sequence are divided over `C` devices. A value of the program has one of these
kinds:

- *same*: every device has the value of the whole sequence.
- *split*: a device has the entries of its positions.
- *sum*: the devices' values add up to the value of the whole sequence.
- *device*: a property of the device, such as its key, that does not depend on the sequence.
- *zero*: the constant 0, which satisfies the definition of each other kind.

A value may be scaled: a value with the *power* `p` is `C**p` times as large. For example, the
number of a device's positions is *same* with power -1: it is the length of the sequence divided by
`C`. A device's mean over its positions is a *sum* with power 1: the devices' means add up to `C`
times the mean over the sequence. A value may also be divided by a *count*, a sum that differs
between devices, such as the number of valid positions. Multiplying by that count undoes the
division. A *guarded* value is a count in which 0 has been replaced by another number, so that the
count may be a divisor. A *test* is a comparison of a count with 0. An *unpaired* value exists only
in the trace on a device's positions, not in the trace on the whole sequence. Only code in
`named_scope("context_parallel")` may use such a value.

Invariant: the result of an operation has a kind only if the operation is known to be right on every
device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from manualpar.core.checks.shard_operations import Reason, refuse

ValueKind = Literal["same", "split", "sum", "device", "zero", "guarded", "test", "unpaired"]
# The layout of an array's split dim: (before, positions of a device, behind). A reshape may have
# merged the dim of the positions with other dims. `before` and `behind` are the products of the
# sizes of the merged dims before and behind it. `None` if all layouts fit, as for a broadcast
# constant.
Layout = tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class SplitValue:
    """The relation of a device's value to the value of the whole sequence.

    Attributes:
      kind: A kind from the list above, such as `"split"`.
      power: The power of `C` by which the value is scaled.
      layout: Where the dim of a split value contains the device's positions, see `Layout`.
      count: For a value divided by a count, a guarded value or a test: the value number of the
        count, see `value_numbers`.
      is_integral: Whether all entries are integers.
      is_nonzero: For a test, whether it is true if the count is not 0.
    """

    kind: ValueKind = "same"
    power: int = 0
    layout: Layout = None
    count: int | None = None
    is_integral: bool = False
    is_nonzero: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a nonlinear function may be applied to the value."""
        return (
            self.kind in ("same", "split", "device", "zero") and not self.power and not self.count
        )

    @property
    def description(self) -> str:
        """The value in words, for error messages."""
        if self.kind == "guarded" or self.kind == "test":
            return "a count of a device's positions"
        if self.count is not None:
            return "a mean over a device's valid positions"
        if self.kind == "sum":
            prefix = "a mean over" if self.power == 1 else "a part of a sum over"
            return f"{prefix} positions, before the devices' parts are combined"
        if self.power:
            return "a number that depends on how many positions a device has"
        words = {
            "unpaired": "an array that does not exist on one device",
            "device": "a device's own index or key",
            "split": "a split array",
        }
        return words.get(self.kind, "a value that all devices share")

    @property
    def reason(self) -> Reason:
        """The reason to refuse an operation on the value."""
        is_number = self.kind in ("unpaired", "device", "same") and self.count is None
        return "constant" if is_number else "sum"


def merged_layout(name: str, values: Sequence[SplitValue]) -> Layout:
    """Returns the layout that all split values share; refuses different layouts."""
    found = {value.layout for value in values if value.kind == "split"} - {None}
    if len(found) > 1:
        refuse(f"applies {name} to positions in different orders", "reshape")
    return next(iter(found), None)


def multiplied(
    name: str, values: tuple[SplitValue, SplitValue], numbers: tuple[int, int]
) -> SplitValue:
    """Finds the `SplitValue` of a product, or of a contraction over a dim that is not split.

    `name` is the operation's name, for messages; `numbers` are the value numbers of the operands.
    """
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
    if "device" in kinds and kinds <= {"device", "same"}:
        return SplitValue("device")
    if "unpaired" in kinds:
        refuse(f"applies {name} to {SplitValue('unpaired').description}", "constant")
    is_quadratic = x.kind == y.kind == "sum" or kinds == {"sum", "split"}
    if is_quadratic or None not in (x.count, y.count):
        refuse(f"applies {name} to {(x if x.kind == 'sum' else y).description}", "sum")
    kind = next(kind for kind in ("split", "sum", "device", "same") if kind in kinds)
    count = y.count if x.count is None else x.count
    return SplitValue(kind, x.power + y.power, merged_layout(name, (x, y)), count)


def divided(
    name: str, x: SplitValue, y: SplitValue, number_of_y: int, *, is_scalar: bool
) -> SplitValue:
    """Finds the `SplitValue` of `x / y`.

    `name` is the operation's name, for messages. `number_of_y` is the value number of `y`.
    `is_scalar` says whether `y` is a scalar or a broadcast scalar.
    """
    if y.kind in ("sum", "guarded"):
        is_mean = y.kind == "sum" and y.count is not None
        if is_mean or not is_scalar or x.count is not None or x.kind == "device":
            refuse(f"divides by {y.description}", "sum")
        number = y.count if y.kind == "guarded" else number_of_y
        return dataclasses.replace(x, power=x.power - y.power, count=number, is_integral=False)
    if y.count is not None or y.kind == "test":
        refuse(f"divides by {y.description}", "sum")
    inverse = dataclasses.replace(y, power=-y.power)
    return multiplied(name, (x, inverse), (0, 0))


def added(name: str, values: Sequence[SplitValue]) -> SplitValue:
    """Finds the `SplitValue` of a sum; the same rules hold for a selection or a concatenation."""
    values = [value for value in values if value.kind != "zero"] or list(values[:1])
    result = values[0]
    for value in values[1:]:
        result = _added(name, result, value)
    return result


def _added(name: str, x: SplitValue, y: SplitValue) -> SplitValue:
    kinds = {x.kind, y.kind}
    if "device" in kinds and kinds <= {"device", "same"}:
        return SplitValue("device")
    if kinds <= {"same", "split"} and (x.power, x.count) == (y.power, y.count):
        kind: ValueKind = "split" if "split" in kinds else "same"
        return SplitValue(kind, x.power, merged_layout(name, (x, y)), x.count)
    if kinds <= {"same", "sum"} and "sum" in kinds:
        total, other = (x, y) if x.kind == "sum" else (y, x)
        if other.kind == "sum" and (x.power, x.count) == (y.power, y.count):
            return x
        # A value that is the same on all devices is its own mean, so it can be added to a mean.
        shift = 1 if total.count is None else 0
        if other.kind == "same" and other.count is None and other.power + shift == total.power:
            return total
    worst, other = (x, y) if not x.is_plain or x.kind == "device" else (y, x)
    return refuse(f"applies {name} to {worst.description} and to {other.description}", worst.reason)


def is_mean(value: SplitValue, count: SplitValue, number: int) -> bool:
    """Returns whether the mean of `value` over the devices is the value of the whole sequence.

    A step weights the mean by the devices' `count`. `number` is the value number of the count.
    """
    if value.count is not None:
        return value.kind == "sum" and value.count == number and not value.power
    if value.kind == "sum":  # Right if the count is the same on each device.
        return value.power == 1 and count.kind in ("same", "zero")
    return value.kind == "zero" or (value.kind == "same" and not value.power)


def power_of_sum(value: SplitValue) -> int | None:
    """Returns the power of the sum of a value over the devices; `None` if the sum has none."""
    if value.count is not None or value.kind not in ("same", "sum"):
        return None
    return value.power + (value.kind == "same")
