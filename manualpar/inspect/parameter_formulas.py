"""Predicts the collectives of one parameter and of its gradient in a step, without a trace.

A strategy gives three counts for each parameter: how often a step gathers it, scatters its gradient
and gathers its new value (`manualpar.core.modes.strategy.CommCounts`). The parameter's placement
gives the axes. `manualpar.inspect.expected_bytes` explains the bytes, and sums them for a program;
`manualpar.planner.closed_form` uses the same collectives for layouts without a program.

In a pipeline whose stages run several chunks of layers, one use of a stacked parameter reads only
one chunk: `1 / parts` of the layers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.comm_policy import EXACT, CommPolicy
from manualpar.core.parameters.parameter_info import ParameterInfo
from manualpar.core.parameters.placement import Route
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    GATHER_SCOPE,
    NEW_PARAMS_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
)
from manualpar.inspect.communication import Collective, Kind


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
    def comm(self) -> CommPolicy:
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
        self, times: int, scope: str, comm: CommPolicy, dtype: Any, sent: Any, parts: int = 1
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
        self, times: int, scope: str, comm: CommPolicy, reduced: Any, parts: int = 1
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

    def __init__(self, program: Sending, info: ParameterInfo, place: Route) -> None:
        self.program, self.info, self.place = program, info, place
        self.comm = program.comm.for_parameter(info.dtype, trainable=place.trainable)
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
        send the gradients back, see `manualpar.layers.pipeline.exchange`.
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
        yield from self.gathers(sends)
        yield from self.scatters(sends.scatters)
        yield from self.means(uses.backward)
        yield from self.new_gathers(sends.new_gathers)
        yield from self.reductions()


def _gathers(
    program: Sending,
    info: ParameterInfo,
    place: Route,
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


def _data_shards(program: Sending, place: Route) -> int:
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
    comm: CommPolicy, n: int, dtype: Any, axes: tuple[str, ...], size: int, scope: str
) -> Iterator[Collective]:
    """Yields the collectives that compute the mean of `n` numbers over `size` devices."""
    if size > 1 and (code := comm.reduce_quantizer(n / size, dtype, axes)):
        row, sent = code.row(-(-n // size))
        yield Collective("all_to_all", axes, size, (size * row,), sent, 1, scope)
        yield Collective("all_gather", axes, size, (row,), sent, 1, scope)
    else:
        yield Collective("all_reduce", axes, size, (n,), dtype, 1, scope)
