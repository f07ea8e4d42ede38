"""Parameters that are stored in shards and gather themselves where they are used.

`flax.linen` calls `unbox()` on every boxed parameter that a module asks for. `ShardedParameter` is
such a box: it holds a device's shard, and its `unbox()` gathers the full parameter. So a model
written for one device can be sharded without a change. A layer inside `nn.scan` gathers only its
slice of a parameter. A gathered parameter can be dropped after its use (ZeRO-3: Rajbhandari et al.,
https://arxiv.org/abs/1910.02054; FSDP: Zhao et al., https://arxiv.org/abs/2304.11277). The last
section has boxes of replicated parameters, whose gradients are reduced where they are used.

Invariants: `names[i]` is the mesh axis (or tuple of axes) that dimension `i` is sharded over, or
`None`. The value is the device's shard inside `shard_map` and the global array outside. The
gradient of a boxed parameter is boxed too. A dimension whose size is not divisible by the number of
devices may be padded with zeros. Then the padded array is sharded, and `unbox` removes the padding.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from manualpar.core.mesh.axes import AxisName, Names, axis_tuple, is_axis_bound
from manualpar.core.parameters.annotations import take_shared
from manualpar.core.parameters.collectives import (
    EXACT,
    MixedPrecisionPolicy,
    cast_to_varying,
    gather_array_with_mean_grads,
    gather_invariant,
    reduce_mean,
    scatter_mean,
    varying_axes,
)
from manualpar.core.tracing.scopes import NEW_PARAMS_SCOPE
from manualpar.core.trees import Grads, Params

__all__ = [
    "ArrayBox",
    "ShardedParameter",
    "is_box",
    "pad_leaf",
    "unpad_leaf",
]

# -------------------------------------------------------------------------------------------------
# A box that behaves like the array in it.
#
# Modules usually ask for a parameter with `self.param`, which unboxes it. Some modules read the
# parameter from the variables instead, for example to tie the weights of two layers:
# `self.wte.variables["params"]["embedding"].T`. Such a module gets the box and uses it as an
# array. An `ArrayBox` behaves like its unboxed value, so a parameter that gathers itself is
# gathered in this case too.
#
# Libraries that replace products by quantized products (qwix) ask which parameter an operand is:
# they compare the operand with the array of each parameter. So a box remembers the array that the
# module got last.
#
# Invariants: every use unboxes once; shape and dtype are known without unboxing; a box stays a
# pytree whose leaf is the stored array, because flax's transformations need this. So
# `jax.tree.map` over a box gets the stored array, not the parameter. `core.model.probe` refuses
# models with such code.


# Attributes of an array that are known without gathering it.
OF_SHAPE = frozenset({"dtype", "ndim", "shape", "size"})
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS = (
    *("neg", "pos", "abs", "getitem", "eq", "ne", "lt", "le", "gt", "ge"),
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
)


@dataclasses.dataclass(eq=False)
class LastRead:
    """The array that a module got last from a parameter.

    The arrays are held weakly, and `find` returns only an array of the same trace. So no array
    outlives its trace, and a trace gets no array of another trace.
    """

    _stored: Callable[[], Any] = lambda: None
    _array: Callable[[], Any] = lambda: None
    _trace: Any = None

    def keep(self, stored: Any, array: Any) -> None:
        """Remembers the array that was made of `stored`."""
        if isinstance(stored, jax.core.Tracer) and isinstance(array, jax.core.Tracer):
            self._stored, self._array = weakref.ref(stored), weakref.ref(array)
            self._trace = get_opaque_trace_state(convention="flax")

    def find(self, stored: Any) -> Any:
        """Returns the array that was made of `stored` in this trace; `None` if there is none."""
        is_same = self._trace == get_opaque_trace_state(convention="flax")
        return self._array() if is_same and self._stored() is stored else None


class ArrayBox(nn.Partitioned, eq=False, repr=False):
    """A boxed parameter that may be used as the array that its `unbox()` returns.

    A subclass implements `to_array`. Declare it with `eq=False, repr=False`: otherwise `==`
    compares boxes instead of their elements, and `repr` shows everything that a box carries.

    Attributes:
      is_whole: Whether a loss reads the parameter. If so, `unbox()` also gathers over the axes over
        which modules compute with shards, see `core.model.whole_parameters`.

    Communication:
      Each use has the communication of `unbox()`.
    """

    is_whole: bool = flax.struct.field(default=False, pytree_node=False)

    def to_array(self) -> Any:
        """Makes the array that a module gets."""
        raise NotImplementedError

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the array that a module gets, see `to_array`.

        Without `apply_constraint` a library asks which array the module got, and nothing is sent.
        """
        last: LastRead = self.__dict__.setdefault("_last", LastRead())
        (stored, *_) = jax.tree.leaves(self.value)
        if not apply_constraint and (array := last.find(stored)) is not None:
            return array
        array = self.to_array()
        last.keep(stored, array)
        return array

    def __jax_array__(self) -> jax.Array:
        """Unboxes the array for `jax.numpy`."""
        value: jax.Array = self.unbox()
        return value

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the array, such as `T`."""
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(jax.eval_shape(self.to_array) if name in OF_SHAPE else self.unbox(), name)

    def only_value(self) -> Any:
        """Returns an array, or a box whose only array is `value`, for code that keeps only that."""
        return self

    def read_in_branch(self) -> None:
        """Notes that a branch or a loop that some devices skip reads a slice of the parameter."""

    def __repr__(self) -> str:
        """Returns one line: the stored array's dtype and shape, and the axes that shard it."""
        values = ", ".join(map(_describe, jax.tree.leaves(self.value)))
        return f"{type(self).__name__}({values}, names={self.names})"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def _apply_operator(self, *args: Any, name: str) -> Any:
        return getattr(self.__jax_array__(), name)(*args)


def _describe(x: Any) -> str:
    if isinstance(x, jax.Array):
        return str(jax.typeof(x))
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else type(x).__name__


for _name in (f"__{name}__" for name in _OPERATORS):
    setattr(ArrayBox, _name, functools.partialmethod(ArrayBox._apply_operator, name=_name))


# -------------------------------------------------------------------------------------------------


def is_box(x: Any) -> bool:
    """Returns whether `x` is an `nn.Partitioned`, such as a `ShardedParameter`."""
    return isinstance(x, nn.Partitioned)


def boxed_axes(x: Any) -> tuple[str, ...]:
    """Returns the mesh axes that a boxed parameter is sharded over; `()` for an array."""
    return tuple(axis for name in x.names for axis in axis_tuple(name)) if is_box(x) else ()


def averaged_axes(x: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which the backward pass averages the gradient of `x`.

    `x` is a parameter or its gradient. The axes of a reduce-scatter are not counted.
    """
    return x.averaged_axes if isinstance(x, ShardedParameter) else ()


class ShardedParameter(ArrayBox, eq=False, repr=False):
    """The shard of a parameter, in a box that gathers it when a module asks for it.

    Attributes:
      value: The device's shard inside `shard_map`; outside, the global array or its abstract shape.
      names: For each dimension, the mesh axis or tuple of axes that shards it, or `None`.
      gather_axes: The axes to gather over, along which devices have different examples. The
        gradient is scattered back as the mean over these axes.
      shard_only_axes: The axes to gather over, along which devices have the same examples. Each
        device keeps its shard of the gradient. If an axis is in neither field, a dimension sharded
        over it stays sharded.
      shared_names: For each dimension, the mesh axes along which several devices use the same
        entry, see `split_parameter.split`; `()` if no dimension has shared entries.
      padding: The number of zeros at the end of each dimension of the gathered array; `()` if there
        are no zeros. Only dimensions sharded over `gather_axes` are padded.
      comm: The formats in which values are sent, and whether to gather axis by axis.
      largest: The largest magnitude of the full parameter, or of each slice that a loop gathers,
        see `agree_on_largest`; `None` if it is not needed, or not known before the gather.
    """

    names: Names = flax.struct.field(pytree_node=False)  # type: ignore[assignment]  # Tuples too.
    gather_axes: tuple[str, ...] = flax.struct.field(default=(), pytree_node=False)
    shard_only_axes: tuple[str, ...] = flax.struct.field(default=(), pytree_node=False)
    shared_names: Names = flax.struct.field(default=(), pytree_node=False)
    padding: tuple[int, ...] = flax.struct.field(default=(), pytree_node=False)
    comm: MixedPrecisionPolicy = flax.struct.field(default=EXACT, pytree_node=False)
    largest: Any = flax.struct.field(default=None)

    @property
    def averaged_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the gather averages the gradient, beside its own axes."""
        return self.comm.averaged_axes if self.gather_dims() else ()

    def to_array(self) -> Any:
        """Gathers the parameter inside `shard_map`; outside, the value is the full array already.

        Communication:
          One all-gather for each dimension sharded over `gather_axes` or `shard_only_axes`, see
          `gather_array_with_mean_grads` and `gather_invariant`. With `is_whole` also one for each
          other sharded dimension. See `take_shared` for shared entries.
        """
        shared_axes = tuple(axis for name in self.shared_names for axis in axis_tuple(name))
        axes = boxed_axes(self) if self.is_whole else shared_axes
        if not any(map(is_axis_bound, (*self.gather_axes, *self.shard_only_axes, *axes))):
            return self.value
        value = self.value
        if shared_axes and not self.is_whole:  # Takes the slice first, to gather less data.
            value = take_shared(cast_to_varying(value, shared_axes), self.shared_names)
        comm = self.comm
        for dim, name in enumerate(self.names):
            axes = axis_tuple(name)
            if set(axes) & set(self.gather_axes):
                value = self._gather(value, dim, axes, comm)
                comm = dataclasses.replace(comm, averaged_axes=())  # One gather takes the mean.
            elif axes and (self.is_whole or set(axes) & set(self.shard_only_axes)):
                value = gather_invariant(value, dim, axes, comm=self.comm)
        return self.finish(value)

    def finish(self, value: jax.Array) -> jax.Array:
        """Removes the padding of a gathered value and casts it to the dtype that a module gets.

        The result gets no `checkpoint_name`, because a scan does not recognize a named value as one
        of its inputs.
        """
        return cast_floating(unpad_leaf(value, self.padding), self.comm.gather.dtype)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "ShardedParameter":
        """Adds a dim for `nn.scan` or `nn.vmap`, with the mesh axis of their metadata, if any."""
        index %= len(self.names) + 1
        name = params.get(nn.PARTITION_NAME)
        is_mesh_axis = bool(axis_tuple(name)) and all(map(is_axis_bound, axis_tuple(name)))
        return self._with_dims(
            lambda entries, new: (*entries[:index], new, *entries[index:]),
            name if is_mesh_axis else None,
        )

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "ShardedParameter":
        """Drops the entries of a dim that `nn.scan` or `nn.vmap` removes.

        Raises:
          ValueError: The dimension is sharded, so it would have to be gathered.
        """
        index %= len(self.names)
        name = self.names[index]
        if set(axis_tuple(name)) & {*self.gather_axes, *self.shard_only_axes}:
            raise ValueError(
                f"ShardedParameter: nn.scan or nn.vmap runs over dim {index} of a parameter with "
                f"names {self.names}. This dim is sharded over {name!r}, so no device has all of "
                "its slices. Shard another dim of the parameter."
            )
        return self._with_dims(lambda entries, _: (*entries[:index], *entries[index + 1 :]), None)

    def _with_dims(
        self, change: Callable[[Any, Any], tuple[Any, ...]], name: AxisName | None
    ) -> "ShardedParameter":
        """Applies `change(entries, new)` to each field that has an entry for each dimension.

        `name` is the new entry of `names`.
        """
        return self.replace(
            names=change(self.names, name),
            shared_names=change(self.shared_names, None) if self.shared_names else (),
            padding=change(self.padding, 0) if self.padding else (),
        )

    def gather_dims(self) -> list[tuple[int, tuple[str, ...]]]:
        """Returns (dimension, mesh axes) for each dimension sharded over `gather_axes`."""
        dims = enumerate(map(axis_tuple, self.names))
        return [(dim, axes) for dim, axes in dims if set(axes) & set(self.gather_axes)]

    def gather_data_axes(self) -> "ShardedParameter":
        """Gathers the value over `gather_axes`, casts it, and boxes it again.

        A step calls it once, outside the function that is differentiated.

        Communication:
          One all-gather for each dimension sharded over `gather_axes`.
        """
        value, names = self.value, list(self.names)
        for dim, axes in self.gather_dims():
            value = self._gather(value, dim, axes, self.comm)
            names[dim] = None
        value = cast_floating(unpad_leaf(value, self.padding), self.comm.gather.dtype)
        return self.replace(value=value, names=tuple(names), padding=(), largest=None)

    def _gather(
        self, value: jax.Array, dim: int, axes: tuple[str, ...], comm: MixedPrecisionPolicy
    ) -> jax.Array:
        return gather_array_with_mean_grads(value, dim, axes, comm=comm, largest=self.largest)


def pad_leaf(x: jax.Array, padding: tuple[int, ...]) -> jax.Array:
    """Pads the end of each dimension with zeros."""
    return jnp.pad(x, [(0, width) for width in padding]) if any(padding) else x


def unpad_leaf(x: jax.Array, padding: tuple[int, ...]) -> jax.Array:
    """Removes the zeros that `pad_leaf` added."""
    if not any(padding):
        return x
    ends = [size - width for size, width in zip(x.shape, padding, strict=True)]
    return jax.lax.slice(x, [0] * x.ndim, ends)


def cast_floating(x: jax.Array, dtype: str | None) -> jax.Array:
    """Casts a floating-point array if `dtype` is given; returns other arrays as they are."""
    return x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x


def scatter_gradients(grads: Grads, shards: Any) -> Any:
    """Reduces gradients to each device's shard of their mean over the devices.

    Args:
      grads: This device's gradients of full parameters; a gradient is boxed if its parameter is.
      shards: The same tree, with a `ShardedParameter` for each gradient to scatter over the box's
        `gather_axes`.

    Returns:
      The tree of `shards` with gradients as values. Other gradients are returned unchanged.

    Communication:
      One reduce-scatter for each dimension sharded over `gather_axes`, quantized by
      `comm.reduce.quantizer` or in the dtype that `reduction_dtype` returns.
    """

    def scatter(shard: Any, g: Any) -> Any:
        if not is_box(shard) or not shard.gather_dims():
            return g
        value = g.value if is_box(g) else g
        value = pad_leaf(value, shard.padding)
        for dim, axes in shard.gather_dims():
            dtype = reduction_dtype(shard)
            value = scatter_mean(value, dim, axes, comm=shard.comm, dtype=dtype)
        return shard.replace(value=value)

    return jax.tree.map(scatter, shards, grads, is_leaf=is_box)


def comm_policy(x: Any) -> MixedPrecisionPolicy:
    """Returns the communication policy of a `ShardedParameter`; `EXACT` for anything else."""
    return x.comm if isinstance(x, ShardedParameter) else EXACT


def reduction_dtype(x: Any) -> Any:
    """Returns the dtype in which a gradient is reduced; `x` is the gradient or its parameter."""
    if not isinstance(x, ShardedParameter):
        return (x.value if is_box(x) else x).dtype
    return x.comm.reduced_dtype(x.value.dtype)


def replicate_shards(params: Params) -> Any:
    """Gathers boxed shards into replicated parameters.

    Communication:
      One all-gather for each dimension sharded over `gather_axes`.
    """

    def gather(x: Any) -> Any:
        value = x.value
        for dim, axes in x.gather_dims():
            value = gather_invariant(value, dim, axes, scope=NEW_PARAMS_SCOPE, comm=x.comm)
        return unpad_leaf(value, x.padding)

    return jax.tree.map(lambda x: gather(x) if is_box(x) else x, params, is_leaf=is_box)


# -------------------------------------------------------------------------------------------------
# Replicated parameters whose gradients are reduced where the model uses the parameters.
#
# A loop over layers computes the gradient of a layer in each iteration of its backward pass. If
# the gradients are averaged after the loop, no computation hides the collectives. In the loop, the
# mean of a layer's gradient may run behind the backward pass of the layers that follow.
#
# If the gradients are scattered after the loop, a device also holds the gradients of all layers at
# once, which ZeRO-2 should avoid. In the loop, a device scatters the gradient of a layer and keeps
# its shard, as the backward pass of `ShardedParameter.to_array` does.
#
# A cotangent has the shape of its argument, but the shard of a gradient is smaller than the
# parameter. So the loss is differentiated with respect to zeros in the shape of the shard, instead
# of the parameter. No computation reads the zeros.


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
def _with_mean(value: jax.Array, _: Any, comm: MixedPrecisionPolicy) -> jax.Array:
    """Returns `value`, whose gradient is averaged over `comm.averaged_axes`."""
    return cast_to_varying(value, comm.averaged_axes)


def _mean_forward(
    value: jax.Array, quantizer: Any, comm: MixedPrecisionPolicy
) -> tuple[jax.Array, Any]:
    return cast_to_varying(value, comm.averaged_axes), quantizer


def _mean_backward(
    comm: MixedPrecisionPolicy, quantizer: Any, g: jax.Array
) -> tuple[jax.Array, None]:
    quantized = comm.with_reduce_quantizer(quantizer)
    dtype = comm.reduced_dtype(g.dtype)
    mean = reduce_mean(g, comm.averaged_axes, comm=quantized, dtype=dtype)
    return mean.astype(g.dtype), None


_with_mean.defvjp(_mean_forward, _mean_backward)
