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

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import flax.linen as nn
from jax.sharding import Mesh, PartitionSpec

from manualpar.core.mesh.axes import AxisName, Names, axes_size, axis_tuple, written_with
from manualpar.core.parameters.split_parameter import SplitParameter, names_on

Rules = Sequence[tuple[str, AxisName | None]]


class AxesOrLogicalNames(nn.LogicallyPartitioned):
    """An annotation whose names are logical if they have a rule, and mesh axes otherwise."""


def check_rules(strategy: str, rules: Any, mesh: Mesh) -> Rules:
    """Checks the user's rules and normalizes them: `None` for no axes, a string for one axis.

    Names that no parameter uses are allowed.

    Raises:
      TypeError: The rules are not a sequence of pairs of a name and axes.
      ValueError: A rule names an axis that the mesh does not have, or an axis twice.
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
                f"{_nearest(missing, mesh.shape)}. Name one of these, write ({rule[0]!r}, None), "
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

    Raises:
      TypeError: The names are not a tuple of names, or the box has rules that are not pairs of a
        name and axes.
      ValueError: A name is unknown, or the annotation does not fit the shape, the mesh or a loop.
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
      rules: The user's rules.
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
            f"{where}, of which {unknown} are not in rules {known}{_nearest(unknown, known)}. "
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
            f"{_nearest(unknown, mesh.shape)}. Name one of these or nothing, or build the mesh "
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


def _nearest(names: list[str], known: Iterable[str]) -> str:
    """Writes a clause that suggests the known name nearest to `names[0]`; "" if none is near."""
    near = difflib.get_close_matches(names[0], list(known), n=1)
    return f"; the nearest is {near[0]!r}" if near else ""


def _entry(axes: tuple[str, ...]) -> AxisName | None:
    """Converts a dimension's axes: `None` without axes, a string for one, else a tuple."""
    return axes if len(axes) > 1 else axes[0] if axes else None


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_axes(x: Any) -> bool:
    """Returns whether `x` can be a dimension's axes: a name, a sequence of names, or `None`."""
    return x is None or all(isinstance(name, str) for name in (x if _is_sequence(x) else [x]))
