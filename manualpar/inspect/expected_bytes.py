"""Computes the bytes that a step sends for its parameters and gradients, without a trace.

A strategy gives three counts for each parameter: how often a step gathers it, scatters its gradient
and gathers its new value (`manualpar.core.modes.strategy.CommCounts`). This module converts the
counts to bytes. A parameter has `P` elements (padding included) of `b` bytes and is sharded over
`S` devices. For each collective a device sends

    all-gather or reduce-scatter                                    b P (S - 1) / S
    all-reduce over the `R` groups that each store all shards       2 b (P / S) (R - 1) / R

The all-reduce of the gradient runs once a step (`S = 1` under data parallelism). `b` is the size of
the dtype that is sent: `gather_dtype` for a gather, `reduce_dtype` (else `gather_dtype`) for a
reduction, the parameter's dtype for the gather of a new value. With `gather_code` or `reduce_code`
devices send quantized numbers. `n` numbers then take `c(n)` bytes
(`manualpar.quantization.quantized_collectives.quantized_bytes`), and a device sends for each

    all-gather, or all-to-all in place of a reduce-scatter          c(P / S) (S - 1)
    all-to-all and all-gather in place of an all-reduce             2 c(P / S / R) (R - 1)

Each layer of a loop is quantized separately, and only if quantization saves bytes.

For a frozen parameter a step sends only gathers. They send the dtype in which the parameter is
stored, if this dtype is as narrow as `gather_dtype`, and otherwise `gather_dtype`. If no layer
before a frozen parameter's layer is trained, the backward pass does not gather the parameter.

If the option `axis_by_axis` is set and a parameter is sharded over two axes of sizes `A, B`, its
gather is one gather over `B` of `P / A` elements and then one over `A` of all elements:
`b P (1 / A) (B - 1) / B + b P (A - 1) / A`. The sum is the same as for one gather over both axes.
Most of these bytes are sent over `A`, the major axis.

The formulas assume that a minibatch uses each parameter once, and that the backward pass needs the
parameter. If parameters are dropped after the forward pass, the result is an upper bound, because
the step gathers neither biases nor the kernel of the first layer again. A parameter with several
uses is gathered for each use (only once, if it stays gathered). For a replicated parameter the
number of uses does not matter.

A layer may compute with its own part of a parameter (see
`manualpar.core.parameters.annotations`). Such a split parameter is not gathered over the axes
that split it, and `P` counts a device's part. If `N` devices share the `K` entries of a dim (8
devices and 2 heads), `1 / K` of the parameter is gathered, and the gradient is summed in each
minibatch: `2 b P (N - 1) / N` over the axes that split the parameter.

In a pipeline `P` of a stacked parameter counts one stage's part.
`manualpar.inspect.expected_bytes` counts the uses by each stage. Gradients of parameters that
are not stacked are summed over the `N` stages once a step: `2 b (P / S) (N - 1) / N`.

Under `diloco` the replicas train separately. A step sends the bytes of one replica's program on
that replica's part of the mesh. `outer_step_bytes` counts the bytes of the outer step.

An optimizer that multiplies matrices, such as Muon, runs on whole matrices, see
`manualpar.core.program.whole_matrices`. For a group of `M` matrices of `s` bytes each, whose dims
are sharded over axes of `n_1, n_2, ...` devices (`n` is their product), a device sends for each
input and each result of the function

    an all-to-all over each of these axes                           M s / n (n_i - 1) / n_i

`M` counts the matrices of which a device has a part, and repeats that make `M` a multiple of `n`.
If `C` devices with the same parts divide the matrices, `M` is a multiple of `n C`, an all-to-all
sends `1 / C` of this, and an all-gather of each result sends `M s / n (C - 1) / C`.

The formulas do not count: collectives of split layers, of metrics, of example counts, and of
variables outside `params`; activations that stages send; collectives that the compiler inserts for
an optimizer that is not elementwise, if this optimizer is left to it (see `matrix_functions`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.collectives import EXACT, MixedPrecisionPolicy
from manualpar.core.parameters.placement import ParameterInfo, ParameterSharding, partition
from manualpar.core.program.program import Program
from manualpar.core.program.whole_matrices import MatrixFunctions
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    COLLECTIONS_SCOPE,
    COUNT_SCOPE,
    EXAMPLES_SCOPE,
    GATHER_SCOPE,
    MATRICES_SCOPE,
    METRICS_SCOPE,
    NEW_PARAMS_SCOPE,
    NONFINITE_SCOPE,
    OPTIMIZER_SCOPE,
    OUTER_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
    purpose_of,
)
from manualpar.inspect.communication import Collective, Kind, bytes_by_axes
from manualpar.inspect.scope_parsing import LAYER_SCOPES, OTHER
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.staged_loss import StagedLoss

# -------------------------------------------------------------------------------------------------
# Predicts the collectives of one parameter and of its gradient in a step, without a trace.
#
# A strategy gives three counts for each parameter: how often a step gathers it, scatters its
# gradient and gathers its new value (`manualpar.core.modes.strategy.CommCounts`). The parameter's
# placement gives the axes. `manualpar.inspect.expected_bytes` explains the bytes, and sums them
# for a program; `manualpar.plans.layouts` uses the same collectives for layouts without a
# program.
#
# In a pipeline whose stages run several chunks of layers, one use of a stacked parameter reads
# only one chunk: `1 / parts` of the layers.


class Sending(Protocol):
    """The fields of a program that determine what devices send for parameters."""

    @property
    def strategy(self) -> Strategy:
        """The strategy."""

    @property
    def mesh(self) -> Any:
        """The mesh; only the sizes of its axes are read."""

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""

    @property
    def num_minibatches(self) -> int:
        """The minibatches of a step."""

    @property
    def comm(self) -> MixedPrecisionPolicy:
        """The dtypes and quantizers with which values are sent."""


class Uses(NamedTuple):
    """How often a step sends a parameter; `backward` counts the uses with a backward pass."""

    sends: CommCounts
    backward: int


class _DimGather(NamedTuple):
    """One all-gather of a parameter, along one dimension.

    A dimension that is sharded over several axes may be gathered in several rounds.

    Attributes:
      elements: The number of elements in a device's operand, over all `calls`.
      is_data: Whether the axes split the batch.
      rows: The number of shards of the dimension that earlier rounds have joined to the operand.
      calls: How many all-gathers one use of the parameter takes: one for each layer of a loop.
    """

    axes: tuple[str, ...]
    axis_size: int
    elements: int
    is_data: bool
    rows: int
    calls: int

    @property
    def sends(self) -> bool:
        """Whether the program has the gather; it leaves out gathers over data axes of size 1."""
        return self.axis_size > 1 or not self.is_data

    def gather(
        self,
        times: int,
        scope: str,
        comm: MixedPrecisionPolicy,
        dtype: Any,
        sent: Any,
        parts: int = 1,
    ) -> Collective:
        """Returns the all-gathers of this round, as one `Collective`, for `times` gathers.

        `dtype` is the parameter's dtype. `sent` is the dtype in which values are sent if they are
        not quantized.
        """
        n = self.elements // self.rows // self.calls
        code = comm.gather.quantizer_for(n, dtype) if self.is_data else None
        size, sent = code.row(n) if code else (n, sent)
        times = times * self.calls // parts
        shape = (self.rows * size,)
        return Collective("all_gather", self.axes, self.axis_size, shape, sent, times, scope)

    def scatter(
        self, times: int, scope: str, comm: MixedPrecisionPolicy, reduced: Any, parts: int = 1
    ) -> Collective:
        """Returns `times` reduce-scatters of the gradient, or all-to-alls if it is quantized."""
        n, times = self.elements // self.calls, times * self.calls // parts
        code = comm.reduce_quantizer(n, reduced, self.axes)
        kind: Kind = "all_to_all" if code else "reduce_scatter"
        size, sent = code.row(n) if code else (n, reduced)
        shape = (self.axis_size * size,)
        return Collective(kind, self.axes, self.axis_size, shape, sent, times, scope)


class ParameterForm:
    """The collectives of one parameter of a program, and of its gradient."""

    def __init__(self, program: Sending, info: ParameterInfo, place: ParameterSharding) -> None:
        self.program, self.info, self.place = program, info, place
        self.comm = program.comm.for_parameter(
            info.dtype, trainable=place.trainable, is_float8=place.is_float8
        )
        self.once_a_step = program.strategy.gather_every == "step"
        self.reduced = self.comm.reduced_dtype(info.dtype)
        self._gathered = jnp.dtype(self.comm.gather.dtype or info.dtype)
        self._shard = elements_on_device(program, info, place.names, place.parameter_padding)

    @functools.cached_property
    def _calls(self) -> int:
        """How many gathers one use of the parameter takes: one for each layer of a loop."""
        names, shape, mesh = self.place.names, self.info.shape, self.program.mesh
        loops = sorted(self.info.loop_dims)
        return math.prod(shape[i] // axes_size(mesh, axis_tuple(names[i])) for i in loops)

    @functools.cached_property
    def _used(self) -> list[_DimGather]:
        info, place, shard = self.info, self.place, self._shard
        if any(place.shared_names) and not self.once_a_step:
            named = zip(info.shape, place.shared_names, strict=True)
            shard //= math.prod(entries for entries, name in named if name)
        calls = 1 if self.once_a_step else self._calls
        once = self.once_a_step
        return _gathers(self.program, info, place, place.names, shard, calls, once_a_step=once)

    @functools.cached_property
    def _of_state(self) -> list[_DimGather]:
        """The gathers of the new parameter, over the axes that shard the optimizer's state."""
        info, place, shard = self.info, self.place, self._state_shard
        names = place.sharded_names
        return _gathers(self.program, info, place, names, shard, 1, once_a_step=True)

    @functools.cached_property
    def _state_shard(self) -> int:
        """The number of elements of the optimizer's state on a device."""
        place = self.place
        return elements_on_device(self.program, self.info, place.sharded_names, place.padding)

    @functools.cached_property
    def _reduced_over(self) -> list[tuple[tuple[str, ...], int]]:
        """The axes of each reduction of the gradient once a step, and their number of devices."""
        program = self.program
        done = {axis for name in self.place.sharded_names for axis in axis_tuple(name)}
        done |= {*self._averaged_axes}
        others = tuple(axis for axis in program.data_axes if axis not in done)
        reductions = self.comm.reductions(others) if others else ()
        return [(axes, axes_size(program.mesh, axes)) for axes in reductions]

    @functools.cached_property
    def _averaged_axes(self) -> tuple[str, ...]:
        """The axes over which the backward pass averages the gradient where it is used."""
        if self.place.is_averaged_in_loop:
            return self.place.mean_axes
        is_gathered = not self.once_a_step and any(gather.is_data for gather in self._used)
        return self.comm.averaged_axes if is_gathered else ()

    def shared_sums(
        self, times: int, scope: str = CAST_SCOPE, parts: int = 1
    ) -> Iterator[Collective]:
        """Yields the all-reduces of gradients that are needed where devices share entries.

        If a dim has fewer entries than there are devices (2 key heads on 8 devices), several
        devices use the same entry, and its gradient is the sum over these devices.
        """
        place, mesh = self.place, self.program.mesh
        shared = [axis for name in place.shared_names for axis in axis_tuple(name)]
        summed = tuple(axis for axis in shared if axis not in place.mean_axes)
        if summed and place.trainable:
            # Each device uses one slice of the array that it stores. The gradients of all slices
            # are summed as one array.
            once = self.once_a_step
            elements = self._shard * (_data_shards(self.program, place) if once else 1)
            dtype = self._gathered if once else jnp.dtype(self.info.dtype)
            size, calls = axes_size(mesh, summed), self._calls
            shape = (elements // calls,)
            yield Collective(
                "all_reduce", summed, size, shape, dtype, times * calls // parts, scope
            )

    def gathers(
        self, sends: CommCounts, scope: str = GATHER_SCOPE, parts: int = 1
    ) -> Iterator[Collective]:
        """Yields the gathers of the parameter before the model uses it."""
        strategy, info = self.program.strategy, self.info
        sent = self._gathered if self.once_a_step else jnp.dtype(info.dtype)
        for gather in self._used:
            sent = self._gathered if gather.is_data else sent
            if not gather.sends:
                continue
            times = sends.gathers if gather.is_data else sends.uses
            if gather.is_data and not {*gather.axes} <= {*(strategy.regather_axes or gather.axes)}:
                # Over these axes the parameter stays gathered for the backward pass.
                times = strategy.sends(self.program.num_minibatches, True).gathers
            yield gather.gather(times, scope, self.comm, info.dtype, sent, parts)

    def scales(self, scope: str = GATHER_SCOPE) -> Iterator[Collective]:
        """Yields the parameter's part of the all-reduce of scales, if it is gathered in float8."""
        quantizer = self.comm.gather.quantizer
        if quantizer is None or quantizer.name != "float8":
            return
        gathered = {axis for x in self._used if x.is_data for axis in x.axes}
        named = (axis for name in self.place.names for axis in axis_tuple(name))
        axes = tuple(axis for axis in named if axis in gathered)
        if (size := axes_size(self.program.mesh, axes)) > 1:
            shape = (math.prod(self.info.shape[dim] for dim in self.info.loop_dims),)
            yield Collective("all_reduce", axes, size, shape, jnp.dtype("float32"), 1, scope)

    def scatters(
        self, times: int, scope: str = SCATTER_SCOPE, parts: int = 1
    ) -> Iterator[Collective]:
        """Yields the reduce-scatters of the gradient, over the axes of the gather."""
        place = self.place
        if not self.once_a_step:
            for gather in self._used:
                if gather.is_data and gather.sends:
                    yield gather.scatter(times, scope, self.comm, self.reduced, parts)
        if place.trainable and (place.state_names is not None or self.once_a_step):
            for gather in self._of_state:
                if gather.is_data and gather.sends:
                    yield gather.scatter(times, scope, self.comm, self.reduced)

    def means(self, times: int, scope: str = REDUCE_SCOPE) -> Iterator[Collective]:
        """Yields the means of the gradient in the backward pass, after the reduce-scatters."""
        if self._averaged_axes:
            gathered = (gather.elements for gather in self._used if gather.is_data)
            n = next(gathered, self._shard) // self._calls
            for axes in self.comm.reductions(self._averaged_axes):
                size = axes_size(self.program.mesh, axes)
                for mean in mean_collectives(self.comm, n, self.reduced, axes, size, scope):
                    yield dataclasses.replace(mean, times=times * self._calls)

    def new_gathers(self, times: int, scope: str = NEW_PARAMS_SCOPE) -> Iterator[Collective]:
        """Yields the gathers of the new parameter, if only the optimizer's state is sharded."""
        dtype = jnp.dtype(self.info.dtype)
        if self.place.trainable and self.place.state_names is not None:
            for gather in self._of_state:
                if gather.is_data:
                    yield gather.gather(times, scope, EXACT, dtype, dtype)

    def reductions(self, scope: str = REDUCE_SCOPE) -> Iterator[Collective]:
        """Yields the reductions of the gradient once a step, over the axes that do not shard it."""
        if not self.place.trainable:
            return
        shard = self._state_shard
        for axes, size in self._reduced_over:
            yield from mean_collectives(self.comm, shard, self.reduced, axes, size, scope)
        if stages := self.place.sum_axes:  # Each stage has computed a term of the gradient.
            size = axes_size(self.program.mesh, stages)
            yield Collective("all_reduce", stages, size, (shard,), self.reduced, 1, scope)

    def exchanged(self, chunks: int, axis: str) -> Iterator[Collective]:
        """Yields the permutes that exchange a stacked parameter and its gradient between stages.

        Each stage stores a contiguous run of layers. If a stage runs several chunks of layers, it
        runs other layers than it stores. So stages send each other the parameters of chunks, and
        send the gradients back, see `manualpar.layers.pipeline.executor`.
        """
        size = axes_size(self.program.mesh, (axis,))
        for (layers, *rest), dtype in self._exchanged_arrays:
            piece = (layers // chunks, *rest)
            yield Collective("permute", (axis,), size, piece, dtype, chunks, PIPELINE_SCOPE)

    @functools.cached_property
    def _exchanged_arrays(self) -> list[tuple[tuple[int, ...], Any]]:
        """The shapes on a device, and dtypes, of a stacked parameter and its gradient."""
        info, place, mesh = self.info, self.place, self.program.mesh
        reduced = dtype_of_sums(info.dtype)
        is_scattered = self.once_a_step or place.state_names is not None
        sharded = {axis for name in place.sharded_names for axis in axis_tuple(name)}
        if is_scattered and sharded & set(place.mean_axes):  # It is scattered before the permutes.
            reduced = self.reduced
        exchanged = [(place.names, place.parameter_padding, info.dtype)]
        if place.trainable:
            exchanged.append((place.sharded_names, place.padding, reduced))
        arrays = []
        for names, padding, dtype in exchanged:
            sizes = [axes_size(mesh, axis_tuple(name)) for name in names]
            named = zip(info.shape, padding or (0,) * len(sizes), sizes, strict=True)
            shape = tuple((n + more) // size for n, more, size in named)
            arrays.append((shape, jnp.dtype(dtype)))
        return arrays

    def collectives(self, uses: Uses) -> Iterator[Collective]:
        """Yields all collectives of the parameter in a step."""
        sends = uses.sends
        if not self.place.trainable:
            sends = CommCounts(sends.uses, sends.gathers)
        yield from self.shared_sums(uses.backward)
        yield from self.scales()
        yield from self.gathers(sends)
        yield from self.scatters(sends.scatters)
        yield from self.means(uses.backward)
        yield from self.new_gathers(sends.new_gathers)
        yield from self.reductions()


def _gathers(
    program: Sending,
    info: ParameterInfo,
    place: ParameterSharding,
    names: Names,
    shard: int,
    calls: int,
    *,
    once_a_step: bool,
) -> list[_DimGather]:
    """Returns the gathers of a parameter before the model uses it, in their order."""
    dims = [axes for axes in map(axis_tuple, names) if axes and not place.split_axes & {*axes}]
    is_data = [bool(set(axes) & set(program.data_axes)) for axes in dims]
    if sum(is_data) > 1:
        raise ValueError(
            f"step_bytes: parameter {info.path} is sharded as {names}, expected data axes in one "
            "dimension at most. Read what is sent with trace_collectives."
        )
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


def _data_shards(program: Sending, place: ParameterSharding) -> int:
    """Returns the number of shards of a parameter along the axes that split the batch."""
    axes = [axis for name in place.names for axis in axis_tuple(name) if axis in place.mean_axes]
    return axes_size(program.mesh, tuple(axes))


def dtype_of_sums(dtype: Any) -> Any:
    """Returns the dtype in which gradients and metrics of a dtype are summed."""
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.promote_types(dtype, jnp.float32) if is_inexact else dtype


def elements_on_device(
    program: Sending, info: ParameterInfo, names: Names, padding: tuple[int, ...]
) -> int:
    """Counts a parameter's elements on a device, padding included."""
    padding = padding or (0,) * len(info.shape)
    elements = math.prod(n + width for n, width in zip(info.shape, padding, strict=True))
    return elements // math.prod(axes_size(program.mesh, axis_tuple(name)) for name in names)


def mean_collectives(
    comm: MixedPrecisionPolicy, n: int, dtype: Any, axes: tuple[str, ...], size: int, scope: str
) -> Iterator[Collective]:
    """Yields the collectives that compute the mean of `n` numbers over `size` devices."""
    if size > 1 and (code := comm.reduce_quantizer(n / size, dtype, axes)):
        row, sent = code.row(-(-n // size))
        yield Collective("all_to_all", axes, size, (size * row,), sent, 1, scope)
        yield Collective("all_gather", axes, size, (row,), sent, 1, scope)
    else:
        yield Collective("all_reduce", axes, size, (n,), dtype, 1, scope)


# -------------------------------------------------------------------------------------------------
# Predicts what the stages of a pipeline send, and how often each stage uses each parameter.
#
# `S` stages run `M` microbatches through `v S` chunks of layers in `T` ticks. A device sends
#
# activations T permutes of a layer's output their gradients T permutes of the differentiated part
# of the output metrics 1 all-reduce of each scalar parameters with v > 1: v permutes of 1 / v of
# the stage's layers, in shards their gradients with v > 1: v permutes of 1 / v of the gradients,
# in shards
#
# over the axis of stages. The program writes the permutes of a tick once for all stages, so they
# also count on a device that sends zeros in this tick or has no neighbour.
#
# A parameter is used in the prefix (before the layers, on the first stage), in chunks of layers
# (on each stage), or in the suffix (after the layers, on the last stage). The backward pass of a
# chunk gathers the chunk's parameters again, because slots
# (`manualpar.layers.pipeline.staged_loss`)
# keep only values that depend on activations. If the backward pass also runs the complete chunk
# again, and drops gathered parameters after that, it gathers them a second time. The prefix has a
# backward pass if one of its parameters is trained.


class _FoundStages(Exception):  # noqa: N818 (it is no error)
    """Carries the staged loss out of the trace of a step, and ends the trace."""


@dataclasses.dataclass(frozen=True)
class _Seeker:
    """Stands in for the pipeline of a step, and raises `_FoundStages` when it is called."""

    run: PipelineRun

    def __call__(
        self, loss: Any, params: Any, collections: Any, minibatches: Any, reduce: Any
    ) -> Any:
        raise _FoundStages(self.run.staged(loss, params, collections, minibatches))

    def exchange_layers(self, tree: Any) -> Any:
        return tree

    def with_all_layers(self, params: Any) -> Any:
        return self.run.with_all_layers(params)


class PipelineForm:
    """Predicts the collectives of a program's pipeline.

    Attributes:
      run: The program's pipeline.
      loss: The loss function, cut into a prefix, chunks of layers and a suffix.
    """

    def __init__(self, program: Program) -> None:
        assert isinstance(program.pipeline, PipelineRun)
        self.program, self.run = program, program.pipeline
        seeker: Any = _Seeker(self.run)
        step = dataclasses.replace(program.step, pipeline=seeker)
        try:
            jax.eval_shape(step.train, program.abstract_state, program.abstract_batch)
        except _FoundStages as found:
            self.loss: StagedLoss = found.args[0]

    def stages(self, stage: int | None) -> range:
        """Returns the range of one stage, or of all stages; refuses a stage that does not exist."""
        every = range(self.run.num_stages)
        if stage is None:
            return every
        if stage not in every:
            raise ValueError(f"step_bytes: stage={stage!r}, expected one of {list(every)} or None.")
        return range(stage, stage + 1)

    def uses(self, stage: int) -> list[Uses]:
        """Returns how often a stage uses each parameter, in the program's order of parameters."""
        return [self._uses(index, stage) for index in range(len(self.program.parameters))]

    def _uses(self, index: int, stage: int) -> Uses:
        place = self.program.parameters[index][1]
        strategy, microbatches = self.program.strategy, self.run.num_microbatches
        last = self.run.num_stages - 1
        backward, sends = 0, CommCounts(0)

        def add(times: int, passes: int, *, dropped: bool, differentiated: bool = True) -> None:
            """Counts `times` uses in each of `passes` forward passes, and in a differentiated pass.

            With `dropped`, the differentiated pass drops gathered parameters after its forward half
            and gathers them again for its backward half.
            """
            nonlocal backward, sends
            each_pass = [strategy.sends(times, True)] * passes
            if differentiated:
                backward += times
                each_pass.append(strategy.sends(times, not dropped))
            for counts in each_pass:
                sends = CommCounts(*(x + y for x, y in zip(sends, counts, strict=True)))

        if index in self.loss.prefix_params and stage == 0:
            places = [self.program.parameters[i][1] for i in self.loss.prefix_params]
            is_trained = any(place.trainable for place in places)
            add(microbatches, 1, dropped=True, differentiated=is_trained)
        if index in self.loss.cut.stacked:  # A chunk uses 1 / v of the layers.
            add(microbatches, 1, dropped=self.run.keep == "inputs")
        elif index in self.loss.chunk_params:
            add(microbatches * self.run.chunks, 1, dropped=self.run.keep == "inputs")
        if index in self.loss.suffix_params and stage == last:
            add(microbatches, 0, dropped=True)
        once = strategy.sends(1, place.keep)
        if strategy.gather_every == "step":
            sends = sends._replace(gathers=once.gathers)
        if strategy.gather_every == "step" or place.state_names is not None:
            sends = sends._replace(scatters=once.scatters)
        else:
            sends = sends._replace(scatters=backward)
        return Uses(sends._replace(new_gathers=once.new_gathers), backward)

    def sends(self) -> Iterator[Collective]:
        """Yields a step's collectives over the axis of stages, without sums of gradients."""
        table, types = self.run.table, self.loss.types
        for activation in (*types.inexact, *types.exact):
            yield self._sent("permute", activation.shape, activation.dtype, table.num_ticks)
        for activation in types.inexact:
            yield self._sent("permute", activation.shape, activation.dtype, table.num_ticks)
        for metric in jax.tree.leaves(self.loss.returns[1][0]):
            yield self._sent("all_reduce", metric.shape, dtype_of_sums(metric.dtype))
        if self.run.chunks > 1:
            for index in self.loss.cut.stacked:
                form = ParameterForm(self.program, *self.program.parameters[index])
                yield from form.exchanged(self.run.chunks, self.run.axis)

    def _sent(self, kind: Kind, shape: tuple[int, ...], dtype: Any, times: int = 1) -> Collective:
        axis, size = self.run.axis, self.run.num_stages
        return Collective(kind, (axis,), size, shape, jnp.dtype(dtype), times, PIPELINE_SCOPE)


def pipeline_collectives(program: Program) -> tuple[Collective, ...]:
    """Predicts the collectives of a step over the axis of stages, without sums of gradients.

    Returns:
      The collectives, which are the same on every stage; `()` if the program has no pipeline.
    """
    return tuple(PipelineForm(program).sends()) if program.pipeline else ()


# -------------------------------------------------------------------------------------------------
# Predicts the collectives of an optimizer's matrix functions.


def matrix_functions(program: Program) -> MatrixFunctions | None:
    """Finds the matrix functions of a program's optimizer.

    Returns:
      The functions that run on whole matrices, and the parameters whose update is left to XLA;
      `None` if XLA writes all collectives of the update.
    """
    if program.outer is not None:
        program = program.outer.inner
    update, state = program.step.update, program.unpadded_state
    if not update.mode.writes_collectives:
        return None
    params, _ = partition(program.placements, state.params)
    return update.matrix_functions(state.tx, params, state.opt_state, state.collections)


def matrix_collectives(program: Program) -> Iterator[Collective]:
    """Yields the collectives of a step for the optimizer's matrix functions."""
    functions, scope = matrix_functions(program), f"{OPTIMIZER_SCOPE}/{MATRICES_SCOPE}"
    for group in functions.groups if functions else ():
        owners = math.prod(axes_size(program.mesh, axes) for _, axes in group.exchanged)
        copies = axes_size(program.mesh, group.copies)
        part = math.prod(group.shape) // owners
        for dtype in (*group.inputs, *group.outputs):
            for _, axes in group.exchanged:
                size, operand = axes_size(program.mesh, axes), (group.padded // copies, part)
                yield Collective("all_to_all", axes, size, operand, dtype, 1, scope)
        for dtype in group.outputs if group.copies else ():
            operand = (group.padded // copies, part)
            yield Collective("all_gather", group.copies, copies, operand, dtype, 1, scope)


# -------------------------------------------------------------------------------------------------


# The scopes of collectives that `step_bytes` does not count.
OTHER_SCOPES = (
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    *LAYER_SCOPES,
)


def step_bytes(program: Program, *, stage: int | None = None) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends in a step for parameters, gradients and updates.

    Args:
      program: The program. In modes `auto` and `explicit` the prediction holds if the compiler
        gathers and scatters as its sharding constraints ask. The parameters of `other_models` are
        included.
      stage: The stage of a pipeline; `None` for the stage that sends the most.

    Returns:
      The bytes over each axis, or tuple of axes. In mode `manual` these bytes equal `bytes_by_axes`
      of the traced program, or are an upper bound if parameters are gathered again in the backward
      pass.

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
    of_update = tuple(matrix_collectives(program))
    if program.pipeline is None:
        m, strategy = program.num_minibatches, program.strategy
        pairs = [(pair, strategy.sends(m, pair[1].keep)) for pair in program.parameters]
        for name, other in program.model.others.items():
            sends = other.sends or strategy.sends
            trees = program.model.parameters[name], program.step.placements[name]
            pairs += [
                (pair, sends(m, pair[1].keep))
                for pair in zip(*map(jax.tree.leaves, trees), strict=True)
            ]
        uses = ((pair, Uses(sent, backward=m)) for pair, sent in pairs)
        return _bytes_of(program, uses, of_update)
    form = PipelineForm(program)
    stages = form.stages(stage)
    sent = [
        _bytes_of(program, zip(program.parameters, form.uses(one), strict=True), of_update)
        for one in stages
    ]
    return max(sent, key=lambda by_axes: sum(by_axes.values()))


def _bytes_of(
    program: Program,
    uses: Iterable[tuple[tuple[ParameterInfo, ParameterSharding], Uses]],
    of_update: Iterable[Collective],
) -> dict[tuple[str, ...], Fraction]:
    """Sums the bytes that a device sends for parameters, given the uses of each parameter."""
    of_each = (
        x
        for (info, place), used in uses
        for x in ParameterForm(program, info, place).collectives(used)
    )
    return bytes_by_axes((*of_each, *of_update))


def total_step_bytes(program: Program, *, stage: int | None = None) -> Fraction:
    """Returns the sum of `step_bytes` over all axes."""
    return sum(step_bytes(program, stage=stage).values(), Fraction(0))


def outer_step_bytes(
    program: Program, *, fragment: int | None = None
) -> dict[tuple[str, ...], Fraction]:
    """Predicts the bytes that a device sends for parameters in outer steps.

    An outer step averages, over `R` replicas, how much each replica's parameters differ from the
    common parameters. A trained parameter has `P` elements, and its optimizer state is sharded over
    `S` devices. For its average a device sends `2 b (P / S) (R - 1) / R` bytes, or, quantized,
    `2 c(P / S / R) (R - 1)` if this is less. If only the optimizer state is sharded over the `S`
    devices, they then gather the new parameter: `b P (S - 1) / S`.

    Args:
      program: The program that `diloco` returns.
      fragment: The fragment that is exchanged; `None` for all fragments, each once.

    Returns:
      The bytes over each axis, or tuple of axes. `bytes_by_axes` of the traced `outer_step` gives
      the same bytes, plus 4 bytes for the number of examples, plus the bytes of collections.

    Raises:
      ValueError: The program has no outer steps.
    """
    outer = program.outer
    if outer is None:
        raise ValueError(
            f"outer_step_bytes: program of {program.strategy.name} has no outer steps, expected "
            "one of diloco. step_bytes predicts what its steps send."
        )
    sent: list[Collective] = []
    axes, comm = outer.replica_axes, outer.comm
    size = axes_size(program.mesh, axes)
    for (info, place), its_fragment in zip(program.parameters, outer.fragments, strict=True):
        if its_fragment is None or fragment not in (None, its_fragment):
            continue
        shard = elements_on_device(program, info, place.sharded_names, place.padding)
        dtype = jnp.dtype(comm.reduce.dtype or info.dtype)
        sent += mean_collectives(comm, shard, dtype, axes, size, OUTER_SCOPE)
        form = ParameterForm(program, info, place)
        sent += (x for x in form.new_gathers(1) if x.axis_size > 1)
    return bytes_by_axes(sent)


def parameter_collectives(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Returns the collectives of a traced step that `step_bytes` predicts.

    Collectives of metrics, of collections and of layers are left out. A collective from other code
    than this package is included, unless it is known to run over no data axis. If there is one, the
    traced step therefore sends more than `step_bytes` predicts.
    """
    return tuple(x for x in collectives if is_of_parameters(x.scope, x.purpose))


def is_of_parameters(scope: str, purpose: str) -> bool:
    """Returns whether `step_bytes` predicts the collective of this scope and purpose."""
    if purpose_of(scope) is None:
        return purpose == OTHER
    return purpose not in OTHER_SCOPES
