"""Rules for operations on sequences that are divided over devices: the kind of each result.

`sequence_values` defines the kinds of values (*same*, *split*, *sum*, ...), and `shard_operations`
defines the operations that are right along a split dim. This file handles operations whose result
depends on more than shapes: sums over positions, comparisons that keep a count from being 0,
reshapes, collectives and random numbers.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.checks.sequence_values import (
    Layout,
    SplitValue,
    added,
    divided,
    merged_layout,
    multiplied,
)
from manualpar.core.checks.shard_operations import Reason, check_operation, refuse, split_dim
from manualpar.core.checks.value_numbers import ValueNumbers
from manualpar.core.tracing.scopes import EXAMPLES_SCOPE, purpose_of

# These operations are linear in their first operand; further operands are indices.
_LINEAR = frozenset(
    """
    broadcast_in_dim convert_element_type copy dynamic_slice gather name neg reduce_precision
    reduce_sum reshape rev slice split squeeze stop_gradient transpose unstack
    """.split()  # noqa: SIM905
)
# The result of one of these operations on a scalar is the scalar, cast or repeated.
_OF_ONE_NUMBER = frozenset(
    "broadcast_in_dim convert_element_type copy reshape squeeze stop_gradient".split()  # noqa: SIM905
)
# The results of these operations have only integer entries if all operands do.
_INTEGRAL = _LINEAR | {"add", "concatenate", "dot_general", "max", "min", "mul", "select_n", "sub"}
# Comparisons `count <op> 0`, and whether the comparison is true if the count is not 0.
_TESTS = {"gt": True, "ne": True, "eq": False, "le": False}
# The largest constant that may keep a count from being 0. `max` with 1 changes no count that is not
# 0, and adding 1e-5 changes a count by at most a hundred-thousandth.
_LARGEST_GUARDS = {"max": 1.0, "add": 1e-5}
SUMS = frozenset({"psum", "psum_invariant"})
_COLLECTIVES = SUMS | frozenset(
    """
    all_gather all_gather_invariant all_to_all pbroadcast pmax pmin ppermute ragged_all_to_all
    reduce_scatter
    """.split()  # noqa: SIM905
)


class SequenceOperations:
    """Finds the kinds of the results of operations that contain no inner program.

    Args:
      axis: The mesh axis over which positions are divided.
      devices: The number of devices along `axis`.
      numbers: The value numbers of the values visited so far, see `value_numbers`.
    """

    def __init__(self, axis: str, devices: int, numbers: ValueNumbers) -> None:
        self._axis, self._devices, self._numbers = axis, devices, numbers

    def results(
        self, part: Any, whole: Any, values: list[SplitValue], numbers: list[int]
    ) -> list[SplitValue]:
        """Finds the `SplitValue`s of an operation's results, and gives the results value numbers.

        Args:
          part: The operation on a device's positions.
          whole: The same operation on whole sequences.
          values: The `SplitValue`s of the operands.
          numbers: The operands' value numbers.

        Raises:
          WrongOnShardsError: The operation is wrong, or it is not known to be right.
        """
        name = part.primitive.name
        results = self._results(part, whole, values, numbers)
        is_integral = name in _INTEGRAL and all(value.is_integral for value in values)
        keeps_number = len(numbers) == 1 and (
            (name in _OF_ONE_NUMBER and self._numbers.is_scalar(numbers[0]))
            or (name == "convert_element_type" and _keeps_value(part, values[0]))
        )
        for index, variable in enumerate(part.outvars):
            if keeps_number:
                self._numbers.set(variable, numbers[0])
            else:
                self._numbers.set_result(variable, part, index, numbers)
        return [
            dataclasses.replace(value, is_integral=is_integral or not _is_inexact(variable))
            for variable, value in zip(part.outvars, results, strict=True)
        ]

    def summed(self, value: SplitValue) -> SplitValue:
        """Returns the `SplitValue` of the `psum` of a value over the mesh axis."""
        if value.kind == "zero":
            return value
        if value.count is None and value.kind in ("same", "sum"):
            return SplitValue("same", value.power + (value.kind == "same"))
        return refuse(f"sums {value.description} over {self._axis!r}", "sum")

    def _results(
        self, part: Any, whole: Any, values: list[SplitValue], numbers: list[int]
    ) -> list[SplitValue]:
        name = part.primitive.name
        axes = named_axes(part)
        if name == "axis_index":
            return [SplitValue("device" if self._axis in axes else "same")]
        if name in _COLLECTIVES and self._axis in axes:
            if name not in SUMS:
                is_of_examples = purpose_of(str(part.source_info.name_stack)) == EXAMPLES_SCOPE
                reason: Reason = "examples" if is_of_examples else "unknown"
                refuse(f"sends by {name} over {self._axis!r}", reason)
            return [self.summed(value) for value in values]
        if (guarded := self._guard(part, values, numbers)) is not None:
            return [guarded]
        ins = [self._split_dim(name, *x) for x in zip(part.invars, whole.invars, strict=True)]
        if len(part.outvars) != len(whole.outvars):
            refuse(f"makes {len(part.outvars)} arrays from a split array by {name}", "size")
        outs = [self._split_dim(name, *y) for y in zip(part.outvars, whole.outvars, strict=True)]
        if name in ("random_bits", "random_split"):
            return [_random(name, values[0], is_split=outs[0] is not None)]
        if (total := _sum_over_positions(part, values, numbers, ins)) is not None:
            return [total]
        if name in _COLLECTIVES or name == "optimization_barrier":  # Collectives over other axes.
            if name in _COLLECTIVES - SUMS:
                _check_plain(name, values)
            triples = zip(values, part.outvars, outs, strict=True)
            return [x if dim is None else _resized(x, y.aval.shape[dim]) for x, y, dim in triples]
        if name != "reshape":  # `_reshaped` checks reshapes.
            check_operation(part, whole, axis=self._axis, devices=self._devices)
        return self._arithmetic(part, values, numbers, ins, outs)

    def _arithmetic(
        self, eqn: Any, values: list[SplitValue], numbers: list[int], ins: Any, outs: Any
    ) -> list[SplitValue]:
        name = eqn.primitive.name
        if name in ("mul", "dot_general"):
            result = multiplied(name, (values[0], values[1]), (numbers[0], numbers[1]))
        elif name == "div":
            is_scalar = self._numbers.is_scalar(numbers[1])
            result = divided(name, values[0], values[1], numbers[1], is_scalar=is_scalar)
        elif name in ("add", "add_any", "sub", "concatenate", "stack"):
            result = added(name, values)
        elif name == "select_n":
            _check_plain(name, values[:1])
            result = added(name, values[1:])
        elif name in _LINEAR:
            is_cast = name == "convert_element_type" and not _is_inexact(eqn.outvars[0])
            is_rounded = is_cast and not values[0].is_integral
            takes_all = not is_rounded and values[0].kind not in ("guarded", "test")
            _check_plain(name, values[1:] if takes_all else values)
            result = values[0]
        else:
            _check_plain(name, values)
            kinds = {value.kind for value in values}
            result = SplitValue("device" if "device" in kinds and "split" not in kinds else "same")
        if any(value.kind == "device" for value in values) and result.kind != "device":
            refuse(f"applies {name} to a device's own index or key", "constant")
        was_split = result.kind == "split" and any(dim is not None for dim in ins)
        results = []
        for variable, dim in zip(eqn.outvars, outs, strict=True):
            if dim is None and was_split:
                refuse(f"makes {list(variable.aval.shape)} from a split array by {name}", "size")
            if dim is None or result.kind not in ("same", "split"):
                results.append(result)
            else:
                layout = merged_layout(name, values)
                if name == "reshape" and ins[0] is not None:
                    layout = _reshaped(eqn, layout, ins[0], dim)
                results.append(SplitValue("split", result.power, layout, result.count))
        return results

    def _guard(self, eqn: Any, values: list[SplitValue], numbers: list[int]) -> SplitValue | None:
        """Finds the `SplitValue` of a result that keeps a count from being 0; else `None`.

        Such operations are comparisons like `count > 0`, `max(count, 1)`, `count + 1e-8`, `count +
        (count == 0)`, `where(count > 0, count, 1)`, `where(count > 0, total / count, 0)`, and casts
        of their results.
        """
        name = eqn.primitive.name
        if not any(value.kind in ("sum", "guarded", "test") for value in values):
            return None
        first = values[0]
        if name in _TESTS and first.kind == "sum" and values[1].kind == "zero":
            is_nonzero = _TESTS[name]
            return SplitValue("test", first.power, None, numbers[0], is_nonzero=is_nonzero)
        if name in ("max", "add") and len(values) == 2:
            for index, count in enumerate(values):
                if count.kind == "sum" and count.count is None:
                    constant = self._numbers.constant(numbers[1 - index]) or 0.0
                    other = values[1 - index]
                    is_one_if_zero = other.kind == "test" and not other.is_nonzero
                    is_one_if_zero &= other.count == numbers[index] and name == "add"
                    if is_one_if_zero or 0 < constant <= _LARGEST_GUARDS[name]:
                        return SplitValue("guarded", count.power, None, numbers[index])
        if name == "select_n" and first.kind == "test" and len(values) == 3:
            index = 2 if first.is_nonzero else 1
            if_nonzero, if_zero = values[index], values[3 - index]
            is_count = if_nonzero.kind == "sum" and numbers[index] == first.count
            if is_count and if_zero.kind == "same" and not if_zero.power:
                return SplitValue("guarded", if_nonzero.power, None, first.count)
            is_mean = if_nonzero.kind == "sum" and if_nonzero.count == first.count
            if is_mean and if_zero.kind == "zero":
                return if_nonzero
        is_exact = first.is_integral or _is_inexact(eqn.outvars[0])
        is_rounded = name == "convert_element_type" and not is_exact
        is_one_number = name in _OF_ONE_NUMBER and self._numbers.is_scalar(numbers[0])
        is_kept = first.kind == "test" or (first.kind == "guarded" and not is_rounded)
        return first if is_one_number and is_kept else None

    def _split_dim(self, name: str, part: Any, whole: Any) -> int | None:
        return split_dim(name, tuple(part.aval.shape), tuple(whole.aval.shape), self._devices)


def named_axes(eqn: Any) -> list[str]:
    """Returns the mesh axes that an equation names."""
    named = jax.tree.leaves([eqn.params.get("axis_name"), *(eqn.params.get("axes") or ())])
    return [axis for axis in named if isinstance(axis, str)]


def _sum_over_positions(
    eqn: Any, values: list[SplitValue], numbers: list[int], ins: Sequence[int | None]
) -> SplitValue | None:
    """Finds the `SplitValue` of a sum over the split dim; `None` for other operations."""
    name, product = eqn.primitive.name, values[0] if values else SplitValue()
    if name == "dot_general":
        contracted = zip(ins, eqn.params["dimension_numbers"][0], strict=True)
        if not all(dim in dims for dim, dims in contracted):
            return None
        product = multiplied(name, (values[0], values[1]), (numbers[0], numbers[1]))
    elif name != "reduce_sum" or ins[0] not in eqn.params["axes"]:
        return None
    if product.kind == "split":
        return SplitValue("sum", product.power, None, product.count)
    return product if product.kind == "zero" else None


def _random(name: str, key: SplitValue, *, is_split: bool) -> SplitValue:
    """Finds the `SplitValue` of random bits or of new keys.

    If the key is the same on all devices, the result must not be split. If the keys of the devices
    differ, random bits must be split.
    """
    differs = key.kind in ("device", "split")
    if is_split and not differs:
        refuse("draws the same random numbers on each device", "random")
    if differs and not is_split and name == "random_bits":
        refuse("draws random numbers that positions share", "random")
    return SplitValue("split") if is_split else key


def _reshaped(eqn: Any, layout: Layout, before: int, dim: int) -> Layout:
    """Finds the layout of `dim` after a reshape; `layout` is that of the operand's dim `before`."""
    (x,), (y,) = eqn.invars[:1], eqn.outvars
    size = y.aval.shape[dim]
    if layout is None and size < x.aval.shape[before]:
        return None  # With the layout `None` all entries are equal.
    outer, length, _ = layout or (1, x.aval.shape[before], 1)
    outer *= math.prod(x.aval.shape[:before])
    outside = math.prod(y.aval.shape[:dim])
    within = outer // outside * length
    if outer % outside or not within or size % within:
        shapes = f"{list(y.aval.shape)} from positions {list(x.aval.shape)}"
        refuse(f"makes {shapes} by reshape", "reshape")
    return outer // outside, length, size // within


def _resized(value: SplitValue, size: int) -> SplitValue:
    """Updates a layout after a collective over another axis has changed the split dim to `size`."""
    if value.kind != "split" or value.layout is None or math.prod(value.layout) == size:
        return value
    return dataclasses.replace(value, layout=(1, size, 1))


def _check_plain(name: str, values: Sequence[SplitValue]) -> None:
    for value in values:
        if not value.is_plain:
            refuse(f"applies {name} to {value.description}", value.reason)


def _keeps_value(eqn: Any, value: SplitValue) -> bool:
    """Returns whether a cast keeps all values, such as a cast of a mask or of counts to float32."""
    new = np.dtype(eqn.params["new_dtype"])
    return value.is_integral and new != np.bool_ and new.itemsize >= 4


def _is_inexact(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))
