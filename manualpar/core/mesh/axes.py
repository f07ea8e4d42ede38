"""Names and sizes of mesh axes, and checks of both.

An axis name is a string. A function with an argument `axis_name` also accepts a tuple of names,
which means the product of these axes. The first name is the major axis, as in a `PartitionSpec`.
"""

import contextlib
import math
import re
import traceback
from collections.abc import Iterator, Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

__all__ = [
    "AxisName",
    "Names",
    "axes_size",
    "axis_tuple",
    "is_axis_bound",
    "names_to_spec",
    "with_axis_types",
]

AxisName = str | tuple[str, ...]
# For each dimension of an array, the axis or tuple of axes that shard it, or `None`.
Names = tuple[AxisName | None, ...]


def axis_tuple(axis_name: AxisName | Sequence[str] | None) -> tuple[str, ...]:
    """Converts an axis name, a tuple of names, or `None` (no axes) to a tuple of names."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, str):
        return (axis_name,)
    if not isinstance(axis_name, Sequence) or not all(isinstance(a, str) for a in axis_name):
        raise TypeError(f"axis_name={axis_name!r}, expected a mesh axis or a tuple of mesh axes.")
    return tuple(axis_name)


def is_axis_bound(axis: str) -> bool:
    """Returns whether an enclosing `shard_map` (or `vmap`) binds `axis`."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def check_axes_bound(function: str, axes: tuple[str, ...]) -> None:
    """Raises a `ValueError` that begins with `function` unless a `shard_map` binds each axis."""
    unbound = [axis for axis in axes if not is_axis_bound(axis)]
    if unbound or not axes:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"{function}: axis_name names {unbound or 'no axis'}, expected axes of the surrounding "
            f"jax.shard_map, which binds {list(bound)}. Call it inside a shard_map over a mesh "
            "that has the axis."
        )


@contextlib.contextmanager
def naming_unbound_axes() -> Iterator[None]:
    """Explains JAX's errors about unbound axes in a model or a loss; a context manager.

    JAX's error is the cause of the new one.
    """
    try:
        yield
    except (AssertionError, NameError) as error:
        name = _unbound_axis(error)
        if name is None:
            raise
        mesh = jax.sharding.get_abstract_mesh()
        bound = list(mesh.manual_axes)
        meant = name if name in mesh.axis_names else [*mesh.axis_names, "data"][0]
        where, mend = (
            "in this mode no axis is bound, because the batch is global",
            "leave it out, or use mode='manual'",
        )
        if bound:
            where = f"the mesh has the axes {bound}"
            mend = (
                f"write an axis of the mesh, or build make_mesh({{{name!r}: -1}}) and pass "
                f"axis_name={name!r}"
            )
        raise ValueError(
            f"model or loss_fn: a layer or a collective reduces over a mesh axis {name!r}, but "
            f"{where}. If it is a layer with axis_name={name!r}, such as BatchNorm, name the mesh "
            f"axes for it: axis_aliases={{{name!r}: {meant!r}}}. If it is a collective that you "
            f"call, such as jax.lax.pmean(x, {name!r}), {mend}."
        ) from error


def _unbound_axis(error: BaseException) -> str | None:
    """Returns the axis that JAX did not find; `None` for any other error."""
    if isinstance(error, NameError):
        found = re.search(r"unbound axis name: (\w+)", str(error))
        return found[1] if found else None
    # JAX's assertion has no message, so the axis is read from the arguments of JAX's function.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    names = frame.f_locals.get("axis_name")
    names = names if isinstance(names, tuple | list | frozenset) else (names,)
    unbound = [x for x in names if isinstance(x, str) and not is_axis_bound(x)]
    return unbound[0] if unbound and not error.args else None


def check_mesh_has(function: str, mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> None:
    """Raises a `ValueError` that begins with `function` unless the mesh has each axis."""
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(
            f"{function}: axis_name names {missing or 'no axis'}, but the mesh has the axes "
            f"{list(mesh.shape)}. Build the mesh with {written_with(mesh, missing)} (with a larger "
            "size, if the batch is to be split along this axis), or name one of the mesh's axes "
            "with axis_name=."
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: axis_name={axes} names an axis twice; name each once.")


def written_with(mesh: Mesh | AbstractMesh, missing: list[str]) -> str:
    """Formats, for messages, the `make_mesh` call that adds `missing` axes of size 1 to a mesh."""
    sizes: dict[str, int] = dict.fromkeys(missing or ["data"], 1)
    return f"make_mesh({sizes | dict(mesh.shape)})"


def axes_size(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """Returns the number of devices along `axes` together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def with_axis_types(mesh: Mesh | AbstractMesh, axis_type: AxisType) -> Mesh | AbstractMesh:
    """Returns the mesh with all axes of `axis_type`; `mesh` itself if its axes have this type."""
    types = (axis_type,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def names_to_spec(names: Names) -> PartitionSpec:
    """Makes a `PartitionSpec` from each dimension's axes; `PartitionSpec()` if there are none."""
    return PartitionSpec(*names) if any(map(axis_tuple, names)) else PartitionSpec()
