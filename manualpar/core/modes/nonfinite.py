"""Finds losses and gradients that are not finite; all devices take the same decision."""

from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.state.metrics import Metrics
from manualpar.core.tracing.scopes import NONFINITE_SCOPE

# A reserved metric name.
NONFINITE_GRADIENTS = "devices with a gradient that is not finite"


def find_nonfinite(grads: Any, axis_names: AxisName) -> jax.Array:
    """Looks for gradients that are not finite, element by element, because a norm could overflow.

    Args:
      grads: A tree of gradients without boxes; integers and empty arrays are finite.
      axis_names: The mesh axes that split the batch.

    Returns:
      `float32[]`, 1 if a gradient is not finite, else 0. Inside `shard_map` the result is each
      device's along `axis_names`, and `sync_metrics` can sum it.

    Communication:
      One all-reduce of 4 bytes over the axes not in `axis_names` over which gradients vary.
    """
    with jax.named_scope(NONFINITE_SCOPE):
        found = [~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        flag = jnp.stack([jnp.zeros((), bool), *found]).any().astype(jnp.float32)
        others = tuple(sorted(varying_axes(flag) - set(axis_tuple(axis_names))))
        return jnp.minimum(jax.lax.psum(flag, others), 1) if others else flag


def count_nonfinite(metrics: Metrics, grads: Any, axes: tuple[str, ...]) -> Metrics:
    """Adds to a device's metrics, before they are summed, whether its gradients are finite.

    Pass the gradients after summing and casting, because both may overflow.
    """
    return {**metrics, NONFINITE_GRADIENTS: (find_nonfinite(grads, axes), jnp.ones(()))}


def is_finite(builder: str, option: str, metrics: Metrics, objective: str) -> jax.Array:
    """Returns whether the loss and all gradients of a step are finite, `bool[]`.

    Removes the entry of `count_nonfinite` from the metrics. `objective` names the metric of the
    differentiated loss. A loss that returns a metric `nonfinite` is refused.
    """
    if "nonfinite" in metrics:
        raise ValueError(
            f"{builder}: nonfinite={option!r} reports a metric 'nonfinite', and loss_fn returns "
            "one of that name too; expected another. Rename it."
        )
    devices, _ = metrics.pop(NONFINITE_GRADIENTS)
    means = [total / jnp.where(n == 0, 1, n) for total, n in (metrics[objective], metrics["loss"])]
    return (devices == 0) & jnp.isfinite(jnp.stack(means)).all()
