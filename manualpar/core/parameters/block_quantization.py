"""Quantizes numbers to 8 or 4 bits: an integer code of each number, and a scale of each block.

`round_to_bfloat16` rounds numbers to 16 bits, without blocks.

A block is a run of adjacent numbers along the last dim of an array. The scale of a block is the
block's largest magnitude divided by the largest code. The code of a number is `number / scale`,
rounded to an integer (Dettmers et al., LLM.int8(), https://arxiv.org/abs/2208.07339). For storage,
`quantize` and `dequantize` use separate arrays for codes and scales. For sending, `pack_codes` and
`unpack_codes` put both into bytes: a row of `n` numbers takes `quantized_bytes(n, code)` bytes.

Invariants:

- A scale has the 8 significant bits of bfloat16, whatever its dtype. So a cast of the scale to
  bfloat16 changes nothing, and the product of scale and code is exact in float32.
- The error of a finite number is at most half the scale of its block. With stochastic rounding the
  error is less than the scale. Rounding the product of code and scale adds to this error.
  Magnitudes above `LARGEST` are clipped to `LARGEST`, so that no scale overflows.
- If numbers are dequantized in float32 and quantized again with rounding to the nearest, codes and
  scales stay the same. In bfloat16 products are rounded, so a few codes change by one.
- A block whose scale would be subnormal becomes zeros. A block with a number that is not finite
  becomes NaN.
- The shapes of codes and scales give the length of the blocks. The last block may be shorter.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

Quantization = Literal["int8", "int4"]
LARGEST_CODE: dict[Quantization, int] = {"int8": 127, "int4": 7}
BITS: dict[Quantization, int] = {"int8": 8, "int4": 4}
SCALE_BYTES = 2
LARGEST = 2.0**128 * (1 - 2**-6)  # 3.35e38; float32 ends at 3.40e38.
ROW_BLOCK = 256  # The longest block of a row that is sent.


def quantized_block_size(size: int, most: int) -> int:
    """Returns a block length of at most `most` that divides `size` numbers about evenly."""
    return -(-size // -(-size // most)) if size else most


def quantize(
    x: jax.Array, block: int, *, code: Quantization = "int8", key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantizes an array to codes and scales.

    Args:
      x: `[..., K]` of floating-point numbers.
      block: The length of the blocks, as `quantized_block_size` returns it for `K`.
      code: The type of the codes, `"int8"` or `"int4"`.
      key: The key for stochastic rounding: the mean over keys is the unrounded number. Arrays with
        different scales get different noise from one key. Without a key, numbers are rounded to the
        nearest.

    Returns:
      The codes, `[..., K]` of int8, and the scales, `[..., ceil(K / block)]` of the dtype of `x`.

    Communication:
      None, if each device has complete blocks.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    largest, size = LARGEST_CODE[code], x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % block)]
    blocks = jnp.pad(x.astype(wide), padding).reshape(*x.shape[:-1], -1, block)
    scales = _scales(jnp.abs(blocks).max(-1), largest, covers=key is not None)
    codes = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    if key is None:
        codes = jnp.round(codes)
    else:
        codes = jnp.floor(codes + _noise(key, scales, codes.shape).astype(wide))
    codes = jnp.where(jnp.isfinite(codes), jnp.clip(codes, -largest, largest), 0)
    codes = codes.reshape(*x.shape[:-1], -1)[..., :size]
    return codes.astype(jnp.int8), scales.astype(x.dtype)


def _scales(peaks: jax.Array, largest: int, *, covers: bool) -> jax.Array:
    """Returns the scales of blocks with the largest magnitudes `peaks`, in the dtype of `peaks`.

    A scale is rounded to bfloat16. So `peak / scale` may exceed the largest code by up to 0.5. When
    rounding to the nearest, the largest code is still the right code. With stochastic rounding, the
    mean of the rounded peak would be too small. So with `covers`, scales are rounded up.
    """
    cap = jnp.asarray(LARGEST, peaks.dtype)
    peaks = jnp.where(jnp.isfinite(peaks.astype(jnp.float32)), jnp.minimum(peaks, cap), peaks)
    scales = (peaks / largest).astype(jnp.bfloat16)
    if covers:  # Adding 1 to the bits of a scale that is too small gives the next bfloat16.
        is_small = scales.astype(peaks.dtype) * largest < peaks
        bits = jax.lax.bitcast_convert_type(scales, jnp.uint16) + is_small.astype(jnp.uint16)
        scales = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales).astype(peaks.dtype)


def _noise(key: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws a number in [0, 1) for each element: a hash of its index, the key and the scales.

    XLA fuses the hash into the operation that uses it. `jax.random` draws only one number here. To
    draw all numbers, it would need memory for several arrays of this shape on CPUs.
    """
    salt = jax.lax.bitcast_convert_type(scales.sum(dtype=jnp.float32), jnp.uint32)
    start = jax.random.bits(key, (), jnp.uint32) ^ _hash(salt)
    rows = jax.lax.iota(jnp.uint32, math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    columns = jnp.expand_dims(jax.lax.iota(jnp.uint32, shape[-1]), range(len(shape) - 1))
    return (_hash(rows * shape[-1] + start + columns) >> 8).astype(jnp.float32) * 2**-24


def _hash(x: jax.Array) -> jax.Array:
    """Computes the last step of MurmurHash3 for uint32 (https://github.com/aappleby/smhasher)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Dequantizes codes and scales of `quantize`, in the dtype of the scales.

    Args:
      codes: `[..., K]` of int8; a device may also pass a shard: complete blocks, or a part of one
        block.
      scales: `[..., B]`, the scales of these blocks.

    Communication:
      None, if the scales are sharded like the codes.
    """
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    size, count = codes.shape[-1], scales.shape[-1]
    block = -(-size // count)
    factors = jnp.broadcast_to(scales.astype(wide)[..., None], (*scales.shape, block))
    factors = factors.reshape(*scales.shape[:-1], count * block)[..., :size]
    return (codes.astype(wide) * factors).astype(scales.dtype)


def round_to_bfloat16(x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Rounds an array `[..., n]` to bfloat16.

    With a key, numbers are rounded up or down at random, so that the mean over keys is the
    unrounded number. Rows with different largest magnitudes get different noise from one key.
    Without a key, numbers are rounded to the nearest. What is not finite stays as it is.
    """
    if key is None:
        return x.astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    noise = _noise(key, jnp.abs(wide).max(-1), x.shape) * 2**16
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32) + noise.astype(jnp.uint32)
    up_or_down = jax.lax.bitcast_convert_type(bits >> 16 << 16, jnp.float32)
    return jnp.where(jnp.isfinite(wide), up_or_down, wide).astype(jnp.bfloat16)


def quantized_bytes(n: int, code: Quantization) -> int:
    """Returns the number of bytes into which `pack_codes` packs a row of `n` numbers."""
    count, block = _row_blocks(n, code)
    return count * (block * BITS[code] // 8 + SCALE_BYTES)


def _row_blocks(n: int, code: Quantization) -> tuple[int, int]:
    """Returns the number and length of a row's blocks; the codes of a block fill whole bytes."""
    block = quantized_block_size(n, ROW_BLOCK)
    block += block * BITS[code] % 8 // 4
    return -(-n // block), block


def pack_codes(x: jax.Array, code: Quantization, key: jax.Array | None = None) -> jax.Array:
    """Quantizes rows of numbers to rows of bytes: for each block the codes, then the scale.

    Args:
      x: `[..., n]` of floating-point numbers, which are cast to float32.
      code: The type of the codes. With `"int4"`, the first half of a block is in the lower bits of
        the bytes, and the second half is in the upper bits.
      key: As in `quantize`.

    Returns:
      `uint8[..., quantized_bytes(n, code)]`.
    """
    *rows, n = x.shape
    count, block = _row_blocks(n, code)
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, count * block - n)])
    codes, scales = quantize(x, block, code=code, key=key)
    packed = jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(*rows, count, block)
    if code == "int4":
        low, high = jnp.split(packed, 2, -1)
        packed = (low & 15) | (high << 4)
    scale_bytes = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)
    return jnp.concatenate([packed, scale_bytes], -1).reshape(*rows, -1)


def unpack_codes(packed: jax.Array, n: int, code: Quantization) -> jax.Array:
    """Dequantizes the bytes of `pack_codes` to rows of `n` numbers, `float32[..., n]`."""
    *rows, _ = packed.shape
    count, block = _row_blocks(n, code)
    packed = packed.reshape(*rows, count, -1)
    codes, scale_bytes = jnp.split(packed, [packed.shape[-1] - SCALE_BYTES], -1)
    codes = jax.lax.bitcast_convert_type(codes, jnp.int8)
    if code == "int4":  # A shift of a signed integer to the right copies the sign bit.
        codes = jnp.concatenate([(codes << 4) >> 4, codes >> 4], -1)
    scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.bfloat16).astype(jnp.float32)
    return dequantize(codes.reshape(*rows, count * block), scales)[..., :n]
