"""The collectives of a step on a layout, in closed form.

`manualpar.inspect.parameter_formulas` has the formulas for parameters and gradients, and the
layout's strategy decides how they are sharded. `manualpar.models.transformer_collectives` has the
formulas for activations. This module counts how often a step runs each collective, and gives each
the scope that it has in a traced program; the scope names the pass.

`tests/planner/closed_form/layout_law_test.py` compares the collectives with traced programs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from manualpar.core.modes.strategy import CommCounts
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    CONTEXT_SCOPE,
    COUNT_SCOPE,
    GATHER_SCOPE,
    METRICS_SCOPE,
    NONFINITE_SCOPE,
    PIPELINE_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
)
from manualpar.inspect.communication import Collective, total_bytes
from manualpar.inspect.layer_formulas import BACKWARD, FLOAT32, FORWARD, INT32, RECOMPUTED
from manualpar.inspect.parameter_formulas import ParameterForm
from manualpar.inspect.tick_parts import ROWS, TickParts
from manualpar.models import Transformer
from manualpar.models.transformer_collectives import COPIES, MinibatchCollectives
from manualpar.planner.closed_form.layout import DeviceSizes, Layout
from manualpar.planner.closed_form.layout_parameters import LAYERS
from manualpar.training.task import CONTEXT_AXIS, STAGE_AXIS

BFLOAT16 = jnp.dtype("bfloat16")
EMBEDDING = "embedding"  # The name of the parameter before the layers.
# The number of metrics: loss, accuracy and objective; with experts, two losses and the dropped
# tokens, and then one metric for each expert: the expert's share of the tokens.
METRICS, METRICS_OF_EXPERTS = 3, 3


@dataclasses.dataclass(frozen=True)
class LayoutCollectives:
    """The collectives of a step.

    With stages, a step runs in *ticks*, see `manualpar.layers.pipeline.schedule_table`. A tick has
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
                *_times(layers, first.layer, at["forward"], LAYERS, passes=("forward",)),
                *_times(runs, first.documents, at["forward"]),
            ],
            "backward": [
                *self._gathers(inside, gathers_again * runs, RECOMPUTED, at["backward"]),
                *self._scatters(inside, runs, at["backward"]),
                *_times(layers, again.layer, at["backward"], LAYERS, again=True),
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
        yield from _times(m * self.x.L, sends.layer, module=LAYERS)
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
      number: The number of runs.
      sends: The collectives; the scope of each is a pass and a purpose.
      scope: The scope around the collectives, with a slash at the end.
      module: The module that runs the collectives, `""` for the model.
      passes: The passes whose collectives are yielded.
      again: Whether the collectives of the forward pass get the scope of the recomputed pass.
    """
    for x in sends:
        if x.times and x.phase in passes:
            prefix, _, purpose = x.scope.partition("/")
            prefix = RECOMPUTED if again and prefix == FORWARD else prefix
            name = scope + "/".join(filter(None, (prefix, module, purpose)))
            times = number * x.times
            yield Collective(x.kind, x.axes, x.axis_size, x.shape, x.dtype, times, name)
