"""Replicated parameters whose gradients are reduced where the model uses the parameters.

A loop over layers computes the gradient of a layer in each iteration of its backward pass. If the
gradients are averaged after the loop, no computation hides the collectives. In the loop, the mean
of a layer's gradient may run behind the backward pass of the layers that follow.

If the gradients are scattered after the loop, a device also holds the gradients of all layers at
once, which ZeRO-2 should avoid. In the loop, a device scatters the gradient of a layer and keeps
its shard, as the backward pass of `ShardedParameter.to_array` does.

A cotangent has the shape of its argument, but the shard of a gradient is smaller than the
parameter. So the loss is differentiated with respect to zeros in the shape of the shard, instead of
the parameter. No computation reads the zeros.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName, is_axis_bound
from manualpar.core.parameters.collectives import (
    CommPolicy,
    cast_to_varying,
    reduce_mean,
    varying_axes,
)
from manualpar.core.parameters.sharded_parameter import (
    ShardedParameter,
    is_box,
    pad_leaf,
    scatter_gradients,
)


class ReplicatedParameter(ShardedParameter, eq=False, repr=False):
    """A parameter with a box for the shard of its gradient.

    Attributes:
      value: Zeros in the shape of the device's shard of the gradient. The gradient of a loss with
        respect to them is the shard of the mean gradient over `gather_axes`. The other fields of
        `ShardedParameter` describe this shard.
      whole: The parameter: an array, or the box that the mode makes of it.
    """

    whole: Any = flax.struct.field(default=None)

    @classmethod
    def from_gradient(cls, shard: ShardedParameter, whole: Any) -> "ReplicatedParameter":
        """Makes the box of a parameter from the box that `zeros_of_shard` returns."""
        return cls(**_fields(shard), whole=whole)

    def to_array(self) -> Any:
        """Returns the parameter; its gradient is scattered.

        Communication:
          Backward: the reduce-scatters of `scatter_gradients`. Forward: what `whole` needs.
        """
        linked = self.only_value()
        return linked.unbox() if is_box(linked) else linked

    def only_value(self) -> Any:
        """Returns the parameter as an array or in the mode's box; its gradient is scattered."""
        value = self.whole.value if is_box(self.whole) else self.whole
        shard = ShardedParameter(**_fields(self))
        axes = {axis for _, axes in shard.gather_dims() for axis in axes}
        # A loop of flax traces a box only to find shapes. Values in such a trace do not vary.
        if all(map(is_axis_bound, axes)) and axes <= varying_axes(self.value):
            # A quantizer may contain a key, so it is an argument, and no part of a static field.
            exact = shard.replace(comm=self.comm.with_reduce_quantizer(None))
            value = _with_scattered_gradient(exact, value, self.comm.reduce.quantizer)
        if not is_box(self.whole):
            return value
        return self.whole.replace(value=value, is_whole=self.is_whole)

    def _with_dims(
        self, change: Callable[[Any, Any], tuple[Any, ...]], name: AxisName | None
    ) -> "ReplicatedParameter":
        box = cast(ReplicatedParameter, super()._with_dims(change, name))
        # `self.whole` has the same dims, so its entries change in the same way.
        whole = self.whole._with_dims(change, name) if is_box(self.whole) else self.whole
        return box.replace(whole=whole)


class AveragedParameter(ShardedParameter, eq=False, repr=False):
    """A replicated parameter whose gradient `unbox` averages over `comm.averaged_axes`."""

    @classmethod
    def from_parameter(cls, axes: tuple[str, ...], parameter: Any) -> "AveragedParameter":
        """Makes the box of a parameter, an array or its box, whose gradient is averaged."""
        if not is_box(parameter):
            parameter = ShardedParameter(parameter, (None,) * parameter.ndim)
        box = cls(**_fields(parameter))
        return box.replace(comm=dataclasses.replace(box.comm, averaged_axes=axes))

    @property
    def averaged_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the gradient is averaged."""
        return self.comm.averaged_axes

    def to_array(self) -> Any:
        """Returns the parameter; its gradient is averaged.

        Communication:
          Backward: the all-reduces of `reduce_mean`. Forward: as `ShardedParameter.to_array`.
        """
        box = self
        if all(map(is_axis_bound, self.averaged_axes)):
            exact = self.comm.with_reduce_quantizer(None)
            box = self.replace(value=_with_mean(self.value, self.comm.reduce.quantizer, exact))
        return super(AveragedParameter, box).to_array()


def _fields(box: ShardedParameter) -> dict[str, Any]:
    return {field.name: getattr(box, field.name) for field in dataclasses.fields(ShardedParameter)}


def zeros_of_shard(box: ShardedParameter) -> ShardedParameter:
    """Returns zeros in the shape of a device's shard of a gradient, in a box.

    `box` is the box of the gradient with the parameter as its value.
    """

    def shard(x: jax.Array) -> jax.Array:
        x = pad_leaf(x, box.padding)
        for dim, axes in box.gather_dims():
            x = jax.lax.slice_in_dim(x, 0, x.shape[dim] // jax.lax.axis_size(axes), axis=dim)
        return x

    shape = jax.eval_shape(shard, box.value)
    zeros = jnp.zeros(shape.shape, shape.dtype)
    return box.replace(value=cast_to_varying(zeros, varying_axes(box.value)))


@jax.custom_vjp
def _with_scattered_gradient(shard: ShardedParameter, value: jax.Array, _: Any) -> jax.Array:
    """Returns `value`; its gradient, scattered, is the gradient of `shard`."""
    return cast_to_varying(value, varying_axes(shard.value))


def _forward(shard: ShardedParameter, value: jax.Array, quantizer: Any) -> tuple[jax.Array, Any]:
    # The result must be `value` itself, so that a loop does not save a copy for its backward pass.
    return cast_to_varying(value, varying_axes(shard.value)), (shard, quantizer)


def _backward(residuals: Any, g: jax.Array) -> tuple[ShardedParameter, None, None]:
    shard, quantizer = residuals
    comm = shard.comm.with_reduce_quantizer(quantizer)
    scattered = scatter_gradients(g, shard.replace(comm=comm)).value
    return shard.replace(value=scattered.astype(shard.value.dtype)), None, None


_with_scattered_gradient.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_mean(value: jax.Array, _: Any, comm: CommPolicy) -> jax.Array:
    """Returns `value`, whose gradient is averaged over `comm.averaged_axes`."""
    return cast_to_varying(value, comm.averaged_axes)


def _mean_forward(value: jax.Array, quantizer: Any, comm: CommPolicy) -> tuple[jax.Array, Any]:
    return cast_to_varying(value, comm.averaged_axes), quantizer


def _mean_backward(comm: CommPolicy, quantizer: Any, g: jax.Array) -> tuple[jax.Array, None]:
    quantized = comm.with_reduce_quantizer(quantizer)
    dtype = comm.reduced_dtype(g.dtype)
    mean = reduce_mean(g, comm.averaged_axes, comm=quantized, dtype=dtype)
    return mean.astype(g.dtype), None


_with_mean.defvjp(_mean_forward, _mean_backward)
