"""Predicts what the stages of a pipeline send, and how often each stage uses each parameter.

`S` stages run `M` microbatches through `v S` chunks of layers in `T` ticks. A device sends

    activations         T permutes of a layer's output
    their gradients     T permutes of the differentiated part of the output
    metrics             1 all-reduce of each scalar
    parameters          with v > 1: v permutes of 1 / v of the stage's layers, in shards
    their gradients     with v > 1: v permutes of 1 / v of the gradients, in shards

over the axis of stages. The program writes the permutes of a tick once for all stages, so they also
count on a device that sends zeros in this tick or has no neighbour.

A parameter is used in the prefix (before the layers, on the first stage), in chunks of layers (on
each stage), or in the suffix (after the layers, on the last stage). The backward pass of a chunk
gathers the chunk's parameters again, because slots (`manualpar.layers.pipeline.slots`) keep only
values that depend on activations. If the backward pass also runs the complete chunk again, and
drops gathered parameters after that, it gathers them a second time. The prefix has a backward pass
if one of its parameters is trained.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.modes.strategy import CommCounts
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import PIPELINE_SCOPE
from manualpar.inspect.communication import Collective, Kind
from manualpar.inspect.parameter_formulas import ParameterForm, Uses, dtype_of_sums
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.staged_loss import StagedLoss


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
