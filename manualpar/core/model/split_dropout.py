"""Dropout keys for activations that are split over a model axis.

The key of a loss differs over the axes that split the batch, and is the same along a model axis.
This is right for activations that are replicated along the model axis, because all devices along
the axis need the same mask. But split activations would be dropped at the same positions of every
shard. Therefore the device's index is folded into the key for split activations. The type of the
activations shows whether the activations are split.

Invariants: a key changes only if the activations vary over an axis over which the key does not
vary. Axes of one device do not count. A key that is the same on all devices does not change either:
a program gives no such key to a loss, so the user has made this key to get one mask everywhere.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from manualpar.core.mesh.splitting import fold_rng_over_axis
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.tracing.scopes import TENSOR_SCOPE


def key_like(key: jax.Array, x: jax.Array) -> jax.Array:
    """Makes a key differ along the axes over which `x` varies.

    Communication:
      None.
    """
    axes = sorted(varying_axes(x) - varying_axes(key))
    axes = [axis for axis in axes if jax.lax.axis_size(axis) > 1]
    with jax.named_scope(TENSOR_SCOPE):
        return fold_rng_over_axis(key, tuple(axes)) if axes and varying_axes(key) else key


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """Wraps flax's `attention_fn`, so that its dropout key varies like the queries.

    Attention draws its dropout key before the types show whether heads are split. With
    `broadcast_dropout` all heads share one mask on all devices.
    """

    attention_fn: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function whose signature flax reads."""
        return self.attention_fn

    def __call__(self, query: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Calls `attention_fn`; flax passes the arguments of dropout by name."""
        key = kwargs.get("dropout_rng")
        if key is not None and not kwargs.get("broadcast_dropout", False):
            kwargs["dropout_rng"] = key_like(key, query)
        return self.attention_fn(query, *args, **kwargs)
