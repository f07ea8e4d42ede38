"""Layouts: which device stores which part of the training state.

A layout is a tree like the state, with a `PartitionSpec` at each leaf. A layout is a pure function
of shapes, the model's annotations (`nn.with_partitioning`) and the strategy. No device is needed to
compute it. A strategy's `PlaceFn` returns the `Placement` of a parameter from its `ParameterInfo`.
"""

import dataclasses
import difflib
import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.mesh.axes import Names, axes_size, axis_tuple, names_to_spec
from manualpar.core.mesh.roles import AxisRoles
from manualpar.core.parameters.annotations import (
    Rules,
    SplitParameter,
    mesh_names,
    names_on,
    with_all_names,
)
from manualpar.core.parameters.sharded_parameter import is_box
from manualpar.core.trees import Infos, Params, Placements, path_keys, path_name
from manualpar.errors import old_names, suggest

__all__ = [
    "Declared",
    "MatrixDims",
    "ParameterInfo",
    "ParameterSharding",
    "PlaceFn",
    "Placement",
    "choose_matrices",
    "combine",
    "describe_parameters",
    "is_trained",
    "map_in_scopes",
    "param_specs",
    "parameter_sharding",
    "partition",
    "replicate",
    "shard_one_dim",
    "shard_state_only",
    "split_over_stages",
    "state_specs",
    "strip_boxes",
]

# -------------------------------------------------------------------------------------------------
# The facts about each parameter from which a strategy decides how to shard it.


class MatrixDims(NamedTuple):
    """The dims by which a parameter is a matrix, or a stack of matrices along its other dims.

    A module may say this of its parameters, in an attribute `matrix_dims` that maps their names to
    `MatrixDims`, or to `None` for a parameter that is no matrix.

    Attributes:
      inputs: The dims that the module's product sums over.
      outputs: The dims that the result of the product has instead.
      hidden: Whether both sides are features. They are not in an embedding, a head and a router.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    hidden: bool = True


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
      is_float8: Whether only products in float8 read the parameter; known where codes in float8 are
        to be sent.
      platform: The platform of the mesh's devices, such as `"gpu"`; `""` if they are not known.
      matrix: The dims by which the parameter is a matrix, counted from the first dim; `None` if it
        is none. Dims of loops and of experts are neither inputs nor outputs.
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
    is_float8: bool = False
    platform: str = ""
    matrix: MatrixDims | None = None

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


def split_over_stages(infos: Infos, stacked: frozenset[str], axis: str) -> Any:
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


class Declared(NamedTuple):
    """A parameter as its module makes it, before loops add dims.

    Attributes:
      shape: The shape; `None` if it is not known.
      matrix: The dims by which it is a matrix; `None` if it is none.
    """

    shape: tuple[int, ...] | None
    matrix: MatrixDims | None


# Names of parameters that are no matrices, although a product may have several output dims.
_VECTORS = ("bias", "scale")


def as_matrix(path: str, number_of_dims: int) -> MatrixDims | None:
    """Returns the dims of a matrix whose module is not known: two dims, as in optax."""
    is_matrix = number_of_dims == 2 and path.rpartition("/")[2] not in _VECTORS
    return MatrixDims((0,), (1,)) if is_matrix else None


def added_dims(shape: tuple[int, ...], declared: tuple[int, ...]) -> list[frozenset[int]]:
    """Returns the sets of dims of `shape` without which it is the shape that a module declared.

    The first set has the first dims, where loops stack parameters by default.
    """
    dims = range(len(shape))
    return [
        frozenset(added)
        for added in itertools.combinations(dims, max(len(shape) - len(declared), 0))
        if tuple(n for dim, n in enumerate(shape) if dim not in added) == declared
    ]


def matrix_of(info: ParameterInfo, declared: Declared | None) -> MatrixDims | None:
    """Returns the dims by which a stored parameter is a matrix, from what its module declared."""
    loops = info.loop_dims
    if declared is not None:
        if declared.matrix is None:
            return None
        if declared.shape is not None:
            found = added_dims(info.shape, declared.shape)
            if not found:
                return None
            loops = loops if loops in found else found[0]
    own = [dim for dim in range(len(info.shape)) if dim not in loops]
    found_dims = as_matrix(info.path, len(own)) if declared is None else declared.matrix
    if found_dims is None or not all(found_dims[:2]):
        return None
    if max(map(max, found_dims[:2])) >= len(own):  # NNX: several dims may be a loop's.
        return None
    inputs, outputs = (tuple(own[dim] for dim in dims) for dims in found_dims[:2])
    return MatrixDims(inputs, outputs, found_dims.hidden)


def choose_matrices(
    infos: Infos, globs: Sequence[str] = (), field: str = "muon_dims: matrices"
) -> Any:
    """Chooses the parameters that an optimizer such as Muon trains as matrices.

    Args:
      infos: The tree of parameters with a `ParameterInfo` at each leaf.
      globs: Globs on paths, as in `manualpar.muon_dims`.
      field: The argument or field that has the globs, for messages.

    Returns:
      A tree like the parameters with `True` at each matrix and `False` elsewhere.

    Raises:
      ValueError: A glob matches no parameter, or names a parameter whose dims are not known.

    Communication:
      None.
    """
    leaves = jax.tree.leaves(infos)
    paths = [info.path for info in leaves]
    for glob in globs:
        if not fnmatch.filter(paths, glob.removeprefix("!")):
            raise ValueError(
                f"{field} has {glob!r}, which matches no parameter, expected globs on the "
                f"parameters' paths such as '*kernel' and '!head/*'"
                f"{suggest(glob.removeprefix('!'), paths)}."
            )
    named = [glob for glob in globs if not glob.startswith("!")]
    spared = [glob.removeprefix("!") for glob in globs if glob.startswith("!")]

    def matches(path: str, globs: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, glob) for glob in globs)

    def is_chosen(info: ParameterInfo) -> bool:
        if matches(info.path, spared):
            return False
        if not named:
            return info.matrix is not None and info.matrix.hidden
        exact = [glob for glob in named if glob == info.path]
        if info.matrix is None and exact:
            raise ValueError(
                f"{field} has {exact[0]!r}, a parameter of shape {info.shape}, expected a matrix, "
                "and the module that makes it does not say which dims are inputs and outputs. Give "
                "the module an attribute matrix_dims with the parameter's MatrixDims."
            )
        return info.matrix is not None and matches(info.path, named)

    return jax.tree.map(is_chosen, infos)


def computed_specs(infos: Infos) -> Any:
    """Returns, per parameter, the `PartitionSpec` of the array that the model computes with."""
    return jax.tree.map(lambda info: names_to_spec(split_names(info)), infos)


# -------------------------------------------------------------------------------------------------


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
class ParameterSharding(Placement):
    """A placement, with the axes over which the parameter is gathered and its gradient is reduced.

    The added fields follow from the placement and from the roles of the mesh axes, see
    `parameter_sharding`.

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
      is_float8: As in `ParameterInfo`.
    """

    mean_axes: tuple[str, ...] = ()
    sum_axes: tuple[str, ...] = ()
    divisor: int = 1
    shard_only_axes: tuple[str, ...] = ()
    split_axes: frozenset[str] = frozenset()
    shared_names: Names = ()
    trainable: bool = True
    in_loop: bool = False
    is_float8: bool = False

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


def parameter_sharding(
    placement: Placement, parameter: ParameterInfo, roles: AxisRoles, mesh: Mesh
) -> ParameterSharding:
    """Returns the sharding that follows from a strategy's placement and the roles of the axes."""
    axes = [axis for name in placement.names for axis in axis_tuple(name)]
    split = parameter.split_axes
    if placement.state_names is not None and not parameter.trainable:  # It has no state to shard.
        placement = Placement(placement.names, keep=placement.keep)
    return ParameterSharding(
        placement.names,
        placement.note,
        placement.state_names,
        placement.padding,
        placement.keep,
        placement.mean_in_loop,
        trainable=parameter.trainable,
        is_float8=parameter.is_float8,
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


def like_params(
    tree: Any,
    params: Params,
    values: Any,
    default: Any,
    other_shape: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> Any:
    """Returns a tree like an optimizer's state; each leaf gets the value of its parameter.

    A leaf belongs to a parameter if its path ends in the parameter's path and the shapes are equal.
    Adam's moments belong to a parameter; the statistics of Shampoo have another shape. `values` is
    a tree like `params`. A leaf whose path only contains a parameter's path gets `other_shape(keys,
    leaf)`, where `keys` are the path of the parameter. All other leaves get the default.
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
        if other_shape is None:
            return default
        for size in range(len(keys), 0, -1):  # The longest path, because it says most.
            for start in range(len(keys) - size + 1):
                if keys[start : start + size] in by_path:
                    return other_shape(keys[start : start + size], x)
        return default

    return jax.tree_util.tree_map_with_path(value, tree)


def as_parameter(info: ParameterInfo, x: Any) -> ParameterInfo | None:
    """Describes an array of an optimizer's state that belongs to a parameter of another shape.

    The array may be sharded along any dim, because no loop of the model runs over it. If it has the
    parameter's first dims, of experts or of the stages of a pipeline, these stay divided. Returns
    `None` for an array that has no two dims for each layer, such as a factored moment.
    """
    matrix = info.matrix[0] + info.matrix[1] if info.matrix else ()
    batch = [dim for dim in range(len(info.shape)) if dim not in matrix] if matrix else []
    if len(x.shape) - len(batch or info.loop_dims) < 2:
        return None
    names: list[Any] = [None] * len(x.shape)
    for dim, name in enumerate(split_names(info)):
        if dim not in batch or x.shape[dim] != info.shape[dim]:
            break
        names[dim] = name
    return ParameterInfo(
        info.path,
        x.shape,
        x.dtype,
        tuple(names),
        frozenset(),
        frozenset(axis for name in names for axis in axis_tuple(name)),
    )


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


# -------------------------------------------------------------------------------------------------
# Rules by which strategies place parameters: replicate, shard one dim, shard the state only.
#
# Each rule is a `PlaceFn`, or becomes a `PlaceFn` by `functools.partial`. `choose_shard_dim`
# decides which dim is sharded.


# A tile of a 16-bit array in TPU memory: 128 entries of the last dimension by 16 entries of the
# dimension before it. See https://openxla.org/xla/tiled_layout.
TILE = (128, 16)
TOO_SMALL = "too small"  # Begins the note of a parameter below `min_weight_size`.
# The platforms that average a layer's gradient while they compute other layers, and the elements of
# a layer's parameter that are worth an all-reduce. A TPU v5e computes nothing during an all-reduce.
OVERLAPS_MEANS = frozenset({"gpu"})
MIN_MEAN_SIZE = 2**18


def replicate(
    parameter: ParameterInfo,
    axes: tuple[str, ...],
    axis_size: int,
    *,
    mean_in_loop: bool = False,
) -> Placement:
    """Replicates a parameter, except along the dims that its annotation shards.

    With `mean_in_loop` a loop over layers averages the gradient of each layer, if the platform
    overlaps such means and the parameter of one layer is large enough.
    """
    del axes
    dims = enumerate(parameter.shape)
    layer_size = math.prod(size for dim, size in dims if dim not in parameter.loop_dims)
    mean_in_loop &= axis_size > 1 and layer_size >= MIN_MEAN_SIZE
    mean_in_loop &= parameter.platform in OVERLAPS_MEANS
    return Placement(parameter.names, mean_in_loop=mean_in_loop)


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

    A parameter in `keep_gathered` gets `Placement.keep`. A parameter in `replicate` is replicated,
    even if it is annotated.
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
        prefers_first=parameter.platform == "gpu",
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


def shard_state_only(
    parameter: ParameterInfo, axes: tuple[str, ...], axis_size: int, **placing: Any
) -> Placement:
    """Shards the gradient and the optimizer state like `shard_one_dim`, but not the parameter.

    `placing` has the keyword arguments of `shard_one_dim`.
    """
    sharded = shard_one_dim(parameter, axes, axis_size, **placing)
    if sharded.names == parameter.names or sharded.keep:
        return sharded
    return dataclasses.replace(sharded, names=parameter.names, state_names=sharded.names)


def choose_shard_dim(
    shape: tuple[int, ...],
    names: Names,
    axis_size: int,
    *,
    min_weight_size: int,
    excluded_dims: frozenset[int] = frozenset(),
    pad: bool = False,
    prefers_first: bool = False,
) -> tuple[int | None, str]:
    """Decides which dimension of a parameter to shard.

    The candidates are the free dimensions (their name is `None`) that `axis_size` divides. If there
    are none, `pad` makes every free dimension a candidate. Dimensions whose shards are complete
    tiles (`TILE`) are preferred, because TPUs have to copy partial tiles before sending. The
    largest preferred dimension is chosen. If several have this size, the first is chosen, because
    its shards are contiguous. A simulation on CPUs has the layout of TPUs. With `prefers_first` the
    first candidate is chosen. This is the rule on GPUs, because XLA:GPU gathers and scatters along
    the first dimension only, and keeps a transposed copy of a stack of parameters that is sharded
    along another one. A parameter of fewer than `min_weight_size` elements is not worth a
    collective and stays replicated. `excluded_dims` are not sharded, because each use of the
    parameter gets only one slice along them (as in `nn.scan`).

    Returns:
      The dimension, or `None` if no dimension is sharded, and the reason.
    """
    size = math.prod(shape)
    if size < min_weight_size:
        return None, f"{TOO_SMALL}: {size} < {min_weight_size}"
    if size == 0 or not shape:
        return None, "no elements to shard" if shape else "a scalar"
    seen = [dim for dim in range(len(shape)) if dim not in excluded_dims]
    free = [dim for dim in seen if names[dim] is None]
    candidates = [dim for dim in free if shape[dim] % axis_size == 0]
    candidates = candidates or [dim for dim in free if pad and shape[dim] > 1]
    if not candidates:
        return None, f"none of {[shape[dim] for dim in free]} divides by {axis_size}"
    if prefers_first:
        return candidates[0], "only one that divides" if len(candidates) == 1 else "first"
    tile = dict(zip(reversed(seen), TILE, strict=False))
    tiled = [dim for dim in candidates if shape[dim] % (axis_size * tile.get(dim, 1)) == 0]
    dim = max(tiled or candidates, key=lambda dim: (shape[dim], -dim))
    if len(candidates) == 1:
        return dim, "only one that divides"
    largest = max(shape[dim] for dim in candidates)
    return dim, "largest" if shape[dim] == largest else "whole tiles"


def is_inside(path: str, name: str) -> bool:
    """Returns whether a path is `name` or below it: `head/kernel` is inside `head`."""
    return f"{path}/".startswith(f"{name}/")


def check_named(
    builder: str, parameters: Iterable[ParameterInfo], **fields: tuple[str, ...]
) -> None:
    """Refuses a name in `fields` that is not a parameter or module of the model.

    `fields` are options of the builder, such as `replicate=("head",)`.
    """
    paths = [info.path for info in parameters]
    for field, name in ((field, name) for field, names in fields.items() for name in names):
        if not any(is_inside(path, name) for path in paths):
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            raise ValueError(
                f"{builder}: {field} names {name!r}, expected a parameter or a module with "
                f"parameters, such as {near[0]!r}; inspect.layout_table shows all parameters."
            )


# -------------------------------------------------------------------------------------------------
# Divides trees of parameters into a trained and a frozen part.
#
# A parameter that is not trained is *frozen*. In the tree that a step differentiates, an
# `optax.MaskedNode`, which has no leaves, replaces each frozen parameter. The gradients for the
# optimizer form the same tree. Every optimizer accepts such trees, because `optax.masked` passes
# them to its inner optimizer. The paths of parameters do not change.


def is_trained(path: str, globs: tuple[str, ...]) -> bool:
    """Returns whether a path fits one of the globs; `*` matches any characters, even `/`."""
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def partition(placements: Placements, tree: Any) -> tuple[Any, Any]:
    """Divides a tree like the parameters, with or without boxes, into a trained and a frozen part.

    Each leaf of `placements` has the field `trainable`: it is a `ParameterSharding` or a
    `ParameterInfo`.
    """

    def part(is_trained: bool) -> Any:
        return jax.tree.map(
            lambda place, x: x if place.trainable is is_trained else optax.MaskedNode(),
            placements,
            tree,
        )

    return part(True), part(False)


def empty_part(tree: Any) -> Any:
    """Returns an empty frozen part: every leaf of `tree` is masked."""
    return jax.tree.map(lambda _: optax.MaskedNode(), tree, is_leaf=is_box)


def trained(placements: Placements) -> Any:
    """Returns the placements of the trained parameters."""
    return partition(placements, placements)[0]


def combine(parts: tuple[Any, Any]) -> Any:
    """Combines the parts that `partition` returned into one tree."""
    return jax.tree.map(
        lambda x, y: y if is_masked(x) else x,
        *parts,
        is_leaf=lambda x: is_masked(x) or is_box(x),
    )


def is_masked(x: Any) -> bool:
    """Returns whether a leaf is a placeholder for a parameter of the other part."""
    return isinstance(x, optax.MaskedNode)


if not TYPE_CHECKING:
    __getattr__ = old_names(
        __name__, {"Route": "ParameterSharding", "route_parameter": "parameter_sharding"}
    )
