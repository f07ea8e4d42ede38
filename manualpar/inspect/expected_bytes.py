"""What a step sends for its parameters and gradients, in closed form.

A strategy says how many times a step gathers a parameter, scatters its gradient and gathers its new
value, see `manualpar.core.modes.strategy.CommCounts`. Here the counts become bytes. For a parameter
of `P` elements (padding included) of `b` bytes that is sharded over `S` devices, a device sends for
each

    all-gather or reduce-scatter                                    b P (S - 1) / S
    all-reduce over the `R` groups that each have all shards        2 b (P / S) (R - 1) / R

of which the second happens once a step (`S = 1` under data parallelism). `b` is that of the dtype
that travels: `gather_dtype` for a gather, `reduce_dtype` (else `gather_dtype`) for a reduction, the
parameter's own for the gather of a new value. With `gather_code` or `reduce_code` it is bytes of
codes: with `c(n)` the `quantized_bytes` of `n` numbers,

    all-gather, or all-to-all in place of a reduce-scatter          c(P / S) (S - 1)
    all-to-all and all-gather in place of an all-reduce             2 c(P / S / R) (R - 1)

for each layer of a loop by itself, where that is fewer bytes than without.

A frozen parameter costs its gathers alone, in the dtype that it is stored in if that is as narrow
as `gather_dtype`. Where nothing before it is trained, the backward pass does not ask for it either.

Over two axes of sizes `A, B` with `axis_by_axis`, a gather is one over `B` of `P / A` elements and
one over `A` of all elements: `b P (1 / A) (B - 1) / B + b P (A - 1) / A`. That is as much in all,
and more of it over the major axis.

The closed form takes each parameter as used once in a minibatch and needed in the backward pass. If
parameters are dropped after the forward pass, it is therefore the most that is sent: biases and the
kernel of the first layer are not gathered again. A parameter that is used several times is gathered
for each use (once, if it is kept), and a replicated one costs the same however often it is used.

A parameter that is split (see `manualpar.core.parameters.split_parameter`) is not gathered over the
axes that it is split over, and `P` is what a device has of it. Where `K` entries are shared by `N`
devices, `1 / K` of the parameter is gathered, and its gradient is summed in each minibatch: `2 b P
(N - 1) / N` over these axes.

In a pipeline `P` of a stacked parameter is that of a stage. How often each stage uses a parameter
is in `manualpar.inspect.pipeline_formulas`. Gradients of parameters that are not stacked are summed
over the `N` stages once a step, `2 b (P / S) (N - 1) / N`.

Replicas that train alone (`diloco`) send in a step what one of them sends on its part of the mesh,
and see `outer_step_bytes` for their outer step.

Not counted are collectives of layers that are split, of metrics, of examples and their number, and
of other collections, what else stages send, and those that the compiler inserts for an optimizer
that is not elementwise.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple
from manualpar.core.modes.strategy import CommCounts
from manualpar.core.parameters.collectives import EXACT, CommPolicy
from manualpar.core.parameters.placement import ParameterInfo, Placement
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
from manualpar.strategies.diloco.program import DiLoCoProgram

# The scopes of what a step sends besides parameters and gradients.
OTHER_SCOPES = (
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    *LAYER_SCOPES,
)


def step_bytes(program: Program, *, stage: int | None = None) -> dict[tuple[str, ...], Fraction]:
    """Predicts what a device sends in a step for parameters and gradients.

    Args:
      program: The program. In modes `auto` and `explicit` the prediction is what the compiler is
        asked for, and not what it makes of it.
      stage: The stage of a pipeline whose device it is; `None` for the one that sends the most.

    Returns:
      The bytes over each axis, or tuple of axes, as `bytes_by_axes` gives them of the traced
      program in mode `manual`; for parameters that are gathered again in the backward pass, the
      most that it can be.

    Raises:
      ValueError: The mode is `auto-unconstrained`, in which the compiler may send activations
        instead; or a parameter is sharded over data axes in two dimensions.
    """
    if program.mode == "auto-unconstrained":
        raise ValueError(
            "step_bytes: program has mode='auto-unconstrained', expected 'manual', 'auto' or "
            "'explicit': the compiler is free to send what it likes. Read what it sends with "
            "compiled_collectives."
        )
    if isinstance(program, DiLoCoProgram):
        program = program.inner
    if program.step.pipeline is None:
        m = program.num_minibatches
        sends = (program.strategy.sends(m, place.keep) for _, place in program.parameters)
        return _of_stage(program, (Uses(one, backward=m) for one in sends))
    form = PipelineForm(program)
    stages = form.stages(stage)
    sent = [_of_stage(program, form.uses(one)) for one in stages]
    return max(sent, key=lambda by_axes: sum(by_axes.values()))


def _of_stage(program: Program, uses: Iterable[Uses]) -> dict[tuple[str, ...], Fraction]:
    """What a device sends that uses parameters so often."""
    totals: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
    for (info, place), used in zip(program.parameters, uses, strict=True):
        for axes, sent in _of_parameter(program, info, place, used):
            totals[axes] += sent
    return dict(totals)


def total_step_bytes(program: Program, *, stage: int | None = None) -> Fraction:
    """The sum of `step_bytes` over all axes."""
    return sum(step_bytes(program, stage=stage).values(), Fraction(0))


def outer_step_bytes(
    program: DiLoCoProgram, *, fragment: int | None = None
) -> dict[tuple[str, ...], Fraction]:
    """Predicts what a device sends in outer steps for parameters and their differences.

    A device sends `2 b (P / S) (R - 1) / R` bytes over `R` replicas for each trained parameter of
    `P` elements, sharded over `S` devices as its optimizer's state is; with a code
    `2 c(P / S / R) (R - 1)`, where that is less. Where the parameter itself is whole, the new one
    is gathered in each replica: `b P (S - 1) / S`.

    Args:
      program: What `diloco` returns.
      fragment: The fragment that is exchanged; `None` for all of them, each once.

    Returns:
      The bytes over each axis, or tuple of axes, as `bytes_by_axes` gives them of the traced
      `outer_step`, without the 4 bytes of the number of examples and without collections.
    """
    totals: defaultdict[tuple[str, ...], Fraction] = defaultdict(Fraction)
    axes, wire = program.replica_axes, program.outer_wire
    size = axes_size(program.mesh, axes)
    for (info, place), own in zip(program.parameters, program.fragments, strict=True):
        if own is None or fragment not in (None, own):
            continue
        shard = _local_elements(program, info, place.sharded_names, place.padding)
        dtype = jnp.dtype(wire.reduce_dtype or info.dtype)
        totals[axes] += _mean_bytes(wire, shard, dtype, axes, size)
        if place.state_names is not None:
            names = place.sharded_names
            for gather in _gathers(program, info, place, names, shard, once_a_step=True):
                if gather.is_data and gather.axis_size > 1:
                    totals[gather.axes] += gather.gather_bytes(info.dtype.itemsize)
    return dict(totals)


def _mean_bytes(wire: CommPolicy, n: int, dtype: Any, axes: tuple[str, ...], size: int) -> Fraction:
    """What a device sends for the mean over `size` devices of `n` numbers."""
    if size > 1 and (code := wire.reduce_quantizer(n / size, dtype, axes)):
        return 2 * ring_bytes("all_gather", code.row_bytes(-(-n // size)), size)
    return ring_bytes("all_reduce", n * dtype.itemsize, size)


def of_parameters(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Those collectives of a traced step that `step_bytes` predicts.

    They are none of metrics, of collections or of layers. One that this package has not written
    counts, so that it shows as a difference, unless it is known to run over no data axis.
    """
    return tuple(one for one in collectives if is_of_parameters(one.scope, one.purpose))


def is_of_parameters(scope: str, purpose: str) -> bool:
    """Whether the collective of this scope and purpose is one that `step_bytes` predicts."""
    if purpose_of(scope) is None:
        return purpose == OTHER
    return purpose not in OTHER_SCOPES


class _DimGather(NamedTuple):
    """One round of the gather of a dimension.

    Attributes:
      elements: How many elements a device puts in.
      rows: In how many shards they were before the dimension's first round.
      calls: How many times it is called for them: once for each layer of a loop.
    """

    axes: tuple[str, ...]
    axis_size: int
    elements: int
    is_data: bool
    rows: int
    calls: int

    def gather_bytes(self, itemsize: int, wire: CommPolicy = EXACT, dtype: Any = None) -> Fraction:
        """The bytes that a device sends for it; `dtype` is that of the parameter."""
        n = self.elements // self.rows // self.calls
        size = n * itemsize
        if self.is_data and (code := wire.gather_quantizer(n, dtype)):
            size = code.row_bytes(n)
        return ring_bytes("all_gather", self.calls * self.rows * size, self.axis_size)

    def scatter_bytes(self, wire: CommPolicy, reduced: Any) -> Fraction:
        """The bytes that a device sends for the reduce-scatter that goes back."""
        n = self.elements // self.calls
        code = wire.reduce_quantizer(n, reduced, self.axes)
        size = code.row_bytes(n) if code else n * reduced.itemsize
        return ring_bytes("all_gather", self.calls * size, self.axis_size)


def _of_parameter(
    program: Program, info: ParameterInfo, place: Placement, uses: Uses
) -> Iterator[tuple[tuple[str, ...], Fraction]]:
    """What is sent for one parameter, as pairs of axes and bytes."""
    strategy, sends = program.strategy, uses.sends
    wire = program.wire.for_parameter(info.dtype, trainable=place.trainable)
    if not place.trainable:
        sends = CommCounts(sends.uses, sends.gathers)
    stored = info.dtype.itemsize
    gathered = jnp.dtype(wire.gather_dtype or info.dtype).itemsize
    reduced = jnp.dtype(wire.reduce_dtype or wire.gather_dtype or info.dtype)
    once_a_step = strategy.gather_every == "step"

    shard = _local_elements(program, info, place.names, place.parameter_padding)
    itemsize = gathered if once_a_step else stored
    shared = [axis for name in place.shared_names for axis in axis_tuple(name)]
    summed = tuple(axis for axis in shared if axis not in place.mean_axes)
    if summed and place.trainable:
        # Each device uses a slice of what it has; the gradients of all slices are summed.
        has = shard * (_data_shards(program, place) if once_a_step else 1)
        each = ring_bytes("all_reduce", has * itemsize, axes_size(program.mesh, summed))
        yield summed, uses.backward * each
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
            times = strategy.sends(program.num_minibatches, True).gathers  # It is kept.
        yield gather.axes, times * gather.gather_bytes(itemsize, wire, info.dtype)
        if gather.is_data and not once_a_step:  # The gradient goes back the way it came.
            yield gather.axes, sends.scatters * gather.scatter_bytes(wire, reduced)
    if not place.trainable:
        return

    shard = _local_elements(program, info, place.sharded_names, place.padding)
    if place.state_names is not None or once_a_step:  # The gradient of a whole parameter.
        for gather in _gathers(program, info, place, place.sharded_names, shard, once_a_step=True):
            if gather.is_data:
                if gather.axis_size > 1:
                    yield gather.axes, sends.scatters * gather.scatter_bytes(wire, reduced)
                if place.state_names is not None:  # The new parameter.
                    yield gather.axes, sends.new_gathers * gather.gather_bytes(stored)

    sharded = {axis for name in place.sharded_names for axis in axis_tuple(name)}
    if others := tuple(axis for axis in program.data_axes if axis not in sharded):
        for some in wire.reductions(others):
            size = axes_size(program.mesh, some)
            yield some, _mean_bytes(wire, shard, reduced, some, size)
    if stages := place.sum_axes:  # Each stage has a part of the gradient.
        size = axes_size(program.mesh, stages)
        yield stages, ring_bytes("all_reduce", shard * reduced.itemsize, size)


def _gathers(
    program: Program,
    info: ParameterInfo,
    place: Placement,
    names: Names,
    shard: int,
    *,
    once_a_step: bool,
) -> list[_DimGather]:
    """The gathers, in their order, that make a parameter what the model computes with."""
    dims = [axes for axes in map(axis_tuple, names) if axes and not place.split_axes & {*axes}]
    is_data = [bool(set(axes) & set(program.data_axes)) for axes in dims]
    if sum(is_data) > 1:
        raise ValueError(
            f"step_bytes: parameter {info.path} is sharded as {names}, expected data axes in one "
            "dimension at most. Read what is sent with trace_collectives."
        )
    loops = [] if once_a_step else sorted(info.loop_dims)
    local = (info.shape[i] // axes_size(program.mesh, axis_tuple(names[i])) for i in loops)
    calls = math.prod(local)
    gathers = []
    in_order = sorted(zip(dims, is_data, strict=True), key=lambda dim: once_a_step and not dim[1])
    for axes, data in in_order:
        rows = 1
        for some in reversed(program.wire.rounds(axes)):
            size = axes_size(program.mesh, some)
            gathers.append(_DimGather(some, size, shard * rows, data, rows, calls))
            rows *= size
        shard *= rows
    return gathers


def _data_shards(program: Program, place: Placement) -> int:
    """Over how many devices a parameter is sharded that is gathered over the batch's axes."""
    axes = [axis for name in place.names for axis in axis_tuple(name) if axis in place.mean_axes]
    return axes_size(program.mesh, tuple(axes))


def _local_elements(
    program: Program, info: ParameterInfo, names: Names, padding: tuple[int, ...]
) -> int:
    """The elements of a parameter, padding included, that lie on a device."""
    padding = padding or (0,) * len(info.shape)
    whole = math.prod(n + width for n, width in zip(info.shape, padding, strict=True))
    return whole // math.prod(axes_size(program.mesh, axis_tuple(name)) for name in names)
