"""Layouts: which device holds which part of the training state.

A layout is a tree like the state, with a `PartitionSpec` at each leaf. It is a pure function of
shapes, the model's annotations (`nn.with_partitioning`) and the strategy. No device is needed to
compute it. A strategy's `PlaceFn` returns the `Placement` of a parameter from its `ParameterInfo`.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.parameters.annotations import Rules, mesh_names, with_all_names
from manualpar.core.parameters.sharded_parameter import choose_shard_dim, is_box
from manualpar.core.parameters.split_parameter import SplitParameter, names_on


@dataclasses.dataclass(frozen=True)
class ParameterInfo:
    """The facts about a parameter from which a strategy decides its placement.

    Attributes:
      path: Its path in the tree of parameters, `encoder/kernel`.
      shape: Its global shape.
      dtype: Its dtype.
      names: The mesh axes that the model's annotation shards each dimension over.
      loop_dims: The dimensions that `nn.scan` or `nn.vmap` run over: each use of the parameter sees
        one slice.
      split_axes: The mesh axes in `names` over which the model computes with the shards, see
        `split_parameter.split`. The parameter is gathered over the other axes where it is used.
      shared_names: For each dimension, the mesh axes whose devices share its entries; `()` if no
        dimension has shared entries.
      trainable: Whether the parameter is trained. If not, it is *frozen*.
      absent_axes: Axes that a split parameter names and the mesh does not have.
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

    @property
    def unsharded_dims(self) -> frozenset[int]:
        """The dimensions that must not be sharded, because each use sees one slice of them."""
        loops = frozenset(dim for dim in self.loop_dims if self.names[dim] is None)
        return loops | {dim for dim, name in enumerate(self.shared_names) if name}


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a parameter and its optimizer state are sharded, and how its gradient is reduced.

    A strategy decides the first five fields. `complete_placement` adds the others, which follow
    from the roles of the mesh axes.

    Attributes:
      names: For each dimension of the parameter, the mesh axis or tuple of axes that shards it
        between steps, or `None`.
      note: The reason for the sharded dimension, or the reason why no dimension is sharded.
      state_names: The same as `names` for the gradient and the optimizer's state; `None` if they
        are sharded like the parameter.
      padding: The number of zeros added at the end of each dimension, so that the axes divide the
        sharded dimension; `()` if no zeros are added.
      keep: Whether the parameter is gathered once in each minibatch, before the forward pass, and
        kept until the backward pass.
      mean_axes: The mesh axes along which devices see different examples: the gradient is averaged
        over them.
      sum_axes: The mesh axes along which each device has a part of the gradient: it is summed over
        them.
      divisor: A further divisor of the gradient: autodiff has already summed over some data axes,
        and the divisor makes the sum a mean.
      storage_axes: The mesh axes that only share the storage: the parameter is gathered over them
        where it is used.
      split_axes: The mesh axes over which the model computes with its shards.
      shared_names: As in `ParameterInfo`.
      trainable: As in `ParameterInfo`. A frozen parameter has neither gradient nor state.
    """

    names: Names
    note: str = ""
    state_names: Names | None = None
    padding: tuple[int, ...] = ()
    keep: bool = False
    mean_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    divisor: int = 1
    storage_axes: tuple[str, ...] = ()
    split_axes: frozenset[str] = frozenset()
    shared_names: Names = ()
    trainable: bool = True

    @property
    def sharded_names(self) -> Names:
        """The mesh axes of each dimension of the gradient and of the optimizer's state."""
        return self.names if self.state_names is None else self.state_names

    @property
    def spec(self) -> PartitionSpec:
        """The parameter's `PartitionSpec`; `PartitionSpec()` if it is replicated."""
        return names_to_spec(self.names)

    @property
    def state_spec(self) -> PartitionSpec:
        """The `PartitionSpec` of the gradient and of the optimizer's state."""
        return names_to_spec(self.sharded_names)

    @property
    def parameter_padding(self) -> tuple[int, ...]:
        """The padding of the parameter; `()` if only its gradient and state are sharded."""
        return () if self.state_names is not None else self.padding


def names_to_spec(names: Names) -> PartitionSpec:
    """Makes a `PartitionSpec` from each dimension's axes; `PartitionSpec()` if there are none."""
    return PartitionSpec(*names) if any(map(axis_tuple, names)) else PartitionSpec()


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Returns a tree of abstract arrays with the shardings of another tree."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


# (parameter, axes to shard over, number of devices along them) -> how the parameter is sharded.
PlaceFn = Callable[[ParameterInfo, tuple[str, ...], int], Placement]


def replicate(parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int) -> Placement:
    """Replicates a parameter, except where its annotation shards it."""
    del axes, axis_size
    return Placement(parameter.names)


def shard_one_dim(
    parameter: ParameterInfo,
    axes: tuple[str, ...],
    axis_size: int,
    *,
    min_weight_size: int,
    pad: bool = False,
    keep_gathered: tuple[str, ...] = (),
    replicate: tuple[str, ...] = (),
) -> Placement:
    """Shards a parameter along the dim that `choose_shard_dim` returns, and pads it if needed.

    A parameter that `keep_gathered` names has `Placement.keep`. A parameter that `replicate` names
    is replicated, even if it is annotated.
    """
    if any(is_inside(parameter.path, name) for name in replicate):
        return Placement(split_names(parameter), "named by replicate", keep=True)
    keep = any(is_inside(parameter.path, name) for name in keep_gathered)
    if set(axes) & {axis for name in parameter.names for axis in axis_tuple(name)}:
        return Placement(parameter.names, "annotated", keep=keep)
    shape, names = parameter.shape, parameter.names
    dim, note = choose_shard_dim(
        shape,
        names,
        axis_size,
        min_weight_size=min_weight_size,
        excluded_dims=parameter.unsharded_dims,
        pad=pad,
    )
    if dim is None:
        return Placement(names, note, keep=keep)
    padding: tuple[int, ...] = ()
    if missing := -shape[dim] % axis_size:
        padding = tuple(missing if i == dim else 0 for i in range(len(shape)))
        note = f"padded from {shape[dim]} to {shape[dim] + missing}"
    name = axes[0] if len(axes) == 1 else axes
    names = (*names[:dim], name, *names[dim + 1 :])
    return Placement(names, note, padding=padding, keep=keep)


def split_names(parameter: ParameterInfo) -> Names:
    """Returns the axes of each dimension over which the model computes with shards."""
    split = parameter.split_axes
    return tuple(n if split.issuperset(axis_tuple(n)) else None for n in parameter.names)


def is_inside(path: str, name: str) -> bool:
    """Returns whether a path is `name` or below it: `head/kernel` is inside `head`."""
    return f"{path}/".startswith(f"{name}/")


def check_named(
    builder: str,
    parameters: Iterable[tuple[ParameterInfo, Placement]],
    **fields: tuple[str, ...],
) -> None:
    """Refuses a name in `fields` that is no parameter or module of the model."""
    paths = [info.path for info, _ in parameters]
    for field, name in ((field, name) for field, names in fields.items() for name in names):
        if not any(is_inside(path, name) for path in paths):
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            raise ValueError(
                f"{builder}: {field} names {name!r}, expected a parameter or a module with some, "
                f"such as {near[0]!r}; inspect.layout_table shows all."
            )


def shard_state_only(
    parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int, **placing: Any
) -> Placement:
    """Shards the gradient and the optimizer state like `shard_one_dim`, but not the parameter."""
    sharded = shard_one_dim(parameter, axes, axis_size, **placing)
    if sharded.names == parameter.names or sharded.keep:
        return sharded
    return dataclasses.replace(sharded, names=parameter.names, state_names=sharded.names)


def complete_placement(
    placement: Placement, parameter: ParameterInfo, roles: AxisRoles, mesh: Mesh
) -> Placement:
    """Adds to a strategy's placement the axes to gather over and to reduce gradients over."""
    axes = [axis for name in placement.names for axis in axis_tuple(name)]
    split = parameter.split_axes
    if placement.state_names is not None and not parameter.trainable:
        placement = dataclasses.replace(placement, state_names=None, padding=(), note="")
    return dataclasses.replace(
        placement,
        trainable=parameter.trainable,
        mean_axes=tuple(axis for axis in roles.data_axes if axis not in split),
        sum_axes=tuple(axis for axis in roles.stage_axes if axis not in split),
        # Along these axes a shard is used for the examples of all devices: autodiff has summed.
        divisor=axes_size(mesh, tuple(axis for axis in roles.data_axes if axis in split)),
        storage_axes=tuple(
            axis for axis in axes if roles.role_of(axis) == "storage" and axis not in split
        ),
        split_axes=split,
        shared_names=parameter.shared_names,
    )


def describe_parameters(
    params: Any,
    loop_dims: Mapping[str, frozenset[int]],
    mesh: Mesh,
    rules: Rules,
    data_axes: tuple[str, ...] = (),
) -> Any:
    """Returns a `ParameterInfo` for each leaf of a tree of abstract parameters, boxes included.

    `loop_dims` maps a parameter's path to the dimensions that loops run over. An annotation that
    does not fit is refused, see `mesh_names`. An annotation that mixes an axis of `data_axes` with
    another axis in one dim is refused too, because gradients are reduced over the data axis only.
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
                    f"over {name!r}, of which only {sorted(split)} split the batch; expected data "
                    "axes or other axes. Annotate two dims, or one of the axes."
                )
        return ParameterInfo(key, value.shape, value.dtype, names, dims)

    return jax.tree_util.tree_map_with_path(info, params, is_leaf=is_box)


def on_stages(infos: Any, stacked: frozenset[str], axis: str) -> Any:
    """Marks the parameters in `stacked` as split over the stages along dim 0.

    Dim 0 is the dimension in which `nn.scan` stacks layers.
    """

    def staged(info: ParameterInfo) -> ParameterInfo:
        if info.path not in stacked:
            return info
        if info.names[0] not in (None, axis):
            raise ValueError(
                f"model: parameter {info.path!r} of shape {info.shape} is annotated to be sharded "
                f"over {info.names[0]!r} along the layers of dim 0, which pipeline= spreads over "
                f"{axis!r}; expected None. Annotate another dim."
            )
        names = (axis, *info.names[1:])
        return dataclasses.replace(info, names=names, split_axes=info.split_axes | {axis})

    return jax.tree.map(staged, infos)


def like_params(tree: Any, params: Any, values: Any, default: Any) -> Any:
    """Returns a tree like an optimizer's state, with the value of each leaf's parameter.

    A leaf belongs to a parameter if its path ends in the parameter's path and the shapes are equal.
    Adam's moments belong to a parameter; Adafactor's factored moments have another shape. `values`
    is a tree like `params`. Leaves that belong to no parameter get the default.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        _keys(path): (x.shape, value)
        for (path, x), value in zip(leaves, jax.tree.leaves(values), strict=True)
    }

    def value(path: Any, x: Any) -> Any:
        keys = _keys(path)
        for start in range(len(keys) + 1):
            shape, found = by_path.get(keys[start:], (None, default))
            if shape is not None and shape == x.shape:
                return found
        return default

    return jax.tree_util.tree_map_with_path(value, tree)


def computed_specs(infos: Any) -> Any:
    """Returns the `PartitionSpec` of the array that the model computes with, per parameter."""
    return jax.tree.map(lambda info: names_to_spec(split_names(info)), infos)


def param_specs(placements: Any) -> Any:
    """Returns each parameter's `PartitionSpec`."""
    return jax.tree.map(lambda placement: placement.spec, placements)


def state_specs(placements: Any) -> Any:
    """Returns the `PartitionSpec` of each parameter's gradient."""
    return jax.tree.map(lambda placement: placement.state_spec, placements)


def map_padded(function: Callable[..., Any], tree: Any, paddings: Iterable[Any]) -> Any:
    """Applies `pad_leaf` or `unpad_leaf` to each leaf of a tree, with the leaf's padding."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(function, leaves, paddings))


def strip_boxes(tree: Any) -> Any:
    """Replaces each box by its value, with no constraint and no collective."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def map_in_scopes(function: Callable[..., Any], placements: Any, *trees: Any) -> Any:
    """Maps a function of a placement and leaves over trees with the parameters' structure.

    Each call runs in the named scope of the parameter's path.
    """

    def call(path: Any, *leaves: Any) -> Any:
        with jax.named_scope(path_name(path)):
            return function(*leaves)

    return jax.tree_util.tree_map_with_path(call, placements, *trees)


def path_name(path: Any) -> str:
    """Joins the keys of a tree path by slashes: `encoder/kernel`."""
    return "/".join(_keys(path))


def _keys(path: Any) -> tuple[str, ...]:
    """Returns a path's keys as strings; dict keys, attributes and indices look the same."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
