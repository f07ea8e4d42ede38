"""The facts about each parameter from which a strategy decides how to shard it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from manualpar.core.mesh.axes import Names, axis_tuple, names_to_spec
from manualpar.core.parameters.annotations import Rules, mesh_names, with_all_names
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.parameters.split_parameter import SplitParameter, names_on
from manualpar.core.trees import Infos, Params, path_name


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """The facts about a parameter from which a strategy decides its placement.

    Attributes:
      path: The path in the tree of parameters, such as `encoder/kernel`.
      shape: The global shape.
      dtype: The dtype.
      names: The mesh axes that the model's annotation shards each dimension over.
      loop_dims: The dimensions that `nn.scan` or `nn.vmap` run over. Each use of the parameter gets
        one slice along these dimensions.
      split_axes: The mesh axes in `names` over which the model computes with the shards, see
        `split_parameter.split`. Over the other axes, the parameter is gathered where it is used.
      shared_names: For each dimension, the mesh axes along which several devices use the same
        entry; `()` if no dimension has shared entries.
      trainable: Whether the parameter is trained. If not, it is *frozen*.
      absent_axes: The axes in the annotation of a split parameter that the mesh does not have.
      platform: The platform of the mesh's devices, such as `"gpu"`; `""` if they are not known.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    names: Names
    loop_dims: frozenset[int]
    split_axes: frozenset[str] = frozenset()
    shared_names: Names = ()
    trainable: bool = True
    absent_axes: frozenset[str] = frozenset()
    platform: str = ""

    @property
    def unsharded_dims(self) -> frozenset[int]:
        """The dims that must not be sharded, because of loops or of entries that devices share."""
        loops = frozenset(dim for dim in self.loop_dims if self.names[dim] is None)
        return loops | {dim for dim, name in enumerate(self.shared_names) if name}


def split_names(parameter: ParameterInfo) -> Names:
    """Returns, for each dimension, the axes over which the model computes with shards."""
    split = parameter.split_axes
    return tuple(n if split.issuperset(axis_tuple(n)) else None for n in parameter.names)


def describe_parameters(
    params: Params,
    loop_dims: Mapping[str, frozenset[int]],
    mesh: Mesh,
    rules: Rules,
    data_axes: tuple[str, ...] = (),
) -> Any:
    """Returns a `ParameterInfo` for each leaf of a tree of abstract parameters, boxed or not.

    `loop_dims` maps a parameter's path to the dimensions that loops run over. An annotation that
    does not fit is refused, see `mesh_names`. So is an annotation that names both an axis in
    `data_axes` and another axis for one dim, because gradients are reduced only over the data axis.
    """

    def loop_dims_of(path: Any) -> frozenset[int]:
        return loop_dims.get(path_name(path), frozenset())

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    all_rules = with_all_names([(x, loop_dims_of(path)) for path, x in leaves], mesh, rules)

    def info(path: Any, x: Any) -> ParameterInfo:
        key = path_name(path)
        value = x.value if is_box(x) else x
        dims = loop_dims_of(path)
        names: Names = (None,) * value.ndim
        if is_box(x):
            names = mesh_names(
                key,
                x,
                value.shape,
                loop_dims=dims,
                mesh=mesh,
                rules=rules,
                all_rules=all_rules,
            )
        if isinstance(x, SplitParameter):
            axes = frozenset(axis for name in names for axis in axis_tuple(name))
            _, shared = names_on(key, value.shape, x.names, mesh.shape, shared=x.shared)
            absent = frozenset(x for name in x.names for x in axis_tuple(name)) - {*mesh.shape}
            return ParameterInfo(
                key, value.shape, value.dtype, names, dims, axes, shared, absent_axes=absent
            )
        for dim, name in enumerate(names):
            split = set(axis_tuple(name)) & set(data_axes)
            if split and set(axis_tuple(name)) - split:
                raise ValueError(
                    f"model: parameter {key!r} of shape {value.shape} is sharded along dim {dim} "
                    f"over {name!r}, of which only {sorted(split)} split the batch; expected only "
                    "data axes or only other axes. Annotate two dims, or name one kind of axes."
                )
        return ParameterInfo(key, value.shape, value.dtype, names, dims)

    return jax.tree_util.tree_map_with_path(info, params, is_leaf=is_box)


def on_stages(infos: Infos, stacked: frozenset[str], axis: str) -> Any:
    """Marks the parameters in `stacked` as split over the stages along dim 0.

    Dim 0 is the dimension in which `nn.scan` stacks layers.
    """

    def staged(info: ParameterInfo) -> ParameterInfo:
        if info.path not in stacked:
            return info
        if info.names[0] not in (None, axis):
            raise ValueError(
                f"model: parameter {info.path!r} of shape {info.shape} is annotated to be sharded "
                f"over {info.names[0]!r} along dim 0, but pipeline= splits the layers along dim 0 "
                f"over {axis!r}; expected None for dim 0. Annotate another dim."
            )
        names = (axis, *info.names[1:])
        return dataclasses.replace(info, names=names, split_axes=info.split_axes | {axis})

    return jax.tree.map(staged, infos)


def computed_specs(infos: Infos) -> Any:
    """Returns, per parameter, the `PartitionSpec` of the array that the model computes with."""
    return jax.tree.map(lambda info: names_to_spec(split_names(info)), infos)
