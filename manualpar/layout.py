"""Layouts: which device holds which part of the training state.

A layout is a tree like the state with a `PartitionSpec` at each leaf. It is a pure function of
shapes, of the model's annotations (`nn.with_partitioning`), and of the strategy; deciding it
touches no device. A strategy is a `PlaceFn`: from what is known of a parameter to a `Placement`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from manualpar.mesh import axes_size, axis_tuple
from manualpar.partitioning import Names, ShardedParameter, choose_shard_dim, is_box


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """What a strategy may look at to place a parameter.

    Attributes:
      path: Where it is in the tree of parameters, `encoder/kernel`.
      shape: Its global shape.
      dtype: Its dtype.
      names: The mesh axes that the model's annotation shards each dimension over.
      loop_dims: The dimensions that `nn.scan` or `nn.vmap` run over: each use of the parameter sees
        one slice.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: Names
    loop_dims: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lives.

    Attributes:
      names: The mesh axis, or tuple of axes, that each dimension is sharded over, or `None`.
      note: Why it is not sharded where the strategy would have; `''` otherwise.
    """

    names: Names
    note: str = ""

    @property
    def spec(self) -> PartitionSpec:
        """The placement as JAX writes it; `PartitionSpec()` for a replicated parameter."""
        return (
            PartitionSpec(*self.names)
            if any(axis_tuple(name) for name in self.names)
            else PartitionSpec()
        )

    def bytes_per_device(self, shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> int:
        """The bytes of a parameter's shard on one device."""
        shards = axes_size(mesh, tuple(axis for name in self.names for axis in axis_tuple(name)))
        return math.prod(shape) // shards * dtype.itemsize


# (parameter, data axes, number of devices along them) -> where the parameter lives.
PlaceFn = Callable[[ParameterInfo, tuple[str, ...], int], Placement]


def replicate(parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int) -> Placement:
    """Places a parameter whole on every device, except where its annotation shards it."""
    del axes, axis_size
    return Placement(parameter.names)


def shard_largest_dim(
    parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int, *, min_weight_size: int
) -> Placement:
    """Shards a parameter along its largest free dimension, as `shard_params` does."""
    if set(axes) & {axis for name in parameter.names for axis in axis_tuple(name)}:
        return Placement(parameter.names)
    dim, note = choose_shard_dim(
        parameter.shape,
        parameter.names,
        axis_size,
        min_weight_size=min_weight_size,
        excluded_dims=parameter.loop_dims,
    )
    if dim is None:
        return Placement(parameter.names, note)
    name = axes[0] if len(axes) == 1 else axes
    return Placement((*parameter.names[:dim], name, *parameter.names[dim + 1 :]))


def describe_parameters(
    params: Any, loop_dims: Mapping[str, frozenset[int]], mesh: Mesh, data_axes: tuple[str, ...]
) -> Any:
    """Collects what a strategy may look at.

    Args:
      params: The abstract parameters as the model's `init` returns them, boxes included.
      loop_dims: The dimensions that `nn.scan` and `nn.vmap` run over, by a parameter's path.
      mesh: The mesh.
      data_axes: The mesh axes that annotations may name.

    Returns:
      The tree of parameters with a `ParameterInfo` at each leaf.

    Raises:
      ValueError: An annotation names something else than `data_axes`, or does not fit the shape.
    """

    def info(path: Any, x: Any) -> ParameterInfo:
        key = path_name(path)
        value = x.value if is_box(x) else x
        dims = loop_dims.get(key, frozenset())
        names: Names = (None,) * value.ndim
        if is_box(x):
            names = _check_annotation(key, x.names, value.shape, dims, mesh, data_axes)
        return ParameterInfo(key, value.shape, value.dtype, names, dims)

    return jax.tree_util.tree_map_with_path(info, params, is_leaf=is_box)


def like_params(tree: Any, params: Any, specs: Any) -> Any:
    """Gives each leaf of an optimizer's state the spec of the parameter that it belongs to.

    A leaf belongs to a parameter if its path ends in the parameter's path and it has the
    parameter's shape (Adam's moments do, Adafactor's factored ones have another shape); every other
    leaf is replicated.

    Args:
      tree: The abstract optimizer state.
      params: The abstract parameters.
      specs: Their `PartitionSpec`s, of the same structure.

    Returns:
      `tree` with a `PartitionSpec` at each leaf.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        _keys(path): (x.shape, spec)
        for (path, x), spec in zip(flat, jax.tree.leaves(specs), strict=True)
    }

    def spec(path: Any, x: Any) -> PartitionSpec:
        keys = _keys(path)
        for start in range(len(keys) + 1):
            shape, found = by_path.get(keys[start:], (None, None))
            if found is not None and shape == x.shape:
                return found
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def param_specs(placements: Any) -> Any:
    """The tree of parameters with a `PartitionSpec` at each leaf."""
    return jax.tree.map(lambda placement: placement.spec, placements)


def box_params(params: Any, placements: Any, axes: tuple[str, ...]) -> Any:
    """Boxes each sharded parameter so that it is gathered over `axes` where it is used."""

    def box(placement: Placement, x: Any) -> Any:
        is_sharded = len(placement.spec) > 0
        return ShardedParameter(x, placement.names, gather_axes=axes) if is_sharded else x

    return jax.tree.map(box, placements, params)


def strip_boxes(tree: Any) -> Any:
    """Takes what boxes hold out of them as it is, with no constraint and no collective."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def path_name(path: Any) -> str:
    """A tree path as people write it: `encoder/kernel`."""
    return "/".join(_keys(path))


def _check_annotation(
    path: str,
    names: Names,
    shape: tuple[int, ...],
    loop_dims: frozenset[int],
    mesh: Mesh,
    data_axes: tuple[str, ...],
) -> Names:
    """The mesh axes that a parameter's box names; a loop's name for its dim is not one."""
    where = f"model: parameter {path!r} of shape {shape} is annotated with names {tuple(names)}"
    if len(names) > len(shape):
        raise ValueError(f"{where}, expected no more than one for each dimension.")
    names = (*names, *(None,) * (len(shape) - len(names)))
    names = tuple(
        None if dim in loop_dims and not set(axis_tuple(name)) <= set(data_axes) else name
        for dim, name in enumerate(names)
    )
    axes = [axis for name in names for axis in axis_tuple(name)]
    unknown = sorted(set(axes) - set(data_axes))
    if unknown:
        raise ValueError(
            f"{where}, of which {unknown} are not data axes of this program {data_axes}. Logical "
            f"names and model axes are not supported; name {data_axes} or nothing."
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"{where}, which shards it over an axis twice; name each axis once.")
    for dim, name in enumerate(names):
        if name and (dim in loop_dims or shape[dim] % axes_size(mesh, axis_tuple(name))):
            reason = "nn.scan or nn.vmap runs over" if dim in loop_dims else "does not divide by it"
            raise ValueError(
                f"{where}, but dim {dim} cannot be sharded over {name!r} of size "
                f"{axes_size(mesh, axis_tuple(name))}: {reason}. Name another dim."
            )
    return names


def _keys(path: Any) -> tuple[str, ...]:
    """A tree path as strings, the same for dict keys, attributes and indices of one name."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
