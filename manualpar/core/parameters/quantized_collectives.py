"""Collectives that send numbers in a quantized format, see `block_quantization`.

A row of a device's numbers becomes a row of bytes with codes and scales, so that one collective
sends both. A gather of several rounds quantizes a shard once and dequantizes at the end. Codes
cannot be summed. So for a sum, each device receives the codes of its shard from all devices (by an
all-to-all), dequantizes them, and sums them in float32 (quantized gradients of ZeRO++: Wang et al.,
https://arxiv.org/abs/2306.10209). For a mean, the shards of the sum are then quantized and
gathered. Every device dequantizes the same bytes, so all have the same mean, bit for bit.

On `N` devices, a device sends `(N - 1) quantized_bytes(n)` bytes to gather rows of `n` numbers, or
to compute a sum whose shards have `n` numbers. For a mean a device sends twice as many bytes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from manualpar.core.parameters.block_quantization import (
    Quantization,
    pack_codes,
    quantized_bytes,
    unpack_codes,
)
from manualpar.core.tracing.scopes import DECODE_SCOPE


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockQuantizer:
    """Quantizes in blocks; a `Quantizer`, see `comm_policy`.

    Attributes:
      name: The name of the format.
    """

    name: Quantization

    def row_bytes(self, n: int) -> int:
        """Returns the bytes that are sent for a row of `n` numbers."""
        return quantized_bytes(n, self.name)

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
          An all-gather of bytes for each round.
        """
        with jax.named_scope(DECODE_SCOPE):
            rows = pack_codes(x.reshape(1, -1), self.name, key)
        to = "invarying" if is_invariant else "varying"
        for axes in rounds:
            rows = jax.lax.all_gather(rows, axes, axis=0, tiled=True, to=to)
        with jax.named_scope(DECODE_SCOPE):
            shards = jnp.moveaxis(
                unpack_codes(rows, x.size, self.name).reshape(-1, *x.shape), 0, dim
            )
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
          One all-to-all of bytes.
        """
        size = jax.lax.axis_size(axes)
        shard = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
        # A shard consists of `lead` runs of adjacent numbers. If quantizing run by run takes no
        # more bytes than quantizing the shard as one row, the runs stay in place, and only their
        # codes are reordered by shards. Otherwise the numbers are reordered, and so copied.
        lead, run = math.prod(shard[:dim]), math.prod(shard[dim:])
        rows = x.reshape(lead, size, run)
        is_in_place = lead > 1 and lead * self.row_bytes(run) == self.row_bytes(lead * run)
        if is_in_place:
            packed = pack_codes(rows, self.name, key)
            sent = jnp.moveaxis(packed, 1, 0)
        else:
            rows = jnp.moveaxis(rows, 1, 0).reshape(size, -1)
            packed = sent = pack_codes(rows, self.name, key)
        received = jax.lax.all_to_all(sent, axes, 0, 0, tiled=True)
        total = unpack_codes(received, rows.shape[-1], self.name).sum(0).reshape(shard)
        error = rows - unpack_codes(packed, rows.shape[-1], self.name)
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
          One all-to-all of `x` and one all-gather of the mean's shards, both of bytes.
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
