"""The collectives of a step on a layout, in closed form, as a traced step has them.

Nothing is counted here: parameters and gradients are those of
`manualpar.inspect.parameter_formulas`, for the placements that the strategy of the layout decides,
and activations are those of `manualpar.models.transformer_collectives`. This module says in which
pass of the step each of them runs, by its scope.

`tests/planner/closed_form/layout_law_test.py` compares the collectives with traced programs.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.mesh import abstract_mesh
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.collectives import CommPolicy
from manualpar.core.parameters.placement import (
    complete_placement,
    describe_parameters,
    on_stages,
    path_name,
)
from manualpar.core.parameters.quantized_collectives import BlockQuantizer
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.program.placement_check import place_parameter
from manualpar.core.tracing.scopes import (
    CONTEXT_SCOPE,
    COUNT_SCOPE,
    GATHER_SCOPE,
    METRICS_SCOPE,
    NONFINITE_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
)
from manualpar.core.tracing.tick_scopes import ticks_scope
from manualpar.inspect.communication import Collective, total_bytes
from manualpar.inspect.layer_formulas import BACKWARD, FLOAT32, FORWARD, INT32
from manualpar.inspect.parameter_formulas import ParameterForm
from manualpar.inspect.tick_parts import ROWS
from manualpar.layers.pipeline.schedule_table import Table
from manualpar.models import Transformer
from manualpar.models.transformer_collectives import COPIES, MinibatchCollectives
from manualpar.planner.closed_form.layout import DeviceSizes, Layout
from manualpar.strategies.fsdp import fully_sharded
from manualpar.strategies.shared_options import PARAMETER_SHARDING
from manualpar.training.experiment import DATA_AXES
from manualpar.training.task import CONTEXT_AXIS, EXPERT_AXIS, SPLIT_AXIS, STAGE_AXIS

RECOMPUTED = f"{BACKWARD}/rematted_computation"
LAYERS = "layers"  # The module of scanned layers.
BFLOAT16 = jnp.dtype("bfloat16")
# Metrics, each a sum and a number: loss, accuracy and objective; two losses of experts, the share of
# dropped tokens, and the share of each expert.
METRICS, METRICS_OF_EXPERTS = 3, 3


def model_on(model: Transformer, layout: Layout) -> Transformer:
    """Returns the model as the program of a layout has it."""
    axes = layout.mesh
    split = SPLIT_AXIS if SPLIT_AXIS in axes else ""
    return model.clone(
        split_axis=split,
        sequence_parallel=bool(split),
        expert_axis=EXPERT_AXIS if EXPERT_AXIS in axes else "",
        context_axis=CONTEXT_AXIS if CONTEXT_AXIS in axes else "",
        scan_layers=True,
    )


@functools.lru_cache(maxsize=32)
def _parameters(model: Transformer) -> Any:
    """Returns the model's abstract parameters, in their boxes."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


@dataclasses.dataclass(frozen=True)
class LayoutProgram:
    """What `ParameterForm` reads of the program of a layout."""

    strategy: Strategy
    mesh: Any
    data_axes: tuple[str, ...]
    num_minibatches: int
    wire: CommPolicy


def parameter_forms(
    model: Transformer, layout: Layout, *, min_weight_size: int
) -> tuple[ParameterForm, ...]:
    """Returns the collectives of each parameter of a model, as the strategy places it.

    Only the layout's mesh, `communicate` and its quantizations are read.
    """
    axes = layout.mesh
    replicas = ("replica",) if "replica" in axes else ()
    shard_axes = tuple(axis for axis in DATA_AXES if axis in axes and axis not in replicas)
    context = (CONTEXT_AXIS,) if CONTEXT_AXIS in axes else ()
    batch_dims = {0: (*replicas, *shard_axes)} | ({1: context} if context else {})
    others: Any = dict.fromkeys(axes, "model")
    others |= {STAGE_AXIS: "stage"} if STAGE_AXIS in axes else {}
    roles = AxisRoles(batch_dims, others)
    strategy = fully_sharded(
        "hsdp" if replicas else "fsdp",
        replicas,
        **{**PARAMETER_SHARDING, "min_weight_size": min_weight_size}
        | {"communicate_every": layout.communicate},
    )
    gather, reduce = (
        BlockQuantizer(code) if code else None for code in (layout.gather_code, layout.reduce_code)
    )
    wire = CommPolicy("bfloat16", "float32", gather_code=gather, reduce_code=reduce)
    if reduce and replicas:
        wire = wire._replace(code_axes=replicas)
    mesh: Any = abstract_mesh(axes, layout.num_devices)
    program = LayoutProgram(strategy, mesh, roles.data_axes, layout.num_minibatches, wire)
    params = _parameters(model)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    paths = [path_name(path) for path, _ in leaves]
    stacked = frozenset(path for path in paths if path.startswith(f"{LAYERS}/"))
    infos = describe_parameters(params, dict.fromkeys(stacked, frozenset({0})), mesh, ())
    if STAGE_AXIS in axes:
        infos = on_stages(infos, stacked, STAGE_AXIS)
    forms = []
    for info in jax.tree.leaves(infos):
        place = place_parameter(strategy, info, (*shard_axes, *context), mesh)
        forms.append(ParameterForm(program, info, complete_placement(place, info, roles, mesh)))
    return tuple(forms)


@dataclasses.dataclass(frozen=True)
class LayoutCollectives:
    """The collectives of a step.

    Attributes:
      model: The model, as `model_on` returns it.
      layout: The layout.
      x: The sizes on a device.
      forms: The collectives of parameters, as `parameter_forms` returns them.
      table: The schedule of a pipeline; `None` without stages.
    """

    model: Transformer
    layout: Layout
    x: DeviceSizes
    forms: tuple[ParameterForm, ...]
    table: Table | None = None

    def of_step(self) -> tuple[Collective, ...]:
        """Returns all collectives; in a pipeline those of the stage that sends the most."""
        always = (*self._once_a_step(), *self._of_batch())
        if self.table is None:
            return (*always, *self._of_minibatches())
        parts = self.of_ticks()
        shared = [x for part in ("forward", "backward") for x in parts[part]]
        ends = ([*parts["before"], *parts["before_backward"]], parts["after"])
        return (*always, *self._of_stages(), *shared, *max(ends, key=total_bytes))

    def of_ticks(self) -> Mapping[str, list[Collective]]:
        """Returns the collectives of each part of a pipeline's ticks, in all runs of a stage."""
        layout, table = self.layout, self.table
        assert table is not None
        m, runs = layout.num_minibatches, self.chunk_runs
        layers = runs * self.x.L // layout.chunks
        first = self._in_minibatch(passes=1, recomputed=False)
        again = self._in_minibatch(passes=int(layout.runs_chunks_again))
        before_again = self._in_minibatch(lookups=1)
        gathers_again = 1 + layout.runs_chunks_again
        parts = {
            "forward": [
                *self._in_chunks(self._gathers(runs, FORWARD, inside=True)),
                *_times(layers, _of_pass(first.layer, forward=True)),
                *_times(runs, first.documents),
            ],
            "backward": [
                *self._in_chunks(self._gathers(gathers_again * runs, RECOMPUTED, inside=True)),
                *self._in_chunks(self._scatters(runs, inside=True)),
                *_times(layers, _as_recomputed(again.layer)),
                *_times(runs, _as_recomputed(again.documents)),
            ],
            "before": [
                *self._gathers(m, FORWARD, inside=False, after=False),
                *_times(m, _of_pass(first.before, forward=True)),
            ],
            "before_backward": [
                *self._gathers(m, RECOMPUTED, inside=False, after=False),
                *self._scatters(m, inside=False, after=False),
                *_times(m, _as_recomputed(before_again.before)),
            ],
            "after": [
                *self._gathers(m, FORWARD, inside=False, after=True),
                *self._gathers(m, RECOMPUTED, inside=False, after=True),
                *self._scatters(m, inside=False, after=True),
                *_times(m, first.after),
            ],
        }
        ticks = {
            part: ticks_scope(table.is_run(row, together=self._together))
            for part, row in ROWS.items()
        }
        return {
            part: [dataclasses.replace(x, scope=f"{ticks[part]}/{x.scope}") for x in sends]
            for part, sends in parts.items()
        }

    def _in_chunks(self, sends: Iterable[Collective]) -> Iterator[Collective]:
        """Yields collectives of all layers of a stage as those of one of its chunks."""
        return (
            dataclasses.replace(x, times=x.times // self.layout.chunks) for x in sends if x.times
        )

    @property
    def _together(self) -> bool:
        """Whether all stages run a chunk if any stage has to, because a ring goes around in it."""
        return bool(self.model.context_axis)

    @property
    def chunk_runs(self) -> int:
        """How often a stage runs a chunk forward."""
        assert self.table is not None
        is_run = self.table.is_run("forward_microbatch", together=self._together)
        return int(is_run[:, 0].sum())

    def _in_minibatch(
        self, *, passes: int = 1, recomputed: bool | None = None, lookups: int = 1
    ) -> MinibatchCollectives:
        again = bool(self.layout.recomputed) if recomputed is None else recomputed
        has_documents = self.model.bos_token >= 0
        # A loss whose backward pass gathers parameters again is traced without the second copy.
        copies = 1 if self.layout.communicate == "minibatch" else COPIES
        return MinibatchCollectives(
            self.model,
            self.layout.mesh,
            (self.x.B, self.x.S),
            parameter_dtype=BFLOAT16,
            passes=passes,
            recomputed=again,
            lookups=lookups,
            documents="counted" if has_documents else "",
            in_ticks=self.table is not None,
            copies=copies,
        )

    def _of_minibatches(self) -> Iterator[Collective]:
        """Yields the collectives of all minibatches, without stages."""
        m, sends = self.layout.num_minibatches, self._in_minibatch()
        yield from self._gathers(m, FORWARD)
        yield from self._gathers(m, RECOMPUTED)
        yield from self._scatters(m)
        yield from _times(m, [*sends.before, *sends.documents])
        yield from _times(m * self.x.L, sends.layer)
        yield from _times(m, sends.after)

    def _chosen(self, inside: bool | None, after: bool | None) -> Iterator[ParameterForm]:
        """Yields the parameters of the layers, or of the model before or after its layers."""
        for form in self.forms:
            is_inside = form.info.path.startswith(f"{LAYERS}/")
            is_after = form.info.path != "embedding" or self.model.tied_head
            is_before = form.info.path == "embedding"
            is_at_end = is_after if after else is_before
            if inside is None or (is_inside if inside else not is_inside and is_at_end):
                yield form

    def _gathers(
        self, times: int, prefix: str, *, inside: bool | None = None, after: bool | None = None
    ) -> Iterator[Collective]:
        """Yields the gathers in a pass, of parameters that are gathered where they are used."""
        if self.layout.communicate != "minibatch":
            return
        for form in self._chosen(inside, after):
            if self.table is not None or prefix == FORWARD or self._is_needed_backward(form):
                scope = _scope(prefix, form, GATHER_SCOPE)
                yield from form.gathers(CommCounts(times, times), scope)

    def _scatters(
        self, times: int, *, inside: bool | None = None, after: bool | None = None
    ) -> Iterator[Collective]:
        """Yields the scatters in the backward pass."""
        for form in self._chosen(inside, after):
            if self.layout.communicate == "minibatch":
                yield from form.scatters(times, _scope(BACKWARD, form, SCATTER_SCOPE))
            yield from form.shared_sums(times)

    def _is_needed_backward(self, form: ParameterForm) -> bool:
        """Whether the backward pass reads a parameter."""
        path = form.info.path
        if path.endswith("/bias"):
            return bool(self.layout.recomputed)
        return path != "embedding" or self.model.tied_head

    def _once_a_step(self) -> Iterator[Collective]:
        """Yields the collectives of parameters and gradients outside of the passes."""
        layout = self.layout
        for form in self.forms:
            path = form.info.path
            if layout.communicate != "minibatch":
                times = layout.num_minibatches if layout.communicate == "gather-step" else 1
                yield from form.gathers(CommCounts(1, 1), f"{path}/{GATHER_SCOPE}")
                yield from form.scatters(times, f"{path}/{SCATTER_SCOPE}")
            yield from form.reductions(f"{path}/{REDUCE_SCOPE}")

    def _of_batch(self) -> Iterator[Collective]:
        """Yields the collectives of examples and metrics."""
        layout, sizes = self.layout, self.layout.mesh
        data = self.forms[0].program.data_axes
        of_data = _product(sizes, data)
        others = tuple(axis for axis in sizes if axis not in data)
        if sizes.get(CONTEXT_AXIS, 1) > 1:  # The order that balances causal attention.
            rows = (self.x.B * layout.num_minibatches, self.x.S // 2)
            for dtype in (INT32, INT32, FLOAT32):
                yield Collective(
                    "permute", (CONTEXT_AXIS,), sizes[CONTEXT_AXIS], rows, dtype, 2, CONTEXT_SCOPE
                )
        several = tuple(axis for axis in data if sizes[axis] > 1)
        yield Collective("all_reduce", several, of_data, (), FLOAT32, 1, COUNT_SCOPE)
        yield Collective(
            "all_reduce", data, of_data, (self.num_metrics + 2,), FLOAT32, 1, METRICS_SCOPE
        )
        if others:
            size = _product(sizes, others)
            yield Collective("all_reduce", others, size, (), FLOAT32, 1, NONFINITE_SCOPE)

    @property
    def num_metrics(self) -> int:
        """The numbers of a minibatch's metrics."""
        experts = self.model.num_experts
        return 2 * (METRICS + bool(experts) * (METRICS_OF_EXPERTS + experts))

    def _of_stages(self) -> Iterator[Collective]:
        """Yields the collectives between stages, except those of gradients."""
        layout, x, table = self.layout, self.x, self.table
        assert table is not None

        def sent(kind: Any, shape: tuple[int, ...], dtype: Any, times: int) -> Collective:
            return Collective(
                kind, (STAGE_AXIS,), layout.stage, shape, dtype, times, PIPELINE_SCOPE
            )

        stream = (x.B, x.S // layout.model, x.D)
        yield sent("permute", stream, BFLOAT16, 2 * table.num_ticks)
        if experts := self.model.num_experts:  # What layers sow: losses and counts.
            of_layers = (self.model.num_layers, x.B)
            yield sent("permute", of_layers, FLOAT32, 3 * 2 * table.num_ticks)
            yield sent("permute", (*of_layers, experts), FLOAT32, 2 * table.num_ticks)
        yield sent("all_reduce", (), FLOAT32, self.num_metrics)
        if layout.chunks > 1:  # Stages exchange shards of chunks, and back.
            for form in self._chosen(True, None):
                yield from form.exchanged(layout.chunks, STAGE_AXIS)


def _product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product


def _scope(prefix: str, form: ParameterForm, purpose: str) -> str:
    """Returns the scope of a parameter's collective in a pass: it has the path of its module."""
    module = form.info.path.rpartition("/")[0]
    return "/".join(filter(None, (prefix, module, purpose)))


def _of_pass(sends: Iterable[Collective], *, forward: bool) -> Iterator[Collective]:
    return (x for x in sends if (x.phase == "forward") == forward)


def _as_recomputed(sends: Iterable[Collective]) -> Iterator[Collective]:
    """Yields collectives of the backward pass, with those of the forward pass that runs in it."""
    for x in sends:
        if x.phase == "forward":
            x = dataclasses.replace(x, scope=x.scope.replace(FORWARD, RECOMPUTED))
        yield x


def _times(number: int, sends: Iterable[Collective]) -> list[Collective]:
    return [dataclasses.replace(x, times=x.times * number) for x in sends if x.times]
