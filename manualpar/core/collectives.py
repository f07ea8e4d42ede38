"""Collectives whose gradient is written by hand, and what the types say about them.

A parameter that is stored in shards is gathered where it is used, and its gradient is scattered
back. The gradient of such a gather is written by hand, because the mean over devices is wanted
where autodiff would take the sum.

Under `jax.shard_map(check_vma=True)` the type of every value names the mesh axes over which it
*varies*, that is, along which devices may hold different values. This file has all the code that
reads or changes that set.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from manualpar.purposes import CAST_SCOPE, GATHER_SCOPE, SCATTER_SCOPE
from manualpar.sharding.axes import AxisName, axis_tuple, check_axes_bound


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which any leaf varies by its type; none with `check_vma=False`."""
    return frozenset[str]().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))


def is_vma_checked(axis: str) -> bool:
    """Whether the types of the surrounding `shard_map` tell what varies over `axis`."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def cast_to_varying(tree: Any, axes: tuple[str, ...] | frozenset[str]) -> Any:
    """Types every leaf as varying over `axes`, so that autodiff does not sum its gradient.

    Communication:
      None. The *transpose* of this cast is a `psum`. A value that is cast inside a differentiated
      function therefore costs an all-reduce in the backward pass. Cast it before.
    """

    def cast(x: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    with jax.named_scope(CAST_SCOPE):  # The scope is for the transpose.
        return jax.tree.map(cast, tree)


class Wire(NamedTuple):
    """The dtypes that travel, and the order of the axes.

    Attributes:
      gather_dtype: The dtype that a shard is cast to before it is gathered, and that the model
        computes with; `None` for the shard's own.
      reduce_dtype: The dtype that gradients are summed in; `None` for their own.
      axis_by_axis: Whether a dimension that is sharded over a tuple of axes is gathered, and its
        gradient scattered, over one axis after the other instead of over their product at once.
    """

    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    axis_by_axis: bool = False

    @property
    def casts(self) -> bool:
        """Whether anything travels in a dtype that is not its own."""
        return self.gather_dtype is not None or self.reduce_dtype is not None

    @property
    def uncast(self) -> "Wire":
        """The same without casts."""
        return self._replace(gather_dtype=None, reduce_dtype=None)

    def of(self, dtype: Any, *, trainable: bool = True) -> "Wire":
        """The same for a parameter of a dtype.

        One that is no float, and a frozen one that is stored as narrow, travels as it is stored.
        """
        gathered = jnp.dtype(self.gather_dtype or dtype)
        is_narrow = not trainable and dtype.itemsize <= gathered.itemsize
        return self if jnp.issubdtype(dtype, jnp.floating) and not is_narrow else self.uncast

    def rounds(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The axes of each collective that scatters over `axes`, in order; gathers reverse it.

        The major axis comes first, so that shards lie as a `PartitionSpec` says. The number of
        rounds does not change the bytes that a device sends.
        """
        return tuple((axis,) for axis in axes) if self.axis_by_axis else (axes,)


AS_STORED = Wire()


def gather_array_with_mean_grads(
    x: jax.Array, axis: int, axis_name: AxisName, *, wire: Wire = AS_STORED
) -> jax.Array:
    """Gathers the shards of an array; its gradient is scattered back as the mean over the devices.

    Args:
      x: The local shard, `[..., D/axis_name, ...]`.
      axis: The dimension along which `x` is sharded.
      axis_name: The mesh axis, or tuple of axes, over which it is sharded.
      wire: The dtypes that travel, and the order of the axes.

    Returns:
      The whole array, `[..., D, ...]`, on every device, of dtype `wire.gather_dtype`.

    Raises:
      ValueError: A mesh axis is not bound, or `axis` is not a dimension of `x`.

    Communication:
      Forward an all-gather over `axis_name`: a device sends `(N - 1) / N` of the gathered bytes on
      a ring of `N`. Backward a reduce-scatter of the same size. With `wire.axis_by_axis` there is
      one of each for each axis, and the bytes are the same.

    Gradient:
      Written by hand: `psum_scatter(g) / N`, where the transpose of an all-gather would be
      `psum_scatter(g)`. So the gradient of a sharded parameter is the mean of the devices'
      gradients, which is what `pmean` gives for a replicated one. It is summed in
      `wire.reduce_dtype` and returned in the dtype of `x`.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("gather_array_with_mean_grads", axes)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"gather_array_with_mean_grads: axis={axis} is not a dimension of an array of shape "
            f"{x.shape}."
        )
    if is_vma_checked(axes[0]) and not varying_axes(x) & set(axes):
        # By its type all devices hold the same shard. Flax's nested scans trace a box like this to
        # learn shapes, with values that have lost their types.
        x = jnp.concatenate([x] * jax.lax.axis_size(axes), axis)
        return x.astype(wire.gather_dtype or x.dtype)
    plan = _Gather(axis % x.ndim, axes, x.dtype, wire)
    return _gather_with_mean_grads(cast_to_varying(x, axes), plan)


class _Gather(NamedTuple):
    """The static arguments of a gather."""

    dim: int
    axes: tuple[str, ...]
    dtype: Any
    wire: Wire


def _gather(x: jax.Array, plan: _Gather) -> jax.Array:
    with jax.named_scope(GATHER_SCOPE):
        x = x.astype(plan.wire.gather_dtype or x.dtype)
        for axes in reversed(plan.wire.rounds(plan.axes)):
            if jax.lax.axis_size(axes) > 1:  # XLA may keep a collective over one device, and copy.
                x = jax.lax.all_gather(x, axes, axis=plan.dim, tiled=True)
        return x


_gather_with_mean_grads = jax.custom_vjp(_gather, nondiff_argnums=(1,))


def _gather_forward(x: jax.Array, plan: _Gather) -> tuple[jax.Array, None]:
    # The function without the rule, so that `modes.remat` sees the all-gather.
    return _gather(x, plan), None


def _gather_backward(plan: _Gather, _: None, g: jax.Array) -> tuple[jax.Array]:
    reduce_dtype = plan.wire.reduce_dtype or g.dtype
    g = scatter_mean(g.astype(reduce_dtype), plan.dim, plan.axes, wire=plan.wire)
    return (g.astype(plan.dtype),)


_gather_with_mean_grads.defvjp(_gather_forward, _gather_backward)


def scatter_mean(
    x: jax.Array, dim: int, axes: tuple[str, ...], *, wire: Wire = AS_STORED
) -> jax.Array:
    """Leaves each device its shard of the mean of what the devices hold.

    Args:
      x: Each device's own `[..., D, ...]`.
      dim: The dimension to scatter along; the size of `axes` divides it.
      axes: The mesh axes.
      wire: The order of the axes; `x` has the dtype that travels.

    Returns:
      `[..., D/axes, ...]`, the shard of the mean.

    Communication:
      One reduce-scatter in the dtype of `x`, or one for each axis: a device sends `(N - 1) / N` of
      the bytes of `x`.
    """
    with jax.named_scope(SCATTER_SCOPE):
        for some in wire.rounds(axes):
            if jax.lax.axis_size(some) > 1:
                x = jax.lax.psum_scatter(x, some, scatter_dimension=dim, tiled=True)
        return x / jax.lax.axis_size(axes)


def gather_invariant(
    x: jax.Array,
    dim: int,
    axes: tuple[str, ...],
    *,
    scope: str = GATHER_SCOPE,
    wire: Wire = AS_STORED,
) -> jax.Array:
    """Gathers shards into an array that is typed as the same on all devices along `axes`.

    Args:
      x: The local shard, `[..., D/axes, ...]`.
      dim: The dimension along which it is sharded.
      axes: The mesh axes over which it is sharded.
      scope: The named scope that says for what purpose.
      wire: The order of the axes; the dtype stays.

    Returns:
      The whole array, `[..., D, ...]`, not varying over `axes`.

    Communication:
      One all-gather, or one for each axis: a device sends `(N - 1) / N` of the gathered bytes.

    Gradient:
      The device's shard of the gradient; nothing is sent. Where devices along `axes` use the array
      differently, the cast that makes it varying has summed their gradients.
    """
    with jax.named_scope(scope):
        x = cast_to_varying(x, axes)
        for some in reversed(wire.rounds(axes)):
            x = jax.lax.all_gather(x, some, axis=dim, tiled=True, to="invarying")
        return x
