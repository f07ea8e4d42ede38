"""The gated MLP of an expert: SwiGLU, or gpt-oss's clamped SwiGLU, with biases or without.

Symbols: `D` features between layers, `F` features inside an expert.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Weights(NamedTuple):
    """The weights of an expert, or of several experts with a dim in front of each array.

    Attributes:
      gate: `[D, F]`.
      up: `[D, F]`.
      down: `[F, D]`.
      gate_bias: `[F]`; `None` for none.
      up_bias: `[F]`; `None` for none.
      down_bias: `[D]`; `None` for none.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class Gating(NamedTuple):
    """How the gate of an MLP multiplies its features.

    Attributes:
      limit: The bound of gates and features; 0 for none.
      alpha: The factor inside of the sigmoid, only with a limit.
    """

    limit: float = 0.0
    alpha: float = 1.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Computes `silu(gate) * up`, or the clamped SwiGLU of gpt-oss, which adds 1 to `up`."""
        if not self.limit:
            return nn.silu(gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU = Gating()


def gated_mlp(
    x: jax.Array,
    weights: Weights,
    gating: Gating = SWIGLU,
    *,
    product: Callable[..., jax.Array] = jnp.matmul,
    of_rows: Callable[[jax.Array], jax.Array] = lambda bias: bias,
) -> jax.Array:
    """Computes `down(gating(gate(x), up(x)))` in the dtype of `x`.

    Args:
      x: `[..., D]`.
      weights: The weights.
      gating: How gates multiply features.
      product: `product(x, weights)` multiplies rows with the weights of their experts.
      of_rows: Returns the bias of each row from the biases of the experts.
    """

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = product(x, kernel.astype(x.dtype))
        return y if bias is None else y + of_rows(bias.astype(x.dtype))

    gate, up = dense(x, weights.gate, weights.gate_bias), dense(x, weights.up, weights.up_bias)
    return dense(gating(gate, up), weights.down, weights.down_bias)
