"""Collectives whose gradient is written by hand, and the axes over which values vary.

A parameter that is stored in shards is gathered where it is used, and its gradient is scattered
back. The gradient of this gather is written by hand, because the gradient must be the mean over the
devices and autodiff would take the sum.

Under `jax.shard_map(check_vma=True)` the type of every value names the mesh axes over which it
*varies*: devices along these axes may hold different values. All code that reads or changes this
set of axes is in this file.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    COLLECTIONS_SCOPE,
    GATHER_SCOPE,
    REDUCE_SCOPE,
    SCATTER_SCOPE,
)
from manualpar.errors import old_names

__all__ = [
    "Format",
    "GatherCode",
    "GatherQuantizer",
    "MixedPrecisionPolicy",
    "Quantizer",
    "ReduceCode",
    "agree_on_largest",
    "cast_to_varying",
    "gather_array_with_mean_grads",
    "gather_invariant",
    "varying_axes",
]

# -------------------------------------------------------------------------------------------------
# The formats in which parameters and gradients are sent.
#
# A collective over several mesh axes runs over all axes at once, or over one axis after the other.


Quantization = Literal["int8", "int4"]
GatherCode = Literal["int8", "float8"]
ReduceCode = Literal[Quantization, "bfloat16"]


class GatherQuantizer(Protocol):
    """A pytree whose methods gather numbers in fewer bits; see `quantized_collectives`."""

    @property
    def name(self) -> str:
        """The quantizer's name in the options `gather_code` and `reduce_code`."""

    def row(self, n: int) -> tuple[int, Any]:
        """Returns the length and the dtype of the row that is sent for `n` numbers."""

    def is_worth(self, n: float, itemsize: int) -> bool:
        """Returns whether to use the quantizer for `n` numbers of `itemsize` bytes, on average.

        If `n` is no integer, some devices send a number fewer, and rows are padded.
        """

    def largest(self, x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array | None:
        """Returns the magnitudes on which the devices agree before a gather; `None` for none.

        They are the largest of each slice along the dims `kept`; the other dims have size 1.
        """

    def gather(
        self,
        x: jax.Array,
        dim: int,
        rounds: Sequence[tuple[str, ...]],
        dtype: Any,
        largest: jax.Array | None = None,
    ) -> jax.Array:
        """Gathers shards along `dim`, over the axes of each round in turn, to an array of `dtype`.

        `largest` is the maximum over the devices of what the method `largest` returns.
        """


class Quantizer(GatherQuantizer, Protocol):
    """A pytree whose methods also sum numbers in fewer bits."""

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
        That of a gradient can sum.
    """

    dtype: str | None = None
    quantizer: GatherQuantizer | None = None

    def quantizer_for(self, n: float, dtype: Any) -> GatherQuantizer | None:
        """Returns the quantizer if it is worth it for a row of `n` numbers of `dtype`."""
        itemsize = jnp.dtype(self.dtype or dtype).itemsize
        quantizer = self.quantizer
        return quantizer if quantizer and quantizer.is_worth(n, itemsize) else None


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The formats in which weights are gathered and gradients reduced, as in FSDP2.

    A format has a quantizer as well, which FSDP2's policy of this name does not have.

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
    def exact(self) -> "MixedPrecisionPolicy":
        """The same policy without casts and quantizers."""
        return MixedPrecisionPolicy(axis_by_axis=self.axis_by_axis)

    def for_parameter(
        self, dtype: Any, *, trainable: bool = True, is_float8: bool = False
    ) -> "MixedPrecisionPolicy":
        """Returns the policy for a parameter with dtype `dtype`.

        A parameter that is not floating-point is sent as it is stored. A frozen parameter is cast
        only to a narrower dtype. Codes in float8 are sent only of a parameter that `is_float8`:
        only products in float8 read it.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.exact
        policy, quantizer = self, self.gather.quantizer
        if quantizer and quantizer.name == "float8" and not is_float8:
            policy = dataclasses.replace(self, gather=Format(self.gather.dtype))
        gather_dtype = jnp.dtype(self.gather.dtype or dtype)
        if trainable or dtype.itemsize > gather_dtype.itemsize:
            return policy
        formats = policy.gather, policy.reduce
        gather, reduce = (Format(quantizer=each.quantizer) for each in formats)
        return dataclasses.replace(policy, gather=gather, reduce=reduce)

    def with_reduce_quantizer(self, quantizer: Quantizer | None) -> "MixedPrecisionPolicy":
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
        return cast(Quantizer, self.reduce.quantizer_for(n, dtype)) if is_quantized else None

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


EXACT = MixedPrecisionPolicy()


# -------------------------------------------------------------------------------------------------


def varying_axes(tree: Any) -> frozenset[str]:
    """Returns the mesh axes over which any leaf's type varies; none with `check_vma=False`."""
    return frozenset[str]().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def is_vma_checked(axis: str) -> bool:
    """Returns whether the enclosing `shard_map` checks which values vary over `axis`."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def cast_to_varying(tree: Any, axes: tuple[str, ...] | frozenset[str]) -> Any:
    """Casts the type of every leaf to varying over `axes`.

    Cast before the function that is differentiated: then autodiff does not sum gradients over
    `axes`.

    Communication:
      None. The *transpose* of this cast is a `psum`: a cast inside the differentiated function
      costs an all-reduce in the backward pass.
    """

    def cast(x: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    with jax.named_scope(CAST_SCOPE):  # This scope marks the psum of the transpose.
        return jax.tree.map(cast, tree)


def _cast_coefficients() -> None:
    """Makes JAX 0.12 differentiate `erf`, thus exact GELU, under `check_vma=True`.

    The derivative is a polynomial with constant coefficients. JAX casts the constants of other
    operations to the type of the other operand, but refuses those of this one ("Primitive
    polynomial requires varying manual axes to match"). So they are cast here; no number changes.
    """
    polynomial = getattr(jax.lax, "polynomial_p", None)  # JAX before 0.12 has none.
    if polynomial is None:
        return
    bind = polynomial.bind

    @functools.wraps(bind)
    def cast_and_bind(*args: Any, **params: Any) -> Any:
        return bind(*cast_to_varying(args, varying_axes(args)), **params)

    polynomial.bind = cast_and_bind


_cast_coefficients()


def cast_with_max(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts the type of an array of flax's dtype `fm32` to varying over `axes`.

    Autodiff takes the maximum of several gradients of such an array, so the transpose of this cast
    takes the maximum over the devices.

    Communication:
      Backward: an all-reduce of the gradient over `axes`.
    """
    return _cast_with_max(axes, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cast_with_max(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    dtype = x.dtype
    value = cast_to_varying(jax.lax.convert_element_type(x, jnp.float32), axes)
    return jax.lax.convert_element_type(value, dtype)


def _max_backward(axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    with jax.named_scope(COLLECTIONS_SCOPE):
        largest = jax.lax.pmax(jax.lax.convert_element_type(g, jnp.float32), axes)
    return (jax.lax.convert_element_type(largest, g.dtype),)


_cast_with_max.defvjp(lambda axes, x: (_cast_with_max(axes, x), None), _max_backward)


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisName,
    *,
    comm: MixedPrecisionPolicy = EXACT,
    largest: jax.Array | None = None,
) -> jax.Array:
    """Gathers the shards of an array; its gradient is scattered back as the mean over the devices.

    Args:
      x: The device's shard, `[..., D/axis_name, ...]`.
      axis: The dimension along which `x` is sharded.
      axis_name: The mesh axis, or tuple of axes, over which `x` is sharded.
      comm: The formats in which values are sent, and whether to gather axis by axis. The type of
        `x` must not vary over `comm.averaged_axes`; the type of the result does.
      largest: The largest magnitude of the full array, if the quantizer needs it, see
        `agree_on_largest`.

    Returns:
      The full array, `[..., D, ...]`, on every device, of dtype `comm.gather.dtype`.

    Raises:
      ValueError: A mesh axis is not bound, or `axis` is not a dimension of `x`.

    Communication:
      Forward: an all-gather over `axis_name`; a device sends `(N - 1) / N` of the gathered bytes on
      a ring of `N` devices. Backward: a reduce-scatter of the same size. `comm.axis_by_axis` makes
      one all-gather and one reduce-scatter for each axis, with the same bytes in total. With
      `comm.averaged_axes` an all-reduce of the device's shard of the gradient follows backward.

    Gradient:
      `psum_scatter(g) / N`, written by hand; the transpose of an all-gather is `psum_scatter(g)`.
      So the gradient of a sharded parameter is the mean of the devices' gradients, like `pmean` of
      a replicated parameter's gradient. The mean is also over `comm.averaged_axes`. The gradient is
      summed in `comm.reduce.dtype` and returned in the dtype of `x`.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("gather_array_with_mean_grads", axes)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"gather_array_with_mean_grads: axis={axis} is not a dimension of an array of shape "
            f"{x.shape}."
        )
    if is_vma_checked(axes[0]) and not varying_axes(x) & set(axes):
        # The type says that all devices hold the same shard. This happens if flax's nested scans
        # trace a box only to find shapes, because the values in such a trace have no varying axes.
        repeats = [jax.lax.axis_size(axes) if dim == axis % x.ndim else 1 for dim in range(x.ndim)]
        x = jnp.tile(x, repeats)
        return x.astype(comm.gather.dtype or x.dtype)
    args = _GatherArgs(axis % x.ndim, axes, x.dtype, comm.with_reduce_quantizer(None))
    x = cast_to_varying(x, axes)
    if largest is None:
        (largest,) = agree_on_largest([(x, comm, axes, ())])
    return _gather_with_mean_grads(x, comm.reduce.quantizer, largest, args)


def agree_on_largest(
    arrays: Sequence[tuple[jax.Array, MixedPrecisionPolicy, tuple[str, ...], tuple[int, ...]]],
) -> list[jax.Array | None]:
    """Finds the magnitudes that devices must agree on before they gather codes.

    Args:
      arrays: For each array this device's shard, its policy, the mesh axes of its gather, and the
        dims of loops, each slice along which is gathered for itself.

    Returns:
      For each array the largest magnitude of each slice of the full array, the other dims of size
      1; `None` if its policy needs none.

    Communication:
      An all-reduce of all magnitudes over the same axes.
    """
    found: list[jax.Array | None] = [None] * len(arrays)
    groups: dict[tuple[str, ...], list[int]] = {}
    with jax.named_scope(GATHER_SCOPE):
        for i, (x, comm, axes, kept) in enumerate(arrays):
            x = jax.lax.stop_gradient(x)
            if quantizer := comm.gather.quantizer_for(x.size, x.dtype):
                found[i] = quantizer.largest(x.astype(comm.gather.dtype or x.dtype), kept)
            if found[i] is not None and jax.lax.axis_size(axes) > 1:
                groups.setdefault(axes, []).append(i)
        for axes, indices in groups.items():
            magnitudes = [cast(jax.Array, found[i]) for i in indices]
            varying = frozenset().union(*map(varying_axes, magnitudes))
            flat = [cast_to_varying(x.reshape(-1), varying) for x in magnitudes]
            agreed = jax.lax.pmax(jnp.concatenate(flat), axes)
            ends = np.cumsum([x.size for x in magnitudes])
            for i, x, part in zip(indices, magnitudes, jnp.split(agreed, ends[:-1]), strict=True):
                found[i] = part.reshape(x.shape)
    return found


class _GatherArgs(NamedTuple):
    """The static arguments of a gather."""

    dim: int
    axes: tuple[str, ...]
    dtype: Any
    comm: MixedPrecisionPolicy


def _gather(
    x: jax.Array, _: Quantizer | None, largest: jax.Array | None, args: _GatherArgs
) -> jax.Array:
    with jax.named_scope(GATHER_SCOPE):
        dtype = args.comm.gather.dtype or x.dtype
        # XLA may keep a collective over one device, which costs a copy.
        rounds = [a for a in reversed(args.comm.rounds(args.axes)) if jax.lax.axis_size(a) > 1]
        if rounds and (quantizer := args.comm.gather.quantizer_for(x.size, x.dtype)):
            x = quantizer.gather(x, args.dim, rounds, dtype, largest)
        else:
            x = x.astype(dtype)
            for axes in rounds:
                x = jax.lax.all_gather(x, axes, axis=args.dim, tiled=True)
    # This function has no transpose, so the cast sends nothing. A cast of the shard would be kept
    # for the backward pass.
    return cast_to_varying(x, args.comm.averaged_axes)


_gather_with_mean_grads = jax.custom_vjp(_gather, nondiff_argnums=(3,))


def _gather_forward(
    x: jax.Array, quantizer: Any, largest: jax.Array | None, args: _GatherArgs
) -> tuple[jax.Array, Any]:
    # The forward rule calls `_gather`, which has no gradient rule, so that `modes.remat` finds the
    # all-gather.
    return _gather(x, quantizer, largest, args), quantizer


def _gather_backward(
    args: _GatherArgs, quantizer: Any, g: jax.Array
) -> tuple[jax.Array, None, None]:
    # A quantizer may contain a random key that differs between steps. So it is a residual of the
    # forward pass, not a static argument.
    comm = args.comm.with_reduce_quantizer(quantizer)
    dtype = comm.reduce.dtype or g.dtype
    g = scatter_mean(g, args.dim, args.axes, comm=comm, dtype=dtype)
    g = reduce_mean(g, comm.averaged_axes, comm=comm, dtype=dtype)
    return g.astype(args.dtype), None, None


_gather_with_mean_grads.defvjp(_gather_forward, _gather_backward)


def scatter_mean(
    x: jax.Array,
    dim: int,
    axes: tuple[str, ...],
    *,
    comm: MixedPrecisionPolicy = EXACT,
    dtype: Any = None,
) -> jax.Array:
    """Returns this device's shard of the mean of the devices' arrays.

    Args:
      x: Each device's array, `[..., D, ...]`.
      dim: The dimension to scatter along; the size of `axes` divides it.
      comm: The quantizer, which is used if it is worth it, and whether to scatter axis by axis.
      dtype: The dtype in which unquantized values are sent; by default the dtype of `x`.

    Returns:
      `[..., D/axes, ...]`, the shard of the mean.

    Communication:
      One reduce-scatter in `dtype`, or one for each axis: a device sends `(N - 1) / N` of the bytes
      of `x` in `dtype`. A quantizer uses one all-to-all instead, see `Quantizer`.
    """
    dtype = dtype or x.dtype
    with jax.named_scope(SCATTER_SCOPE):
        for round_axes in comm.rounds(axes):
            if (size := jax.lax.axis_size(round_axes)) == 1:
                continue
            if quantizer := comm.reduce_quantizer(x.size // size, dtype, round_axes):
                x, _ = quantizer.scatter_sum(x, dim, round_axes)
            else:
                x = x.astype(dtype)
                x = jax.lax.psum_scatter(x, round_axes, scatter_dimension=dim, tiled=True)
        return x / jax.lax.axis_size(axes)


def reduce_mean(
    x: jax.Array, axes: tuple[str, ...], *, comm: MixedPrecisionPolicy, dtype: Any
) -> jax.Array:
    """Returns the mean of the devices' arrays, whose type does not vary over `axes`.

    Args:
      axes: The mesh axes; `()` returns `x`.
      comm: The quantizer, which is used if it is worth it, and the axes that it is used over.

    Communication:
      One all-reduce in `dtype` for each group of `comm.reductions(axes)`: a device sends
      `2 (N - 1) / N` of the bytes. A quantizer uses an all-to-all and an all-gather instead.
    """
    with jax.named_scope(REDUCE_SCOPE):
        for group in comm.reductions(axes):
            size = jax.lax.axis_size(group)
            quantizer = comm.reduce_quantizer(x.size / size, dtype, group)
            if quantizer and size > 1:
                x, _ = quantizer.mean(x, group)
            else:
                x = jax.lax.pmean(x.astype(dtype), group)
        return x


def gather_invariant(
    x: jax.Array,
    dim: int,
    axes: tuple[str, ...],
    *,
    scope: str = GATHER_SCOPE,
    comm: MixedPrecisionPolicy = EXACT,
) -> jax.Array:
    """Gathers shards into an array whose type says that it is the same on all devices of `axes`.

    Args:
      x: The device's shard, `[..., D/axes, ...]`.
      dim: The dimension along which `x` is sharded.
      axes: The mesh axes over which `x` is sharded.
      scope: The named scope, which marks the purpose of the collective.
      comm: Decides whether to gather axis by axis; its dtypes and quantizers are not used.

    Returns:
      The full array, `[..., D, ...]`, not varying over `axes`.

    Communication:
      One all-gather, or one for each axis: a device sends `(N - 1) / N` of the gathered bytes.

    Gradient:
      The device's shard of the gradient; nothing is sent. If devices along `axes` use the array
      differently, their code casts it to varying, and the cast's transpose sums their gradients.
    """
    with jax.named_scope(scope):
        x = cast_to_varying(x, axes)
        for round_axes in reversed(comm.rounds(axes)):
            x = jax.lax.all_gather(x, round_axes, axis=dim, tiled=True, to="invarying")
        return x


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, {"CommPolicy": "MixedPrecisionPolicy"})
