"""The bytes that a step sends for its parameters and gradients, in closed form.

A strategy says how many times a step gathers a parameter, scatters its gradient and gathers its new
value, see `manualpar.core.modes.strategy.CommCounts`. This module converts the counts to bytes. A
parameter has `P` elements (padding included) of `b` bytes and is sharded over `S` devices. A device
sends for each

    all-gather or reduce-scatter                                    b P (S - 1) / S
    all-reduce over the `R` groups that each have all shards        2 b (P / S) (R - 1) / R

The all-reduce happens once a step (`S = 1` under data parallelism). `b` belongs to the dtype that
is sent: `gather_dtype` for a gather, `reduce_dtype` (else `gather_dtype`) for a reduction, the
parameter's dtype for the gather of a new value. With `gather_code` or `reduce_code`, quantized
numbers are sent. If `c(n)` is the `quantized_bytes` of `n` numbers, a device sends for each

    all-gather, or all-to-all in place of a reduce-scatter          c(P / S) (S - 1)
    all-to-all and all-gather in place of an all-reduce             2 c(P / S / R) (R - 1)

This is done for each layer of a loop separately, and only if it sends fewer bytes than without
quantization.

A frozen parameter costs only its gathers. They have the dtype in which it is stored if this is as
narrow as `gather_dtype`. If nothing before a frozen parameter is trained, the backward pass does
not need the parameter either.

Over two axes of sizes `A, B` with `axis_by_axis`, a gather is one gather over `B` of `P / A`
elements and one gather over `A` of all elements: `b P (1 / A) (B - 1) / B + b P (A - 1) / A`. The
total is the same, but more of it is sent over the major axis.

The closed form assumes that each parameter is used once in a minibatch and needed in the backward
pass. It is an upper bound if parameters are dropped after the forward pass, because biases and the
kernel of the first layer are not gathered again. A parameter that is used several times is gathered
for each use (once, if it is kept). A replicated parameter costs the same for any number of uses.

A parameter that is split (see `manualpar.core.parameters.split_parameter`) is not gathered over the
axes that split it, and `P` counts a device's part of it. If `N` devices share `K` entries, `1 / K`
of the parameter is gathered, and its gradient is summed in each minibatch: `2 b P (N - 1) / N` over
these axes.

In a pipeline `P` of a stacked parameter counts one stage's part.
`manualpar.inspect.pipeline_formulas` gives the number of uses by each stage. Gradients of
parameters that are not stacked are summed over the `N` stages once a step: `2 b (P / S) (N - 1) /
N`.

With `diloco` a step sends the bytes of one replica on its part of the mesh. `outer_step_bytes`
counts the bytes of the outer step.

This does not count: collectives of split layers, metrics, example counts and collections; other
sends of stages; what the compiler inserts for an optimizer that is not elementwise.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple
from manualpar.core.modes.strategy import CommCounts
from manualpar.core.parameters.comm_policy import EXACT, CommPolicy
from manualpar.core.parameters.parameter_info import ParameterInfo
from manualpar.core.parameters.placement import Route
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import (
    COLLECTIONS_SCOPE,
    COUNT_SCOPE,
    EXAMPLES_SCOPE,
    METRICS_SCOPE,
    NONFINITE_SCOPE,
    purpose_of,
)
from manualpar.inspect.communication import Collective, ring_bytes
from manualpar.inspect.pipeline_formulas import PipelineForm, Uses
from manualpar.inspect.scope_parsing import LAYER_SCOPES, OTHER

# Scopes of a step's collectives that are not for parameters or gradients.
OTHER_SCOPES = (
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    *LAYER_SCOPES,
)


def step_bytes(program: Program, *, stage: int | None = None) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends in a step for parameters and gradients.

    Args:
      program: The program. In modes `auto` and `explicit` the prediction holds for the program that
        the compiler is asked for; it may compile another.
      stage: The stage of a pipeline; `None` for the stage that sends the most.

    Returns:
      The bytes over each axis, or tuple of axes. In mode `manual` they equal `bytes_by_axes` of the
      traced program; they are an upper bound if parameters are gathered again in the backward pass.

    Raises:
      ValueError: The mode is `auto-unconstrained`, in which the compiler may send activations
        instead; or a parameter is sharded over data axes in two dimensions.
    """
    if program.mode == "auto-unconstrained":
        raise ValueError(
            "step_bytes: program has mode='auto-unconstrained', expected 'manual', 'auto' or "
            "'explicit', because in this mode the compiler chooses the collectives. Read them with "
            "compiled_collectives."
        )
    if program.outer is not None:
        program = program.outer.inner
    if program.pipeline is None:
        m = program.num_minibatches
        sends = (program.strategy.sends(m, place.keep) for _, place in program.parameters)
        return _of_stage(program, (Uses(one, backward=m) for one in sends))
    form = PipelineForm(program)
    stages = form.stages(stage)
    sent = [_of_stage(program, form.uses(one)) for one in stages]
    return max(sent, key=lambda by_axes: sum(by_axes.values()))


def _of_stage(program: Program, uses: Iterable[Uses]) -> dict[tuple[str, ...], Fraction]:
    """Sums the bytes of a device over parameters, each with its counts in `uses`."""
    totals: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
    for (info, place), used in zip(program.parameters, uses, strict=True):
        for axes, sent in _of_parameter(program, info, place, used):
            totals[axes] += sent
    return dict(totals)


def total_step_bytes(program: Program, *, stage: int | None = None) -> Fraction:
    """Returns the sum of `step_bytes` over all axes."""
    return sum(step_bytes(program, stage=stage).values(), Fraction(0))


def outer_step_bytes(
    program: Program, *, fragment: int | None = None
) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends in outer steps for parameters.

    A trained parameter has `P` elements, and its optimizer state is sharded over `S` devices. For
    the difference of `R` replicas from it a device sends `2 b (P / S) (R - 1) / R` bytes;
    quantized, `2 c(P / S / R) (R - 1)`, if this is less. If the parameter itself is replicated
    within a replica, its new value is gathered there: `b P (S - 1) / S`.

    Args:
      program: The program that `diloco` returns.
      fragment: The fragment that is exchanged; `None` for all of them, each once.

    Returns:
      The bytes over each axis, or tuple of axes, as `bytes_by_axes` of the traced `outer_step`,
      without the 4 bytes of the number of examples and without collections.

    Raises:
      ValueError: The program has no outer steps.
    """
    outer = program.outer
    if outer is None:
        raise ValueError(
            f"outer_step_bytes: program of {program.strategy.name} has no outer steps, expected "
            "one of diloco. step_bytes predicts what its steps send."
        )
    totals: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
    axes, comm = outer.replica_axes, outer.comm
    size = axes_size(program.mesh, axes)
    for (info, place), its_fragment in zip(program.parameters, outer.fragments, strict=True):
        if its_fragment is None or fragment not in (None, its_fragment):
            continue
        shard = _elements_on_device(program, info, place.sharded_names, place.padding)
        dtype = jnp.dtype(comm.reduce.dtype or info.dtype)
        totals[axes] += _mean_bytes(comm, shard, dtype, axes, size)
        if place.state_names is not None:
            names = place.sharded_names
            for gather in _gathers(program, info, place, names, shard, once_a_step=True):
                if gather.is_data and gather.axis_size > 1:
                    totals[gather.axes] += gather.gather_bytes(info.dtype.itemsize)
    return dict(totals)


def _mean_bytes(comm: CommPolicy, n: int, dtype: Any, axes: tuple[str, ...], size: int) -> Fraction:
    """Returns the bytes that a device sends for the mean over `size` devices of `n` numbers."""
    if size > 1 and (code := comm.reduce_quantizer(n / size, dtype, axes)):
        return 2 * ring_bytes("all_gather", code.row_bytes(-(-n // size)), size)
    return ring_bytes("all_reduce", n * dtype.itemsize, size)


def of_parameters(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Returns the collectives of a traced step that `step_bytes` predicts.

    Collectives of metrics, of collections and of layers are left out. A collective that this
    package did not write is included, so that it shows as a difference, unless it is known to run
    over no data axis.
    """
    return tuple(x for x in collectives if is_of_parameters(x.scope, x.purpose))


def is_of_parameters(scope: str, purpose: str) -> bool:
    """Returns whether `step_bytes` predicts the collective of this scope and purpose."""
    if purpose_of(scope) is None:
        return purpose == OTHER
    return purpose not in OTHER_SCOPES


class _DimGather(NamedTuple):
    """One round of the gather of a dimension.

    Attributes:
      elements: The number of elements in a device's operand.
      rows: The number of shards of these elements before the dimension's first round.
      calls: The number of calls that gather the elements: one for each layer of a loop.
    """

    axes: tuple[str, ...]
    axis_size: int
    elements: int
    is_data: bool
    rows: int
    calls: int

    def gather_bytes(self, itemsize: int, comm: CommPolicy = EXACT, dtype: Any = None) -> Fraction:
        """Returns the bytes that a device sends for the gather; `dtype` is the parameter's."""
        n = self.elements // self.rows // self.calls
        size = n * itemsize
        if self.is_data and (code := comm.gather.quantizer_for(n, dtype)):
            size = code.row_bytes(n)
        return ring_bytes("all_gather", self.calls * self.rows * size, self.axis_size)

    def scatter_bytes(self, comm: CommPolicy, reduced: Any) -> Fraction:
        """Returns the bytes that a device sends for the reduce-scatter of the gradient."""
        n = self.elements // self.calls
        code = comm.reduce_quantizer(n, reduced, self.axes)
        size = code.row_bytes(n) if code else n * reduced.itemsize
        return ring_bytes("all_gather", self.calls * size, self.axis_size)


def _of_parameter(
    program: Program, info: ParameterInfo, place: Route, uses: Uses
) -> Iterator[tuple[tuple[str, ...], Fraction]]:
    """Yields pairs of axes and bytes for one parameter."""
    strategy, sends = program.strategy, uses.sends
    comm = program.comm.for_parameter(info.dtype, trainable=place.trainable)
    if not place.trainable:
        sends = CommCounts(sends.uses, sends.gathers)
    stored = info.dtype.itemsize
    gathered = jnp.dtype(comm.gather.dtype or info.dtype).itemsize
    reduced = comm.reduced_dtype(info.dtype)
    once_a_step = strategy.gather_every == "step"

    shard = _elements_on_device(program, info, place.names, place.parameter_padding)
    itemsize = gathered if once_a_step else stored
    shared = [axis for name in place.shared_names for axis in axis_tuple(name)]
    summed = tuple(axis for axis in shared if axis not in place.mean_axes)
    if summed and place.trainable:
        # Each device uses a slice of its part; the gradients of all slices are summed.
        elements = shard * (_data_shards(program, place) if once_a_step else 1)
        sum_bytes = ring_bytes("all_reduce", elements * itemsize, axes_size(program.mesh, summed))
        yield summed, uses.backward * sum_bytes
    if shared and not once_a_step:
        named = zip(info.shape, place.shared_names, strict=True)
        shard //= math.prod(entries for entries, name in named if name)
    used = _gathers(program, info, place, place.names, shard, once_a_step=once_a_step)
    for gather in used:
        itemsize = gathered if gather.is_data else itemsize
        if gather.is_data and gather.axis_size == 1:  # Nothing is gathered over one device.
            continue
        times = sends.gathers if gather.is_data else sends.uses
        if gather.is_data and not {*gather.axes} <= {*(strategy.regather_axes or gather.axes)}:
            times = strategy.sends(program.num_minibatches, True).gathers  # It stays gathered.
        yield gather.axes, times * gather.gather_bytes(itemsize, comm, info.dtype)
        if gather.is_data and not once_a_step:  # The gradient is scattered over the same axes.
            yield gather.axes, sends.scatters * gather.scatter_bytes(comm, reduced)
    if not place.trainable:
        return

    shard = _elements_on_device(program, info, place.sharded_names, place.padding)
    if place.state_names is not None or once_a_step:  # The gradient of a gathered parameter.
        for gather in _gathers(program, info, place, place.sharded_names, shard, once_a_step=True):
            if gather.is_data:
                if gather.axis_size > 1:
                    yield gather.axes, sends.scatters * gather.scatter_bytes(comm, reduced)
                if place.state_names is not None:  # The new parameter.
                    yield gather.axes, sends.new_gathers * gather.gather_bytes(stored)

    sharded = {axis for name in place.sharded_names for axis in axis_tuple(name)}
    if others := tuple(axis for axis in program.data_axes if axis not in sharded):
        for axes in comm.reductions(others):
            size = axes_size(program.mesh, axes)
            yield axes, _mean_bytes(comm, shard, reduced, axes, size)
    if stages := place.sum_axes:  # Each stage has a part of the gradient.
        size = axes_size(program.mesh, stages)
        yield stages, ring_bytes("all_reduce", shard * reduced.itemsize, size)


def _gathers(
    program: Program,
    info: ParameterInfo,
    place: Route,
    names: Names,
    shard: int,
    *,
    once_a_step: bool,
) -> list[_DimGather]:
    """Returns the gathers of a parameter before the model uses it, in their order."""
    dims = [axes for axes in map(axis_tuple, names) if axes and not place.split_axes & {*axes}]
    is_data = [bool(set(axes) & set(program.data_axes)) for axes in dims]
    if sum(is_data) > 1:
        raise ValueError(
            f"step_bytes: parameter {info.path} is sharded as {names}, expected data axes in one "
            "dimension at most. Read the bytes with trace_collectives."
        )
    loops = [] if once_a_step else sorted(info.loop_dims)
    calls = math.prod(info.shape[i] // axes_size(program.mesh, axis_tuple(names[i])) for i in loops)
    gathers = []
    in_order = sorted(zip(dims, is_data, strict=True), key=lambda dim: once_a_step and not dim[1])
    for axes, data in in_order:
        rows = 1
        for round_axes in reversed(program.comm.rounds(axes)):
            size = axes_size(program.mesh, round_axes)
            gathers.append(_DimGather(round_axes, size, shard * rows, data, rows, calls))
            rows *= size
        shard *= rows
    return gathers


def _data_shards(program: Program, place: Route) -> int:
    """Returns the number of shards of a parameter over axes of the batch."""
    axes = [axis for name in place.names for axis in axis_tuple(name) if axis in place.mean_axes]
    return axes_size(program.mesh, tuple(axes))


def _elements_on_device(
    program: Program, info: ParameterInfo, names: Names, padding: tuple[int, ...]
) -> int:
    """Counts a parameter's elements on a device, padding included."""
    padding = padding or (0,) * len(info.shape)
    elements = math.prod(n + width for n, width in zip(info.shape, padding, strict=True))
    return elements // math.prod(axes_size(program.mesh, axis_tuple(name)) for name in names)
