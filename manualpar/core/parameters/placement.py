"""Layouts: which device stores which part of the training state.

A layout is a tree like the state, with a `PartitionSpec` at each leaf. A layout is a pure function
of shapes, the model's annotations (`nn.with_partitioning`) and the strategy. No device is needed to
compute it. A strategy's `PlaceFn` returns the `Placement` of a parameter from its `ParameterInfo`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple, names_to_spec
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.parameters.parameter_info import ParameterInfo
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import Params, Placements, path_keys, path_name


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a strategy shards a parameter and its optimizer state.

    Attributes:
      names: For each dimension of the parameter, the mesh axis or tuple of axes that shards it
        between steps, or `None`.
      note: The reason why this dimension is sharded, or why no dimension is sharded.
      state_names: The same as `names` for the gradient and the optimizer's state; `None` if they
        are sharded like the parameter.
      padding: The number of zeros added at the end of each dimension, so that the axes divide the
        sharded dimension; `()` if no zeros are added.
      keep: Whether the parameter is gathered once in each minibatch, before the forward pass, and
        kept until the backward pass.
      mean_in_loop: Whether the gradients of layers in a loop are averaged in the loop, if the
        parameter is replicated.
    """

    names: Names
    note: str = ""
    state_names: Names | None = None
    padding: tuple[int, ...] = ()
    keep: bool = False
    mean_in_loop: bool = False

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


@dataclasses.dataclass(frozen=True)
class Route(Placement):
    """A placement, with the axes over which the parameter is gathered and its gradient is reduced.

    The added fields follow from the placement and from the roles of the mesh axes, see
    `route_parameter`.

    Attributes:
      mean_axes: The mesh axes along which devices see different examples. The gradient is averaged
        over these axes.
      sum_axes: The mesh axes along which each device computes a part of the gradient. The parts are
        summed.
      divisor: The number of devices along the data axes over which autodiff has already summed the
        gradient. Dividing by this number makes the sum a mean.
      shard_only_axes: The mesh axes along which devices have the same examples and only divide the
        storage. The parameter is gathered over them where it is used.
      split_axes: The mesh axes over which the model computes with shards of the parameter.
      shared_names: As in `ParameterInfo`.
      trainable: As in `ParameterInfo`. A frozen parameter has neither gradient nor state.
      in_loop: Whether a loop of the model runs over a dimension of the parameter.
    """

    mean_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    divisor: int = 1
    shard_only_axes: tuple[str, ...] = ()
    split_axes: frozenset[str] = frozenset()
    shared_names: Names = ()
    trainable: bool = True
    in_loop: bool = False

    @property
    def is_averaged_in_loop(self) -> bool:
        """Whether a loop's backward pass averages the gradient, in each of its iterations."""
        return self.mean_in_loop and self.in_loop and self.trainable and bool(self.mean_axes)


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Returns a tree of abstract arrays with the shardings of another tree."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


# (parameter, axes to shard over, number of devices along these axes) -> the placement.
PlaceFn = Callable[[ParameterInfo, tuple[str, ...], int], Placement]


def route_parameter(
    placement: Placement, parameter: ParameterInfo, roles: AxisRoles, mesh: Mesh
) -> Route:
    """Returns the route that follows from a strategy's placement and the roles of the axes."""
    axes = [axis for name in placement.names for axis in axis_tuple(name)]
    split = parameter.split_axes
    if placement.state_names is not None and not parameter.trainable:  # It has no state to shard.
        placement = Placement(placement.names, keep=placement.keep)
    return Route(
        placement.names,
        placement.note,
        placement.state_names,
        placement.padding,
        placement.keep,
        placement.mean_in_loop,
        trainable=parameter.trainable,
        mean_axes=tuple(axis for axis in roles.data_axes if axis not in split),
        sum_axes=tuple(axis for axis in roles.stage_axes if axis not in split),
        # If a data axis splits the parameter, each shard is used for the examples of all devices
        # along this axis. Then autodiff has summed the gradient, which is only divided here.
        divisor=axes_size(mesh, tuple(axis for axis in roles.data_axes if axis in split)),
        shard_only_axes=tuple(
            axis for axis in axes if roles.role_of(axis) == "shard_only" and axis not in split
        ),
        split_axes=split,
        shared_names=parameter.shared_names,
        in_loop=bool(parameter.loop_dims),
    )


def like_params(tree: Any, params: Params, values: Any, default: Any) -> Any:
    """Returns a tree like an optimizer's state; each leaf gets the value of its parameter.

    A leaf belongs to a parameter if its path ends in the parameter's path and the shapes are equal.
    Adam's moments belong to a parameter; Adafactor's factored moments have another shape. `values`
    is a tree like `params`. Leaves that belong to no parameter get the default.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
        path_keys(path): (x.shape, value)
        for (path, x), value in zip(leaves, jax.tree.leaves(values), strict=True)
    }

    def value(path: Any, x: Any) -> Any:
        keys = path_keys(path)
        for start in range(len(keys) + 1):
            shape, found = by_path.get(keys[start:], (None, default))
            if shape is not None and shape == x.shape:
                return found
        return default

    return jax.tree_util.tree_map_with_path(value, tree)


def param_specs(placements: Placements) -> Any:
    """Returns each parameter's `PartitionSpec`."""
    return jax.tree.map(lambda placement: placement.spec, placements)


def state_specs(placements: Placements) -> Any:
    """Returns the `PartitionSpec` of each parameter's gradient and optimizer state."""
    return jax.tree.map(lambda placement: placement.state_spec, placements)


def map_padded(function: Callable[..., Any], tree: Any, paddings: Iterable[Any]) -> Any:
    """Applies `pad_leaf` or `unpad_leaf` to each leaf of a tree, with the leaf's padding."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, map(function, leaves, paddings))


def strip_boxes(tree: Any) -> Any:
    """Replaces each box by its value, without constraints or collectives."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def map_in_scopes(function: Callable[..., Any], placements: Placements, *trees: Any) -> Any:
    """Maps `function(placement, *leaves)` over trees with the structure of the parameters.

    Each call runs in a named scope: the path of its parameter.
    """

    def call(path: Any, *leaves: Any) -> Any:
        with jax.named_scope(path_name(path)):
            return function(*leaves)

    return jax.tree_util.tree_map_with_path(call, placements, *trees)
