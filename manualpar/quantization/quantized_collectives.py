"""Collectives that send numbers in fewer bits than the numbers have.

A device's numbers become rows that are sent: of 8-bit or 4-bit codes with their scales, see
`block_quantization`, so that one collective sends both, or of bfloat16 numbers. A gather of several
rounds quantizes a shard once and dequantizes at the end. Codes cannot be summed, and sums in
bfloat16 are rounded after every addition. So for a sum, each device receives its shard of all
devices' rows (by an all-to-all), dequantizes them, and sums them in float32 (quantized gradients of
ZeRO++: Wang et al., https://arxiv.org/abs/2306.10209). For a mean, the shards of the sum are then
quantized and gathered. Every device dequantizes the same rows, so all have the same mean, bit for
bit.

If a row of `n` numbers takes `b` bytes, one of `N` devices sends `(N - 1) b` bytes to gather such
rows, or to compute a sum whose shards have `n` numbers. For a mean a device sends twice as many.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import (
    GatherCode,
    GatherQuantizer,
    Quantization,
    ReduceCode,
)
from manualpar.core.tracing.scopes import DECODE_SCOPE

# -------------------------------------------------------------------------------------------------
# Quantizes numbers to 8 or 4 bits: an integer code of each number, and a scale of each block.
#
# `round_to_bfloat16` rounds numbers to 16 bits, without blocks.
#
# A block is a run of adjacent numbers along the last dim of an array. The scale of a block is the
# block's largest magnitude divided by the largest code. The code of a number is `number / scale`,
# rounded to an integer (Dettmers et al., LLM.int8(), https://arxiv.org/abs/2208.07339). For
# storage, `quantize` and `dequantize` use separate arrays for codes and scales. For sending,
# `pack_codes` and `unpack_codes` put both into bytes: a row of `n` numbers takes
# `quantized_bytes(n, code)` bytes.
#
# Invariants:
#
# - A scale has the 8 significant bits of bfloat16, whatever its dtype. So a cast of the scale to
#   bfloat16 changes nothing, and the product of scale and code is exact in float32.
# - The error of a finite number is at most half the scale of its block. With stochastic rounding
# the
#   error is less than the scale. Rounding the product of code and scale adds to this error.
#   Magnitudes above `LARGEST` are clipped to `LARGEST`, so that no scale overflows.
# - If numbers are dequantized in float32 and quantized again with rounding to the nearest, codes
# and
#   scales stay the same. In bfloat16 products are rounded, so a few codes change by one.
# - A block whose scale would be subnormal becomes zeros. A block with a number that is not finite
#   becomes NaN.
# - The shapes of codes and scales give the length of the blocks. The last block may be shorter.


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


# -------------------------------------------------------------------------------------------------
# Codes in float8, whose scale is a power of two.
#
# A number divided by a power of two keeps its digits. So numbers that were decoded are coded again
# as the same codes, or as codes of twice the size with half of the scale, and products of both are
# equal bit for bit.


FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
# Scales below would have a reciprocal that is not finite. Their numbers become zeros.
SMALLEST_EXPONENT = -120


def float8_scale(largest: jax.Array, dtype: Any) -> jax.Array:
    """Returns the smallest power of two that brings magnitudes up to `largest` into a dtype.

    Args:
      largest: Magnitudes, `[...]`.
      dtype: The dtype of the codes, such as `FLOAT8`.

    Returns:
      `float32[...]`: 1 for a magnitude of 0, and NaN for one that is not finite.
    """
    ratio = largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    fraction, exponent = jnp.frexp(ratio)  # `ratio` is `fraction * 2**exponent`, from 0.5.
    exponent = jnp.maximum(exponent - (fraction == 0.5), SMALLEST_EXPONENT)
    scale = jnp.where(ratio > 0, jnp.ldexp(jnp.ones_like(ratio), exponent), 1)
    return jnp.where(jnp.isfinite(ratio), scale, jnp.nan)


def encode_float8(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Rounds `x / scale` to a float8 dtype; the scale is a power of two."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(in_float32(x) * (1 / scale), -largest, largest).astype(dtype)


def in_float32(x: jax.Array) -> jax.Array:
    """Casts to float32 numbers with the digits that the dtype of `x` has.

    XLA may compute `x` in float32 and leave out its rounding. Then codes would depend on which
    operations XLA fuses.
    """
    kind = jnp.finfo(x.dtype)
    wide = x.astype(jnp.float32)
    return wide if kind.bits >= 32 else jax.lax.reduce_precision(wide, kind.nexp, kind.nmant)


# -------------------------------------------------------------------------------------------------


# The formats in which gradients are sent to be summed in float32.
# The most devices whose numbers are added one by one, because the program has each of them.
MOST_TERMS = 64


class RowQuantizer(abc.ABC):
    """Packs numbers into rows that collectives send; a base class of `Quantizer`s.

    A subclass packs and unpacks the rows.

    Attributes:
      name: The name of the format.
    """

    name: str

    @abc.abstractmethod
    def row(self, n: int) -> tuple[int, Any]:
        """Returns the length and the dtype of the row that is sent for `n` numbers."""

    @abc.abstractmethod
    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether to use the quantizer for `n` numbers of `itemsize` bytes, on average."""

    @abc.abstractmethod
    def pack(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Packs numbers `[..., n]` into rows; with a key, numbers are rounded stochastically."""

    @abc.abstractmethod
    def unpack(self, rows: jax.Array, n: int) -> jax.Array:
        """Returns the numbers of rows, `float32[..., n]`."""

    def largest(self, x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array | None:
        """Returns `None`, because rows contain the scales of their blocks."""
        del x, kept
        return None

    def gather(
        self,
        x: jax.Array,
        dim: int,
        rounds: Sequence[tuple[str, ...]],
        dtype: Any = jnp.float32,
        largest: jax.Array | None = None,
        *,
        is_invariant: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Gathers quantized shards.

        Args:
          x: The device's shard, `[..., D/axes, ...]`.
          dim: The dimension along which `x` is sharded.
          rounds: The mesh axes of each all-gather, in their order: the minor axis first.
          largest: `None`, because each block has a scale of its own.
          is_invariant: Whether the type of the result is not varying over the axes.
          key: As in `scatter_sum`.

        Returns:
          `[..., D, ...]`, the full array. The device's own shard is also dequantized.

        Communication:
          An all-gather of rows for each round.
        """
        with jax.named_scope(DECODE_SCOPE):
            rows = self.pack(x.reshape(1, -1), key)
        to = "invarying" if is_invariant else "varying"
        for axes in rounds:
            rows = jax.lax.all_gather(rows, axes, axis=0, tiled=True, to=to)
        with jax.named_scope(DECODE_SCOPE):
            shards = jnp.moveaxis(self.unpack(rows, x.size).reshape(-1, *x.shape), 0, dim)
            return shards.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :]).astype(dtype)

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...], *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns this device's shard of the sum of the devices' quantized arrays.

        Args:
          x: Each device's array, `[..., D, ...]`.
          dim: The dimension to scatter along; the size of `axes` divides it.
          key: A key that differs between devices, for stochastic rounding. Without a key, numbers
            are rounded to the nearest.

        Returns:
          The shard of the sum, `float32[..., D/axes, ...]`, and this device's rounding error,
          `float32[..., D, ...]`: `x` minus its quantized value.

        Communication:
          One all-to-all of rows.
        """
        size = jax.lax.axis_size(axes)
        shard = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
        # A shard consists of `lead` runs of adjacent numbers. If the runs take no more bytes than
        # the shard as one row, they stay in place, and only what is sent is reordered by shards.
        # Otherwise the numbers are reordered, and so copied.
        lead, run = math.prod(shard[:dim]), math.prod(shard[dim:])
        rows = x.reshape(lead, size, run)
        is_in_place = lead > 1 and lead * self.row(run)[0] == self.row(lead * run)[0]
        if is_in_place:
            packed = self.pack(rows, key)
            sent = jnp.moveaxis(packed, 1, 0)
        else:
            rows = jnp.moveaxis(rows, 1, 0).reshape(size, -1)
            packed = sent = self.pack(rows, key)
        received = jax.lax.all_to_all(sent, axes, 0, 0, tiled=True)
        total = self.unpack(received, rows.shape[-1]).sum(0).reshape(shard)
        error = rows - self.unpack(packed, rows.shape[-1])
        if not is_in_place:
            error = jnp.moveaxis(error.reshape(size, lead, run), 0, 1)
        return total, error.reshape(x.shape)

    def mean(
        self, x: jax.Array, axes: tuple[str, ...], *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the mean over devices, with the same bits on all devices.

        Args:
          key: As in `scatter_sum`. Each of the two roundings has its own key, because the second
            would be biased if it depended on the first.

        Returns:
          The mean, `float32` and not varying over `axes`, and the error that this device causes, in
          the shape of `x`. The error is the rounding error of `x`, plus the number of devices times
          the rounding error of this device's shard of the mean. So the returned mean is the mean
          over devices of `x - error`.

        Communication:
          One all-to-all of `x` and one all-gather of the mean's shards, both of rows.
        """
        size = jax.lax.axis_size(axes)
        flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
        first, second = (None, None) if key is None else jax.random.split(key)
        total, error = self.scatter_sum(flat, 0, axes, key=first)
        mean = self.gather(total / size, 0, (axes,), is_invariant=True, key=second)
        index = jax.lax.axis_index(axes) * total.size
        shard_error = total - jax.lax.dynamic_slice_in_dim(mean, index, total.size) * size
        shard_error += jax.lax.dynamic_slice_in_dim(error, index, total.size)
        error = jax.lax.dynamic_update_slice_in_dim(error, shard_error, index, 0)
        return mean[: x.size].reshape(x.shape), error[: x.size].reshape(x.shape)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockQuantizer(RowQuantizer):
    """Sends codes of blocks; it is worth it where it saves bytes.

    Attributes:
      name: The type of the codes.
    """

    name: Quantization

    def row(self, n: int) -> tuple[int, Any]:
        """Returns the number of bytes of codes and scales; see `RowQuantizer`."""
        return quantized_bytes(n, self.name), jnp.dtype("uint8")

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether codes and scales take fewer bytes; see `RowQuantizer`."""
        return quantized_bytes(math.ceil(n), self.name) < n * itemsize

    def pack(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Packs codes and scales into bytes, see `pack_codes`."""
        return pack_codes(x, self.name, key)

    def unpack(self, rows: jax.Array, n: int) -> jax.Array:
        """Returns the products of codes and scales, see `unpack_codes`."""
        return unpack_codes(rows, n, self.name)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Bfloat16Quantizer(RowQuantizer):
    """Sends bfloat16 numbers; it is worth it even in place of sums in bfloat16."""

    name = "bfloat16"

    def row(self, n: int) -> tuple[int, Any]:
        """Returns `n` bfloat16 numbers; see `RowQuantizer`."""
        return n, jnp.dtype(jnp.bfloat16)

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether the numbers take no more bytes; see `RowQuantizer`."""
        return 2 * math.ceil(n) <= n * itemsize

    def pack(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Rounds to bfloat16, see `round_to_bfloat16`."""
        return round_to_bfloat16(x, key)

    def unpack(self, rows: jax.Array, n: int) -> jax.Array:
        """Casts rows to float32."""
        return rows.astype(jnp.float32)

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...], *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Sums pairs of shards that keep their shape, see `RowQuantizer`.

        XLA's TPU compiler copies arrays that become rows, and adds pairs in one loop over memory.
        """
        size = jax.lax.axis_size(axes)
        sent = self.pack(x, key)
        shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
        shards = jax.lax.all_to_all(sent.reshape(shape), axes, dim, 0).astype(jnp.float32)
        terms = list(shards) if size <= MOST_TERMS else [shards.sum(0)]
        while len(terms) > 1:
            terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
        return terms[0], x - sent.astype(jnp.float32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Float8Gather:
    """Gathers codes in float8, which products in float8 find again, so no bit changes.

    The scale of a shard is that of the whole array.
    """

    name = "float8"

    def row(self, n: int) -> tuple[int, Any]:
        """Returns `n` codes; see `GatherQuantizer`."""
        return n, FLOAT8

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether the numbers take more bytes than codes; see `GatherQuantizer`."""
        return n > 0 and itemsize > 1

    def largest(self, x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array | None:
        """Returns the largest magnitudes, in float32; see `GatherQuantizer`."""
        dims = tuple(dim for dim in range(x.ndim) if dim not in kept)
        found = in_float32(jnp.max(jnp.abs(x), dims, keepdims=True, initial=0))
        # The maximum of NaN and a number may be the number.
        return jnp.where(jnp.isfinite(found), found, jnp.inf)

    def gather(
        self,
        x: jax.Array,
        dim: int,
        rounds: Sequence[tuple[str, ...]],
        dtype: Any,
        largest: jax.Array | None = None,
    ) -> jax.Array:
        """Gathers shards along `dim`, in the dtype in which a product gets them.

        Communication:
          An all-gather of codes for each round.
        """
        assert largest is not None
        with jax.named_scope(DECODE_SCOPE):
            scale = float8_scale(largest, FLOAT8)
            codes = encode_float8(x.astype(dtype), scale, FLOAT8)
        for axes in rounds:
            codes = jax.lax.all_gather(codes, axes, axis=dim, tiled=True)
        with jax.named_scope(DECODE_SCOPE):
            return codes.astype(dtype) * scale.astype(dtype)


def make_quantizer(code: ReduceCode | GatherCode | Literal[""] | None) -> GatherQuantizer | None:
    """Makes the quantizer of an option `gather_code` or `reduce_code`; `None` for no code."""
    if not code:
        return None
    if code == "float8":
        return Float8Gather()
    return Bfloat16Quantizer() if code == "bfloat16" else BlockQuantizer(code)
