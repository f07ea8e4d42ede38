"""Gathers the examples of all devices, for losses that couple examples."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.tracing.scopes import EXAMPLES_SCOPE


def gather_examples(x: Any, axis_name: AxisName | None = None) -> Any:
    """Gathers arrays with one entry for each example, for a loss that couples examples.

    Examples are losses with in-batch negatives, or with a statistic of the global batch. With this
    function the same loss function has the same value on one device and on many, in every mode.

    Args:
      x: A tree of arrays `[b, ...]` of any dtype, with one entry for each of the device's examples.
      axis_name: The mesh axis, or tuple of axes, over which the batch is split, in the order of
        `program.data_axes`. By default the axes over which a leaf of `x` varies, in the order of
        the mesh.

    Returns:
      The tree with leaves `[B, ...]`: the examples of all devices, in the order of the batch. With
      `num_minibatches` these are the examples of one minibatch: the `m`-th part of every device's
      examples. If no mesh axis is manual, `x` already has all examples and is returned unchanged.
      (No axis is manual on one device, and in the modes in which XLA writes the collectives.) In
      mode `"explicit"`, dim 0 of the result is not sharded, so that it can be combined with arrays
      of the sharded batch.

    Raises:
      ValueError: A leaf has no dims, an axis is not bound, or the type of `x` varies over no axis.
        Building a program fails if the order of the axes differs from the batch's order.

    Communication:
      One all-gather for each leaf: a device sends `(N - 1) / N` of the gathered bytes. Backward:
      one reduce-scatter of the same size for each leaf that has a gradient.

    Gradient:
      The gradient of JAX's all-gather: each device's examples get the sum of the gradients of all
      devices' losses. A program then averages gradients over the devices. So the gradient is exact
      in two cases: if every device computes the loss of all examples, or if each device computes
      the loss of its own examples against all examples.
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
        varying = varying_axes(x)
        axes = tuple(axis for axis in mesh.axis_names if axis in varying)
        if not axes:
            raise ValueError(
                "gather_examples: x is the same on all devices by its type, expected a value "
                "computed from the batch. Name the axes (axis_name=program.data_axes), or put x "
                "into one tree with a value that varies."
            )
    else:
        axes = axis_tuple(axis_name)
        check_axes_bound("gather_examples", axes)

    def gather(leaf: Any) -> jax.Array:
        return jax.lax.all_gather(leaf, axes, axis=0, tiled=True)

    with jax.named_scope(EXAMPLES_SCOPE):
        return jax.tree.map(gather, x)


def _unshard_examples(x: jax.Array) -> jax.Array:
    """Unshards dim 0 of an array in mode `"explicit"`."""
    return jax.sharding.reshard(x, PartitionSpec(None, *jax.typeof(x).sharding.spec[1:]))
