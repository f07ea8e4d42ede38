"""Estimates a step on a layout that has not been traced.

The formula makes the `StepWork` of a layout: its collectives, its products and its memory. The
roofline then times this work like the work of a traced program (`manualpar.planner.roofline`).

The formula makes these assumptions. Only the largest products and reductions count. All stages
have as many layers as the fullest stage. If a model has a token that begins documents, each step
numbers the documents of its batch. Each step checks that gradients are finite. Quantizing and
dequantizing take no time, and quantization saves bytes that are sent, but no memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from manualpar.core.mesh.compiler_options import Overlap
from manualpar.core.modes.strategy import CommCounts
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    CONTEXT_SCOPE,
    COUNT_SCOPE,
    GATHER_SCOPE,
    HALVES,
    METRICS_SCOPE,
    NONFINITE_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
)
from manualpar.inspect.communication import Collective, grouped, total_bytes
from manualpar.inspect.expected_bytes import ParameterForm
from manualpar.inspect.flops import ROWS, TickParts
from manualpar.inspect.layer_formulas import BACKWARD, FLOAT32, FORWARD, INT32, RECOMPUTED
from manualpar.inspect.throughput import Throughput
from manualpar.layers.pipeline.schedules import make_table
from manualpar.models import Transformer
from manualpar.models.transformer import flops_per_token
from manualpar.models.transformer_collectives import COPIES, MinibatchCollectives
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import PartWork, PipelineWork, StepWork
from manualpar.planner.timed_collectives import Rings
from manualpar.planner.topology import Topology
from manualpar.plans.layouts.layout import (
    LAYERS,
    DeviceSizes,
    Layout,
    abstract_parameters,
    check_formulas,
    find_obstacle,
    model_on,
    parameter_forms,
    sizes_on_device,
)
from manualpar.plans.layouts.layout_work import (
    SINGLE,
    STATE,
    kept_for_backward,
    state_elements,
    step_memory_of,
    step_products,
)
from manualpar.strategies.shared_options import PARAMETER_SHARDING
from manualpar.training.task import CONTEXT_AXIS, STAGE_AXIS


class LayoutEstimator:
    """Estimates steps of a model on layouts of the same devices.

    Args:
      model: The model on one device, computed in bfloat16 and stored in float32.
      topology: The devices.
      examples: Examples of a step on all devices.
      positions: Positions of each example.
      even: Whether all stages must have equally many layers. If not, each stage counts as the
        stage with the most layers.
      min_weight_size: The size from which parameters are sharded, see `ParameterShardingOptions`.
      overlap: The compiler options, see `manualpar.core.mesh.compiler_options`.

    Raises:
      ValueError: There is no formula for the model.
    """

    def __init__(
        self,
        model: Transformer,
        topology: Topology,
        *,
        examples: int,
        positions: int,
        even: bool = True,
        min_weight_size: int = PARAMETER_SHARDING["min_weight_size"].default,
        overlap: Overlap = "auto",
    ) -> None:
        check_formulas(model)
        self.model, self.topology, self.even = model, topology, even
        self.examples, self.positions = examples, positions
        self._min_weight_size, self._overlap = min_weight_size, overlap
        self._throughput = Throughput(
            examples_per_step=examples,
            tokens_per_example=positions,
            flops_per_example=flops_per_token(model, positions) * positions,
        )
        self._rings: dict[str, Rings] = {}
        # A cache, because layouts that differ only in minibatches, chunks, `keep` and remat have
        # the same model and the same collectives of parameters.
        self._on_mesh = functools.cache(self._uncached_on_mesh)

    def estimate(self, layout: Layout, *, brief: bool = False) -> StepEstimate:
        """Estimates a step; with `brief`, without collectives, assumptions and notes."""
        rings = self._rings.setdefault(layout.name, {})
        return estimate(self.work(layout, brief=brief), self.topology, rings=rings, brief=brief)

    def work(self, layout: Layout, *, brief: bool = False) -> StepWork:
        """Returns the work of a device, as `read_work` reads it off a traced program.

        If `brief` is set, `collectives` leaves out the collectives in a pipeline's ticks, which
        `pipeline` contains in any case.
        """
        sizes: Any = {"examples": self.examples, "positions": self.positions}
        if problem := find_obstacle(self.model, layout, **sizes, even=self.even):
            raise ValueError(f"{layout.name}: {problem}.")
        x = sizes_on_device(self.model, layout, **sizes)
        shared = dataclasses.replace(
            layout, num_minibatches=1, chunks=1, keep="residuals", remat=next(iter(layout.remats))
        )
        model, forms = self._on_mesh(shared, x.L * layout.stage)
        ticks = _tick_parts(layout) if layout.stage > 1 else None
        sends = LayoutCollectives(model, layout, x, forms, ticks)
        chunk_runs = sends.chunk_runs if ticks is not None else 0
        products = step_products(x, layout, ticks=ticks, chunk_runs=chunk_runs)
        pipeline = None
        if ticks is not None:
            runs = {"forward": chunk_runs, "backward": chunk_runs}
            computed = grouped((ticks.part_of(product.scope), product) for product in products)
            works = {
                part: PartWork(
                    runs.get(part, layout.num_minibatches),
                    tuple(of_part),
                    tuple(computed.get(part, ())),
                )
                for part, of_part in sends.of_ticks().items()
            }
            pipeline = PipelineWork(ticks, works)
        return StepWork(
            name=f"{forms[0].program.strategy.name} manual",
            mesh=layout.mesh,
            throughput=self._throughput,
            num_minibatches=layout.num_minibatches,
            collectives=sends.outside_ticks() if brief else sends.of_step(),
            products=products,
            update_traffic=int(SINGLE * (3 + 2 * STATE) * state_elements(x, layout)),
            memory=step_memory_of(x, layout),
            overlap=self._overlap,
            pipeline=pipeline,
            stacked=0.0 if ticks else kept_for_backward(x, layout),
            source="formula",
        )

    def _uncached_on_mesh(
        self, layout: Layout, num_layers: int
    ) -> tuple[Transformer, tuple[ParameterForm, ...]]:
        """Returns the model for the layout's program, and the collectives of its parameters."""
        model = self.model
        if layout.stage > 1 and num_layers != model.num_layers:  # As if all stages were full.
            model = model.clone(num_layers=num_layers)
        params = abstract_parameters(model)
        device = self.topology.chip.abstract_device
        forms = parameter_forms(params, layout, device, min_weight_size=self._min_weight_size)
        return model_on(model, layout, device), forms


def estimate_layout(
    model: Transformer, layout: Layout, topology: Topology, **options: Any
) -> StepEstimate:
    """Estimates one step; see `LayoutEstimator` for `options` and errors."""
    return LayoutEstimator(model, topology, **options).estimate(layout)


def _tick_parts(layout: Layout) -> TickParts:
    return _parts_of_table(layout.stage, layout.num_minibatches, layout.chunks)


@functools.lru_cache(maxsize=512)
def _parts_of_table(stages: int, microbatches: int, chunks: int) -> TickParts:
    return TickParts(make_table("1f1b", stages, microbatches, chunks))


# -------------------------------------------------------------------------------------------------
# The collectives of a step on a layout, by formula.
#
# `manualpar.inspect.expected_bytes` has the formulas for parameters and gradients, and the
# layout's strategy decides how they are sharded. `manualpar.models.transformer_collectives` has
# the formulas for activations. This module counts how often a step runs each collective, and gives
# each the scope that it has in a traced program; the scope names the pass.
#
# `tests/plans/layouts/layout_law_test.py` compares the collectives with traced programs.


BFLOAT16 = jnp.dtype("bfloat16")
EMBEDDING = "embedding"  # The name of the parameter before the layers.
# The number of metrics: loss, accuracy and objective; with experts, two losses and the dropped
# tokens, and then one metric for each expert: the expert's share of the tokens.
METRICS, METRICS_OF_EXPERTS = 3, 3


@dataclasses.dataclass(frozen=True)
class LayoutCollectives:
    """The collectives of a step.

    With stages, a step runs in *ticks*, see `manualpar.layers.pipeline.schedules`. A tick has
    parts, such as the forward pass of a chunk of layers.

    Attributes:
      model: The model, as `model_on` returns it.
      layout: The layout.
      x: The sizes on a device.
      forms: The collectives of parameters, as `parameter_forms` returns them.
      ticks: The parts of a tick; `None` without stages.
    """

    model: Transformer
    layout: Layout
    x: DeviceSizes
    forms: tuple[ParameterForm, ...]
    ticks: TickParts | None = None

    def of_step(self) -> tuple[Collective, ...]:
        """Returns all collectives; with stages, those of the stage that sends the most."""
        outside = self.outside_ticks()
        if self.ticks is None:
            return outside
        parts = self.of_ticks()
        shared = [x for part in ("forward", "backward") for x in parts[part]]
        ends = ([*parts["before"], *parts["before_backward"]], parts["after"])
        return (*outside, *shared, *max(ends, key=total_bytes))

    def outside_ticks(self) -> tuple[Collective, ...]:
        """Returns the collectives that all devices run outside of the ticks."""
        by_layout = self._of_minibatches() if self.ticks is None else self._of_stages()
        return (*self._once_a_step(), *self._of_batch(), *by_layout)

    def of_ticks(self) -> Mapping[str, list[Collective]]:
        """Returns for each part of a tick the collectives that a stage runs in a step."""
        layout, ticks = self.layout, self.ticks
        assert ticks is not None
        m, runs = layout.num_minibatches, self.chunk_runs
        layers = runs * self.x.L // layout.chunks
        first = self._in_minibatch(passes=1, recomputed=False)
        again = self._in_minibatch(passes=int(layout.runs_chunks_again))
        gathers_again = 1 + layout.runs_chunks_again
        at = {part: f"{ticks.scope(part, together=self._together)}/" for part in ROWS}
        inside, before, behind = self._inside, self._before, self._behind
        return {
            "forward": [
                *self._gathers(inside, runs, FORWARD, at["forward"]),
                *_times(layers, first.layer, at["forward"], self._module, passes=("forward",)),
                *_times(runs, first.documents, at["forward"]),
            ],
            "backward": [
                *self._gathers(inside, gathers_again * runs, RECOMPUTED, at["backward"]),
                *self._scatters(inside, runs, at["backward"]),
                *_times(layers, again.layer, at["backward"], self._module, again=True),
                *_times(runs, again.documents, at["backward"], again=True),
            ],
            "before": [
                *self._gathers(before, m, FORWARD, at["before"]),
                *_times(m, first.before, at["before"], passes=("forward",)),
            ],
            "before_backward": [
                *self._gathers(before, m, RECOMPUTED, at["before_backward"]),
                *self._scatters(before, m, at["before_backward"]),
                *_times(m, first.before, at["before_backward"], again=True),
            ],
            "after": [
                *self._gathers(behind, m, FORWARD, at["after"]),
                *self._gathers(behind, m, RECOMPUTED, at["after"]),
                *self._scatters(behind, m, at["after"]),
                *_times(m, first.after, at["after"]),
            ],
        }

    @property
    def _together(self) -> bool:
        """Whether all stages run a chunk in each tick in which one stage has to run a chunk.

        This is so if attention sends keys and values around a ring, in which all devices must take
        part.
        """
        context = self.model.context
        return context.axis is not None and context.how == "ring"

    @property
    def chunk_runs(self) -> int:
        """The number of times that a stage runs a chunk forward in a step."""
        assert self.ticks is not None
        is_run = self.ticks.table.is_run("forward_microbatch", together=self._together)
        return int(is_run[:, 0].sum())

    @property
    def _module(self) -> str:
        """The scope of the layers' collectives of activations."""
        return f"{LAYERS}/{HALVES[0]}" if self.layout.layer_overlap == "dual_batch" else LAYERS

    @functools.cached_property
    def _inside(self) -> tuple[ParameterForm, ...]:
        """The parameters of the layers."""
        return tuple(form for form in self.forms if _is_inside(form))

    @functools.cached_property
    def _before(self) -> tuple[ParameterForm, ...]:
        """The parameters before the layers."""
        return tuple(form for form in self.forms if form.info.path == EMBEDDING)

    @functools.cached_property
    def _behind(self) -> tuple[ParameterForm, ...]:
        """The parameters after the layers: the last norm, and the head or a tied embedding."""
        outside = (form for form in self.forms if not _is_inside(form))
        return tuple(x for x in outside if x.info.path != EMBEDDING or self.model.tied_head)

    def _in_minibatch(
        self, *, passes: int = 1, recomputed: bool | None = None
    ) -> MinibatchCollectives:
        again = bool(self.layout.recomputed) if recomputed is None else recomputed
        has_documents = self.model.bos_token >= 0
        # `COPIES` counts copies of a traced loop. If the backward pass gathers parameters again,
        # the trace has only one copy.
        copies = 1 if self.layout.communicate == "minibatch" else COPIES
        return MinibatchCollectives(
            self.model,
            self.layout.mesh,
            (self.x.B, self.x.S),
            parameter_dtype=BFLOAT16,
            passes=passes,
            recomputed=again,
            documents="counted" if has_documents else "",
            in_ticks=self.x.L // self.layout.chunks if self.ticks is not None else 0,
            copies=copies,
        )

    def _of_minibatches(self) -> Iterator[Collective]:
        """Yields the collectives of all minibatches of a layout without stages."""
        m, sends = self.layout.num_minibatches, self._in_minibatch()
        needed = [form for form in self.forms if self._is_needed_backward(form)]
        yield from self._gathers(self.forms, m, FORWARD)
        yield from self._gathers(needed, m, RECOMPUTED)
        yield from self._scatters(self.forms, m)
        yield from _times(m, [*sends.before, *sends.documents])
        yield from _times(m * self.x.L, sends.layer, module=self._module)
        yield from _times(m, sends.after)

    def _gathers(
        self, forms: Iterable[ParameterForm], times: int, prefix: str, scope: str = ""
    ) -> Iterator[Collective]:
        """Yields the gathers of parameters in a pass; none if a step gathers them only once.

        With chunks, each run of a chunk gathers the parameters of the chunk's layers.
        """
        if self.layout.communicate == "minibatch":
            for form in forms:
                parts = self.layout.chunks if _is_inside(form) else 1
                name = _scope(scope + prefix, form, GATHER_SCOPE)
                yield from form.gathers(CommCounts(times, times), name, parts)

    def _scatters(
        self, forms: Iterable[ParameterForm], times: int, scope: str = ""
    ) -> Iterator[Collective]:
        """Yields the scatters in the backward pass, and the sums of gradients of shared slices."""
        for form in forms:
            parts = self.layout.chunks if _is_inside(form) else 1
            if self.layout.communicate == "minibatch":
                name = _scope(scope + BACKWARD, form, SCATTER_SCOPE)
                yield from form.scatters(times, name, parts)
                yield from form.means(times, _scope(scope + BACKWARD, form, REDUCE_SCOPE))
            yield from form.shared_sums(times, _scope(scope + BACKWARD, form, CAST_SCOPE), parts)

    def _is_needed_backward(self, form: ParameterForm) -> bool:
        """Returns whether the backward pass reads a parameter."""
        path = form.info.path
        if path.endswith("/bias"):
            return bool(self.layout.recomputed)
        return path != EMBEDDING or self.model.tied_head

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
        of_data = math.prod(sizes[axis] for axis in data)
        others = tuple(axis for axis in sizes if axis not in data)
        if sizes.get(CONTEXT_AXIS, 1) > 1:  # Moves the positions to the zigzag order.
            rows = (self.x.B * layout.num_minibatches, self.x.S // 2)
            for dtype in (INT32, INT32, FLOAT32):
                yield Collective(
                    "permute", (CONTEXT_AXIS,), sizes[CONTEXT_AXIS], rows, dtype, 2, CONTEXT_SCOPE
                )
        several = tuple(axis for axis in data if sizes[axis] > 1)
        yield Collective("all_reduce", several, of_data, (), FLOAT32, 1, COUNT_SCOPE)
        yield Collective(
            "all_reduce", data, of_data, (self._num_metrics + 2,), FLOAT32, 1, METRICS_SCOPE
        )
        if others:
            size = math.prod(sizes[axis] for axis in others)
            yield Collective("all_reduce", others, size, (), FLOAT32, 1, NONFINITE_SCOPE)

    @property
    def _num_metrics(self) -> int:
        """The number of values in a minibatch's metrics; each metric is a sum and a count."""
        experts = self.model.experts.num_experts
        return 2 * (METRICS + bool(experts) * (METRICS_OF_EXPERTS + experts))

    def _of_stages(self) -> Iterator[Collective]:
        """Yields the collectives between stages, except the reductions of gradients."""
        layout, x = self.layout, self.x
        assert self.ticks is not None
        table = self.ticks.table

        def sent(kind: Any, shape: tuple[int, ...], dtype: Any, times: int) -> Collective:
            return Collective(
                kind, (STAGE_AXIS,), layout.stage, shape, dtype, times, PIPELINE_SCOPE
            )

        stream = (x.B, x.S // layout.model, x.D)
        yield sent("permute", stream, BFLOAT16, 2 * table.num_ticks)
        if experts := self.model.experts.num_experts:  # Losses and counts that layers `sow`.
            of_layers = (self.model.num_layers, x.B)
            yield sent("permute", of_layers, FLOAT32, 3 * 2 * table.num_ticks)
            yield sent("permute", (*of_layers, experts), FLOAT32, 2 * table.num_ticks)
        yield sent("all_reduce", (), FLOAT32, self._num_metrics)
        if layout.chunks > 1:  # Stages exchange the parameters of chunks, then the gradients.
            for form in self._inside:
                yield from form.exchanged(layout.chunks, STAGE_AXIS)


def _is_inside(form: ParameterForm) -> bool:
    return form.info.path.startswith(f"{LAYERS}/")


def _scope(prefix: str, form: ParameterForm, purpose: str) -> str:
    """Returns the scope of a parameter's collective: prefix, path of the module, and purpose."""
    module = form.info.path.rpartition("/")[0]
    return "/".join(filter(None, (prefix, module, purpose)))


def _times(
    number: int,
    sends: Iterable[Collective],
    scope: str = "",
    module: str = "",
    *,
    passes: tuple[str, ...] = ("forward", "backward"),
    again: bool = False,
) -> Iterator[Collective]:
    """Yields collectives `number` times, inside of a scope.

    Args:
      sends: The collectives; the scope of each is a pass and a purpose.
      scope: The scope around the collectives, with a slash at the end.
      module: The module that runs the collectives, `""` for the model.
      again: Whether the collectives of the forward pass get the scope of the recomputed pass.
    """
    for x in sends:
        if x.times and x.phase in passes:
            prefix, _, purpose = x.scope.partition("/")
            prefix = RECOMPUTED if again and prefix == FORWARD else prefix
            name = scope + "/".join(filter(None, (prefix, module, purpose)))
            times = number * x.times
            yield Collective(x.kind, x.axes, x.axis_size, x.shape, x.dtype, times, name)
