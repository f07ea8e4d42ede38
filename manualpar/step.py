"""What happens in a step: on every device inside `shard_map`, and on global arrays outside.

Inside run the forward and the backward pass and the synchronisation of gradients and metrics: every
collective in it is written in this package. Outside runs the optimizer: there the norm of a
gradient is that of the whole gradient, whichever devices hold it, and an elementwise update needs
no collective.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from manualpar.gradients import accumulate, sync_collections, sync_gradients, sync_metrics
from manualpar.layout import box_params, param_specs, strip_boxes
from manualpar.loss import LossFn, Metrics, call_loss
from manualpar.mesh import axes_size
from manualpar.model import CarryingApply
from manualpar.rng import fold_rng_over_axis
from manualpar.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training and one of evaluation, to be jitted.

    Attributes:
      model: The Linen model.
      loss_fn: The loss.
      mesh: The mesh.
      data_axes: The mesh axes that examples are split over.
      placements: The tree of parameters with a `Placement` at each leaf.
      num_minibatches: Parts that a device takes its share of a batch in.
      use_scan: Whether they run in a scan.
    """

    model: nn.Module
    loss_fn: LossFn
    mesh: Mesh
    data_axes: tuple[str, ...]
    placements: Any
    num_minibatches: int
    use_scan: bool

    def train(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Takes one step of the optimizer; returns the new state and the metrics of the batch."""
        rng, step_rng = jax.random.split(state.rng)
        out_specs = (param_specs(self.placements), PartitionSpec(), PartitionSpec())
        on_devices = self._on_devices(self._gradients_on_device, batch, out_specs)
        grads, metrics, collections = on_devices(state.params, state.collections, step_rng, batch)
        with jax.named_scope("optimizer"):
            state = state.apply_gradients(grads=grads, rng=rng, collections=collections)
        return state, metrics

    def evaluate(self, state: TrainState, batch: Any) -> Metrics:
        """Returns the metrics of the batch with training turned off; the state stays as it is."""
        on_devices = self._on_devices(self._metrics_on_device, batch, PartitionSpec())
        return on_devices(state.params, state.collections, state.rng, batch)

    def _on_devices(
        self, function: Callable[..., Any], batch: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Runs a function of (params, collections, rng, batch) on every device's part of them."""
        check_batch("batch", batch, self.mesh, self.data_axes)
        specs = (
            param_specs(self.placements),
            PartitionSpec(),
            PartitionSpec(),
            batch_specs(batch, self.data_axes),
        )
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=True
        )

    def _gradients_on_device(
        self, params: Any, collections: Any, rng: jax.Array, batch: Any
    ) -> tuple[Any, Metrics, Any]:
        """One device's part of a training step."""
        grads, metrics, collections = accumulate(
            self._carrying_loss,
            box_params(params, self.placements, self.data_axes),
            collections,
            batch,
            fold_rng_over_axis(rng, self.data_axes),
            num_minibatches=self.num_minibatches,
            use_scan=self.use_scan,
        )
        grads = strip_boxes(sync_gradients(grads, self.data_axes))
        metrics = sync_metrics(metrics, self.data_axes)
        return grads, metrics, sync_collections(collections, self.data_axes)

    def _metrics_on_device(
        self, params: Any, collections: Any, rng: jax.Array, batch: Any
    ) -> Metrics:
        """One device's part of an evaluation step."""
        params = box_params(params, self.placements, self.data_axes)
        apply_fn = CarryingApply(self.model, collections, train=False)
        rng = fold_rng_over_axis(rng, self.data_axes)
        _, metrics = call_loss(self.loss_fn, params, apply_fn, batch, rng)
        return sync_metrics(metrics, self.data_axes)

    def _carrying_loss(
        self, params: Any, collections: Any, minibatch: Any, rng: jax.Array
    ) -> tuple[Any, Any, Any]:
        """The user's loss, with the model's other collections passed in and out."""
        apply_fn = CarryingApply(self.model, collections, train=True)
        loss, metrics = call_loss(self.loss_fn, params, apply_fn, minibatch, rng)
        return loss, metrics, apply_fn.collections


def check_batch(field: str, batch: Any, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Refuses a batch that cannot be split evenly over the data axes, in the name of `field`."""
    if not hasattr(batch, "inputs"):
        raise TypeError(
            f"{field} is a {type(batch).__name__}, expected one with .inputs: manualpar.Batch."
        )
    devices = axes_size(mesh, axes)
    if not jax.tree.leaves(batch.inputs):
        raise ValueError(f"{field}.inputs has no arrays, expected some of shape [B, ...].")
    sizes = {
        f"{field}{jax.tree_util.keystr(path)}": x.shape[0]
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
        if jnp.ndim(x)
    }
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
