"""Keys of dropout for activations that are split over a model axis.

The key that a loss gets differs over the axes that split the batch, and is the same along a model
axis. So is the mask of what is the same on all devices along that axis, as it has to be. Where the
activations are split the devices would all drop the same of their own parts. Their key is
therefore folded with the device's place. The type of the activations says which of the two it is.

Invariants: where no activation varies over more axes than the key, and along axes of one device,
keys stay as they are. So does a key that is the same on all devices, because a program makes none:
somebody wants it to be.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from manualpar.core.mesh.rng import fold_rng_over_axis
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.tracing.scopes import TENSOR_SCOPE


def key_like(key: jax.Array, x: jax.Array) -> jax.Array:
    """A key that differs along the axes that `x` varies over.

    Communication:
      None.
    """
    axes = sorted(varying_axes(x) - varying_axes(key))
    axes = [axis for axis in axes if jax.lax.axis_size(axis) > 1]
    with jax.named_scope(TENSOR_SCOPE):
        return fold_rng_over_axis(key, tuple(axes)) if axes and varying_axes(key) else key


@dataclasses.dataclass(frozen=True)
class SplitAttention:
    """The `attention_fn` of flax's attention with a key as its queries need it.

    Attention draws its key itself, before anything says whether its heads are split. With
    `broadcast_dropout` all heads have one mask, on whichever device they are.
    """

    attention_fn: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function whose signature says what flax passes."""
        return self.attention_fn

    def __call__(self, query: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """As `attention_fn`; flax passes what concerns dropout by name."""
        key = kwargs.get("dropout_rng")
        if key is not None and not kwargs.get("broadcast_dropout", False):
            kwargs["dropout_rng"] = key_like(key, query)
        return self.attention_fn(query, *args, **kwargs)
