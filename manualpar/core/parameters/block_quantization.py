"""Numbers in 8 or 4 bits: a code of each, and a scale that a block of them shares.

A block is a run along the last dim of an array. Its scale is its largest magnitude divided by the
largest code, and the code of a number is the number in units of the scale, rounded to an integer
(Dettmers et al., LLM.int8(), https://arxiv.org/abs/2208.07339). `encode` and `decode` keep codes
and scales as arrays of their own, to be stored. `pack_codes` and `unpack_codes` lay them side by
side in bytes, to be sent: `coded_bytes(n, code)` for a row of `n` numbers. Nothing here knows what
they are.

Invariants: a scale has the 8 significant bits of bfloat16, whatever its dtype, so that casting it
to bfloat16 changes nothing, and the product with a code is exact in float32. A finite number is off
by at most half the scale of its block, or less than the scale if it is rounded at random, but for
the rounding of one product; one beyond `LARGEST` counts as that, so that none overflows. What has
been decoded in float32, encoded again to the nearest, has the same codes and scales; in bfloat16
products are rounded, and a few codes are one off. A block whose scale would be subnormal becomes
zeros, and one with a number that is not finite becomes NaN. The shapes of codes and scales say how
long the blocks are, and the last block may be shorter.
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
    """The length of the blocks of a dim: at most `most`, and as equal as can be."""
    return -(-size // -(-size // most)) if size else most


def encode(
    x: jax.Array, block: int, *, code: Quantization = "int8", key: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The codes and the scales of an array.

    Args:
      x: `[..., K]` of floating-point numbers.
      block: The length of the blocks, as `quantized_block_size` returns it for `K`.
      code: How many bits a code has.
      key: Rounds up or down at random, so that the mean over keys is the number. Arrays with other
        scales round otherwise by the same key. If not given, numbers are rounded to the nearest.

    Returns:
      The codes, `[..., K]` of int8, and the scales, `[..., ceil(K / block)]` of the dtype of `x`.

    Communication:
      None, if each device has whole blocks.
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
    """The scales of blocks with these largest magnitudes, in their dtype.

    In units of the nearest scale a peak may be up to a half more than the largest code, which is
    still the nearest one. Rounded at random, its mean would be too small: `covers` rounds up.
    """
    cap = jnp.asarray(LARGEST, peaks.dtype)
    peaks = jnp.where(jnp.isfinite(peaks.astype(jnp.float32)), jnp.minimum(peaks, cap), peaks)
    scales = (peaks / largest).astype(jnp.bfloat16)
    if covers:  # Where it is too small, the next larger one: its bits are the next integer.
        is_less = scales.astype(peaks.dtype) * largest < peaks
        bits = jax.lax.bitcast_convert_type(scales, jnp.uint16) + is_less.astype(jnp.uint16)
        scales = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return jnp.where(scales < jnp.finfo(jnp.bfloat16).tiny, 0, scales).astype(peaks.dtype)


def _noise(key: jax.Array, scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number in [0, 1) for each element: a hash of its index, of a key and of the scales.

    XLA fuses it with what uses it. `jax.random` would do, but its loop on CPUs holds several arrays
    of this shape.
    """
    salt = jax.lax.bitcast_convert_type(scales.sum(dtype=jnp.float32), jnp.uint32)
    start = jax.random.bits(key, (), jnp.uint32) ^ _hash(salt)
    rows = jax.lax.iota(jnp.uint32, math.prod(shape[:-1])).reshape(*shape[:-1], 1)
    columns = jnp.expand_dims(jax.lax.iota(jnp.uint32, shape[-1]), range(len(shape) - 1))
    return (_hash(rows * shape[-1] + start + columns) >> 8).astype(jnp.float32) * 2**-24


def _hash(x: jax.Array) -> jax.Array:
    """The last step of MurmurHash3 (Appleby, https://github.com/aappleby/smhasher), of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


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


def coded_bytes(n: int, code: Quantization) -> int:
    """The bytes of a row of `n` numbers as `pack_codes` lays it out."""
    count, block = _row_blocks(n, code)
    return count * (block * BITS[code] // 8 + SCALE_BYTES)


def _row_blocks(n: int, code: Quantization) -> tuple[int, int]:
    """How many blocks a row of `n` numbers has, and how long they are: whole bytes of codes."""
    block = quantized_block_size(n, ROW_BLOCK)
    block += block * BITS[code] % 8 // 4
    return -(-n // block), block


def pack_codes(x: jax.Array, code: Quantization, key: jax.Array | None = None) -> jax.Array:
    """Rows of numbers as rows of bytes: of each block the codes, and then the scale.

    Args:
      x: `[..., n]` of floating-point numbers, which are taken as float32.
      code: How many bits a code has. Of 4 bits, the first half of a block lies in the lower ones.
      key: As for `encode`.

    Returns:
      `uint8[..., coded_bytes(n, code)]`.
    """
    *rows, n = x.shape
    count, block = _row_blocks(n, code)
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, count * block - n)])
    codes, scales = encode(x, block, code=code, key=key)
    packed = jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(*rows, count, block)
    if code == "int4":
        low, high = jnp.split(packed, 2, -1)
        packed = (low & 15) | (high << 4)
    scale_bytes = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)
    return jnp.concatenate([packed, scale_bytes], -1).reshape(*rows, -1)


def unpack_codes(packed: jax.Array, n: int, code: Quantization) -> jax.Array:
    """The rows of which `pack_codes` has made bytes, `float32[..., n]`."""
    *rows, _ = packed.shape
    count, block = _row_blocks(n, code)
    packed = packed.reshape(*rows, count, -1)
    codes, scale_bytes = jnp.split(packed, [packed.shape[-1] - SCALE_BYTES], -1)
    codes = jax.lax.bitcast_convert_type(codes, jnp.int8)
    if code == "int4":  # Shifted right, the sign comes in.
        codes = jnp.concatenate([(codes << 4) >> 4, codes >> 4], -1)
    scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.bfloat16).astype(jnp.float32)
    return decode(codes.reshape(*rows, count * block), scales)[..., :n]
