"""Collectives that send codes of numbers in place of numbers, see `block_codec`.

A row of a device's numbers becomes a row of bytes, codes beside scales, so that one collective
sends both. A gather encodes a shard once, however many rounds it takes, and decodes at the end. A
sum cannot be taken of codes. So devices exchange the codes of each other's shards (all-to-all),
decode, and add up in float32, each its own shard (quantised gradients of ZeRO++: Wang et al.,
https://arxiv.org/abs/2306.10209). A mean that all devices need gathers the shards' codes after
that; every device decodes the same bytes, so that all have the same mean, bit for bit.

On `N` devices a device sends `(N - 1) coded_bytes(n)` for a gather of rows of `n` numbers, as much
for a sum whose shards have `n`, and twice as much for a mean.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from manualpar.core.parameters.block_quantization import (
    Quantization,
    coded_bytes,
    pack_codes,
    unpack_codes,
)
from manualpar.core.tracing.scopes import DECODE_SCOPE


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockQuantizer:
    """A `manualpar.core.parameters.collectives.Quantizer` in blocks.

    Attributes:
      name: The name of its codes.
    """

    name: Quantization

    def row_bytes(self, n: int) -> int:
        """The bytes in which a row of `n` numbers travels."""
        return coded_bytes(n, self.name)

    def gather(
        self,
        x: jax.Array,
        dim: int,
        rounds: Sequence[tuple[str, ...]],
        *,
        is_invariant: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Gathers shards as codes.

        Args:
          x: The local shard, `[..., D/axes, ...]`.
          dim: The dimension along which it is sharded.
          rounds: The mesh axes of each all-gather, in their order: the minor axis first.
          is_invariant: Whether the result is typed as the same on all devices.
          key: As for `scatter_sum`.

        Returns:
          `float32[..., D, ...]`, the whole array as every device decodes it, its own shard too.

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
        """Leaves each device its shard of the sum of what the devices' codes say.

        Args:
          x: Each device's own `[..., D, ...]`.
          dim: The dimension to scatter along; the size of `axes` divides it.
          axes: The mesh axes.
          key: A key that differs between devices, to round at random; if not given, to the nearest.

        Returns:
          The shard of the sum, `float32[..., D/axes, ...]`, and what this device's codes leave out
          of its `x`, `float32[..., D, ...]`.

        Communication:
          One all-to-all of bytes.
        """
        size = jax.lax.axis_size(axes)
        shard = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
        # A shard is runs of numbers that lie together. Where blocks end with them, codes are put
        # in the order of shards, and otherwise the numbers, which takes a copy of all.
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
        lost = rows - unpack_codes(packed, rows.shape[-1], self.name)
        if not is_in_place:
            lost = jnp.moveaxis(lost.reshape(size, lead, run), 0, 1)
        return total, lost.reshape(x.shape)

    def mean(
        self, x: jax.Array, axes: tuple[str, ...], *, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The mean over devices, the same bits on all of them.

        Args:
          x: Each device's own array.
          axes: The mesh axes.
          key: As for `scatter_sum`. Each of the two roundings has a key of its own: the second
            would not be right on average if it knew the first.

        Returns:
          The mean, `float32` and not varying over `axes`, and what is lost by this device, of the
          shape of `x`: what its codes leave out, and of the shard of the mean that it encodes,
          times the number of devices. The devices' mean of `x` minus that of what is lost is the
          mean that is returned.

        Communication:
          One all-to-all of each device's parts and one all-gather of the mean's shards, of bytes.
        """
        size = jax.lax.axis_size(axes)
        flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
        first, second = (None, None) if key is None else jax.random.split(key)
        total, lost = self.scatter_sum(flat, 0, axes, key=first)
        mean = self.gather(total / size, 0, (axes,), is_invariant=True, key=second)
        index = jax.lax.axis_index(axes) * total.size
        own = total - jax.lax.dynamic_slice_in_dim(mean, index, total.size) * size
        own += jax.lax.dynamic_slice_in_dim(lost, index, total.size)
        lost = jax.lax.dynamic_update_slice_in_dim(lost, own, index, 0)
        return mean[: x.size].reshape(x.shape), lost[: x.size].reshape(x.shape)
