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

from manualpar.core.parameters.block_quantization import (
    Quantization,
    pack_codes,
    quantized_bytes,
    round_to_bfloat16,
    unpack_codes,
)
from manualpar.core.tracing.scopes import DECODE_SCOPE

# The formats in which gradients are sent to be summed in float32.
ReduceCode = Literal["int8", "int4", "bfloat16"]
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

    def gather(
        self,
        x: jax.Array,
        dim: int,
        rounds: Sequence[tuple[str, ...]],
        *,
        is_invariant: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Gathers quantized shards.

        Args:
          x: The device's shard, `[..., D/axes, ...]`.
          dim: The dimension along which `x` is sharded.
          rounds: The mesh axes of each all-gather, in their order: the minor axis first.
          is_invariant: Whether the type of the result is not varying over the axes.
          key: As in `scatter_sum`.

        Returns:
          `float32[..., D, ...]`, the full array. The device's own shard is also dequantized.

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
            return shards.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...], *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns this device's shard of the sum of the devices' quantized arrays.

        Args:
          x: Each device's array, `[..., D, ...]`.
          dim: The dimension to scatter along; the size of `axes` divides it.
          axes: The mesh axes.
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
          x: Each device's array.
          axes: The mesh axes.
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


def make_quantizer(code: ReduceCode | Literal[""] | None) -> RowQuantizer | None:
    """Makes the quantizer of an option `gather_code` or `reduce_code`; `None` for no code."""
    if not code:
        return None
    return Bfloat16Quantizer() if code == "bfloat16" else BlockQuantizer(code)
