"""Functions for a user's own `shard_map`: shard and gather parameters, accumulate gradients."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from absl import logging

from manualpar.core.mesh.axes import AxisName, axis_tuple, check_axes_bound
from manualpar.core.mesh.splitting import split_minibatches
from manualpar.core.model.loss_function import LossFn, Metrics, call_loss
from manualpar.core.modes.gradients import accumulate, scanned, unrolled
from manualpar.core.parameters.sharded_parameter import (
    Names,
    ShardedParameter,
    boxed_axes,
    choose_shard_dim,
    is_box,
)


def shard_params(params: Any, axis_name: AxisName, min_weight_size: int = 2**18) -> Any:
    """Replaces every large parameter by this device's shard.

    Args:
      params: A tree of replicated parameters, the same on all devices along `axis_name`. Leaves may
        be boxed already (`nn.Partitioned`). A box that names one of the axes in any dimension, as a
        name or in a tuple, is left unchanged.
      axis_name: The mesh axis to shard over, or a tuple of axes: then one dimension is sharded over
        their product.
      min_weight_size: The fewest elements of a parameter that is sharded; smaller parameters stay
        replicated.

    Returns:
      The same tree. A sharded parameter is a `ShardedParameter` holding `[..., D/axis_name, ...]`
      along a free dimension that is divisible by the size of the axis. Dimensions whose shards are
      whole tiles of a TPU's memory come first, then the largest. Other parameters are returned
      unchanged, and absl's log says why at level info.

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


def gather_params(params: Any, axis_name: AxisName) -> Any:
    """Gathers every parameter that is sharded over a mesh axis.

    Args:
      params: A tree of arrays and boxes, as `shard_params` returns it.
      axis_name: The mesh axis, or tuple of axes, to gather over.

    Returns:
      The same tree with plain arrays for parameters that are now replicated. A dimension whose name
      is a tuple with one of the axes in it is gathered over the whole tuple, because its shards are
      not contiguous along one axis of it. A parameter that is also sharded over other axes keeps a
      box that names them.

    Raises:
      ValueError: An axis is not bound by a `shard_map`.

    Communication:
      One all-gather for each such dimension; in the backward pass one reduce-scatter.

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
    """Wraps a module so that its parameters are sharded, and gathered together in a call.

    This is the module-level form of `ShardedParameter`: all parameters of the module are gathered
    once for each call, however often it uses a parameter.

    Args:
      target: A Linen module class, or a function with a module as its first argument.
      axis_name: The mesh axis, or tuple of axes, to shard over; it must be bound when the module is
        initialised or applied.
      min_weight_size: The fewest elements of a parameter that is sharded.

    Returns:
      The wrapped class or function, used like `target`. Its initialised `params` contain
      `ShardedParameter` boxes.

    Communication:
      As `gather_params`, once for each call.
    """

    def gather(params: Any) -> Any:
        return gather_params(params, axis_name)

    def shard(params: Any) -> Any:
        return shard_params(params, axis_name, min_weight_size)

    return nn.map_variables(
        target, trans_in_fn=gather, trans_out_fn=shard, mapped_collections="params", mutable=True
    )


def accumulate_gradients(
    state: Any,
    batch: Any,
    rng: jax.Array,
    num_minibatches: int,
    loss_fn: LossFn,
    use_scan: bool = False,
) -> tuple[Any, Metrics]:
    """Computes a device's share of a step's gradient, one minibatch after another.

    Args:
      state: An object with `params` (boxes allowed) and `apply_fn`, such as a `TrainState`.
      batch: A tree whose leaves are `[B, ...]`, this device's examples. Every minibatch gets
        scalars unchanged.
      rng: A key, from which a key for each minibatch is split. Apply `fold_rng_over_axis` to it if
        devices should differ.
      num_minibatches: The number of equal parts that the batch is split into. It must divide `B`.
      loss_fn: `loss_fn(params, apply_fn, minibatch, rng) -> (loss, metrics)`. `loss` is the mean
        over the minibatch's valid examples; `metrics["loss"]` is the pair (its sum, their count),
        and other metrics are such pairs of scalars too.
      use_scan: Run the minibatches in a `jax.lax.scan` (compiled once) and not unrolled.

    Returns:
      The gradients, of the parameters' structure and dtypes, and the metrics summed over the
      minibatches. The gradients differ between devices. `sync_gradients` makes them the gradient of
      the global mean.

    Raises:
      ValueError: `num_minibatches` does not divide the batch, the loss is not a scalar, `metrics`
        has no `"loss"` pair.
      TypeError: `loss_fn` does not return a pair of a loss and a mapping.

    Communication:
      One `pmean` of a scalar if the count may differ between devices, as with masked losses. In the
      backward pass one `psum` of a scalar for each minibatch if the loss is the same on all devices
      already. Boxed parameters add their gathers.

    Gradient:
      The gradient of the float32 product `loss * count`. Minibatches are accumulated in float32.
    """

    def stateless(
        params: Any, collections: Any, minibatch: Any, key: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        return *call_loss(loss_fn, params, state.apply_fn, minibatch, key), collections

    minibatches = split_minibatches(batch, num_minibatches)
    schedule = scanned if use_scan else unrolled
    grads, metrics, _ = accumulate(stateless, state.params, {}, minibatches, rng, schedule=schedule)
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params), metrics


def _full_names(x: Any, ndim: int) -> Names:
    """Returns the names of a leaf, one for each dimension."""
    names = tuple(x.names) if is_box(x) else ()
    return names + (None,) * (ndim - len(names))
