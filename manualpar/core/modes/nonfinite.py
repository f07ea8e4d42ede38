"""Checks whether the loss and the gradients of a step are finite."""

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.state.metrics import StepSums, mean
from manualpar.core.tracing.scopes import NONFINITE_SCOPE
from manualpar.core.trees import Grads


def find_nonfinite(grads: Grads, axis_names: AxisName) -> jax.Array:
    """Returns whether a gradient is not finite; checks each element, because a norm may overflow.

    Args:
      grads: A tree of gradients without boxes. They must be summed and cast already, because the
        sum and the cast may overflow. Integers and empty arrays are finite.
      axis_names: The mesh axes that split the batch.

    Returns:
      `float32[]`, 1 if a gradient is not finite, else 0. Inside `shard_map`, devices along
      `axis_names` may have different results, which `sync_metrics` can sum.

    Communication:
      One all-reduce of 4 bytes over the axes not in `axis_names` over which gradients vary.
    """
    with jax.named_scope(NONFINITE_SCOPE):
        found = [~jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
        flag = jnp.stack([jnp.zeros((), bool), *found]).any().astype(jnp.float32)
        others = tuple(sorted(varying_axes(flag) - set(axis_tuple(axis_names))))
        return jnp.minimum(jax.lax.psum(flag, others), 1) if others else flag


def is_finite(sums: StepSums) -> jax.Array:
    """Returns whether the loss and all gradients of a step are finite, `bool[]`.

    `sums` are summed over all devices, so all devices get the same result. `sums.nonfinite` is the
    pair of the sum of `find_nonfinite` and the number of devices.
    """
    assert sums.nonfinite is not None
    means = jnp.stack([mean(sums.objective), mean(sums.metrics["loss"])])
    return (sums.nonfinite[0] == 0) & jnp.isfinite(means).all()
