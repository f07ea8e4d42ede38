"""Functions for a user's own `shard_map`: sharding, gathering, and gradient accumulation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import PartitionSpec

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.model.loss_function import LossFn, Metrics, call_loss
from manualpar.core.modes.gradients import accumulate, scanned, unrolled
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.placement import choose_shard_dim, empty_part
from manualpar.core.parameters.sharded_parameter import Names, ShardedParameter, boxed_axes, is_box
from manualpar.core.tracing.scopes import EXAMPLES_SCOPE
from manualpar.core.trees import Batch, Collections, Params


def shard_params(params: Params, axis_name: AxisName, min_weight_size: int = 2**18) -> Any:
    """Replaces every large parameter by this device's shard.

    Args:
      params: A tree of replicated parameters, the same on all devices along `axis_name`. Leaves may
        be boxed already (`nn.Partitioned`). A box that already names one of the axes is returned
        unchanged.
      axis_name: The mesh axis to shard over, or a tuple of axes. With a tuple, one dimension is
        sharded over the product of its axes.
      min_weight_size: Parameters with fewer elements stay replicated.

    Returns:
      The same tree. A sharded parameter is a `ShardedParameter` with the value
      `[..., D/axis_name, ...]`. It is sharded along a free dimension that the size of the axis
      divides. `choose_shard_dim` chooses among these dimensions. Other parameters are returned
      unchanged, and absl logs the reason at level info.

    Raises:
      ValueError: An axis is not bound by a `shard_map`.

    Communication:
      None.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("shard_params", axes)
    axis_size, name = jax.lax.axis_size(axes), axes[0] if len(axes) == 1 else axes

    def shard(x: Any) -> Any:
        value = x.value if is_box(x) else x
        names = _full_names(x, value.ndim)
        if set(boxed_axes(x)) & set(axes):
            return x
        dim, note = choose_shard_dim(value.shape, names, axis_size, min_weight_size=min_weight_size)
        if dim is None:
            logging.info("shard_params: %s with names %s stays whole: %s", value.shape, names, note)
            return x
        size = value.shape[dim] // axis_size
        start = jax.lax.axis_index(axes) * size
        x_shard = jax.lax.dynamic_slice_in_dim(value, start, size, axis=dim)
        gather_axes = x.gather_axes if isinstance(x, ShardedParameter) else ()
        return ShardedParameter(
            x_shard, (*names[:dim], name, *names[dim + 1 :]), gather_axes=(*gather_axes, *axes)
        )

    return jax.tree.map(shard, params, is_leaf=is_box)


def gather_params(params: Params, axis_name: AxisName) -> Any:
    """Gathers every parameter that is sharded over a mesh axis.

    Args:
      params: A tree of arrays and boxes, as `shard_params` returns it.
      axis_name: The mesh axis, or tuple of axes, to gather over.

    Returns:
      The same tree with plain arrays for parameters that are now replicated. A dimension that is
      sharded over a tuple with one of these axes is gathered over the full tuple, because the
      shards are not contiguous along one axis. A parameter that is also sharded over other axes
      stays in a box that names the other axes.

    Raises:
      ValueError: An axis is not bound by a `shard_map`.

    Communication:
      One all-gather for each gathered dimension, and one reduce-scatter in the backward pass.

    Gradient:
      The mean over the devices along the gathered axes, see `gather_array_with_mean_grads`.
    """
    axes = axis_tuple(axis_name)
    check_axes_bound("gather_params", axes)

    def gather(x: Any) -> Any:
        if not set(boxed_axes(x)) & set(axes):
            return x
        names = _full_names(x, x.value.ndim)
        gathered = ShardedParameter(x.value, names, gather_axes=axes).gather_data_axes()
        if not boxed_axes(gathered):
            return gathered.value
        others = tuple(axis for axis in getattr(x, "gather_axes", ()) if axis not in axes)
        return gathered.replace(gather_axes=others)

    return jax.tree.map(gather, params, is_leaf=is_box)


def shard_module_params(
    target: type[nn.Module] | Callable[..., Any], axis_name: AxisName, min_weight_size: int = 2**18
) -> Any:
    """Wraps a module so that its parameters are sharded between calls and gathered in each call.

    A call gathers each parameter of the module once, even if the module uses it several times. (A
    `ShardedParameter` is gathered at each use.)

    Args:
      target: A Linen module class, or a function with a module as its first argument.
      axis_name: The mesh axis, or tuple of axes, to shard over. A `shard_map` must bind the axis
        when the module is initialised or applied.
      min_weight_size: Parameters with fewer elements stay replicated.

    Returns:
      The wrapped class or function, used like `target`. Its initialised `params` contain
      `ShardedParameter` boxes.

    Communication:
      The communication of `gather_params`, once for each call.
    """

    def gather(params: Params) -> Any:
        return gather_params(params, axis_name)

    def shard(params: Params) -> Any:
        return shard_params(params, axis_name, min_weight_size)

    return nn.map_variables(
        target, trans_in_fn=gather, trans_out_fn=shard, mapped_collections="params", mutable=True
    )


def accumulate_gradients(
    state: Any,
    batch: Batch,
    rng: jax.Array,
    num_minibatches: int,
    loss_fn: LossFn,
    use_scan: bool = False,
) -> tuple[Any, Metrics]:
    """Computes the gradient of one device's examples, one minibatch after another.

    Args:
      state: An object with `params` (boxes allowed) and `apply_fn`, such as a `TrainState`.
      batch: A tree whose leaves are `[B, ...]`, this device's examples. Scalars are passed to every
        minibatch unchanged.
      rng: A key, which is split into a key for each minibatch. Apply `fold_rng_over_axis` first if
        devices should get different keys.
      num_minibatches: The number of equal parts into which the batch is split. This number must
        divide `B`.
      loss_fn: `loss_fn(params, apply_fn, minibatch, rng) -> (loss, metrics)`. `loss` is the mean
        over the minibatch's valid examples. `metrics["loss"]` is the pair (sum of the loss, number
        of valid examples). Other metrics are pairs (sum, count) of scalars too.
      use_scan: Whether to run the minibatches in a `jax.lax.scan`, which is compiled once, instead
        of a Python loop.

    Returns:
      The gradients, with the parameters' structure and dtypes, and the metrics summed over the
      minibatches. The gradients differ between devices. `sync_gradients` turns them into the
      gradient of the global mean.

    Raises:
      ValueError: `num_minibatches` does not divide the batch, the loss is not a scalar, or
        `metrics` has no `"loss"` pair.
      TypeError: `loss_fn` does not return a pair of a loss and a mapping.

    Communication:
      One `pmean` of a scalar if the count may differ between devices, as in masked losses. One
      `psum` of a scalar for each minibatch in the backward pass, if the loss is already the same on
      all devices. In addition, boxed parameters are gathered.

    Gradient:
      Each minibatch contributes the gradient of `loss * count`, where `count` is the number of its
      valid examples. Contributions are summed in float32, and divided by the mean count of a
      device. So the mean over the devices is the gradient of the global mean.
    """

    def stateless(
        params: Params, collections: Collections, minibatch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        loss, metrics = call_loss(loss_fn, params, state.apply_fn, minibatch, key)
        return loss, jax.lax.stop_gradient(metrics), collections

    minibatches = split_minibatches(batch, num_minibatches)
    schedule = scanned if use_scan else unrolled
    params = state.params, empty_part(state.params)
    grads, sums, _ = accumulate(stateless, params, {}, minibatches, rng, schedule=schedule)
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params), sums.metrics


def _full_names(x: Any, ndim: int) -> Names:
    """Returns a leaf's mesh axes, one entry for each dimension."""
    names = tuple(x.names) if is_box(x) else ()
    return names + (None,) * (ndim - len(names))


# -------------------------------------------------------------------------------------------------
# Gathers the examples of all devices, for losses that couple examples.


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
