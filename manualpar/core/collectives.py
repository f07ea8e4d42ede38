"""Collectives whose gradient is written by hand, and what the types say about them.

Under `jax.shard_map(check_vma=True)` the type of every value names the mesh axes over which it
*varies*, that is, over which devices may hold different values. Everything that reads or changes
that set is in this file.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.sharding.mesh import AxisName, axis_tuple, check_axes_bound

# The named scopes of what this package sends, for what purpose: they stand in the jaxpr, in the
# metadata of the compiled program, and in profiles. Before them stands the path of the module or of
# the parameter, where it is known. Inside of `OPTIMIZER_SCOPE` XLA sends, what the optimizer needs
# to know of more than its part.
GATHER_SCOPE = "gather_params"
SCATTER_SCOPE = "scatter_gradients"
REDUCE_SCOPE = "sync_gradients"
CAST_SCOPE = "sum_gradients"
NEW_PARAMS_SCOPE = "gather_new_params"
METRICS_SCOPE = "sync_metrics"
COUNT_SCOPE = "count_examples"
COLLECTIONS_SCOPE = "sync_collections"
NONFINITE_SCOPE = "find_nonfinite"
EXAMPLES_SCOPE = "gather_examples"
OPTIMIZER_SCOPE = "optimizer"
SCOPES = (
    GATHER_SCOPE,
    SCATTER_SCOPE,
    REDUCE_SCOPE,
    CAST_SCOPE,
    NEW_PARAMS_SCOPE,
    METRICS_SCOPE,
    COUNT_SCOPE,
    COLLECTIONS_SCOPE,
    NONFINITE_SCOPE,
    EXAMPLES_SCOPE,
    OPTIMIZER_SCOPE,
)
REGATHER = "regather_params"  # A purpose without a scope of its own, see `purpose_of`.
# JAX's name for what a `jax.checkpoint` computes again, and ours.
RECOMPUTED_SCOPE = "rematted_computation"


def purpose_of(scope: str) -> str | None:
    """For what purpose something is sent, by the named scopes around it.

    Args:
      scope: Scopes and transformations, outermost first, separated by slashes: the `scope` of a
        `Collective`, or the `op_name` of an operation in a compiled program.

    Returns:
      The innermost of `SCOPES`; `REGATHER` in place of `GATHER_SCOPE` for what is gathered again in
      the backward pass; `None` if none is there, so that it was not this package that sent.
    """
    parts = [part for part in re.split(r"[/()]", scope) if part]
    ours = next((part for part in reversed(parts) if part in SCOPES), None)
    return REGATHER if ours == GATHER_SCOPE and RECOMPUTED_SCOPE in parts else ours


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` varies by its type; none with `check_vma=False`."""
    return frozenset(jax.typeof(x).mat.varying)


def is_vma_checked(axis: str) -> bool:
    """Whether the types of the surrounding `shard_map` tell what varies over `axis`."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def cast_to_varying(tree: Any, axes: tuple[str, ...] | frozenset[str]) -> Any:
    """Types every leaf as varying over `axes`, so that autodiff does not sum its gradient.

    Communication:
      None. (The *transpose* of this cast is a `psum`: that is what differentiating with respect to
      a value that has not been cast costs, and why it is cast before differentiation and not
      inside.)
    """

    def cast(x: Any) -> Any:
        missing = tuple(sorted(set(axes) - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    with jax.named_scope(CAST_SCOPE):  # Of the transpose: the cast itself sends nothing.
        return jax.tree.map(cast, tree)


class Wire(NamedTuple):
    """What travels, where it is not the parameter's own dtype, and which way.

    Attributes:
      gather_dtype: What a shard is cast to before it is gathered, and computed with; `None`: as it
        is.
      reduce_dtype: What gradients are summed in; `None`: the dtype in which they arrive.
      axis_by_axis: Whether what is sharded over a tuple of axes is gathered, and its gradient
        scattered, over one of them after the other, and not over their product at once.
    """

    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    axis_by_axis: bool = False

    @property
    def casts(self) -> bool:
        """Whether anything travels in another dtype than its own."""
        return self.gather_dtype is not None or self.reduce_dtype is not None

    @property
    def uncast(self) -> "Wire":
        """The same way, for what travels as it is."""
        return self._replace(gather_dtype=None, reduce_dtype=None)

    def rounds(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """The axes of each collective that scatters over `axes`, in order; gathers go backwards.

        The major axis is scattered over first, so that shards lie as a `PartitionSpec` says. Either
        way a device sends as many bytes: what one round leaves is all that the next one sends.
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
      wire: The dtypes that travel, and which way.

    Returns:
      The whole array, `[..., D, ...]`, on every device, of dtype `wire.gather_dtype`.

    Raises:
      ValueError: A mesh axis is not bound, or `axis` is not a dimension of `x`.

    Communication:
      Forward an all-gather over `axis_name`: a device sends `(N - 1) / N` of the gathered bytes on
      a ring of `N`. Backward a reduce-scatter of the same size. With `wire.axis_by_axis` one of
      each for each axis, and as many bytes in all.

    Gradient:
      Written by hand: `psum_scatter(g) / N`, where the transpose of an all-gather would be
      `psum_scatter(g)`. With it the gradient of a sharded parameter is the mean of the devices'
      gradients, as `pmean` gives for a replicated one. It is summed in `wire.reduce_dtype` and has
      the dtype of `x`.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("gather_array_with_mean_grads", axes)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"gather_array_with_mean_grads: axis={axis} is not a dimension of an array of shape "
            f"{x.shape}."
        )
    if is_vma_checked(axes[0]) and not varying_axes(x) & set(axes):
        # Devices that all hold the same shard: flax's nested scans ask so for shapes alone, with
        # values that have lost their types, and expect a type that has lost them too.
        x = jnp.concatenate([x] * jax.lax.axis_size(axes), axis)
        return x.astype(wire.gather_dtype or x.dtype)
    plan = _Gather(axis % x.ndim, axes, x.dtype, wire)
    return _gather_with_mean_grads(cast_to_varying(x, axes), plan)


class _Gather(NamedTuple):
    """What is known of a gather before it runs."""

    dim: int
    axes: tuple[str, ...]
    dtype: Any
    wire: Wire


def _gather(x: jax.Array, plan: _Gather) -> jax.Array:
    with jax.named_scope(GATHER_SCOPE):
        x = x.astype(plan.wire.gather_dtype or x.dtype)
        for axes in reversed(plan.wire.rounds(plan.axes)):
            if jax.lax.axis_size(axes) > 1:  # XLA may keep what sends nothing, and copy for it.
                x = jax.lax.all_gather(x, axes, axis=plan.dim, tiled=True)
        return x


_gather_with_mean_grads = jax.custom_vjp(_gather, nondiff_argnums=(1,))


def _gather_forward(x: jax.Array, plan: _Gather) -> tuple[jax.Array, None]:
    # Not the function with the rule but the bare one: a remat policy must see the all-gather.
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
      wire: Which way it travels; `x` has been cast to the dtype that does.

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
      wire: Which way it travels; the dtype stays.

    Returns:
      The whole array, `[..., D, ...]`, not varying over `axes`.

    Communication:
      One all-gather, or one for each axis: a device sends `(N - 1) / N` of the gathered bytes.

    Gradient:
      The shard of the gradient, nothing is sent: who uses the array differently on the devices
      along `axes` has it summed by the cast that makes it varying.
    """
    with jax.named_scope(scope):
        x = cast_to_varying(x, axes)
        for some in reversed(wire.rounds(axes)):
            x = jax.lax.all_gather(x, some, axis=dim, tiled=True, to="invarying")
        return x


def gather_examples(x: Any, axis_name: AxisName | None = None) -> Any:
    """Gathers what the devices have computed of their examples, for a loss that couples examples.

    Such a loss (in-batch negatives, a statistic of the whole batch) is written once: with this, it
    is the same on one device and on many, in every mode.

    Args:
      x: A tree of arrays `[b, ...]` of any dtype, along whose first dim the device's examples are.
      axis_name: The mesh axis, or tuple of axes, over which the batch is split, in the order of
        `program.data_axes`. If not given, those over which a leaf of `x` varies, in the order of
        the mesh.

    Returns:
      The tree with leaves `[B, ...]`: the examples of all devices, in the order of the batch. With
      `num_minibatches` those are the examples of one minibatch: the `m`-th part of every device's
      share. Where no mesh axis is manual (on one device, in the modes in which XLA writes the
      collectives) `x` has all examples already and is returned as it is; only where shardings are
      types it is made whole, so that it can meet what is sharded.

    Raises:
      ValueError: A leaf has no dims, an axis is not bound, or the types do not say which axes are
        meant. A program that is built with the axes in another order than the batch's is refused.

    Communication:
      One all-gather for each leaf: a device sends `(N - 1) / N` of the gathered bytes. Backward one
      reduce-scatter of the same size for each leaf that has a gradient.

    Gradient:
      That of JAX's all-gather: each device's examples get the sum of the gradients of all devices'
      losses. With the mean over the devices that a program takes, it is exact both if every device
      computes the whole loss and if each computes the loss of its own examples against all.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if not jnp.ndim(leaf):
            raise ValueError(
                f"gather_examples: x{jax.tree_util.keystr(path)} has no dims, expected an array "
                "[b, ...] with one entry for each example. Sum a scalar with jax.lax.psum."
            )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes:
        return jax.tree.map(_unshard_examples, x)
    if not mesh.manual_axes:
        return x
    if axis_name is None:
        varying = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(x)))
        axes = tuple(axis for axis in mesh.axis_names if axis in varying)
        if not axes:
            raise ValueError(
                "gather_examples: x is the same on all devices by its type, expected what is "
                "computed from the batch. Name the axes (axis_name=program.data_axes), or gather "
                "it in one tree with what varies."
            )
    else:
        axes = axis_tuple(axis_name)
        check_axes_bound("gather_examples", axes)

    def gather(leaf: Any) -> jax.Array:
        return jax.lax.all_gather(cast_to_varying(leaf, axes), axes, axis=0, tiled=True)

    with jax.named_scope(EXAMPLES_SCOPE):
        return jax.tree.map(gather, x)


def _unshard_examples(x: jax.Array) -> jax.Array:
    """All examples on every device, where shardings are types."""
    return jax.sharding.reshard(x, PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))
