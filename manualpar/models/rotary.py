"""Rotary positions: features turn in pairs, by an angle that grows with the position.

So the product of a query and a key depends on the difference of their positions (Su et al.,
https://arxiv.org/abs/2104.09864).

Symbols: `B` examples, `S` positions, `N` heads, `H` features of a head.
"""

import jax
import jax.numpy as jnp


def rotary_angles(length: int, head_size: int, *, base: float) -> jax.Array:
    """The angles by which rotary positions turn the pairs of a head's features.

    Args:
      length: Positions, `S`.
      head_size: Features of a head, `H`, an even number.
      base: The base of the frequencies, which are its powers.

    Returns:
      `float32[S, H/2]`, radians: `s * base ** (-2 i / H)` at position `s` for pair `i`.
    """
    frequencies = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)


def rotate(x: jax.Array, angles_SH: jax.Array) -> jax.Array:
    """Turns pairs of features by angles, so that dot products depend only on their differences.

    Feature `i` is paired with `i + H/2`, as in GPT-NeoX and LLaMA's public checkpoints.

    Args:
      x: `[B, S, N, H]`, queries or keys of any floating dtype.
      angles_SH: `float32[S, H/2]`, radians.

    Returns:
      The turned `x` in its own dtype, computed in float32.
    """
    sin, cos = jnp.sin(angles_SH)[None, :, None], jnp.cos(angles_SH)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
