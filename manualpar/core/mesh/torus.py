"""Rings of neighbours in the torus of a slice of TPUs.

Along a mesh axis each device sends to the next device, and the last device to the first. A *hop* is
one link between neighbours. If the next device is always one hop away, each link carries the data
of one device in each direction, and XLA makes permutations along the axis asynchronous. Gathers and
scatters do not depend on the order of devices, because XLA finds rings for them.

If a grid has at least two dimensions and one has an even size, a ring of neighbours can pass
through all positions without a link between opposite ends. The ring first passes through all rows,
but leaves out the first position of each row. The ring then returns through these first positions.
In a grid of 2x4 the ring goes up one column and down the other.

A chip with two devices counts as two positions, one hop apart.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

NAMES = ("x", "y", "z", "core")
FAR = 2**30  # Larger than the number of hops in any slice.
# Words in the `device_kind` of chips whose torus has two dimensions. The torus of other chips has
# three.
FLAT = ("lite", "v5e", "v6e")


@dataclasses.dataclass(frozen=True)
class _Chip:
    """A fake device of a kind for which `mesh_utils` has no special order."""

    device: Any
    coords: tuple[int, ...]
    platform: str = "tpu"
    device_kind: str = ""
    core_on_chip: int = 0


def arrange_in_torus(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arranges the devices of a slice of TPUs in an array whose dimensions have few hops.

    Args:
      sizes: The sizes of the array. The last dimension takes the fastest links.
      devices: The devices of one slice, as many as the product of the sizes.

    Returns:
      The arrangement with the fewest hops along the last dimension; if several are equal, along the
      dimension before it, and so on. The candidates are: the arrangement of
      `mesh_utils.create_device_mesh`; the one that `mesh_utils` makes without its special cases for
      some slices; and both with each dimension in the order of `ring_through`. Devices keep their
      order if they do not fill a box or have no coordinates.
    """
    array = np.empty(len(devices), object)
    array[:] = devices
    coords = _coords_of(array)
    if coords is None or len(array) != math.prod(np.ptp(coords, 0) + 1):
        return array.reshape(sizes)
    arrays = [mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)]
    if not coords[:, -1].any():  # A fake device cannot describe a chip with two devices.
        chips = [_Chip(device, tuple(device.coords)) for device in devices]
        general = mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=True)
        arrays.append(np.vectorize(lambda chip: chip.device, otypes=[object])(general))
    wraps = _wraps(array)
    arrays += [_in_rings(array, wraps) for array in arrays]
    dims = range(len(sizes))[::-1]
    return min(arrays, key=lambda array: [_hops(array, dim, wraps).sum() for dim in dims])


def ring_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the positions of a grid in an order in which successive positions are neighbours.

    The last position is next to the first, unless all sizes are odd or the grid is a line.
    """
    even = next((dim for dim, size in enumerate(shape) if size % 2 == 0), None)
    if even is None:
        return _path_through(shape)
    first, *others = _path_through([size for dim, size in enumerate(shape) if dim != even])
    rows = range(shape[even])
    out = [(row, position) for row in rows for position in others[:: 1 if row % 2 == 0 else -1]]
    ring = [(0, first), *out, *((row, first) for row in reversed(rows[1:]))]
    return [(*position[:even], row, *position[even:]) for row, position in ring]


def _path_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the positions of a grid along a path that goes back and forth between neighbours."""
    path: list[tuple[int, ...]] = [()]
    for size in reversed(shape):
        path = [(i, *place) for i in range(size) for place in (path if i % 2 == 0 else path[::-1])]
    return path


def _in_rings(array: np.ndarray, wraps: np.ndarray) -> np.ndarray:
    """Puts each dimension of the array in the order of a ring if the ring has fewer hops."""
    for dim, size in enumerate(array.shape):
        coords = _coords_of(np.moveaxis(array, dim, 0).reshape(size, -1)[:, 0])
        columns = [np.unique(column, return_inverse=True) for column in coords.T]
        shape = [len(values) for values, _ in columns]
        if math.prod(shape) == size:  # The devices form a grid.
            positions = zip(*(inverse for _, inverse in columns), strict=True)
            index = {position: i for i, position in enumerate(positions)}
            ring = np.take(array, [index[position] for position in ring_through(shape)], dim)
            if _hops(ring, dim, wraps).sum() < _hops(array, dim, wraps).sum():
                array = ring
    return array


def _hops(array: np.ndarray, dim: int, wraps: np.ndarray) -> np.ndarray:
    """Counts the hops from each device to the next along a dimension, and from last to first."""
    coords = _coords_of(array)
    apart = np.abs(coords - np.roll(coords, -1, dim))
    return np.minimum(apart, np.abs(wraps - apart)).sum(-1)


def closed_sides(sides: Sequence[int], *, is_flat: bool) -> list[bool]:
    """Returns, for each side of a slice, whether it is a ring: a link joins its two ends.

    `sides` are in chips. In a flat torus (two dimensions) a side of 16 chips, the full side of a
    pod, is a ring. In three dimensions all sides are rings if each is a multiple of four chips;
    else no side is.
    """
    if is_flat:
        return [side % 16 == 0 for side in sides]
    return [all(side % 4 == 0 for side in sides)] * len(sides)


def _wraps(array: np.ndarray) -> np.ndarray:
    """Returns the number of hops around each dimension of a slice; `FAR` if it has no ring."""
    sides = np.ptp(_coords_of(array).reshape(-1, len(NAMES)), 0) + 1
    is_flat = any(word in array.flat[0].device_kind for word in FLAT)
    closed = [*closed_sides(sides[:-1], is_flat=is_flat), False]  # The last side counts cores.
    return np.where(closed, sides, FAR)


def describe_along(array: np.ndarray, hosts: np.ndarray, dim: int) -> str:
    """Describes how a dimension of a device array runs through the torus of TPUs within a host.

    Args:
      array: The devices.
      hosts: The number of the host or slice of each device, in an array of the same shape.
      dim: The dimension to describe.

    Returns:
      Words such as `in a ring of neighbours along xy`; empty if no host has two devices along
      `dim`.
    """
    if _coords_of(array) is None:
        return "in an unknown order (no coordinates)"
    size, wraps = array.shape[dim], _wraps(array)
    lines, hosts_of_lines = (np.moveaxis(x, dim, -1).reshape(-1, size) for x in (array, hosts))
    runs = [
        line[line_hosts == host]
        for line, line_hosts in zip(lines, hosts_of_lines, strict=True)
        for host in np.unique(line_hosts)
        if (line_hosts == host).sum() > 1
    ]
    if not runs:
        return ""
    moved = np.any([np.ptp(_coords_of(run), 0) > 0 for run in runs], 0)
    along = "".join(name for name, has_moved in zip("xyz", moved, strict=False) if has_moved)
    if not along:
        return "within a chip"
    hops = [_hops(run, 0, wraps) for run in runs]
    most, within = max(map(max, hops)), max(max(run_hops[:-1]) for run_hops in hops)
    if most == 1:
        return f"{'between' if len(runs[0]) == 2 else 'in a ring of'} neighbours along {along}"
    if within == 1:
        return f"in a line of neighbours along {along} with {most} hops back"
    return f"along {along} with up to {most} hops"


def _coords_of(array: np.ndarray) -> Any:
    """Returns each device's coordinates and core number, `[..., 4]`; `None` without coordinates."""
    if not all(getattr(device, "coords", None) for device in array.flat):
        return None
    coords = [(*(*device.coords, 0, 0)[:3], device.core_on_chip) for device in array.flat]
    return np.array(coords).reshape(*array.shape, len(NAMES))
