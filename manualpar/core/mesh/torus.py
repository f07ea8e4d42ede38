"""Rings of neighbours in the torus of a slice of TPUs.

Along a mesh axis each device sends to the next one, and the last to the first. A *hop* is a link on
the way. If each next device is one hop away, each link carries the data of one device in each
direction, and XLA makes permutations along the axis asynchronous. Gathers and scatters do not
depend on the order of devices: XLA finds rings for them by itself.

In a grid of at least two dimensions, one of them of even size, a ring of neighbours goes through
all places, and needs no link between opposite ends. It passes through all rows on the way out, and
leaves the first place of each row for the way back: in a grid of 2x4 up one column and down the
other.

A chip with two devices counts as two places, one hop apart.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

NAMES = ("x", "y", "z", "core")
FAR = 2**30  # More hops than there are.
# Chips whose torus has two dimensions; of others it has three.
FLAT = ("lite", "v5e", "v6e")


@dataclasses.dataclass(frozen=True)
class _Chip:
    """Stands for a device of a kind for which `mesh_utils` has no order of its own."""

    device: Any
    coords: tuple[int, ...]
    platform: str = "tpu"
    device_kind: str = ""
    core_on_chip: int = 0


def arrange_in_torus(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Lays the devices of a slice of TPUs out in an array whose dimensions have few hops.

    Args:
      sizes: The sizes of the array. The last dimension takes the fastest links.
      devices: As many devices of one slice.

    Returns:
      The devices as `mesh_utils.create_device_mesh` lays them out, or with fewer hops: in its
      general order, where it has another for a small slice, and with each dimension in the order of
      `ring_through`. The last dimension counts first. Devices stand as they come if they do not
      fill a box, or do not know their coordinates.
    """
    array = np.empty(len(devices), object)
    array[:] = devices
    coords = _coords_of(array)
    if coords is None or len(array) != math.prod(np.ptp(coords, 0) + 1):
        return array.reshape(sizes)
    arrays = [mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)]
    if not coords[:, -1].any():  # Of chips with two devices only `mesh_utils` knows enough.
        chips = [_Chip(device, tuple(device.coords)) for device in devices]
        general = mesh_utils.create_device_mesh(sizes, chips, allow_split_physical_axes=True)
        arrays.append(np.vectorize(lambda chip: chip.device, otypes=[object])(general))
    wraps = _wraps(array)
    arrays += [_in_rings(array, wraps) for array in arrays]
    dims = range(len(sizes))[::-1]
    return min(arrays, key=lambda array: [_hops(array, dim, wraps).sum() for dim in dims])


def ring_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The places of a grid in an order in which each is next to the one before.

    The last is next to the first, unless all sizes are odd or the grid is a line.
    """
    even = next((dim for dim, size in enumerate(shape) if size % 2 == 0), None)
    if even is None:
        return _path_through(shape)
    first, *others = _path_through([size for dim, size in enumerate(shape) if dim != even])
    rows = range(shape[even])
    out = [(row, place) for row in rows for place in (others if row % 2 == 0 else others[::-1])]
    ring = [(0, first), *out, *((row, first) for row in reversed(rows[1:]))]
    return [(*place[:even], row, *place[even:]) for row, place in ring]


def _path_through(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The places of a grid, each next to the one before, back and forth."""
    path: list[tuple[int, ...]] = [()]
    for size in reversed(shape):
        path = [(i, *place) for i in range(size) for place in (path if i % 2 == 0 else path[::-1])]
    return path


def _in_rings(array: np.ndarray, wraps: np.ndarray) -> np.ndarray:
    """The array with each dimension in the order of a ring, where that has fewer hops."""
    for dim, size in enumerate(array.shape):
        places = _coords_of(np.moveaxis(array, dim, 0).reshape(size, -1)[:, 0])
        found = [np.unique(column, return_inverse=True) for column in places.T]
        shape = [len(values) for values, _ in found]
        if math.prod(shape) == size:  # They make up a grid.
            index = {place: i for i, place in enumerate(zip(*(at for _, at in found), strict=True))}
            ring = np.take(array, [index[place] for place in ring_through(shape)], dim)
            if _hops(ring, dim, wraps).sum() < _hops(array, dim, wraps).sum():
                array = ring
    return array


def _hops(array: np.ndarray, dim: int, wraps: np.ndarray) -> np.ndarray:
    """The hops from each device to the next along a dimension, and from the last to the first."""
    coords = _coords_of(array)
    apart = np.abs(coords - np.roll(coords, -1, dim))
    return np.minimum(apart, np.abs(wraps - apart)).sum(-1)


def closed_sides(sides: Sequence[int], *, is_flat: bool) -> list[bool]:
    """Which sides of a slice, in chips, are closed to a ring by links between their ends.

    In a flat torus, of two dimensions, it is a full side of a pod, of 16 chips. In three dimensions
    it is all sides of a slice that consists of whole cubes of four, or none.
    """
    if is_flat:
        return [side % 16 == 0 for side in sides]
    return [all(side % 4 == 0 for side in sides)] * len(sides)


def _wraps(array: np.ndarray) -> np.ndarray:
    """How many hops lead around each dimension of a slice that is closed to a ring, else `FAR`."""
    sides = np.ptp(_coords_of(array).reshape(-1, len(NAMES)), 0) + 1
    is_flat = any(word in array.flat[0].device_kind for word in FLAT)
    closed = [*closed_sides(sides[:-1], is_flat=is_flat), False]  # The last are cores.
    return np.where(closed, sides, FAR)


def describe_along(array: np.ndarray, hosts: np.ndarray, dim: int) -> str:
    """Says how a dimension of an array of TPUs lies in the torus, as far as it stays on a host.

    Args:
      array: The devices.
      hosts: The host, or the slice, of each.
      dim: The dimension.

    Returns:
      Words such as `in a ring of neighbours along xy`; empty if no host has two devices along it.
    """
    if _coords_of(array) is None:
        return "in an unknown order (no coordinates)"
    size, wraps = array.shape[dim], _wraps(array)
    lines, of_lines = (np.moveaxis(x, dim, -1).reshape(-1, size) for x in (array, hosts))
    parts = [
        line[of_line == host]
        for line, of_line in zip(lines, of_lines, strict=True)
        for host in np.unique(of_line)
        if (of_line == host).sum() > 1
    ]
    if not parts:
        return ""
    moved = np.any([np.ptp(_coords_of(part), 0) > 0 for part in parts], 0)
    along = "".join(name for name, has_moved in zip("xyz", moved, strict=False) if has_moved)
    if not along:
        return "within a chip"
    hops = [_hops(part, 0, wraps) for part in parts]
    most, within = max(map(max, hops)), max(max(some[:-1]) for some in hops)
    if most == 1:
        return f"{'between' if len(parts[0]) == 2 else 'in a ring of'} neighbours along {along}"
    if within == 1:
        return f"in a line of neighbours along {along} with {most} hops back"
    return f"along {along} with up to {most} hops"


def _coords_of(array: np.ndarray) -> Any:
    """The coordinates of devices, and their numbers on their chips: `[..., 4]`, or `None`."""
    if not all(getattr(device, "coords", None) for device in array.flat):
        return None
    coords = [(*(*device.coords, 0, 0)[:3], device.core_on_chip) for device in array.flat]
    return np.array(coords).reshape(*array.shape, len(NAMES))
