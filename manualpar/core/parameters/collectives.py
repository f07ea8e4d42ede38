"""Collectives whose gradient is written by hand, and what the types say about them.

A parameter that is stored in shards is gathered where it is used, and its gradient is scattered
back. The gradient of such a gather is written by hand, because the mean over devices is wanted
where autodiff would take the sum.

Under `jax.shard_map(check_vma=True)` the type of every value names the mesh axes over which it
*varies*, that is, along which devices may hold different values. This file has all the code that
reads or changes that set.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.tracing.scopes import CAST_SCOPE, GATHER_SCOPE, SCATTER_SCOPE


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


class Quantizer(Protocol):
    """How numbers travel in fewer bits, a pytree; see `coded_collectives`."""

    @property
    def name(self) -> str:
        """What the options of builders call it."""

    def row_bytes(self, n: int) -> int:
        """The bytes in which a row of `n` numbers travels."""

    def gather(self, x: jax.Array, dim: int, rounds: Sequence[tuple[str, ...]]) -> jax.Array:
        """An all-gather for each round, in float32."""

    def scatter_sum(
        self, x: jax.Array, dim: int, axes: tuple[str, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """A reduce-scatter, in float32, and what this device's codes leave out of `x`."""

    def mean(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
        """A mean over devices, in float32, and what is lost of it by this device."""


class CommPolicy(NamedTuple):
    """The dtypes and codes that travel, and the order of the axes.

    Attributes:
      gather_dtype: The dtype that a shard is cast to before it is gathered, and that the model
        computes with; `None` for the shard's own.
      reduce_dtype: The dtype that gradients are summed in; `None` for their own.
      axis_by_axis: Whether a dimension that is sharded over a tuple of axes is gathered, and its
        gradient scattered, over one axis after the other instead of over their product at once.
      gather_code: The code of what is gathered over the axes of the batch; `None` for none.
      reduce_code: The code of gradients that are reduced; they are summed in float32.
      code_axes: The mesh axes over which `reduce_code` counts; `None` for all.
    """

    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    axis_by_axis: bool = False
    gather_code: Quantizer | None = None
    reduce_code: Quantizer | None = None
    code_axes: tuple[str, ...] | None = None

    @property
    def casts(self) -> bool:
        """Whether anything travels otherwise than it is."""
        return self != EXACT._replace(axis_by_axis=self.axis_by_axis)

    @property
    def uncast(self) -> "CommPolicy":
        """The same without casts and codes."""
        return EXACT._replace(axis_by_axis=self.axis_by_axis)

    def of(self, dtype: Any, *, trainable: bool = True) -> "CommPolicy":
        """The same for a parameter of a dtype.

        One that is no float travels as it is stored, and a frozen one that is stored as narrow is
        not cast.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.uncast
        gathered = jnp.dtype(self.gather_dtype or dtype)
        is_narrow = not trainable and dtype.itemsize <= gathered.itemsize
        return self._replace(gather_dtype=None, reduce_dtype=None) if is_narrow else self

    def gather_code_of(self, n: int, dtype: Any) -> Quantizer | None:
        """The code in which shards of `n` numbers of a dtype are gathered: if it is fewer bytes."""
        return _if_fewer(self.gather_code, n, self.gather_dtype or dtype)

    def reduce_code_of(self, n: float, dtype: Any, axes: tuple[str, ...]) -> Quantizer | None:
        """The code in which gradients are reduced over axes to shards of `n` numbers each."""
        counts = self.code_axes is None or set(axes) <= set(self.code_axes)
        return _if_fewer(self.reduce_code, n, dtype) if counts else None

    def reductions(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The axes of each all-reduce over `axes`: those over which codes travel by themselves."""
        coded = tuple(axis for axis in axes if axis in (self.code_axes or ()))
        others = tuple(axis for axis in axes if axis not in coded)
        return tuple(some for some in (others, coded) if some)

    def rounds(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The axes of each collective that scatters over `axes`, in order; gathers reverse it.

        The major axis comes first, so that shards lie as a `PartitionSpec` says. The number of
        rounds does not change the bytes that a device sends.
        """
        return tuple((axis,) for axis in axes) if self.axis_by_axis else (axes,)


EXACT = CommPolicy()


def _if_fewer(code: Quantizer | None, n: float, dtype: Any) -> Quantizer | None:
    itemsize = jnp.dtype(dtype).itemsize
    return code if code and code.row_bytes(math.ceil(n)) < n * itemsize else None


def gather_array_with_mean_grads(
    x: jax.Array, axis: int, axis_name: AxisName, *, wire: CommPolicy = EXACT
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
    plan = _Gather(axis % x.ndim, axes, x.dtype, wire._replace(reduce_code=None))
    return _gather_with_mean_grads(cast_to_varying(x, axes), wire.reduce_code, plan)


class _Gather(NamedTuple):
    """The static arguments of a gather."""

    dim: int
    axes: tuple[str, ...]
    dtype: Any
    wire: CommPolicy


def _gather(x: jax.Array, _: Quantizer | None, plan: _Gather) -> jax.Array:
    with jax.named_scope(GATHER_SCOPE):
        dtype = plan.wire.gather_dtype or x.dtype
        # XLA may keep a collective over one device, and copy.
        rounds = [a for a in reversed(plan.wire.rounds(plan.axes)) if jax.lax.axis_size(a) > 1]
        if rounds and (code := plan.wire.gather_code_of(x.size, x.dtype)):
            return code.gather(x, plan.dim, rounds).astype(dtype)
        x = x.astype(dtype)
        for axes in rounds:
            x = jax.lax.all_gather(x, axes, axis=plan.dim, tiled=True)
        return x


_gather_with_mean_grads = jax.custom_vjp(_gather, nondiff_argnums=(2,))


def _gather_forward(x: jax.Array, code: Any, plan: _Gather) -> tuple[jax.Array, Any]:
    # The function without the rule, so that `modes.remat` sees the all-gather.
    return _gather(x, code, plan), code


def _gather_backward(plan: _Gather, code: Any, g: jax.Array) -> tuple[jax.Array, None]:
    wire = plan.wire._replace(reduce_code=code)  # A code may have a key, a value of the step.
    g = scatter_mean(g, plan.dim, plan.axes, wire=wire, dtype=wire.reduce_dtype)
    return g.astype(plan.dtype), None


_gather_with_mean_grads.defvjp(_gather_forward, _gather_backward)


def scatter_mean(
    x: jax.Array, dim: int, axes: tuple[str, ...], *, wire: CommPolicy = EXACT, dtype: Any = None
) -> jax.Array:
    """Leaves each device its shard of the mean of what the devices hold.

    Args:
      x: Each device's own `[..., D, ...]`.
      dim: The dimension to scatter along; the size of `axes` divides it.
      axes: The mesh axes.
      wire: The order of the axes, and the code that travels, if it is fewer bytes.
      dtype: The dtype that travels otherwise; that of `x` if not given.

    Returns:
      `[..., D/axes, ...]`, the shard of the mean.

    Communication:
      One reduce-scatter in `dtype`, or one for each axis: a device sends `(N - 1) / N` of the bytes
      of `x` in it. With a code one all-to-all instead, see `Quantizer`.
    """
    dtype = dtype or x.dtype
    with jax.named_scope(SCATTER_SCOPE):
        for some in wire.rounds(axes):
            if (size := jax.lax.axis_size(some)) == 1:
                continue
            if code := wire.reduce_code_of(x.size // size, dtype, some):
                x, _ = code.scatter_sum(x, dim, some)
            else:
                x = x.astype(dtype)
                x = jax.lax.psum_scatter(x, some, scatter_dimension=dim, tiled=True)
        return x / jax.lax.axis_size(axes)


def gather_invariant(
    x: jax.Array,
    dim: int,
    axes: tuple[str, ...],
    *,
    scope: str = GATHER_SCOPE,
    wire: CommPolicy = EXACT,
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
