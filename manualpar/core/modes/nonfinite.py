"""Losses and gradients that are not finite: found on every device, decided once for all."""

from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.state.metrics import Metrics
from manualpar.core.tracing.scopes import NONFINITE_SCOPE

# A metric that no loss function returns by accident.
NONFINITE_GRADIENTS = "devices with a gradient that is not finite"


def find_nonfinite(grads: Any, axis_names: AxisName) -> jax.Array:
    """Looks for gradients that are not finite, element by element: a norm could overflow.

    Args:
      grads: A tree of gradients, in no boxes; integers are finite, and so is what is empty.
      axis_names: The mesh axes that split the batch.

    Returns:
      `float32[]`, 1 if there is one and else 0. Inside `shard_map` each device along `axis_names`
      speaks of its own part, of which `sync_metrics` can take the sum.

    Communication:
      One all-reduce of 4 bytes over those other axes over which gradients vary, if there are any.
    """
    with jax.named_scope(NONFINITE_SCOPE):
        found = [~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        flag = jnp.stack([jnp.zeros((), bool), *found]).any().astype(jnp.float32)
        others = tuple(sorted(varying_axes(flag) - set(axis_tuple(axis_names))))
        return jnp.minimum(jax.lax.psum(flag, others), 1) if others else flag


def count_nonfinite(metrics: Metrics, grads: Any, axes: tuple[str, ...]) -> Metrics:
    """Adds to a device's metrics, which have yet to be summed, whether its gradients are finite.

    The gradients are those that leave the device: summing and casting may both overflow.
    """
    return {**metrics, NONFINITE_GRADIENTS: (find_nonfinite(grads, axes), jnp.ones(()))}


def is_finite(builder: str, option: str, metrics: Metrics, objective: str) -> jax.Array:
    """Whether the loss and all gradients of a step are finite, `bool[]`.

    What `count_nonfinite` has added to the metrics is taken out. `objective` names the metric that
    is the loss which was differentiated. A loss that returns a metric `nonfinite` is refused.
    """
    if "nonfinite" in metrics:
        raise ValueError(
            f"{builder}: nonfinite={option!r} reports a metric 'nonfinite', and loss_fn returns "
            "one of that name too; expected another. Rename it."
        )
    devices, _ = metrics.pop(NONFINITE_GRADIENTS)
    means = [total / jnp.where(n == 0, 1, n) for total, n in (metrics[objective], metrics["loss"])]
    return (devices == 0) & jnp.isfinite(jnp.stack(means)).all()
