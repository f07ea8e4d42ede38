"""Numbers in 8 bits: a code of each, and a scale that a block of them shares.

A block is a run along the last dim of an array. Its scale is its largest magnitude divided by 127,
and the code of a number is the number in units of the scale, rounded to an integer (Dettmers et
al., LLM.int8(), https://arxiv.org/abs/2208.07339). Nothing here knows what the numbers are.

Invariants: a scale has the 8 significant bits of bfloat16, whatever its dtype, so that casting it
to bfloat16 changes nothing, and the product with a code is exact in float32. A finite number is off
by at most half the scale of its block, but for the rounding of one product: rounding makes the
largest code 127.25 at most, which is 127 again. A block whose scale would be subnormal becomes
zeros, and one with a number that is not finite becomes NaN. The shapes of codes and scales say how
long the blocks are, and the last block may be shorter.
"""

import jax
import jax.numpy as jnp

LARGEST_CODE = 127


def block_size(size: int, most: int) -> int:
    """The length of the blocks of a dim: at most `most`, and as equal as can be."""
    return -(-size // -(-size // most)) if size else most


def encode(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The codes and the scales of an array.

    Args:
      x: `[..., K]` of floating-point numbers.
      block: The length of the blocks, as `block_size` returns it for `K`.

    Returns:
      The codes, `[..., K]` of int8, and the scales, `[..., ceil(K / block)]` of the dtype of `x`.

    Communication:
      None, if each device has whole blocks.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % block)]
    blocks = jnp.pad(x.astype(wide), padding).reshape(*x.shape[:-1], -1, block)
    scales = (jnp.abs(blocks).max(-1) / LARGEST_CODE).astype(jnp.bfloat16).astype(wide)
    scales = jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales)
    codes = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    codes = jnp.where(jnp.isfinite(codes), jnp.clip(jnp.round(codes), -127, 127), 0)
    codes = codes.reshape(*x.shape[:-1], -1)[..., :size]
    return codes.astype(jnp.int8), scales.astype(x.dtype)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The array of which `encode` has made codes and scales, in the dtype of the scales.

    Args:
      codes: `[..., K]` of int8, or a device's whole blocks of them, or a part of one block.
      scales: `[..., B]`, those of the blocks.

    Communication:
      None, if the scales lie as the codes do.
    """
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    size, count = codes.shape[-1], scales.shape[-1]
    block = -(-size // count)
    each = jnp.broadcast_to(scales.astype(wide)[..., None], (*scales.shape, block))
    each = each.reshape(*scales.shape[:-1], count * block)[..., :size]
    return (codes.astype(wide) * each).astype(scales.dtype)
