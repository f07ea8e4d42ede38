"""Reads mesh axes from a model's annotations of its parameters.

A model annotates a parameter with a flax box around it. `nn.with_partitioning` makes an
`nn.Partitioned`, whose names are mesh axes. `nn.with_logical_partitioning` makes an
`nn.LogicallyPartitioned`, whose names are logical, such as `embed`. A logical name stands for a
dimension, and *rules* give the mesh axes that shard it. A rule is a pair: a logical name, and a
mesh axis, a tuple of axes or `None`. A name may have several rules. A rule fits if no other
dimension of the same parameter uses the rule's axes. The first rule that fits is used. If no rule
fits, the dimension is not sharded. `nn.logical_to_mesh_axes`, which this module calls, works in
this way.

Invariants: no device is used; the resulting names are axes of the mesh, one entry for each
dimension; an axis occurs at most once; the axes of a dimension divide its size; a dimension that
`nn.scan` or `nn.vmap` runs over has no axes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.mesh.axes import (
    AxisName,
    Names,
    axes_size,
    axis_tuple,
    is_axis_bound,
    written_with,
)
from manualpar.errors import suggest

Rules = Sequence[tuple[str, AxisName | None]]


class AxesOrLogicalNames(nn.LogicallyPartitioned):
    """An annotation whose names are logical if they have a rule, and mesh axes otherwise."""


def check_rules(strategy: str, rules: Any, mesh: Mesh) -> Rules:
    """Checks the user's rules and normalizes them: `None` for no axes, a string for one axis.

    Names that no parameter uses are allowed.
    """
    example = "(('embed', None), ('mlp', 'model'))"
    if not _is_sequence(rules):
        raise TypeError(f"{strategy}: rules={rules!r}, expected pairs in a tuple like {example}.")
    checked = []
    for rule in rules:
        is_pair = _is_sequence(rule) and len(rule) == 2
        if not is_pair or not isinstance(rule[0], str) or not _is_axes(rule[1]):
            raise TypeError(
                f"{strategy}: rules has {rule!r}, expected a pair (logical name, axes), "
                "where axes is a mesh axis, a tuple of mesh axes, or None. Write rules like "
                f"{example}."
            )
        axes = axis_tuple(rule[1])
        where = f"{strategy}: rules has {tuple(rule)}, which names"
        missing = [axis for axis in axes if axis not in mesh.shape]
        if missing:
            raise ValueError(
                f"{where} {missing}, but the mesh has the axes {list(mesh.shape)}"
                f"{suggest(missing[0], mesh.shape)}. Name one of these, write ({rule[0]!r}, None), "
                "or build the mesh with the axis."
            )
        if len(set(axes)) < len(axes):
            raise ValueError(f"{where} an axis twice; name each once.")
        checked.append((rule[0], _entry(axes)))
    return tuple(checked)


def mesh_names(
    path: str,
    box: Any,
    shape: tuple[int, ...],
    *,
    loop_dims: frozenset[int],
    mesh: Mesh,
    rules: Rules,
    all_rules: str = "",
) -> Names:
    """Reads from a parameter's box the mesh axes that shard each dimension.

    The rules inside an `nn.LogicallyPartitioned` have precedence over `rules`. A loop names its
    dimension by `nn.PARTITION_NAME`; this name is ignored unless it is a mesh axis or has a rule.
    `all_rules` is the line that `with_all_names` writes, for error messages.
    """
    annotation = box.names
    is_tuple = _is_sequence(annotation) or isinstance(annotation, PartitionSpec)
    names: tuple[Any, ...] = tuple(annotation) if is_tuple else ()
    shown = names if is_tuple else repr(annotation)
    where = f"model: parameter {path!r} of shape {shape} is annotated with names {shown}"
    if not is_tuple or not all(_is_axes(name) for name in names):
        raise TypeError(f"{where}, expected a tuple with a name or None for each dimension.")
    if len(names) > len(shape):
        raise ValueError(f"{where}, expected at most one name for each dimension; remove names.")
    names = (*names, *(None,) * (len(shape) - len(names)))
    if isinstance(box, SplitParameter):
        named = {axis for name in names for axis in axis_tuple(name)}
        if logical := sorted(named & {name for name, _ in rules} - set(mesh.shape)):
            raise ValueError(
                f"{where} and marked as split, but rules have {logical}; a split parameter must be "
                "annotated with mesh axes."
            )
        names, _ = names_on(where, shape, names, mesh.shape, shared=box.shared)
    is_logical = isinstance(box, nn.LogicallyPartitioned)
    all_rules = all_rules or with_all_names([(box, loop_dims)], mesh, rules)
    if is_logical:
        rules = (*check_rules(f"model: parameter {path!r}", box.rules or (), mesh), *rules)
    if isinstance(box, AxesOrLogicalNames):
        if loop_dims and len(annotation) < len(shape):
            raise ValueError(
                f"{where}, expected one name for each dimension, also for dimensions that loops "
                "run over. Stack layers with nnx.vmap(..., transform_metadata="
                "{nnx.PARTITION_NAME: None})."
            )
        # A name without a rule is a mesh axis.
        known = {name for name, _ in rules}
        is_logical = any(isinstance(name, str) and name in known for name in names)
        rules = (*rules, *((axis, axis) for axis in mesh.shape if axis not in known))
    # Nested loops may give one name to two dims, which flax refuses: drop names that shard nothing.
    sharding = {name for name, axes in rules if axes} if is_logical else set(mesh.shape)
    names = tuple(
        None if dim in loop_dims and not set(axis_tuple(name)) <= sharding else name
        for dim, name in enumerate(names)
    )
    if is_logical:
        axes_of_dims = _apply_rules(where, names, mesh, rules, all_rules)
    else:
        takes_rules = isinstance(box, AxesOrLogicalNames)
        axes_of_dims = _check_axes(where, names, mesh, rules, all_rules if takes_rules else "")
    for dim, name in enumerate(axes_of_dims):
        size = axes_size(mesh, axis_tuple(name))
        if name is not None and (dim in loop_dims or shape[dim] % size):
            reason = "nn.scan or nn.vmap runs over" if dim in loop_dims else "does not divide by it"
            mend = f", or give {names[dim]!r} another rule" if is_logical else ""
            raise ValueError(
                f"{where}, but dim {dim} cannot be sharded over {name!r} of size {size}: {reason}. "
                f"Name another dim{mend}."
            )
    return axes_of_dims


def with_all_names(boxes: Iterable[tuple[Any, frozenset[int]]], mesh: Mesh, rules: Rules) -> str:
    """Writes, for messages, `rules=` with `None` added for each logical name without a rule.

    Args:
      boxes: The annotations of all parameters, each with the dimensions that loops run over.
      mesh: The mesh. Its axes need no rule in an `AxesOrLogicalNames`.
    """
    missing: dict[str, None] = {}
    for box, loop_dims in boxes:
        if isinstance(box, nn.LogicallyPartitioned) and _is_sequence(box.names):
            known = {name for name, _ in (*rules, *(box.rules or ()))}
            if isinstance(box, AxesOrLogicalNames):
                known |= set(mesh.shape)
            names = [x for dim, x in enumerate(box.names) if dim not in loop_dims]
            missing |= dict.fromkeys(x for x in names if isinstance(x, str) and x not in known)
    return f"rules={(*rules, *((name, None) for name in missing))}"


def _apply_rules(
    where: str, names: tuple[Any, ...], mesh: Mesh, rules: Rules, all_rules: str
) -> Names:
    """Converts logical names to mesh axes; refuses unknown and repeated names."""
    if not all(name is None or isinstance(name, str) for name in names):
        raise TypeError(
            f"{where}, expected one logical name or None for each dimension. Give the dimension "
            "one name, and write a rule that maps this name to several axes."
        )
    used = [name for name in names if name is not None]
    known = list(dict.fromkeys(name for name, _ in rules))
    unknown = sorted(set(used) - set(known))
    if unknown:
        raise ValueError(
            f"{where}, of which {unknown} are not in rules {known}{suggest(unknown[0], known)}. "
            f"Write {all_rules}, which has all names of the model. To shard a dimension, replace "
            f"its None by an axis of the mesh {list(mesh.shape)}."
        )
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise ValueError(
            f"{where}, of which {twice} stand for more than one dimension, so that rules cannot "
            "distinguish the dimensions. Give each dimension its own name, or None."
        )
    return tuple(nn.logical_to_mesh_axes(names, rules) or ())


def _check_axes(
    where: str, names: tuple[Any, ...], mesh: Mesh, rules: Rules, all_rules: str
) -> Names:
    """Checks that names are mesh axes; `all_rules` is "" if they cannot be logical names."""
    axes = [axis for name in names for axis in axis_tuple(name)]
    unknown = sorted(set(axes) - set(mesh.shape))
    if unknown:
        logical = sorted(set(unknown) & {name for name, _ in rules})
        mend = (
            f"{suggest(unknown[0], mesh.shape)}. Name one of these or nothing, or build the mesh "
            f"with {written_with(mesh, unknown)}: an axis of size 1 shards nothing."
        )
        if all_rules:
            mend += (
                f" If they are logical names, write {all_rules}, which has all names of the model."
            )
        elif logical:
            mend = (
                f". The rules have {logical}, but nn.with_partitioning does not use rules: "
                "annotate with nn.with_logical_partitioning."
            )
        where = f"{where}, of which {unknown} are not axes of the mesh {list(mesh.shape)}"
        raise ValueError(f"{where}{mend}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{where}, which shards it over an axis twice; name each axis once.")
    return tuple(_entry(axis_tuple(name)) for name in names)


def _entry(axes: tuple[str, ...]) -> AxisName | None:
    """Converts a dimension's axes: `None` without axes, a string for one, else a tuple."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_axes(x: Any) -> bool:
    """Returns whether `x` can be a dimension's axes: a name, a sequence of names, or `None`."""
    return x is None or all(isinstance(name, str) for name in (x if _is_sequence(x) else [x]))


# -------------------------------------------------------------------------------------------------
# Split parameters, whose modules compute with a shard of the parameter.
#
# A parameter that is *stored* in shards is gathered where it is used (FSDP). A parameter that is
# *split* is not gathered: its module computes with the device's shard, and collectives of the
# module complete the result (tensor and expert parallelism). `split` marks such a parameter when
# the module makes it. If the axis is not bound, the module gets the full parameter, as on one
# device.
#
# A parameter may be too small to split although its module computes in parallel: grouped-query
# attention can have fewer key heads than devices. `shared=True` then replicates the parameter, and
# all devices of a group of neighbours use the same slice.
#
# Invariants: the tree of parameters and their initial values are the same as on one device, for
# every mesh. An axis that the mesh does not have splits nothing.


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
      names: For each dimension the mesh axis, or tuple of axes, that it is split over, or `None`.
      sizes: The sizes of the mesh's axes. Other axes in `names` are ignored.
      shared: Whether devices may share entries, see `split`.

    Returns:
      Two tuples with an entry for each dimension: the axes that split the dimension, and the axes
      along which several devices use the same entry of the dimension. The second tuple is `()` if
      no devices share entries.
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
