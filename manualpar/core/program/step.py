"""One step: gradients on each device inside `shard_map`, the optimizer's update outside of it.

The forward pass, the backward pass and the reductions of gradients and metrics run inside. Read
`Step._gradients_on_device` first. It has four parts: *box* the parameters, so that they gather
themselves; run the *loss*; *accumulate* gradients over minibatches; *reduce* gradients over the
devices. This package writes every collective in it.

The optimizer's *update* runs outside, on global arrays. There the norm of a gradient is the norm
of the global gradient, and an elementwise update needs no collective. Gradients have the specs of
the optimizer's state. ZeRO-1 and -2 replicate parameters and shard the optimizer's state. They
slice the parameters before the update, which sends nothing, and gather them after it.

The mode implements these operations: box, scatter, reduce and others. The default mode is
`manualpar.core.modes.manual`.
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

OBJECTIVE = "objective of the optimizer"  # A reserved metric name.


@dataclasses.dataclass(frozen=True)
class Step:
    """The functions of a training step and of an evaluation step, to be jitted.

    Attributes:
      strategy: Decides when parameters are gathered and gradients scattered.
      model: The model with its loss.
      mode: The mode: this package or XLA writes the collectives.
      roles: The role of each mesh axis.
      placements: The tree of parameters with a `Placement` at each leaf.
      update: Applies the optimizer to the gradients.
      num_minibatches: The number of minibatches into which a device splits its part of a batch.
      schedule: Runs the minibatches one after another, see `modes.gradients`.
      pipeline: Replaces `schedule` if stages split the layers.
      nonfinite: The reaction to a loss or a gradient that is not finite, see `ProgramOptions`.
      feedback: The error feedback or stochastic rounding of quantized gradients, see
        `gradient_rounding`; `None` for rounding to the nearest.
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
        aux = state.collections, state.local
        grads, metrics, new_aux = self.gradients(state.params, aux, key, batch)
        is_applied, (collections, per_device) = self._check_finite(metrics, new_aux, aux)
        objective = metrics.pop(OBJECTIVE)
        params, frozen = partition(self.placements, state.params)
        params, opt_state, norms = self.update(
            state.tx,
            params,
            grads,
            opt_state=state.opt_state,
            value=mean(objective),
            value_and_grad=functools.partial(self._value_and_grad, frozen, aux, key, batch),
            is_applied=is_applied,
        )
        metrics |= {name: (norm, jnp.ones(())) for name, norm in norms.items()}
        state = state.replace(
            step=state.step + 1,
            params=combine((params, frozen)),
            opt_state=opt_state,
            rng=rng,
            collections=collections,
            local=per_device,
        )
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the metrics of the batch with training turned off; the state does not change."""
        check_batch("batch", batch, self.mode.mesh, self.roles)
        return self._metrics(self.model.eval_metrics, state, batch)

    def loss_only(self, state: TrainState, batch: Any) -> Metrics:
        """Calls the loss as `train` does, without derivatives. Only checks trace this function."""

        def first_minibatch(boxes: Any, collections: Any, batch: Any, rng: jax.Array) -> Metrics:
            boxes = cast_to_varying(boxes, self.mode.varying_axes)
            if self.pipeline is None:
                minibatches = self.mode.split(batch, self.num_minibatches, self.roles)
                batch = jax.tree.map(lambda x: x[0], minibatches)
            return self.loss(boxes, collections, batch, rng)[1]

        return self._metrics(first_minibatch, state, batch)

    def gradients(
        self, params: Any, aux: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """Computes the global gradients of a batch.

        Args:
          params: The parameters in the specs in which they are stored.
          aux: The model's collections, and the state that differs between devices
            (`TrainState.local`).
          rng: The key of the step.
          batch: The global batch.

        Returns:
          The gradients in the specs of the optimizer's state, the metrics, and the new `aux`.
        """
        aux_specs = PartitionSpec(), self.feedback.specs() if self.feedback else {}
        out_specs = (state_specs(trained(self.placements)), PartitionSpec(), aux_specs)
        on_mesh = self._on_mesh(self._gradients_on_device, batch, out_specs, aux_specs)
        grads, metrics, aux = on_mesh(params, aux, rng, batch)
        return grads, dict(metrics), aux

    def _gradients_on_device(
        self, params: Any, aux: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """Computes `gradients` on one device, from its shards and its examples."""
        mode, strategy, (collections, per_device) = self.mode, self.strategy, aux
        # Box the parameters twice: in the specs of parameters, and in the specs of gradients.
        boxes = self._boxes(params)
        params, _ = partition(self.placements, params)
        grad_boxes = self._map_trained(functools.partial(mode.box, as_state=True), params)
        if strategy.gather_every == "step":
            boxes = self._map(lambda _, x: x.gather_data_axes() if is_box(x) else x, boxes)
        boxes, frozen = partition(self.placements, boxes)
        if self.feedback is not None:
            boxes, grad_boxes = self.feedback.round_at_random(rng, boxes, grad_boxes)
        # Choose the loss: with or without gathers in the backward pass.
        loss = self.loss
        regathers = strategy.reshard_after_forward
        dequantizes = self.model.adapter.decodes_weights or mode.comm.gather.quantizer
        if self.pipeline is None and (regathers or dequantizes):
            loss = regather_for_backward(
                loss, keep_gathered=not regathers, axes=strategy.regather_axes
            )
        # Accumulate over minibatches.
        scatter = functools.partial(self._map_trained, mode.scatter, grad_boxes)
        per_minibatch = strategy.reduce_every == "minibatch"
        grads, metrics, new_collections = accumulate(
            lambda params, *args: loss(self._map(_unbox_kept, params), *args),
            boxes,
            collections,
            mode.split(mode.to_zigzag(batch, self.roles), self.num_minibatches, self.roles),
            mode.fold(rng),
            schedule=self.pipeline or self.schedule,
            reduce=scatter if per_minibatch else lambda grads: grads,
            frozen=frozen,
            outer_axes=mode.outer_axes,
        )
        # Reduce over devices.
        if self.feedback is not None:
            quantizers, (grads, grad_boxes) = self.feedback.attach(per_device, grads, grad_boxes)
        grads = grads if per_minibatch else self._map_trained(mode.scatter, grad_boxes, grads)
        if self.pipeline is not None:
            grads = self.pipeline.exchange_layers(grads, back=True)
        grads = strip_boxes(self._map_trained(mode.sync, grad_boxes, grads))
        if self.feedback is not None:
            per_device = self.feedback.new_residuals(quantizers)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        if self.nonfinite != "ignore":
            metrics = count_nonfinite(metrics, grads, mode.data_axes + mode.outer_axes)
        collections = mode.sync_collections(
            new_collections, collections, self.model.sync_collections
        )
        return grads, mode.sync_metrics(metrics), (collections, per_device)

    def loss(
        self, params: Any, collections: Any, minibatch: Any, rng: jax.Array
    ) -> tuple[jax.Array, Metrics, Any]:
        """Calls the user's loss, and adds its value to the metrics as `OBJECTIVE`."""
        before = {id(x) for x in jax.tree.leaves(collections)}
        loss, metrics, collections = self.model.train_loss(params, collections, minibatch, rng)
        # Without stop_gradient the backward pass would compute the derivatives of metrics and
        # collections and multiply them by zeros. An infinite derivative would make the gradient
        # NaN. A variable that the loss does not change stays the same array: pipelines need this.
        metrics, collections = jax.tree.map(
            lambda x: x if id(x) in before else jax.lax.stop_gradient(x), (metrics, collections)
        )
        count = metrics["loss"][1].astype(jnp.float32)
        objective = jax.lax.stop_gradient(loss).astype(jnp.float32) * count
        return loss, {**metrics, OBJECTIVE: (objective, count)}, collections

    def _boxes(self, params: Any) -> Any:
        """Boxes the parameters of the layers that run on this device."""
        boxes = self._map(self.mode.box, params)
        return boxes if self.pipeline is None else self.pipeline.exchange_layers(boxes)

    def _metrics(self, measure: Callable[..., Metrics], state: TrainState, batch: Any) -> Metrics:
        """Runs `measure(boxes, collections, batch, rng)` on each device; sums its metrics."""

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
        self, metrics: Metrics, new_aux: Any, aux: Any
    ) -> tuple[jax.Array | None, Any]:
        """Decides whether the step is applied, and adds the metric `nonfinite`.

        Returns:
          `bool[]`, whether the step is applied (`None` if it always is), and `new_aux`, or `aux`
          if the step is not applied.
        """
        if self.nonfinite == "ignore":
            return None, new_aux
        finite = is_finite(self.strategy.name, self.nonfinite, metrics, OBJECTIVE)
        metrics["nonfinite"] = (1 - finite.astype(jnp.float32), jnp.ones(()))
        if self.nonfinite == "report":
            return None, new_aux
        select = functools.partial(jax.lax.select, finite)
        return finite, jax.tree.map(select, new_aux, aux)

    def _value_and_grad(
        self, frozen: Any, aux: Any, rng: jax.Array, batch: Any, params: Any
    ) -> tuple[jax.Array, Any]:
        """Computes the loss and its gradient at `params`, for example for line searches."""
        grads, metrics, _ = self.gradients(combine((params, frozen)), aux, rng, batch)
        return mean(metrics[OBJECTIVE]), grads

    def _on_mesh(
        self, function: Callable[..., Any], batch: Any, out_specs: Any, aux_specs: Any = None
    ) -> Callable[..., Any]:
        """Turns a per-device function of `(params, aux, rng, batch)` into one of global arrays.

        Without `aux_specs`, `aux` is replicated.
        """
        in_specs = (
            param_specs(self.placements),
            aux_specs or PartitionSpec(),
            PartitionSpec(),
            self.roles.batch_specs(batch),
        )
        return self.mode.run(function, in_specs=in_specs, out_specs=out_specs)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, self.placements, *trees)

    def _map_trained(self, function: Callable[..., Any], *trees: Any) -> Any:
        return map_in_scopes(function, trained(self.placements), *trees)


def mean(metric: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean of a metric; 0 if its count is 0."""
    total, count = metric
    return total / jnp.where(count == 0, 1, count)


def _unbox_kept(place: Placement, x: Any) -> Any:
    """Gathers a parameter that is gathered once for each minibatch (`Placement.keep`)."""
    if not place.keep or not is_box(x):
        return x
    split = tuple(n if place.split_axes.issuperset(axis_tuple(n)) else None for n in x.names)
    gathered = x.unbox()
    # A shard of a split parameter stays in a box, so that a loss can gather the full parameter.
    is_part = any(split) and type(x) is ShardedParameter
    return ShardedParameter(gathered, split) if is_part else gathered
