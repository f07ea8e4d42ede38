"""What happens in a step: on every device inside `shard_map`, and on global arrays outside.

Inside run the forward and the backward pass and the synchronisation of gradients and metrics: every
collective in it is written in this package. Outside runs the optimizer: there the norm of a
gradient is that of the whole gradient, whichever devices hold it, and an elementwise update needs
no collective. (In the modes in which XLA writes the collectives, all of it runs on global arrays.)

Between the two a gradient has the spec of the optimizer's state. Parameters that are whole between
steps while their state is not (ZeRO-1 and -2) are sliced for the optimizer, which sends nothing,
and gathered after it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.collectives import AS_STORED, Wire
from manualpar.core.gradients import (
    CarryingLossFn,
    accumulate,
    check_minibatches,
    find_nonfinite,
    split_minibatches,
    sync_collections,
    sync_gradients,
    sync_metrics,
)
from manualpar.core.partitioning import boxed_axes, is_box, scatter_gradients, wire_dtype
from manualpar.core.strategy import Mode, Strategy
from manualpar.guards.options import Nonfinite
from manualpar.modes.modes import (
    box_parameter,
    constrain,
    run_on_mesh,
    split_global_minibatches,
)
from manualpar.modes.remat import regather_for_backward
from manualpar.rng import fold_rng_over_axis
from manualpar.sharding.layout import Placement, pad_leaf, param_specs, state_specs, strip_boxes
from manualpar.sharding.mesh import axes_size
from manualpar.train_state import TrainState
from manualpar.update import Update, map_in_scopes
from manualpar.user_model.loss_function import Metrics
from manualpar.user_model.study import UserModel

# Metrics that no loss function can return by accident.
OBJECTIVE = "objective of the optimizer"
NONFINITE_GRADIENTS = "devices with a gradient that is not finite"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training and one of evaluation, to be jitted.

    Attributes:
      strategy: The strategy.
      model: The model with its loss.
      mesh: The mesh.
      data_axes: The mesh axes that examples are split over.
      num_minibatches: Parts that a device takes its share of a batch in.
      use_scan: Whether they run in a scan.
      mode: Who writes the collectives.
      wire: The dtypes that travel, and which way.
      nonfinite: What is done about a loss or a gradient that is not finite.
      update: What the optimizer does with the gradients.
      placements: The tree of parameters with a `Placement` at each leaf.
    """

    strategy: Strategy
    model: UserModel
    mesh: Mesh
    data_axes: tuple[str, ...]
    num_minibatches: int = 1
    use_scan: bool = False
    mode: Mode = "manual"
    wire: Wire = AS_STORED
    nonfinite: Nonfinite = "ignore"
    placements: Any = None
    update: Update | None = None

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes one step of the optimizer; returns the new state and the metrics of the batch."""
        check_batch("batch", batch, self.mesh, self.data_axes)
        rng, step_rng = jax.random.split(state.rng)
        grads, metrics, collections = self.gradients(
            state.params, state.collections, step_rng, batch
        )
        assert self.update is not None
        objective = metrics.pop(OBJECTIVE)
        is_applied = None
        if self.nonfinite != "ignore":
            is_finite = self._is_finite(objective, metrics)
            metrics["nonfinite"] = (1 - is_finite.astype(jnp.float32), jnp.ones(()))
            if self.nonfinite == "skip":
                is_applied = is_finite
                select = functools.partial(jax.lax.select, is_applied)
                collections = jax.tree.map(select, collections, state.collections)
        value_and_grad = functools.partial(self._value_and_grad, state.collections, step_rng, batch)
        params, opt_state, norms = self.update(
            state.tx,
            state.params,
            grads,
            opt_state=state.opt_state,
            value=mean(objective),
            value_and_grad=value_and_grad,
            is_applied=is_applied,
        )
        metrics |= {name: (norm, jnp.ones(())) for name, norm in norms.items()}
        state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            rng=rng,
            collections=collections,
        )
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the metrics of the batch with training turned off; the state stays as it is."""
        check_batch("batch", batch, self.mesh, self.data_axes)
        on_mesh = self._on_mesh(self._metrics_part, batch, PartitionSpec())
        metrics: Metrics = on_mesh(state.params, state.collections, state.rng, batch)
        return metrics

    # What runs on the mesh: on one device's part in mode `manual`, on global arrays in the others.

    def gradients(
        self, params: Any, collections: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """The global gradients, in the specs of the optimizer's state, metrics and collections."""
        out_specs = (state_specs(self.placements), PartitionSpec(), PartitionSpec())
        on_mesh = self._on_mesh(self._gradients_part, batch, out_specs)
        grads, metrics, collections = on_mesh(params, collections, rng, batch)
        return grads, dict(metrics), collections

    def _gradients_part(
        self, params: Any, collections: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """A training step up to the gradients."""
        before = collections
        is_manual = self.mode == "manual"
        boxes = self._map(functools.partial(self._box, state=False), params)
        shards = self._map(functools.partial(self._box, state=True), params)
        if self.strategy.gather_every == "step":
            boxes = self._map(lambda _, x: x.gather_data_axes() if is_box(x) else x, boxes)
        scatter = functools.partial(self._scatter, shards)
        every_minibatch = self.strategy.reduce_every == "minibatch"
        if is_manual:
            rng = fold_rng_over_axis(rng, self.data_axes)
            minibatches = split_minibatches(batch, self.num_minibatches)
        else:
            devices = axes_size(self.mesh, self.data_axes)
            check_minibatches(batch, self.num_minibatches, devices=devices)
            minibatches = split_global_minibatches(
                self.mode, batch, self.num_minibatches, self.mesh, self.data_axes
            )
        loss: CarryingLossFn = self.carrying_loss
        if self.strategy.reshard_after_forward:
            loss = regather_for_backward(loss)
        loss = self._keeping(loss)
        grads, metrics, collections = accumulate(
            loss,
            boxes,
            collections,
            minibatches,
            rng,
            use_scan=self.use_scan,
            reduce=scatter if every_minibatch else None,
        )
        grads = grads if every_minibatch else scatter(grads)
        if is_manual:
            grads = jax.tree.map(self._to_wire, shards, grads, is_leaf=is_box)
            grads = sync_gradients(grads, self.data_axes)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), strip_boxes(grads), params)
        if self.nonfinite != "ignore":
            # Of what was summed and cast, either of which may overflow.
            found = find_nonfinite(grads, self.data_axes)
            metrics = {**metrics, NONFINITE_GRADIENTS: (found, jnp.ones(()))}
        if is_manual:
            metrics = sync_metrics(metrics, self.data_axes)
            collections = sync_collections(
                collections, self.data_axes, before=before, rules=self.model.sync_collections
            )
        return grads, metrics, collections

    def _is_finite(self, objective: tuple[jax.Array, jax.Array], metrics: Metrics) -> jax.Array:
        """Whether the loss and all gradients are finite, `bool[]`; takes the latter's count out."""
        if "nonfinite" in metrics:
            raise ValueError(
                f"{self.strategy.name}: nonfinite={self.nonfinite!r} reports a metric "
                "'nonfinite', and loss_fn returns one of that name too; expected another. Rename "
                "it."
            )
        devices, _ = metrics.pop(NONFINITE_GRADIENTS)
        losses = jnp.stack([jnp.isfinite(x) for x in (mean(objective), mean(metrics["loss"]))])
        return (devices == 0) & losses.all()

    def _metrics_part(self, params: Any, collections: Any, rng: jax.Array, batch: Any) -> Metrics:
        """An evaluation step."""
        boxes = self._map(functools.partial(self._box, state=False), params)
        boxes = self._map(functools.partial(self._unbox_kept, False), boxes)
        if self.mode == "manual":
            rng = fold_rng_over_axis(rng, self.data_axes)
        metrics = self.model.eval_metrics(boxes, collections, batch, rng)
        return sync_metrics(metrics, self.data_axes) if self.mode == "manual" else metrics

    def carrying_loss(
        self, params: Any, collections: Any, minibatch: Any, rng: jax.Array
    ) -> tuple[Any, Any, Any]:
        """The user's loss, with the model's other collections passed in and out."""
        loss, metrics, collections = self.model.train_loss(params, collections, minibatch, rng)
        count = metrics["loss"][1].astype(jnp.float32)
        objective = jax.lax.stop_gradient(loss).astype(jnp.float32) * count
        return loss, {**metrics, OBJECTIVE: (objective, count)}, collections

    def _keeping(self, loss: CarryingLossFn) -> CarryingLossFn:
        """The loss with what is kept gathered before it, and so outside of what drops."""
        if not any(place.keep for place in jax.tree.leaves(self.placements)):
            return loss
        every_minibatch = self.strategy.gather_every == "minibatch"
        unbox = functools.partial(self._unbox_kept, every_minibatch)
        return lambda params, *args: loss(self._map(unbox, params), *args)

    @staticmethod
    def _unbox_kept(gather: bool, place: Placement, x: Any) -> Any:
        """Unboxes a parameter that is kept; without `gather` only if there is nothing to gather."""
        return x.unbox() if place.keep and is_box(x) and (gather or not boxed_axes(x)) else x

    def _on_mesh(
        self, function: Callable[..., Any], batch: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Runs a function of (params, collections, rng, batch) on the mesh."""
        in_specs = (
            param_specs(self.placements),
            PartitionSpec(),
            PartitionSpec(),
            batch_specs(batch, self.data_axes),
        )
        return run_on_mesh(
            self.mode, function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs
        )

    def _box(self, place: Placement, x: Any, *, state: bool) -> Any:
        """Boxes a parameter as it is stored, or as its gradient and its state are."""
        return box_parameter(
            self.mode,
            x,
            place,
            as_state=state,
            mesh=self.mesh,
            data_axes=self.data_axes,
            wire=self.wire,
            keep_types=self.model.keeps_types,
        )

    def _scatter(self, shards: Any, grads: Any) -> Any:
        """Leaves each device its shard of gradients that are whole; others have been scattered."""
        return self._map(self._scatter_one, shards, grads)

    def _scatter_one(self, place: Placement, shard: Any, g: Any) -> Any:
        if boxed_axes(g) == boxed_axes(shard):
            return g
        if self.mode == "manual":
            return scatter_gradients(g, shard)
        g = pad_leaf(g.value if is_box(g) else g, place.padding)
        return shard.replace(value=constrain(self.mode, g, self.mesh, place.state_spec))

    def _to_wire(self, shard: Any, g: Any) -> Any:
        """Casts a gradient that is yet to be reduced."""
        if not set(self.data_axes) - set(boxed_axes(g)):
            return g
        return jax.tree.map(lambda x: x.astype(wire_dtype(shard)), g)

    def _value_and_grad(
        self, collections: Any, rng: jax.Array, batch: Any, params: Any
    ) -> tuple[jax.Array, Any]:
        """The loss and its gradient at stored parameters, for optimizers that try several."""
        grads, metrics, _ = self.gradients(params, collections, rng, batch)
        return mean(metrics[OBJECTIVE]), grads

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Maps a function of a placement and leaves over trees like the parameters'."""
        return map_in_scopes(function, self.placements, *trees)


def mean(metric: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean of a metric; 0 if nothing was counted."""
    total, count = metric
    return total / jnp.where(count == 0, 1, count)


def abstract_batch(field: str, batch: Any) -> Any:
    """The shapes and dtypes of a batch; refuses what is no array, in the name of `field`."""

    def abstract(path: Any, x: Any) -> Any:
        try:
            return jax.eval_shape(lambda x: x, x)
        except TypeError as error:
            raise TypeError(
                f"{field}{jax.tree_util.keystr(path)} is a {type(x).__name__}, expected an array "
                "of numbers, of shape [B, ...] where it has a row for each example."
            ) from error

    return jax.tree_util.tree_map_with_path(abstract, batch)


def check_batch(field: str, batch: Any, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Refuses a batch that cannot be split evenly over the data axes, in the name of `field`."""
    devices = axes_size(mesh, axes)
    sizes = {
        f"{field}{jax.tree_util.keystr(path)}": x.shape[0]
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
        if jnp.ndim(x)
    }
    if not sizes:
        raise ValueError(f"{field} has no arrays of shape [B, ...], expected some examples.")
    for name, size in sizes.items():
        if not size or size % devices:
            raise ValueError(
                f"{name} has {size} examples, expected a positive multiple of the {devices} "
                f"devices along {axes}: no example may be dropped. Change the batch size or the "
                "number of devices, or pad the batch and mask the padding."
            )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{field} has leaves with different numbers of examples, expected one number along "
            f"their leading dimension: {', '.join(f'{k} has {v}' for k, v in sizes.items())}."
        )


def batch_specs(batch: Any, axes: tuple[str, ...]) -> Any:
    """Splits the leading dimension of each leaf over the data axes; scalars are replicated."""
    return jax.tree.map(lambda x: PartitionSpec(axes) if jnp.ndim(x) else PartitionSpec(), batch)
