"""Layouts: which device holds which part of the training state.

A layout is a tree like the state with a `PartitionSpec` at each leaf. It is a pure function of
shapes, of the model's annotations (`nn.with_partitioning`), and of the strategy; deciding it
touches no device. A strategy is a `PlaceFn`: from what is known of a parameter to a `Placement`.
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
    """What a strategy may look at to place a parameter.

    Attributes:
      path: Where it is in the tree of parameters, `encoder/kernel`.
      shape: Its global shape.
      dtype: Its dtype.
      names: The mesh axes that the model's annotation shards each dimension over.
      loop_dims: The dimensions that `nn.scan` or `nn.vmap` run over: each use of the parameter sees
        one slice.
      split_axes: Those of the mesh axes in `names` over which the model computes with its shards,
        see `split_parameter.split`. Over the others it is gathered where it is used.
      shared_names: For each dimension the mesh axes whose devices share its entries; `()` if there
        are none.
      trainable: Whether it is trained. One that is not is *frozen*.
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
    def whole_dims(self) -> frozenset[int]:
        """The dimensions that must stay whole, because each use sees one slice of them."""
        loops = frozenset(dim for dim in self.loop_dims if self.names[dim] is None)
        return loops | {dim for dim, name in enumerate(self.shared_names) if name}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lives, where its optimizer state lives, and how its gradient is reduced.

    A strategy decides the first five fields. `complete_placement` adds the others, which follow
    from the roles of the mesh axes.

    Attributes:
      names: For each dimension of the parameter the mesh axis, or tuple of axes, that it is sharded
        over between steps, or `None`.
      note: Why it is sharded along its dimension, or why not at all; `''` if nobody asks.
      state_names: The same as `names` for the gradient and the optimizer's state; `None` if they
        are equal.
      padding: How many zeros stand at the end of each dimension of whatever is sharded along it, so
        that it divides; `()` if there are none.
      keep: Whether the model gets it whole: gathered once in each minibatch, before the forward
        pass, and kept until the backward pass.
      mean_axes: The mesh axes along which devices see different examples: the gradient is averaged
        over them.
      sum_axes: The mesh axes along which each device has a part of the gradient: it is summed over
        them.
      divisor: What the gradient is divided by besides, where autodiff has already summed over axes
        whose mean is meant.
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
        """The names of the gradient's and the optimizer state's dimensions."""
        return self.names if self.state_names is None else self.state_names

    @property
    def spec(self) -> PartitionSpec:
        """The placement as JAX writes it; `PartitionSpec()` for a replicated parameter."""
        return names_to_spec(self.names)

    @property
    def state_spec(self) -> PartitionSpec:
        """The placement of the gradient and of the optimizer's state, as JAX writes it."""
        return names_to_spec(self.sharded_names)

    @property
    def parameter_padding(self) -> tuple[int, ...]:
        """The padding of the parameter itself: none where it is not sharded between steps."""
        return () if self.state_names is not None else self.padding


def names_to_spec(names: Names) -> PartitionSpec:
    """Names of dimensions as JAX writes them, `PartitionSpec()` if there are none."""
    return PartitionSpec(*names) if any(map(axis_tuple, names)) else PartitionSpec()


def with_shardings(tree: Any, shardings: Any) -> Any:
    """A tree of abstract arrays that lie as another of shardings says."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


# (parameter, axes to shard over, number of devices along them) -> where the parameter lives.
PlaceFn = Callable[[ParameterInfo, tuple[str, ...], int], Placement]


def replicate(parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int) -> Placement:
    """Places a parameter whole on every device, except where its annotation shards it."""
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
    """Shards a parameter along the dimension that `choose_shard_dim` says, padded if need be.

    What `keep_gathered` names is kept. What `replicate` names is whole, annotated or not.
    """
    if any(is_inside(parameter.path, name) for name in replicate):
        return Placement(split_names(parameter), "named by replicate", keep=True)
    keep = any(is_inside(parameter.path, name) for name in keep_gathered)
    if set(axes) & {axis for name in parameter.names for axis in axis_tuple(name)}:
        return Placement(parameter.names, "annotated", keep=keep)
    shape, names, whole = parameter.shape, parameter.names, parameter.whole_dims
    dim, note = choose_shard_dim(
        shape, names, axis_size, min_weight_size=min_weight_size, excluded_dims=whole, pad=pad
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
    """The names of a parameter's dimensions without those that only share its storage."""
    split = parameter.split_axes
    return tuple(n if split.issuperset(axis_tuple(n)) else None for n in parameter.names)


def is_inside(path: str, name: str) -> bool:
    """Whether a parameter's path is `name`, or in what has that name: `head/kernel` in `head`."""
    return f"{path}/".startswith(f"{name}/")


def check_named(
    builder: str,
    parameters: Iterable[tuple[ParameterInfo, Placement]],
    **fields: tuple[str, ...],
) -> None:
    """Refuses names, by the field that has them, of which the model has no parameter."""
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
    """Shards the gradient and the optimizer's state as `shard_one_dim`; not the parameter."""
    sharded = shard_one_dim(parameter, axes, axis_size, **placing)
    if sharded.names == parameter.names or sharded.keep:
        return sharded
    return dataclasses.replace(sharded, names=parameter.names, state_names=sharded.names)


def complete_placement(
    placement: Placement, parameter: ParameterInfo, roles: AxisRoles, mesh: Mesh
) -> Placement:
    """A strategy's placement with how the parameter is gathered and its gradient reduced."""
    axes = [axis for name in placement.names for axis in axis_tuple(name)]
    split = parameter.split_axes
    if placement.state_names is not None and not parameter.trainable:
        placement = dataclasses.replace(placement, state_names=None, padding=(), note="")
    return dataclasses.replace(
        placement,
        trainable=parameter.trainable,
        mean_axes=tuple(axis for axis in roles.data_axes if axis not in split),
        sum_axes=tuple(axis for axis in roles.stage_axes if axis not in split),
        # The shard has met the examples of all devices along these axes, and autodiff has summed.
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
    """The tree of abstract parameters, boxes included, with a `ParameterInfo` at each leaf.

    `loop_dims` are the dimensions that loops run over, by a parameter's path. An annotation that
    does not fit is refused, see `mesh_names`, and so is one that names an axis of `data_axes` and
    another for one dim: gradients are reduced over the first and not over the other.
    """

    def dims_of_loops(path: Any) -> frozenset[int]:
        return loop_dims.get(path_name(path), frozenset())

    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box)
    all_rules = with_all_names([(x, dims_of_loops(path)) for path, x in leaves], mesh, rules)

    def info(path: Any, x: Any) -> ParameterInfo:
        key = path_name(path)
        value = x.value if is_box(x) else x
        dims = dims_of_loops(path)
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
    """What is known of parameters, of which those in `stacked` have a run of layers on each stage.

    Layers are in dim 0, as `nn.scan` stacks them.
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
    """Gives each leaf of an optimizer's state what is said of the parameter that it belongs to.

    A leaf belongs to a parameter if its path ends in the parameter's path and it has the
    parameter's shape (Adam's moments do, Adafactor's factored ones have another shape). `values` is
    a tree like `params`. Leaves that belong to no parameter get the default.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        _keys(path): (x.shape, value)
        for (path, x), value in zip(flat, jax.tree.leaves(values), strict=True)
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
    """The tree of parameters with the `PartitionSpec` of what the model computes with."""
    return jax.tree.map(lambda info: names_to_spec(split_names(info)), infos)


def param_specs(placements: Any) -> Any:
    """The tree of parameters with a `PartitionSpec` at each leaf."""
    return jax.tree.map(lambda placement: placement.spec, placements)


def state_specs(placements: Any) -> Any:
    """The tree of parameters with the `PartitionSpec` of each gradient."""
    return jax.tree.map(lambda placement: placement.state_spec, placements)


def map_padded(function: Callable[..., Any], tree: Any, paddings: Iterable[Any]) -> Any:
    """Applies `pad_leaf` or `unpad_leaf` to each leaf of a tree with the padding of its own."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(function, leaves, paddings))


def strip_boxes(tree: Any) -> Any:
    """Takes what boxes hold out of them as it is, with no constraint and no collective."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def map_in_scopes(function: Callable[..., Any], placements: Any, *trees: Any) -> Any:
    """Maps a function of a placement and leaves over trees like the parameters'.

    Each call runs in the named scope of the parameter's path.
    """

    def call(path: Any, *leaves: Any) -> Any:
        with jax.named_scope(path_name(path)):
            return function(*leaves)

    return jax.tree_util.tree_map_with_path(call, placements, *trees)


def path_name(path: Any) -> str:
    """A tree path as people write it: `encoder/kernel`."""
    return "/".join(_keys(path))


def _keys(path: Any) -> tuple[str, ...]:
    """A tree path as strings, the same for dict keys, attributes and indices of one name."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
