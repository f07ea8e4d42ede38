"""What happens in a step: on every device inside `shard_map`, and on global arrays outside.

Inside run the forward and the backward pass and the reductions of gradients and metrics. Read
`Step._gradients_on_device` first. It is one straight line: *box* the parameters, so that they
gather themselves; run the *loss*; *accumulate* gradients over minibatches; *reduce* them over the
devices. Every collective in it is written in this package.

Outside runs the optimizer's *update*. There the norm of a gradient is that of the whole gradient,
whichever devices hold it, and an elementwise update needs no collective. A gradient arrives in the
spec of the optimizer's state. Parameters that are whole while their state is sharded (ZeRO-1 and
-2) are sliced for the update, which sends nothing, and gathered after it.

The mode decides what box, reduce and the others do. The default is `manualpar.core.modes.manual`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.mesh.splitting import check_batch
from manualpar.core.model.loss_function import Metrics
from manualpar.core.model.options import Nonfinite
from manualpar.core.model.trace_model import TracedModel
from manualpar.core.modes.gradients import Accumulation, accumulate, unrolled
from manualpar.core.modes.manual import Manual
from manualpar.core.modes.nonfinite import count_nonfinite, is_finite
from manualpar.core.modes.remat import regather_for_backward
from manualpar.core.modes.strategy import Pipelined, Strategy
from manualpar.core.parameters.collectives import cast_to_varying
from manualpar.core.parameters.placement import (
    Placement,
    map_in_scopes,
    param_specs,
    state_specs,
    strip_boxes,
)
from manualpar.core.parameters.sharded_parameter import ShardedParameter, is_box
from manualpar.core.parameters.trainable import combine, partition, trained
from manualpar.core.program.optimizer_update import Update
from manualpar.core.state.train_state import TrainState

OBJECTIVE = "objective of the optimizer"  # A metric that no loss function returns by accident.


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training and one of evaluation, to be jitted.

    Attributes:
      strategy: When parameters are gathered and gradients scattered.
      model: The model with its loss.
      mode: Who writes the collectives.
      roles: What each mesh axis is for.
      placements: The tree of parameters with a `Placement` at each leaf.
      update: What the optimizer does with the gradients.
      num_minibatches: The number of parts that a device takes its share of a batch in.
      schedule: How these parts run.
      pipeline: The schedule instead if the layers are spread over stages.
      nonfinite: What is done about a loss or a gradient that is not finite.
      feedback: What devices keep of gradients that travel as codes, see `error_feedback`.
    """

    strategy: Strategy
    model: TracedModel
    mode: Manual
    roles: AxisRoles
    placements: Any
    update: Update
    num_minibatches: int = 1
    schedule: Accumulation = unrolled
    pipeline: Pipelined | None = None
    nonfinite: Nonfinite = "ignore"
    feedback: Any = None

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes one step of the optimizer; returns the new state and the metrics of the batch."""
        check_batch("batch", batch, self.mode.mesh, self.roles)
        rng, key = jax.random.split(state.rng)
        carried = state.collections, state.local  # The latter is each device's own.
        grads, metrics, updated = self.gradients(state.params, carried, key, batch)
        is_applied, (collections, local) = self._check_finite(metrics, updated, carried)
        objective = metrics.pop(OBJECTIVE)
        params, frozen = partition(self.placements, state.params)
        params, opt_state, norms = self.update(
            state.tx,
            params,
            grads,
            opt_state=state.opt_state,
            value=mean(objective),
            value_and_grad=functools.partial(self._value_and_grad, frozen, carried, key, batch),
            is_applied=is_applied,
        )
        metrics |= {name: (norm, jnp.ones(())) for name, norm in norms.items()}
        state = state.replace(
            step=state.step + 1,
            params=combine((params, frozen)),
            opt_state=opt_state,
            rng=rng,
            collections=collections,
            local=local,
        )
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the metrics of the batch with training turned off; the state stays as it is."""
        check_batch("batch", batch, self.mode.mesh, self.roles)
        return self._metrics(self.model.eval_metrics, state, batch)

    def loss_alone(self, state: TrainState, batch: Any) -> Metrics:
        """Calls the loss as `train` does, with no derivative; it is traced and checked, not run."""

        def first_minibatch(boxes: Any, collections: Any, batch: Any, rng: jax.Array) -> Metrics:
            boxes = cast_to_varying(boxes, self.mode.varying_axes)
            if self.pipeline is None:
                parts = self.mode.split(batch, self.num_minibatches, self.roles)
                batch = jax.tree.map(lambda x: x[0], parts)
            return self.loss(boxes, collections, batch, rng)[1]

        return self._metrics(first_minibatch, state, batch)

    def gradients(
        self, params: Any, carried: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """The global gradients, as the optimizer's state lies, metrics, and what is carried."""
        specs = PartitionSpec(), self.feedback.specs() if self.feedback else {}
        out_specs = (state_specs(trained(self.placements)), PartitionSpec(), specs)
        on_mesh = self._on_mesh(self._gradients_on_device, batch, out_specs, specs)
        grads, metrics, carried = on_mesh(params, carried, rng, batch)
        return grads, dict(metrics), carried

    def _gradients_on_device(
        self, params: Any, carried: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """A training step up to the gradients, on a device's part of everything."""
        mode, strategy, (collections, local) = self.mode, self.strategy, carried
        # Box: as parameters are stored, and as their gradients are to lie.
        boxes = self._boxes(params)
        params, _ = partition(self.placements, params)
        shards = self._map_trained(functools.partial(mode.box, as_state=True), params)
        if strategy.gather_every == "step":
            boxes = self._map(lambda _, x: x.gather_data_axes() if is_box(x) else x, boxes)
        boxes, frozen = partition(self.placements, boxes)
        if self.feedback is not None:
            boxes, shards = self.feedback.round_at_random(rng, boxes, shards)
        # Loss.
        loss = self.loss
        regathers = strategy.reshard_after_forward
        decodes = self.model.adapter.decodes_weights or mode.wire.gather_code
        if self.pipeline is None and (regathers or decodes):
            loss = regather_for_backward(
                loss, keep_gathered=not regathers, axes=strategy.regather_axes
            )
        # Accumulate.
        scatter = functools.partial(self._map_trained, mode.scatter, shards)
        scatters_each = strategy.reduce_every == "minibatch"
        grads, metrics, updated = accumulate(
            lambda params, *args: loss(self._map(_unbox_kept, params), *args),
            boxes,
            collections,
            mode.split(mode.to_zigzag(batch, self.roles), self.num_minibatches, self.roles),
            mode.fold(rng),
            schedule=self.pipeline or self.schedule,
            reduce=scatter if scatters_each else lambda grads: grads,
            frozen=frozen,
            outer_axes=mode.outer_axes,
        )
        # Reduce.
        if self.feedback is not None:
            kept, (grads, shards) = self.feedback.attach(local, grads, shards)
        grads = grads if scatters_each else self._map_trained(mode.scatter, shards, grads)
        if self.pipeline is not None:
            grads = self.pipeline.exchange_layers(grads, back=True)
        grads = strip_boxes(self._map_trained(mode.sync, shards, grads))
        if self.feedback is not None:
            local = self.feedback.left_out(kept)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        if self.nonfinite != "ignore":
            metrics = count_nonfinite(metrics, grads, mode.data_axes + mode.outer_axes)
        updated = mode.sync_collections(updated, collections, self.model.sync_collections)
        return grads, mode.sync_metrics(metrics), (updated, local)

    def loss(
        self, params: Any, collections: Any, minibatch: Any, rng: jax.Array
    ) -> tuple[jax.Array, Metrics, Any]:
        """The user's loss, with its value among the metrics."""
        loss, metrics, collections = self.model.train_loss(params, collections, minibatch, rng)
        # Otherwise their derivatives are computed in the backward pass, of a remat too, and
        # multiplied by zeros: where such a derivative is infinite the gradient would be NaN.
        metrics, collections = jax.lax.stop_gradient((metrics, collections))
        count = metrics["loss"][1].astype(jnp.float32)
        objective = jax.lax.stop_gradient(loss).astype(jnp.float32) * count
        return loss, {**metrics, OBJECTIVE: (objective, count)}, collections

    def _boxes(self, params: Any) -> Any:
        """The parameters of the layers that run here, in boxes."""
        boxes = self._map(self.mode.box, params)
        return boxes if self.pipeline is None else self.pipeline.exchange_layers(boxes)

    def _metrics(self, measure: Callable[..., Metrics], state: TrainState, batch: Any) -> Metrics:
        """What `measure(boxes, collections, batch, rng)` says of all devices' parts of a batch."""

        def on_device(params: Any, collections: Any, rng: jax.Array, batch: Any) -> Metrics:
            boxes = self._map(_unbox_kept, self._boxes(params))
            args = boxes, collections, self.mode.to_zigzag(batch, self.roles), self.mode.fold(rng)
            return self.mode.sync_metrics(
                measure(*args) if self.pipeline is None else self.pipeline.metrics(measure, *args)
            )

        on_mesh = self._on_mesh(on_device, batch, PartitionSpec())
        metrics: Metrics = on_mesh(state.params, state.collections, state.rng, batch)
        return metrics

    def _check_finite(
        self, metrics: Metrics, updated: Any, before: Any
    ) -> tuple[jax.Array | None, Any]:
        """Whether the step is applied, if that is a question, and the collections after it."""
        if self.nonfinite == "ignore":
            return None, updated
        finite = is_finite(self.strategy.name, self.nonfinite, metrics, OBJECTIVE)
        metrics["nonfinite"] = (1 - finite.astype(jnp.float32), jnp.ones(()))
        if self.nonfinite == "report":
            return None, updated
        select = functools.partial(jax.lax.select, finite)
        return finite, jax.tree.map(select, updated, before)

    def _value_and_grad(
        self, frozen: Any, carried: Any, rng: jax.Array, batch: Any, params: Any
    ) -> tuple[jax.Array, Any]:
        """The loss and its gradient at stored parameters, for optimizers that try several."""
        grads, metrics, _ = self.gradients(combine((params, frozen)), carried, rng, batch)
        return mean(metrics[OBJECTIVE]), grads

    def _on_mesh(
        self, function: Callable[..., Any], batch: Any, out_specs: Any, carried: Any = None
    ) -> Callable[..., Any]:
        """Runs a function of (params, collections or what is carried, rng, batch) on the mesh."""
        in_specs = (
            param_specs(self.placements),
            carried or PartitionSpec(),
            PartitionSpec(),
            self.roles.batch_specs(batch),
        )
        return self.mode.run(function, in_specs=in_specs, out_specs=out_specs)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, self.placements, *trees)

    def _map_trained(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, trained(self.placements), *trees)


def mean(metric: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean of a metric; 0 if nothing was counted."""
    total, count = metric
    return total / jnp.where(count == 0, 1, count)


def _unbox_kept(place: Placement, x: Any) -> Any:
    """Gathers a parameter that the model is to get whole."""
    if not place.keep or not is_box(x):
        return x
    split = tuple(n if place.split_axes.issuperset(axis_tuple(n)) else None for n in x.names)
    whole = x.unbox()
    # What the model computes with in parts stays in a box, from which a loss can gather it.
    is_part = any(split) and type(x) is ShardedParameter
    return ShardedParameter(whole, split) if is_part else whole
