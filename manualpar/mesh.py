"""Meshes and the names of their axes.

An axis name is a string; wherever one is taken, a tuple of names is taken too and means their
product, the first name being the major one, as in a `PartitionSpec`.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

AxisName = str | tuple[str, ...]


def axis_tuple(axis_name: AxisName | Sequence[str] | None) -> tuple[str, ...]:
    """The axes behind a name, a tuple of names or the `None` of an unsharded dimension."""
    if axis_name is None:
        return ()
    if isinstance(axis_name, str):
        return (axis_name,)
    if not isinstance(axis_name, Sequence) or not all(isinstance(a, str) for a in axis_name):
        raise TypeError(f"axis_name={axis_name!r}, expected a mesh axis or a tuple of mesh axes.")
    return tuple(axis_name)


def is_axis_bound(axis: str) -> bool:
    """Whether the code being traced runs once for each index of `axis`."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def check_axes_bound(function: str, axes: tuple[str, ...]) -> None:
    """Raises a `ValueError` in the name of `function` unless a `shard_map` binds each axis."""
    unbound = [axis for axis in axes if not is_axis_bound(axis)]
    if unbound or not axes:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        raise ValueError(
            f"{function}: axis_name names {unbound or 'no axis'}, expected axes of the surrounding "
            f"jax.shard_map, which binds {list(bound)}. Call it inside a shard_map over a mesh "
            "that has the axis."
        )


def check_mesh_has(function: str, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raises a `ValueError` in the name of `function` unless the mesh has each axis."""
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing or not axes:
        raise ValueError(
            f"{function}: axis_name names {missing or 'no axis'}, but the mesh has the axes "
            f"{list(mesh.shape)}. "
            f"Build it with make_mesh({{{(missing or ['data'])[0]!r}: -1}}) or pass axis_name=."
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"{function}: axis_name={axes} names an axis twice; name each once.")


def axes_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """How many devices `axes` span together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh for `shard_map` from axis names and sizes.

    ```python
    make_mesh({"data": -1})                # all devices along one axis
    make_mesh({"replica": 2, "data": -1})  # two groups of half the devices each
    ```

    Args:
      axes: The size of each axis, the major one first. One size may be -1: the rest of the devices.
      devices: The devices to use, by default all of `jax.devices()`. With no -1, the sizes may ask
        for fewer than there are: the first ones are used.

    Returns:
      A `jax.sharding.Mesh` whose axes are all of `AxisType.Auto`, laid out by `jax.make_mesh` for
      the devices' interconnect.

    Raises:
      ValueError: A size is neither positive nor -1, more than one is -1, or the sizes do not fit
        the devices.
      TypeError: A name is not a string or a size is not an integer.
    """
    devices = list(jax.devices() if devices is None else devices)
    names, sizes = tuple(axes), list(axes.values())
    if not names:
        raise ValueError(
            "make_mesh: axes is empty, expected at least one axis such as {'data': -1}."
        )
    for name, size in axes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                f"make_mesh: axes has {name!r}: {size!r}, expected a name with an integer size."
            )
        if size < 1 and size != -1:
            raise ValueError(
                f"make_mesh: axis {name!r} has size {size}, expected a positive size or -1 for the "
                "rest of the devices."
            )
    if sizes.count(-1) > 1:
        raise ValueError(
            f"make_mesh: axes={dict(axes)} has more than one -1; fix all sizes but one."
        )
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes:
        if len(devices) % fixed:
            raise ValueError(
                f"make_mesh: axes={dict(axes)} fixes {fixed} devices a group, which does not "
                f"divide the {len(devices)} "
                f"devices there are. Choose sizes whose product divides {len(devices)}."
            )
        sizes[sizes.index(-1)] = len(devices) // fixed
    elif fixed > len(devices):
        raise ValueError(
            f"make_mesh: axes={dict(axes)} needs {fixed} devices, got {len(devices)}. Use smaller "
            "sizes, -1 for the "
            "rest of the devices, or simulate devices with "
            "jax.config.update('jax_num_cpu_devices', N)."
        )
    size = math.prod(sizes)
    return jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names), devices=devices[:size])
