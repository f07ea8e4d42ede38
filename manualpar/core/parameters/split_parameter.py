"""Parameters that a module computes with in shards.

A parameter that is *stored* in shards is gathered where it is used (FSDP). A parameter that is
*split* is not: its module computes with the device's shard, and the module's own collectives make
the result whole (tensor and expert parallelism). `split` marks such a parameter where the module
makes it. Where the axis is not bound, the module gets the whole parameter, as on one device.

A parameter may be too small to split although its module computes in parallel: with grouped-query
attention there can be fewer key heads than devices. `shared=True` then keeps the parameter whole on
every device and gives each the slice that it shares with its neighbours.

Invariants: the tree of parameters and their initial values are those of one device, whatever the
mesh. An axis that the mesh does not have splits nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax

from manualpar.core.mesh.axes import AxisName, Names, axis_tuple, is_axis_bound


class SplitParameter(nn.Partitioned):
    """The annotation that `split` puts around a parameter.

    Attributes:
      value: The parameter: whole outside of `shard_map`, this device's part inside.
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      shared: Whether devices may share slices of a dimension that has fewer than there are devices.
    """

    names: Names = flax.struct.field(pytree_node=False)  # type: ignore[assignment]  # Tuples too.
    shared: bool = flax.struct.field(default=False, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value as it is; inside `shard_map` it is this device's part already."""
        del apply_constraint
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> "SplitParameter":
        """Leaves whole a dimension that `nn.scan` or `nn.vmap` adds."""
        del params
        names = list(self.names)
        names.insert(index % (len(names) + 1), None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "SplitParameter":
        """Forgets a dimension that `nn.scan` or `nn.vmap` takes away."""
        del params
        names = list(self.names)
        names.pop(index % len(names))
        return self.replace(names=tuple(names))


def split(init: Callable[..., Any], names: Names, *, shared: bool = False) -> Callable[..., Any]:
    """Makes an initializer that marks its parameter as split over mesh axes.

    ```python
    kernel = self.param("kernel", split(init, (None, "model")), (D, F))
    ```

    Inside a `shard_map` that binds `model` the kernel is `[D, F/model]`, and elsewhere `[D, F]`.
    Call the initializer with the global shape in both cases.

    Args:
      init: `init(key, shape, ...)`, an initializer of the whole parameter.
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      shared: Whether a dimension with fewer entries than there are devices along its axes stays
        whole, and each device gets the one entry that it shares with others. (The entries must
        divide the number of devices.) The gradient is summed over the devices that share.

    Returns:
      An initializer of a `SplitParameter`, of a Linen module. (NNX modules annotate theirs by
      `nnx.with_partitioning(init, names, split=True)`, and `shared=True` beside it.)

    Raises:
      ValueError: When it is called: there is not one name for each dimension, or an axis is named
        twice, or a dimension does not divide over the devices.
      TypeError: When it is called: `init` annotates the parameter too.

    Communication:
      None.
    """

    def split_init(key: Any, *args: Any, **kwargs: Any) -> SplitParameter:
        value = init(key, *args, **kwargs)
        if isinstance(value, nn.meta.AxisMetadata):
            raise TypeError(
                f"split: init returned a {type(value).__name__}, expected an array. Annotate once."
            )
        if len(names) != value.ndim:
            raise ValueError(
                f"split: names={names} for a parameter of shape {value.shape}, expected a mesh "
                "axis or None for each dimension."
            )
        sizes = {axis: jax.lax.axis_size(axis) for axis in _axes(names) if is_axis_bound(axis)}
        where = f"split: a parameter of shape {value.shape} with names={names}"
        split_names, shared_names = names_on(where, value.shape, names, sizes, shared=shared)
        for dim, name in enumerate(split_names):
            if axes := axis_tuple(name):
                size = value.shape[dim] // math.prod(sizes[axis] for axis in axes)
                start = jax.lax.axis_index(axes) * size
                value = jax.lax.dynamic_slice_in_dim(value, start, size, axis=dim)
        return SplitParameter(take_shared(value, shared_names), tuple(names), shared=shared)

    return split_init


def names_on(
    where: str,
    shape: tuple[int, ...],
    names: Names,
    sizes: Mapping[str, int],
    *,
    shared: bool,
) -> tuple[Names, Names]:
    """How a split parameter lies on a mesh.

    Args:
      where: What begins an error message.
      shape: The whole parameter's shape.
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      sizes: The sizes of the mesh's axes. Axes that are not among them are left out.
      shared: Whether devices may share slices.

    Returns:
      The names of the dimensions that are split, and those of the dimensions that stay whole and of
      whose entries devices share one each; the second is `()` if there are none.

    Raises:
      ValueError: A dimension does not divide over its axes, or an axis is named twice.
    """
    named = _axes(names)
    if len(set(named)) < len(named):
        raise ValueError(f"{where}, which names an axis twice; name each axis once.")
    split_names: list[AxisName | None] = []
    shared_names: list[AxisName | None] = []
    for dim, (size, name) in enumerate(zip(shape, names, strict=True)):
        axes = tuple(axis for axis in axis_tuple(name) if axis in sizes)
        devices = math.prod(sizes[axis] for axis in axes)
        entry = axes if len(axes) > 1 else axes[0] if axes else None
        is_shared = shared and 0 < size < devices and devices % size == 0
        if not is_shared and size % devices:
            also = f", or to divide it, because it is shared={shared}" if shared else ""
            raise ValueError(
                f"{where}: dim {dim} of size {size} does not divide over the {devices} devices "
                f"along {entry!r}, expected a multiple of {devices}{also}. Change the size, for "
                f"example to {-(-size // devices) * devices}, or the mesh."
            )
        split_names.append(None if is_shared else entry)
        shared_names.append(entry if is_shared else None)
    return tuple(split_names), tuple(shared_names) if any(shared_names) else ()


def take_shared(x: jax.Array, shared_names: Names) -> jax.Array:
    """This device's entry, which it shares with others, along each dimension that has a name.

    Communication:
      None forward. Backward one `psum` of the gradient of `x` over the axes, because autodiff sums
      what the devices contribute.
    """
    for dim, name in enumerate(shared_names):
        if axes := axis_tuple(name):
            # Neighbours share: of two heads on four devices the first two have the first.
            entry = jax.lax.axis_index(axes) * x.shape[dim] // jax.lax.axis_size(axes)
            x = jax.lax.dynamic_slice_in_dim(x, entry, 1, axis=dim)
    return x


def _axes(names: Names) -> list[str]:
    return [axis for name in names for axis in axis_tuple(name)]
