"""Codes in which frozen parameters are stored: int8, or the 16 levels of NF4.

Int8 is that of `block_quantization`. NF4 (Dettmers et al., QLoRA,
https://arxiv.org/abs/2305.14314) is for numbers with a normal distribution: its levels are the
quantiles of one, with 0 among them, between -1 and 1. The scale of a block is its largest
magnitude, and the code of a number stands for the level nearest to `number / scale`. A byte has the
codes of two adjacent numbers, the first in its upper bits. The code of 0 is 0, so it is the index
of the level with its bits flipped as those of `ZERO`; bitsandbytes stores the index.

Scales have the 8 significant bits of bfloat16. So with `frozen_dtype="bfloat16"` a number takes
4.25 bits in blocks of 64. That is less than 4.5 with float32 scales, and near the 4.13 of scales
that are quantized again ("double quantization"), which would need a second step to decode.

Invariants: if decoded numbers are encoded again, codes and scales stay the same. The codes of zeros
are zeros. A block with a number that is not finite becomes NaN, and a block whose scale would be
subnormal becomes zeros.
"""

import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.parameters.block_quantization import dequantize, quantize

Code = Literal["int8", "nf4"]
# The levels that bitsandbytes has for the type `nf4`.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
ZERO = NF4.index(0.0)
BORDERS = tuple(float(np.float32(a + b) / 2) for a, b in itertools.pairwise(NF4))


def encode(x: jax.Array, block: int, code: Code) -> tuple[jax.Array, jax.Array]:
    """Quantizes an array, `[..., K]`, in blocks along its last dim.

    Returns:
      The codes, `[..., K]` of int8 or for NF4 `[..., K / 2]` of uint8, and the scales,
      `[..., ceil(K / block)]` of the dtype of `x`.

    Communication:
      None, if each device has complete blocks.
    """
    if code == "int8":
        return quantize(x, block)
    *rows, size = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padding = [(0, 0)] * len(rows) + [(0, -size % block)]
    blocks = jnp.pad(x.astype(wide), padding).reshape(*rows, -1, block)
    peaks = jnp.abs(blocks).max(-1)
    scales = jnp.clip(peaks, max=float(jnp.finfo(jnp.bfloat16).max)).astype(jnp.bfloat16)
    scales = jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales).astype(wide)
    scales = jnp.where(jnp.isfinite(peaks), scales, jnp.nan)
    shares = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    shares = jnp.where(scales[..., None] == 0, 0, shares)
    # The number of borders below a share is the index of its level.
    codes = sum((shares > border).astype(jnp.uint8) for border in BORDERS)
    codes = (jnp.asarray(codes) ^ ZERO).reshape(*rows, -1)[..., :size].reshape(*rows, -1, 2)
    return codes[..., 0] << 4 | codes[..., 1], scales.astype(x.dtype)


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Decodes codes and scales of `encode`, in the dtype of the scales.

    Args:
      codes: The codes; a device may also pass a shard: complete blocks, or a part of one block.
      scales: The scales of these blocks.

    Communication:
      None, if the scales are sharded like the codes.
    """
    if codes.dtype != jnp.uint8:
        return dequantize(codes, scales)
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    numbers = jnp.stack([codes >> 4, codes & 15], -1).reshape(plain_shape(codes))
    size, count = numbers.shape[-1], scales.shape[-1]
    factors = jnp.repeat(scales.astype(wide), -(-size // count), axis=-1)[..., :size]
    return (jnp.asarray(NF4, wide)[numbers ^ ZERO] * factors).astype(scales.dtype)


def plain_shape(codes: Any) -> tuple[int, ...]:
    """Returns the shape of the array that codes of this shape and dtype stand for."""
    *rows, size = codes.shape
    return (*rows, size * 2 if codes.dtype == jnp.uint8 else size)
