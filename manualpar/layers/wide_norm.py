"""The mean of squares over the features of all heads, which devices share."""

import jax
import jax.numpy as jnp

from manualpar.core.tracing.scopes import TENSOR_SCOPE
from manualpar.layers.boundaries import bound_axes


def mean_square_of_heads(x_BSNH: jax.Array, axis: str | None) -> jax.Array:
    """Returns the mean of squares over the last two dims of all devices, `[B, S, 1, 1]`.

    Devices along `axis` that share a key head all have it, and equally many of them. So the mean of
    the devices' means is the mean of all heads.

    Communication:
      An all-reduce of the means over `axis`, and another in the backward pass.
    """
    mean = jnp.mean(jnp.square(x_BSNH), axis=(-2, -1), keepdims=True)
    if axes := bound_axes("WideNorm", axis):
        with jax.named_scope(TENSOR_SCOPE):
            mean = jax.lax.pmean(mean, axes)
    return mean
