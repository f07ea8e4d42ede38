"""Collectives whose gradient is written by hand, and what the types say about them.

Under `jax.shard_map(check_vma=True)` the type of every value names the mesh axes over which it
*varies*, that is, over which devices may hold different values. Everything that reads or changes
that set is in this file.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.mesh import AxisName, axis_tuple, check_axes_bound


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

    return jax.tree.map(cast, tree)


def gather_array_with_mean_grads(x: jax.Array, axis: int, axis_name: AxisName) -> jax.Array:
    """Gathers the shards of an array; its gradient is scattered back as the mean over the devices.

    Args:
      x: The local shard, `[..., D/axis_name, ...]`.
      axis: The dimension along which `x` is sharded.
      axis_name: The mesh axis, or tuple of axes, over which it is sharded.

    Returns:
      The whole array, `[..., D, ...]`, on every device.

    Raises:
      ValueError: A mesh axis is not bound, or `axis` is not a dimension of `x`.

    Communication:
      Forward an all-gather over `axis_name`: a device sends `(N - 1) / N` of the gathered bytes on
      a ring of `N`. Backward a reduce-scatter of the same size.

    Gradient:
      Written by hand: `psum_scatter(g) / N`, where the transpose of an all-gather would be
      `psum_scatter(g)`. With it the gradient of a sharded parameter is the mean of the devices'
      gradients, as `pmean` gives for a replicated one.
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
        return jnp.concatenate([x] * jax.lax.axis_size(axes), axis)
    return _gather_with_mean_grads(cast_to_varying(x, axes), axis % x.ndim, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_with_mean_grads(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    with jax.named_scope("gather_params"):
        return jax.lax.all_gather(x, axes, axis=dim, tiled=True)


def _gather_forward(x: jax.Array, dim: int, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _gather_with_mean_grads(x, dim, axes), None


def _gather_backward(dim: int, axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    with jax.named_scope("scatter_gradients"):
        total = jax.lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
        return (total / jax.lax.axis_size(axes),)


_gather_with_mean_grads.defvjp(_gather_forward, _gather_backward)
