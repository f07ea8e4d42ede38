"""Rotary positions: queries and keys are turned by angles that grow with the position.

So attention sees only differences of positions (Su et al., https://arxiv.org/abs/2104.09864).

Symbols: `B` examples, `S` positions, `N` heads, `H` features of a head.
"""

import jax
import jax.numpy as jnp


def rotary_angles(position_S: jax.Array, head_size: int, *, base: float) -> jax.Array:
    """The angles in radians by which rotary positions turn the pairs of a head's features.

    They are `float32[S, H/2]`: `s * base ** (-2 i / H)` at position `s` for pair `i`. The positions
    are `int32[S]`.
    """
    frequencies = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    return jnp.outer(position_S.astype(jnp.float32), frequencies)


def rotate(x: jax.Array, angles_SH: jax.Array) -> jax.Array:
    """Turns pairs of the features of `[B, S, N, H]`, queries or keys, by angles.

    So the product of a query and a key depends only on the difference of their positions. Feature
    `i` is paired with `i + H/2`, as in GPT-NeoX and LLaMA's public checkpoints. It is computed in
    float32, and the result has the dtype of `x`.
    """
    sin, cos = jnp.sin(angles_SH)[None, :, None], jnp.cos(angles_SH)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
