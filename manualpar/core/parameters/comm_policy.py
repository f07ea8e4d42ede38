"""The formats in which parameters and gradients are sent.

A collective over several mesh axes runs over all axes at once, or over one axis after the other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Quantizer(Protocol):
    """A pytree whose methods send numbers in fewer bits; see `quantized_collectives`."""

    @property
    def name(self) -> str:
        """The quantizer's name in the options `gather_code` and `reduce_code`."""

    def row(self, n: int) -> tuple[int, Any]:
        """Returns the length and the dtype of the row that is sent for `n` numbers."""

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether to use the quantizer for `n` numbers of `itemsize` bytes, on average.

        If `n` is no integer, some devices send a number fewer, and rows are padded.
        """

    def gather(self, x: jax.Array, dim: int, rounds: Sequence[tuple[str, ...]]) -> jax.Array:
        """Gathers shards along `dim`, over the axes of each round in turn; returns float32."""

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the reduce-scattered sum in float32 and this device's rounding error in `x`."""

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns the mean over devices in float32 and the error that this device adds to it."""


@dataclasses.dataclass(frozen=True)
class Format:
    """The format in which numbers are sent.

    Attributes:
      dtype: The dtype to which the numbers are cast; `None` to keep their dtype.
      quantizer: The quantizer, which is used only where it is worth it; `None` for no quantizer.
    """

    dtype: str | None = None
    quantizer: Quantizer | None = None

    def quantizer_for(self, n: float, dtype: Any) -> Quantizer | None:
        """Returns the quantizer if it is worth it for a row of `n` numbers of `dtype`."""
        itemsize = jnp.dtype(self.dtype or dtype).itemsize
        quantizer = self.quantizer
        return quantizer if quantizer and quantizer.is_worth(n, itemsize) else None


@dataclasses.dataclass(frozen=True)
class CommPolicy:
    """The formats in which values are sent, and whether collectives run axis by axis.

    Attributes:
      gather: The format of parameters that are gathered. The model computes in the dtype of this
        format. The quantizer is used only over the axes that split the batch.
      reduce: The format of gradients that are reduced. Quantized gradients are summed in float32.
      axis_by_axis: Whether a dimension that is sharded over a tuple of axes is gathered and
        scattered over one axis after the other. Otherwise one collective runs over all its axes.
      quantized_axes: The mesh axes over which gradients are quantized; `None` for all.
      averaged_axes: The mesh axes, in addition to those of a gather, over which the gather's
        backward pass takes the mean of the gradient. The shards are the same along these axes.
    """

    gather: Format = Format()
    reduce: Format = Format()
    axis_by_axis: bool = False
    quantized_axes: tuple[str, ...] | None = None
    averaged_axes: tuple[str, ...] = ()

    @property
    def changes_values(self) -> bool:
        """Whether values are cast or quantized before they are sent."""
        return (self.gather, self.reduce) != (Format(), Format())

    @property
    def exact(self) -> "CommPolicy":
        """The same policy without casts and quantizers."""
        return CommPolicy(axis_by_axis=self.axis_by_axis)

    def for_parameter(self, dtype: Any, *, trainable: bool = True) -> "CommPolicy":
        """Returns the policy for a parameter with dtype `dtype`.

        A parameter that is not floating-point is sent as it is stored. A frozen parameter is cast
        only to a narrower dtype.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.exact
        gather_dtype = jnp.dtype(self.gather.dtype or dtype)
        if trainable or dtype.itemsize > gather_dtype.itemsize:
            return self
        gather, reduce = (Format(quantizer=each.quantizer) for each in (self.gather, self.reduce))
        return dataclasses.replace(self, gather=gather, reduce=reduce)

    def with_reduce_quantizer(self, quantizer: Quantizer | None) -> "CommPolicy":
        """Returns the policy with another quantizer of gradients."""
        return dataclasses.replace(self, reduce=Format(self.reduce.dtype, quantizer))

    def reduced_dtype(self, dtype: Any) -> Any:
        """Returns the dtype in which the gradient of a parameter with dtype `dtype` is summed."""
        return jnp.dtype(self.reduce.dtype or self.gather.dtype or dtype)

    def reduce_quantizer(self, n: float, dtype: Any, axes: tuple[str, ...]) -> Quantizer | None:
        """Returns the quantizer for reducing gradients over `axes`, if it is worth it.

        `n` is the count of numbers in the shard that each device sums.
        """
        is_quantized = self.quantized_axes is None or set(axes) <= set(self.quantized_axes)
        return self.reduce.quantizer_for(n, dtype) if is_quantized else None

    def reductions(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Divides `axes` into the axes outside and the axes inside `quantized_axes`.

        Each group gets its own all-reduce; an empty group is left out. If `quantized_axes` is
        `None`, there is one group.
        """
        quantized = tuple(axis for axis in axes if axis in (self.quantized_axes or ()))
        exact = tuple(axis for axis in axes if axis not in quantized)
        return tuple(group for group in (exact, quantized) if group)

    def rounds(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """Returns the axes of each collective that scatters over `axes`, in order.

        Gathers use the reverse order. The major axis comes first, so that shards are ordered as in
        a `PartitionSpec`. The number of collectives does not change the bytes that a device sends.
        """
        return tuple((axis,) for axis in axes) if self.axis_by_axis else (axes,)


EXACT = CommPolicy()
