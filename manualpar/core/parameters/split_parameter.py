"""Split parameters, whose modules compute with a shard of the parameter.

A parameter that is *stored* in shards is gathered where it is used (FSDP). A parameter that is
*split* is not gathered: its module computes with the device's shard, and collectives of the module
complete the result (tensor and expert parallelism). `split` marks such a parameter when the module
makes it. If the axis is not bound, the module gets the full parameter, as on one device.

A parameter may be too small to split although its module computes in parallel: grouped-query
attention can have fewer key heads than devices. `shared=True` then replicates the parameter, and
all devices of a group of neighbours use the same slice.

Invariants: the tree of parameters and their initial values are the same as on one device, for every
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
      value: The parameter: the full array outside of `shard_map`, this device's shard inside.
      names: For each dimension, the mesh axis or tuple of axes that splits it, or `None`.
      shared: Whether a dimension with fewer entries than devices is stored replicated, so that
        several devices use the same entry.
    """

    names: Names = flax.struct.field(pytree_node=False)  # type: ignore[assignment]  # Tuples too.
    shared: bool = flax.struct.field(default=False, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the value as it is; inside `shard_map` it is this device's shard already."""
        del apply_constraint
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> "SplitParameter":
        """Adds an unsplit dimension, for `nn.scan` and `nn.vmap`."""
        del params
        names = list(self.names)
        names.insert(index % (len(names) + 1), None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "SplitParameter":
        """Removes a dimension, for `nn.scan` and `nn.vmap`."""
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
      init: `init(key, shape, ...)`, an initializer of the full parameter.
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      shared: Set it for a dimension with fewer entries than devices along its axes (2 key heads on
        8 devices). The dimension is stored replicated, and a group of devices uses each entry.
        (The number of entries must divide the number of devices.) The gradient of an entry is
        summed over the entry's group.

    Returns:
      An initializer of a `SplitParameter`, for a Linen module. (NNX modules annotate their
      parameters by `nnx.with_partitioning(init, names, split=True)`, and `shared=True` if wanted.)

    Raises:
      ValueError: The returned initializer raises this error if `names` does not have one entry for
        each dimension, if an axis is named twice, or if the size of a dimension is not divisible by
        the number of devices along its axes.
      TypeError: The returned initializer raises this error if `init` annotates the parameter too.

    Communication:
      None.
    """

    def split_init(key: Any, *args: Any, **kwargs: Any) -> SplitParameter:
        value = init(key, *args, **kwargs)
        if isinstance(value, nn.meta.AxisMetadata):
            raise TypeError(
                f"split: init returned a {type(value).__name__}, expected an array. Annotate the "
                "parameter only by split."
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
    """Decides how a split parameter is sharded on a mesh.

    Args:
      where: The beginning of an error message.
      shape: The full parameter's shape.
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      sizes: The sizes of the mesh's axes. Other axes in `names` are ignored.
      shared: Whether devices may share entries, see `split`.

    Returns:
      Two tuples with an entry for each dimension: the axes that split the dimension, and the axes
      along which several devices use the same entry of the dimension. The second tuple is `()` if
      no devices share entries.

    Raises:
      ValueError: The size of a dimension is not divisible by the number of devices along its axes,
        or an axis is named twice.
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
            also = f", or a divisor of {devices}, because shared={shared}" if shared else ""
            raise ValueError(
                f"{where}: dim {dim} of size {size} does not divide over the {devices} devices "
                f"along {entry!r}, expected a multiple of {devices}{also}. Change the size, for "
                f"example to {-(-size // devices) * devices}, or the mesh."
            )
        split_names.append(None if is_shared else entry)
        shared_names.append(entry if is_shared else None)
    return tuple(split_names), tuple(shared_names) if any(shared_names) else ()


def take_shared(x: jax.Array, shared_names: Names) -> jax.Array:
    """Slices out the entry that this device uses, along each dim named in `shared_names`.

    Communication:
      Forward: none. Backward: one `psum` of the gradient of `x` over the axes, because autodiff
      sums the devices' contributions.
    """
    for dim, name in enumerate(shared_names):
        if axes := axis_tuple(name):
            # Neighbours share an entry: with two heads on four devices, devices 0 and 1 use head 0.
            entry = jax.lax.axis_index(axes) * x.shape[dim] // jax.lax.axis_size(axes)
            x = jax.lax.dynamic_slice_in_dim(x, entry, 1, axis=dim)
    return x


def _axes(names: Names) -> list[str]:
    return [axis for name in names for axis in axis_tuple(name)]
