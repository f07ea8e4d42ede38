"""Layouts: which device holds which part of the training state.

A layout is a tree like the state with a `PartitionSpec` at each leaf. It is a pure function of
shapes, of the model's annotations (`nn.with_partitioning`), and of the strategy; deciding it
touches no device. A strategy is a `PlaceFn`: from what is known of a parameter to a `Placement`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
from jax.sharding import Mesh, PartitionSpec

from manualpar.mesh import axes_size, axis_tuple
from manualpar.model import leaf_paths, train_argument
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
    model: nn.Module, variables: Any, inputs: Any, data_axes: tuple[str, ...]
) -> tuple[Any, tuple[str, ...]]:
    """Finds out what a layout depends on, by tracing the model once on abstract values.

    Args:
      model: The Linen model.
      variables: Its abstract variables as `init` returns them, boxes included.
      inputs: Its abstract inputs.
      data_axes: The mesh axes that annotations may name.

    Returns:
      The tree of parameters with a `ParameterInfo` at each leaf; and the collections that applying
      the model leaves in the structure that it finds them in, which are those that a training state
      can carry (a collection that is only sown into grows).

    Raises:
      ValueError: An annotation names something else than `data_axes`.
    """
    params = variables["params"]
    loop_dims: dict[str, set[int]] = {}

    def probe(path: Any, x: Any) -> "_Probe":
        key = path_name(path)
        value = x.value if is_box(x) else x
        loop_dims[key] = set()
        return _Probe(value, tuple(map(str, range(value.ndim))), seen=_Seen(loop_dims[key]))

    probes = jax.tree_util.tree_map_with_path(probe, params, is_leaf=is_box)
    others = {name: strip_boxes(tree) for name, tree in variables.items() if name != "params"}

    def apply(probes: Any, others: Any, inputs: Any) -> Any:
        arguments = train_argument(model, train=False)
        rngs = {"params": jax.random.key(0)}
        return model.apply(
            {"params": probes, **others}, inputs, rngs=rngs, mutable=list(others), **arguments
        )[1]

    updated = jax.eval_shape(apply, probes, others, inputs)
    carried = tuple(
        name
        for name, tree in others.items()
        if leaf_paths(tree) == leaf_paths(dict(updated).get(name, tree))
    )

    def info(path: Any, x: Any) -> ParameterInfo:
        key = path_name(path)
        value = x.value if is_box(x) else x
        dims = frozenset(loop_dims[key])
        names = _annotation(key, x, value.ndim, dims, data_axes)
        return ParameterInfo(key, value.shape, value.dtype, names, dims)

    return jax.tree_util.tree_map_with_path(info, params, is_leaf=is_box), carried


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


class _Seen:
    """The dimensions of a parameter that loops run over; one object in all copies of a box."""

    def __init__(self, dims: set[int]) -> None:
        self.dims = dims


class _Probe(nn.Partitioned):
    """A box that notes which dimensions `nn.scan` and `nn.vmap` take away; names are numbers."""

    seen: Any = flax.struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value as it is."""
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """A dimension that is not the parameter's own."""
        names = list(self.names)
        names.insert(index % (len(names) + 1), None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Probe":
        """Notes the dimension."""
        names = list(self.names)
        dim = names.pop(index % len(names))
        if dim is not None:
            self.seen.dims.add(int(dim))
        return self.replace(names=tuple(names))


def _annotation(
    path: str, x: Any, ndim: int, loop_dims: frozenset[int], data_axes: tuple[str, ...]
) -> Names:
    """The mesh axes that a parameter's box names; a loop's name for its dim is not one."""
    if not is_box(x):
        return (None,) * ndim
    names: Names = tuple(x.names) + (None,) * (ndim - len(x.names))
    names = tuple(
        None if dim in loop_dims and not set(axis_tuple(name)) <= set(data_axes) else name
        for dim, name in enumerate(names)
    )
    unknown = sorted({axis for name in names for axis in axis_tuple(name)} - set(data_axes))
    if unknown:
        raise ValueError(
            f"model: parameter {path!r} is annotated with names {names}, of which {unknown} are "
            "not data axes of this program "
            f"{data_axes}. Logical names and model axes are not supported here; annotate with "
            f"{data_axes} or leave the "
            "dimension unnamed."
        )
    return names


def _keys(path: Any) -> tuple[str, ...]:
    """A tree path as strings, the same for dict keys, attributes and indices of one name."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
