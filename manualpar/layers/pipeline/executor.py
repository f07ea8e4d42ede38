"""Runs a pipeline: several microbatches at once, each in the layers of a different stage.

A pipeline accumulates gradients over microbatches, and returns the same sums as
`manualpar.core.modes.gradients.scanned`. Each device along the pipeline's axis is a stage. A stage
has the parameters of some layers, and all parameters that do not belong to layers. A table gives
the work of each stage in each tick, see `schedules`: at most one forward pass F of a microbatch
through a chunk of layers, and then at most one backward pass B. After this, activations are sent to
the next stage and gradients to the previous stage. A `lax.scan` runs the ticks.

The stage of the first chunk runs the prefix of the loss before that chunk. The stage of the last
chunk runs the suffix of the loss after that chunk, and immediately afterwards the suffix's backward
pass. All stages differentiate the same loss. So for a parameter outside the layers each stage
computes a term of the gradient, and the sum over stages is the gradient.

Invariants: all devices send activations and gradients in every tick, outside of any `cond`.
Collectives inside a `cond` run among the devices of one stage. No permute is in a `cond` whose
condition differs between devices, because some backends wait in a permute for all devices. So if
the layers contain a permute, and one stage has to compute a chunk in a tick, all stages compute a
chunk in this tick. The stages that have nothing to compute ignore the result.

Symbols: `S` stages, `v` chunks of layers on a stage, `M` microbatches, `L` layers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.modes.gradients import ParamPair, Reduce, WeightedLoss
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.parameters.trainable import combine, is_masked
from manualpar.core.state.metrics import Metrics, StepSums
from manualpar.core.trees import Batch, Collections, Grads
from manualpar.layers.pipeline.exchange import exchange
from manualpar.layers.pipeline.saved_activations import PipelineSaves
from manualpar.layers.pipeline.schedule_table import Table
from manualpar.layers.pipeline.schedules import ScheduleName, make_table
from manualpar.layers.pipeline.stage_work import StageWork
from manualpar.layers.pipeline.staged_loss import StagedLoss


@dataclasses.dataclass(frozen=True)
class PipelineRun:
    """An `Accumulation` whose minibatches pass through stages.

    Attributes:
      axis: The mesh axis of stages.
      schedule: The name of the schedule.
      num_stages: The number of stages, `S`.
      chunks: The number of chunks of layers on a stage, `v`. Several chunks are interleaved.
      num_microbatches: The number of microbatches of a step, `M`.
      stacked: For each parameter, whether layers are stacked in dim 0.
      keep: What a chunk saves for its backward pass: its input, or the residuals of autodiff.
      regathers: Whether gathered parameters are dropped after the forward pass of a chunk, and
        gathered again for its backward pass.
    """

    axis: str
    schedule: ScheduleName
    num_stages: int
    chunks: int
    num_microbatches: int
    stacked: tuple[bool, ...]
    keep: PipelineSaves = "residuals"
    regathers: bool = False

    @property
    def table(self) -> Table:
        """The schedule of a training step."""
        return make_table(self.schedule, self.num_stages, self.num_microbatches, self.chunks)

    def staged(
        self, loss: WeightedLoss, params: Any, collections: Any, minibatches: Any
    ) -> StagedLoss:
        """Traces the loss and cuts it into stages; see `__call__` for the arguments."""
        return self._differentiated(loss, params, collections, minibatches).loss

    def __call__(
        self,
        loss: WeightedLoss,
        params: ParamPair,
        collections: Collections,
        minibatches: tuple[Batch, jax.Array],
        reduce: Reduce,
    ) -> tuple[Grads, StepSums, Collections]:
        """Adds up the gradients of all microbatches.

        Args:
          loss: Computes the loss of a microbatch times the microbatch's number of examples.
          params: The pair of a stage's trained and frozen parameters; boxes are allowed. All
            parameters vary over the axes of the batch. Stacked parameters are `[L/S, ...]`, in the
            order in which `exchange_layers` returns the layers.
          collections: The collections, which the loss must not change.
          minibatches: The microbatches and their keys, `[M, ...]`.
          reduce: Applied to the sum of the gradients.

        Returns:
          The sums of the gradients (complete for this stage's stacked parameters, only this stage's
          term for other parameters); the sums of the metrics, the same on all stages; and the
          collections.

        Raises:
          ValueError: The loss cannot be cut into stages, or it changes collections.

        Communication:
          In each tick a permute of a microbatch's activations to the next stage, and a permute of
          the gradients of activations to the previous stage. One all-reduce of the metrics over
          `axis`.
        """
        work = self._differentiated(loss, params, collections, minibatches)
        _check_unchanged(work.loss, collections)
        sums, metrics = work.run()
        return reduce(_split_as(params, sums)[0]), metrics, collections

    def metrics(
        self, measure: Callable[..., Metrics], params: Any, collections: Any, batch: Any, rng: Any
    ) -> Metrics:
        """Computes the metrics of a batch with forward passes only.

        Args:
          measure: `measure(params, collections, batch, rng)`, the metrics of some examples.
          params: A stage's parameters, in one tree.
          collections: The collections, which are only read.
          batch: A device's examples, `[B, ...]`. They are split into `n` microbatches, where
            `n` is the largest divisor of `B` that is at most `M`.
          rng: A key.

        Returns:
          The sums of the metrics, the same on all stages.

        Raises:
          ValueError: The loss cannot be cut into stages.

        Communication:
          In each tick a permute of the activations of a microbatch to the next stage. One
          all-reduce of the metrics over `axis`.
        """
        examples = max(len(x) for x in jax.tree.leaves(batch) if jnp.ndim(x))
        number = max(n for n in range(1, self.num_microbatches + 1) if examples % n == 0)
        parts = split_minibatches(batch, number), jax.random.split(rng, number)
        metrics: Metrics = self._work(measure, params, collections, parts, ()).run()[1]
        return metrics

    def _differentiated(
        self, loss: WeightedLoss, params: Any, collections: Any, parts: Any
    ) -> StageWork:
        """Makes the `StageWork` with backward passes; `params`: (trained, frozen) parameters."""

        def combined_loss(combined: Any, *args: Any) -> Any:
            return loss(*_split_as(params, combined), *args)

        is_trained = jax.tree.leaves(combine(_mark_trained(params)))
        return self._work(combined_loss, combine(params), collections, parts, is_trained)

    def _work(
        self,
        loss: Callable[..., Any],
        params: Any,
        collections: Any,
        parts: Any,
        trained: Sequence[bool],
    ) -> StageWork:
        params, others = cast_to_varying((params, (collections, parts)), (self.axis,))
        number, backward = len(parts[1]), any(trained)
        table = make_table(self.schedule, self.num_stages, number, self.chunks, backward=backward)
        return StageWork(
            loss,
            params,
            others,
            table=table,
            axis=self.axis,
            stacked=self.stacked,
            trained=trained,
            keep=self.keep,
            regathers=self.regathers,
        )

    def exchange_layers(self, tree: Any, *, back: bool = False) -> Any:
        """Exchanges the layers that a stage stores for the layers that it runs.

        Args:
          tree: Parameters as they are stored (boxes are allowed), or summed gradients.
          back: Whether to send gradients back to the stages that store the parameters.

        Returns:
          The tree; unchanged with `chunks=1`, because then a stage runs the layers that it stores.

        Communication:
          The communication of `exchange`, for each stacked parameter.
        """
        if self.chunks == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_masked)
        leaves = [
            exchange(x, self.axis, self.chunks, back=back) if is_stacked and not is_masked(x) else x
            for x, is_stacked in zip(leaves, self.stacked, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)


def _mark_trained(params: tuple[Any, Any]) -> tuple[Any, Any]:
    """Replaces each trained parameter by `True`, and each frozen parameter by `False`."""
    trained, frozen = params
    return jax.tree.map(lambda _: True, trained), jax.tree.map(lambda _: False, frozen)


def _split_as(params: tuple[Any, Any], tree: Any) -> tuple[Any, ...]:
    """Splits a tree into trained and frozen parts, as `params` is split; undoes `combine`."""

    def is_leaf(x: Any) -> bool:
        return is_masked(x) or is_box(x)

    def choose(param: Any, x: Any) -> Any:
        return param if is_masked(param) else x

    return tuple(jax.tree.map(choose, part, tree, is_leaf=is_leaf) for part in params)


def _check_unchanged(loss: StagedLoss, collections: Any) -> None:
    """Refuses a loss that changes collections, because stages run microbatches in parallel."""
    paths = jax.tree_util.tree_leaves_with_path(collections)
    first = len(loss.cut.results) - len(paths)
    for i, (path, _) in enumerate(paths):
        if loss.cut.results[first + i] != loss.first_other + i:
            raise ValueError(
                f"pipeline: the loss changes collection {jax.tree_util.keystr(path)}, expected "
                "none to change, because every stage runs only its own layers. Take "
                "LayerNorm or GroupNorm in place of BatchNorm, and leave collections out of "
                "mutable=[...]."
            )
