"""Refuses models and losses that compute wrong results from some of a sequence's positions.

With a context axis a device runs the model on a part of each sequence. The part is not one run of
neighbouring positions, but two half blocks (`mesh.zigzag`). Code that treats every position
separately is right. Attention, convolutions, sums, shifts and position numbers have to handle the
axis, see `manualpar.layers.Context`. Shapes and types do not show whether code ignores the axis. So
this check traces the loss twice, on a device's positions and on all positions, and compares the two
traces operation by operation.

Sums over positions are right if they only contribute to the mean loss and the metrics, because a
step sums both over the devices. The loss may be `sum / count`, where `count` is the count of
`metrics["loss"]`. The loss may replace a count of 0 before it divides, as with data axes, because a
device without a valid position has the weight 0.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec

from manualpar.checks.shard_operations import (
    Reason,
    ValueNumbers,
    WrongOnShardsError,
    cast_values,
    check_operation,
    check_same_operation,
    inner_programs,
    module_of_equation,
    paired,
    place_of,
    refuse,
    split_dim,
    stands_in,
)
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.model.loss_function import Mean
from manualpar.core.model.trace_model import TracedModel
from manualpar.core.modes.variable_reduction import choose_sync
from manualpar.core.parameters.annotations import take_shared
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.placement import computed_specs
from manualpar.core.tracing.jaxprs import all_equations, inner_jaxprs, scan_sizes
from manualpar.core.tracing.scopes import (
    CONTEXT_SCOPE,
    EXAMPLES_SCOPE,
    FLOAT8_SCOPE,
    QUANTIZED_SCOPE,
    SEQUENCE_SCOPE,
    purpose_of,
)
from manualpar.core.trees import Batch, Collections, Params

_POSITIONS = (
    "A device has some positions of a sequence, and not neighbouring ones: take their numbers from "
    "manualpar.layers.Context(axis).positions(length), and pass labels and other shifted arrays in "
    "the batch"
)
_ATTENTION = (
    "Other positions are on other devices: mix positions only by the attention of "
    "manualpar.layers.Context(axis), with document ids instead of a mask, or build the program "
    "without a context axis"
)
_SUM = (
    "A sum or a mean over positions may go into the loss and the metrics, which are added up over "
    "the devices: divide by the count of metrics['loss'], kept from being 0 by jnp.maximum(count, "
    "1), jnp.where(count > 0, count, 1) or count + 1e-8. For anything else sum "
    "over the devices too, with manualpar.layers.Context(axis).total or jax.lax.psum, in "
    "nn.BatchNorm with all of program.data_axes as its axis_name"
)
_MENDS: Mapping[Reason, str] = {
    "examples": "Each device has only some positions of its examples: call gather_examples(x, "
    "axis_name=...) with the axes that split examples, without the context axis",
    "axis": "Context needs the axis that context_axis names, and split layers need another axis",
    "constant": _POSITIONS,
    "convolution": _ATTENTION,
    "loop": _ATTENTION,
    "mixed": _POSITIONS,
    "pad": _POSITIONS,
    "parts": _POSITIONS,
    "product": _ATTENTION,
    "program": f"The code depends on the length of a sequence. {_POSITIONS}. Put code "
    f"that handles the axis itself in jax.named_scope({CONTEXT_SCOPE!r})",
    "random": "Draw random numbers for each position, with the key that the model or the loss gets",
    "reduction": _ATTENTION,
    "reshape": "Keep all positions in one dim and in one order, and do not group neighbouring "
    "positions, because they may be on different devices",
    "size": _POSITIONS,
    "sum": _SUM,
    "two dims": _ATTENTION,
    "unknown": "It is not known whether the operation is right on a part of the positions. If it "
    f"is right, put it in jax.named_scope({CONTEXT_SCOPE!r})",
}


def check_context(strategy: str, model: TracedModel, batch: Batch, roles: AxisRoles) -> None:
    """Refuses a model or a loss that computes wrong results from a part of a sequence.

    Nothing is checked if XLA writes the collectives, or if no axis of several devices splits dim 1
    of the batch. Code in `named_scope("context_parallel")` is trusted. Nothing is compiled.
    """
    axis = roles.context_axis
    if axis is None or not model.mode.writes_collectives or model.mode.mesh.shape[axis] == 1:
        return
    devices = model.mode.mesh.shape[axis]
    sizes = {**model.mode.mesh.shape, axis: 1}
    mesh: Any = model.mode.mesh.abstract_mesh.update(axis_sizes=tuple(sizes.values()))
    whole = dataclasses.replace(model, mode=dataclasses.replace(model.mode, mesh=mesh))
    complaint = f"{strategy}: with context_axis={axis!r}"
    for training in (True, False):
        (part_jaxpr, results), (whole_jaxpr, _) = (
            _trace_loss(each, batch, roles, training=training) for each in (model, whole)
        )
        walk = SequenceWalk(axis, devices, _MENDS, complaint)
        outputs = walk.outputs(part_jaxpr, whole_jaxpr)
        loss, metrics, collections = jax.tree.unflatten(results, outputs)
        _check_results(complaint, loss, metrics)
        if collections is not None:
            _check_collections(complaint, model, axis, collections)


def _trace_loss(
    model: TracedModel, batch: Batch, roles: AxisRoles, *, training: bool
) -> tuple[ClosedJaxpr, Any]:
    """Returns the jaxpr of a device's loss, and the structure of (loss, metrics, collections).

    Without `training`, the loss and the collections are `None`.
    """
    mode, traces = model.mode, list[tuple[ClosedJaxpr, Any]]()
    variables = dict(model.variables)
    params = variables.pop("params")

    def measure(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> Any:
        if training:
            return model.train_loss(params, collections, batch, rng)
        metrics = model.eval_metrics(params, collections, batch, rng)
        return None, metrics, None

    def on_device(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> None:
        def model_shard(info: Any, x: Any) -> Any:
            return take_shared(x, info.shared_names)

        params = jax.tree.map(model_shard, model.parameters, params)
        params = cast_to_varying(params, mode.varying_axes)
        jaxpr, shapes = jax.make_jaxpr(_with_folded_key(mode, measure), return_shape=True)(
            params, collections, rng, batch
        )
        traces.append((jaxpr, jax.tree.structure(shapes)))

    def with_all_layers(info: Any) -> Any:
        """Removes stage axes from a parameter's names: the loss gets the layers of all stages."""
        names = tuple(None if name in roles.stage_axes else name for name in info.names)
        return dataclasses.replace(info, names=names)

    replicated, infos = PartitionSpec(), jax.tree.map(with_all_layers, model.parameters)
    in_specs = (computed_specs(infos), replicated, replicated, roles.batch_specs(batch))
    key = jax.eval_shape(lambda: jax.random.key(0))
    run = mode.run(on_device, in_specs=in_specs, out_specs=replicated)
    jax.eval_shape(run, params, variables, key, batch)
    return traces[-1]


def _with_folded_key(mode: Any, measure: Callable[..., Any]) -> Callable[..., Any]:
    def call(params: Params, collections: Collections, rng: jax.Array, batch: Batch) -> Any:
        return measure(params, collections, mode.fold(rng), batch)

    return call


def _check_results(complaint: str, loss: Any, metrics: Any) -> None:
    """Refuses a loss and metrics that a step would combine wrongly over the devices."""
    value: Any = loss.mean[0] if isinstance(loss, Mean) else None
    if value is not None and not is_mean(value, *metrics["loss"][1]):
        raise ValueError(
            f"{complaint} the loss is {value.description}, which is not a mean over the count of "
            "metrics['loss']; expected sum / count, where count is the count of metrics['loss'] "
            "and both are sums over this device's positions, or a value that is the same on all "
            "devices along the axis. Or return the sum and the count: {'loss': (sum, count)}."
        )
    pairs = {f"metrics[{name!r}]": pair for name, pair in metrics.items()}
    if isinstance(loss, dict):
        pairs |= {f"term {name!r} of the loss": pair for name, pair in loss.items()}
    for name, ((total, _), (count, _)) in pairs.items():
        powers = {power_of_sum(value) for value in (total, count) if value.kind != "zero"}
        if len(powers) > 1 or None in powers:
            raise ValueError(
                f"{complaint} {name} is the pair of {total.description} and "
                f"{count.description}; expected two sums over this device's positions (a step adds "
                "them up over the devices), or two numbers that are the same on all devices."
            )


def _check_collections(
    complaint: str, model: TracedModel, axis: str, collections: Collections
) -> None:
    """Refuses variables that would differ between devices and that a step does not average."""

    def check(path: Any, before: Any, result: Any) -> None:
        value, _ = result
        if value.is_plain and value.kind in ("same", "zero", "device"):
            return
        is_equal_mean = value.kind == "sum" and value.power == 1 and value.count is None
        rule = choose_sync(path, before, model.sync_collections, (axis,))
        if not is_equal_mean or rule != "mean":
            raise ValueError(
                f"{complaint} the variable {jax.tree_util.keystr(path)} becomes "
                f"{value.description}; expected the same value on all devices along the axis, "
                "or a mean over positions that sync_collections averages."
            )

    before = {name: model.variables[name] for name in collections}
    jax.tree_util.tree_map_with_path(check, before, collections)


# -------------------------------------------------------------------------------------------------
# Tracks through arithmetic how a device's value relates to the value of the whole sequence.
#
# The positions of a sequence are divided over `C` devices. A value of the program has one of these
# kinds:
#
# - *same*: every device has the value of the whole sequence.
# - *split*: a device has the entries of its positions.
# - *sum*: the devices' values add up to the value of the whole sequence.
# - *device*: a property of the device, such as its key, that does not depend on the sequence.
# - *zero*: the constant 0, which satisfies the definition of each other kind.
#
# A value may be scaled: a value with the *power* `p` is `C**p` times as large. For example, the
# number of a device's positions is *same* with power -1: it is the length of the sequence divided
# by `C`. A device's mean over its positions is a *sum* with power 1: the devices' means add up to
# `C` times the mean over the sequence. A value may also be divided by a *count*, a sum that
# differs between devices, such as the number of valid positions. Multiplying by that count undoes
# the division. A *guarded* value is a count in which 0 has been replaced by another number, so
# that the count may be a divisor. A *test* is a comparison of a count with 0. An *unpaired* value
# exists only in the trace on a device's positions, not in the trace on the whole sequence. Only
# code in `named_scope("context_parallel")` may use such a value.
#
# Invariant: the result of an operation has a kind only if the operation is known to be right on
# every device.


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


# -------------------------------------------------------------------------------------------------
# Rules for operations on sequences that are divided over devices: the kind of each result.
#
# `sequence_values` defines the kinds of values (*same*, *split*, *sum*, ...), and
# `shard_operations` defines the operations that are right along a split dim. This file handles
# operations whose result depends on more than shapes: sums over positions, comparisons that keep a
# count from being 0, reshapes, collectives and random numbers.


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
          whole: The same operation on whole sequences.
          values: The `SplitValue`s of the operands.

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


# -------------------------------------------------------------------------------------------------
# Walks the traces on a device's positions and on the full sequence; finds each value's kind.
#
# Invariants: an operation that is not known to be right is refused. Code inside
# `named_scope("context_parallel")` is trusted, because its author handles the axis: a result is
# *split* if its shapes in the two traces differ, and *same* otherwise. The collectives of sequence
# parallelism over another axis are trusted too. A sum over the context axis turns a value of kind
# *sum* into the kind *same*, also in trusted code.


_SCOPES = frozenset({CONTEXT_SCOPE, SEQUENCE_SCOPE})

_QUANTIZED = frozenset({FLOAT8_SCOPE, QUANTIZED_SCOPE})


_INLINE = frozenset(
    """
    call_hi_primitive checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit remat2
    """.split()  # noqa: SIM905
)

# A value's kind, and its value number, see `value_numbers`.
Numbered = tuple[SplitValue, int]


class SequenceWalk:
    """Walks through a pair of traces: on a device's positions, and on the full sequence.

    Args:
      axis: The mesh axis over which positions are divided.
      devices: The number of devices along `axis`.
      mends: For each `Reason`, the sentence of an error message that says how to correct the
        mistake.
      complaint: The beginning of each error message.
    """

    def __init__(
        self, axis: str, devices: int, mends: Mapping[Reason, str], complaint: str
    ) -> None:
        self._axis, self._devices = axis, devices
        self._mends, self._complaint = mends, complaint
        self._numbers = ValueNumbers()
        self._operations = SequenceOperations(axis, devices, self._numbers)
        self._values: dict[Any, SplitValue] = {}
        self._constants: dict[Any, Any] = {}
        self._aliases: dict[Any, Any] = {}

    def outputs(self, part: ClosedJaxpr, whole: ClosedJaxpr) -> list[Numbered]:
        """Finds the `SplitValue` and the value number of each result of a program.

        Args:
          part: The trace on a device's positions. An argument is *split* if its shapes in `part`
            and `whole` differ, and *same* otherwise.
        """
        return self._walk(part, whole, None, "")

    def _walk(
        self, part: Any, whole: Any, inputs: Sequence[Numbered] | None, path: str
    ) -> list[Numbered]:
        """Finds what `outputs` finds, for a program in the module at `path`.

        `inputs` are the `SplitValue`s and value numbers of the program's arguments; `None` to
        derive them from the shapes.
        """
        part, whole = (self._record_constants(program) for program in (part, whole))
        if inputs is not None:
            for variable, numbered in zip(part.invars, inputs, strict=True):
                self._set(variable, numbered)
        equations = self._equations(part, path), self._equations(whole, None)
        for pair in paired(*equations):
            eqn = pair[0] or pair[1]
            with self._naming(eqn, path) as where:
                check_same_operation(*pair)
                self._visit(*pair, where)
        return [self._read(*pair) for pair in zip(part.outvars, whole.outvars, strict=True)]

    def _record_constants(self, program: Any) -> Jaxpr:
        if not isinstance(program, ClosedJaxpr):
            return program
        self._constants.update(zip(program.jaxpr.constvars, program.consts, strict=True))
        return program.jaxpr

    @contextlib.contextmanager
    def _naming(self, eqn: Any, path: str) -> Iterator[str]:
        """Yields the path of an equation's module; adds the path to errors in the context."""
        where = "/".join(filter(None, (path, module_of_equation(eqn, _SCOPES))))
        try:
            yield where
        except WrongOnShardsError as error:
            place = f"{f'module {where!r}' if where else 'the loss'}{place_of(eqn)}"
            message = f"{self._complaint} {place} {error.mended(self._mends)}"
            raise ValueError(message) from None

    def _equations(self, jaxpr: Jaxpr, path: str | None) -> Iterator[Any]:
        """Yields the equations whose results are used, without casts and trusted code.

        Trusted code has no counterpart in the trace of the full sequence. `_trust` checks trusted
        code in the trace on a device's positions, the only trace for which `path` is given.
        """
        used = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        live = []
        for eqn in reversed(jaxpr.eqns):
            if not used.isdisjoint(eqn.outvars):
                live.append(eqn)
                used.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
        casts = cast_values(jaxpr)
        self._aliases |= casts
        for eqn in reversed(live):
            if not casts.keys().isdisjoint(eqn.outvars):
                continue
            if not stands_in(eqn, _SCOPES):
                yield eqn
            elif path is not None:
                with self._naming(eqn, path):
                    self._trust(eqn)

    def _trust(self, eqn: Any) -> None:
        """Checks the axes and the inputs of an equation in trusted code."""
        inputs = [self._known(x) for x in eqn.invars]
        named = {axis for inner in _with_inner(eqn) for axis in named_axes(inner)}
        purpose = purpose_of(str(eqn.source_info.name_stack))
        # A layer of experts is in the context scope, so experts may be split over the axis.
        if self._axis in named and not stands_in(eqn, frozenset({CONTEXT_SCOPE})):
            refuse(f"splits layers over {self._axis!r}", "axis")
        if purpose == CONTEXT_SCOPE and named:
            if self._axis not in named:
                refuse(f"is split over {sorted(named)} in Context", "axis")
            if eqn.primitive.name in SUMS:
                for x, value, y in zip(eqn.invars, inputs, eqn.outvars, strict=True):
                    if value is None and self._constant(self._origin(x)) is not None:
                        value = SplitValue("same")
                    if value is not None:
                        self._values[y] = self._operations.summed(value)
                return
        for value in inputs:
            if value is not None and value.kind != "unpaired" and not value.is_plain:
                refuse(f"gives {value.description} to {eqn.primitive.name}", value.reason)

    def _visit(self, part: Any, whole: Any, where: str) -> None:
        name = part.primitive.name
        inputs = self._inputs(part, whole)
        programs = inner_programs(part), inner_programs(whole)
        if name in _INLINE and len(programs[0]) == 1:
            results = self._walk(programs[0][0], programs[1][0], inputs, where)
        elif name in ("scan", "while", "cond"):
            check_operation(part, whole, axis=self._axis, devices=self._devices)
            values = getattr(self, f"_{name}")(part.params, whole.params, inputs, where)
            results = [(value, self._numbers.fresh()) for value in values]
        elif name == "reduce_max" and _QUANTIZED & {*where.split("/")}:
            # A device's scale of its own positions changes only how a product is rounded.
            results = [(SplitValue("same"), self._numbers.fresh())]
        else:
            values, numbers = [x for x, _ in inputs], [number for _, number in inputs]
            values = self._operations.results(part, whole, values, numbers)
            results = [
                (x, self._numbers.number(y)) for x, y in zip(values, part.outvars, strict=True)
            ]
        for variable, numbered in zip(part.outvars, results, strict=True):
            self._set(variable, numbered)

    def _inputs(self, part: Any, whole: Any) -> list[Numbered]:
        """Finds the `SplitValue`s and value numbers of an operation's operands.

        In the trace on a device's positions, a loop may have additional constants that only trusted
        code uses. These constants are *unpaired*.
        """
        if len(part.invars) == len(whole.invars):
            return [self._read(*pair) for pair in zip(part.invars, whole.invars, strict=True)]
        rest = iter([x for x in whole.invars if self._constant(self._origin(x)) is None])
        inputs = []
        for x in part.invars:
            value = self._known(x)
            is_constant = self._constant(self._origin(x)) is not None
            if value.kind == "unpaired" if value is not None else is_constant:
                inputs.append((SplitValue("unpaired"), self._numbers.fresh()))
            elif (y := next(rest, None)) is None:
                refuse(f"applies {part.primitive.name} to other arrays than one device", "program")
            else:
                inputs.append(self._read(x, y))
        return inputs

    def _scan(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        consts, carry = scan_sizes(part)
        return self._loop("scan", (part["jaxpr"], whole["jaxpr"]), inputs, consts, carry, where)

    def _while(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        cond_consts, body_consts = part["cond_nconsts"], part["body_nconsts"]
        fixed, rest = inputs[:cond_consts], inputs[cond_consts:]
        bodies = part["body_jaxpr"], whole["body_jaxpr"]
        results = self._loop("while", bodies, rest, body_consts, len(rest) - body_consts, where)
        carry = [(value, self._numbers.fresh()) for value in results]
        inputs = [*fixed, *carry]
        condition = self._walk(part["cond_jaxpr"], whole["cond_jaxpr"], inputs, where)[0][0]
        _check_condition("while", condition)
        return results

    def _cond(self, part: Any, whole: Any, inputs: Any, where: str) -> list[SplitValue]:
        _check_condition("cond", inputs[0][0])
        branches = zip(part["branches"], whole["branches"], strict=True)
        results = [self._walk(*pair, inputs[1:], where) for pair in branches]
        return [_joined("cond", [x for x, _ in of_all]) for of_all in zip(*results, strict=True)]

    def _loop(
        self, name: str, bodies: Any, inputs: Any, consts: int, carry: int, where: str
    ) -> list[SplitValue]:
        """Finds the `SplitValue`s of a loop's results.

        Walks the loop's body until the kinds of the carry do not change. `consts` and `carry` are
        the numbers of the body's constants and carried values.
        """
        values = [value for value, _ in inputs]
        while True:
            renumbered = [(value, self._numbers.fresh()) for value in values[consts:]]
            outputs = self._walk(bodies[0], bodies[1], [*inputs[:consts], *renumbered], where)
            results = [value for value, _ in outputs]
            before = values[consts : consts + carry]
            pairs = zip(before, results[:carry], strict=True)
            after = [_joined(name, pair) for pair in pairs]
            if after == before:
                return [*after, *results[carry:]]
            values[consts : consts + carry] = after

    def _set(self, variable: Any, numbered: Numbered) -> None:
        self._values[variable] = numbered[0]
        self._numbers.set(variable, numbered[1])

    def _read(self, part: Any, whole: Any) -> Numbered:
        """Finds the `SplitValue` and the value number of a variable or a constant."""
        part, whole = self._origin(part), self._origin(whole)
        return self._value(part, whole), self._numbers.number(part)

    def _value(self, part: Any, whole: Any) -> SplitValue:
        if (known := self._known(part)) is not None:
            return known
        constants = [self._constant(x) for x in (part, whole)]
        is_key = jnp.issubdtype(part.aval.dtype, jax.dtypes.extended)
        if not is_key and not any(x is None for x in constants):
            return self._of_constants(*map(np.asarray, constants))
        shape, whole_shape = tuple(part.aval.shape), tuple(whole.aval.shape)
        dim = split_dim("something", shape, whole_shape, self._devices)
        is_integral = not jnp.issubdtype(part.aval.dtype, jnp.inexact)
        if dim is None:
            return SplitValue(is_integral=is_integral)
        return SplitValue("split", layout=(1, shape[dim], 1), is_integral=is_integral)

    def _known(self, variable: Any) -> SplitValue | None:
        """Returns a variable's `SplitValue` if the walk has set it; `None` otherwise."""
        variable = self._origin(variable)
        return None if isinstance(variable, jex.Literal) else self._values.get(variable)

    def _of_constants(self, part: np.ndarray, whole: np.ndarray) -> SplitValue:
        is_number = jnp.issubdtype(part.dtype, jnp.number)
        is_inexact = jnp.issubdtype(part.dtype, jnp.inexact)
        is_integral = bool(not is_inexact or np.all(part == np.round(part)))
        if part.shape != whole.shape:
            if np.all(part == part.flat[0]) and np.all(whole == part.flat[0]):
                return SplitValue("split", is_integral=is_integral)
        elif np.array_equal(part, whole, equal_nan=bool(is_inexact)):
            return SplitValue(
                "zero" if is_number and not part.any() else "same", is_integral=is_integral
            )
        elif is_number:
            for power in (-1, 1, -2, 2):
                if np.allclose(part, whole * float(self._devices) ** power, rtol=1e-5, atol=0):
                    return SplitValue("same", power, is_integral=is_integral)
        return refuse("takes a constant that depends on the size of a split dim", "constant")

    def _constant(self, variable: Any) -> Any:
        value = variable.val if isinstance(variable, jex.Literal) else self._constants.get(variable)
        return None if isinstance(value, jax.core.Tracer) else value

    def _origin(self, variable: Any) -> Any:
        return (
            variable if isinstance(variable, jex.Literal) else self._aliases.get(variable, variable)
        )


def _with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for _, jaxpr in inner_jaxprs(eqn):
        yield from all_equations(jaxpr)


def _joined(name: str, values: Sequence[SplitValue]) -> SplitValue:
    """Finds the `SplitValue` of a result that is one of `values`, as after a branch."""
    return dataclasses.replace(
        added(name, values), is_integral=all(value.is_integral for value in values)
    )


def _check_condition(name: str, value: SplitValue) -> None:
    if not value.is_plain or value.kind not in ("same", "zero"):
        refuse(f"decides by {value.description} in a {name}", "sum")
