"""The meshes that a search tries on a topology, by the axes that a strategy has.

An axis that splits layers, or divides experts, is the last of the mesh, so its devices are
neighbours. A group of devices that shards a replica of the parameters is a node, or a slice, or a
part of it.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from manualpar.planner.topology import Topology, levels_of, place_axes
from manualpar.strategies import StrategyKind
from manualpar.training.task import EXPERT_AXIS, SPLIT_AXIS

# The name of a second axis to shard over; two axes suit a torus.
MINOR_AXIS = "data_minor"
# The largest number of devices to split layers over.
MOST_SPLIT = 16


def data_meshes(kind: StrategyKind, topology: Topology) -> Iterator[dict[str, int]]:
    """Yields the meshes that have only data axes."""
    count, groups = topology.num_devices, group_sizes(topology)
    if kind.replicates:
        yield from ({"replica": count // size, "data": size} for size in groups)
        return
    yield {"data": count}
    if kind.on_torus and topology.chip.is_tpu and groups:
        yield {"data": count // groups[0], MINOR_AXIS: groups[0]}


def meshes_with(axis: str, kind: StrategyKind, topology: Topology) -> Iterator[dict[str, int]]:
    """Yields a strategy's first mesh, with `axis` added, for each possible size of `axis`."""
    for data_mesh, size in itertools.product(
        itertools.islice(data_meshes(kind, topology), 1), split_sizes(topology)
    ):
        mesh = with_axis(data_mesh, axis, size)
        # With data=1 a strategy that replicates would be another strategy.
        if mesh and not (kind.replicates and mesh["data"] == 1) and _fits_into(topology, mesh):
            yield mesh


def mesh_like(mesh: Mapping[str, int], topology: Topology) -> dict[str, int] | None:
    """Returns a mesh with the axes of another on a topology; `None` if there is none.

    Layers are split, or experts divided, over as many devices as in the other mesh.
    """
    count, groups = topology.num_devices, group_sizes(topology)
    data_axes = [axis for axis in mesh if axis not in (SPLIT_AXIS, EXPERT_AXIS)]
    found: dict[str, int] | None = {"data": count}
    if len(data_axes) > 1:
        if not groups:
            return None
        found = dict(zip(data_axes, (count // groups[0], groups[0]), strict=True))
    for axis in (EXPERT_AXIS, SPLIT_AXIS):
        if found and axis in mesh:
            found = with_axis(found, axis, mesh[axis])
    return found if found and _fits_into(topology, found) else None


def with_axis(mesh: Mapping[str, int], axis: str, size: int) -> dict[str, int] | None:
    """Moves a factor `size` of a mesh's axis `data` to another axis; `None` if it is no factor."""
    if mesh["data"] % size:
        return None
    return {**mesh, "data": mesh["data"] // size, axis: size}


def split_sizes(topology: Topology) -> list[int]:
    """Returns the numbers of devices that layers may be split over, within a node or a slice."""
    inside = topology.num_devices // levels_of(topology)[0]
    return [size for size in range(2, min(inside, MOST_SPLIT) + 1) if inside % size == 0]


def group_sizes(topology: Topology) -> list[int]:
    """Returns the sizes of groups of devices over which to shard; each group may be a replica.

    The first size is a node or a slice. In a single slice it is the slice without one dimension of
    the torus, which is left to the replicas.
    """
    count, levels = topology.num_devices, levels_of(topology)
    products = [math.prod(levels[i:]) for i in range(1, len(levels))]
    sizes = [size for size in products if 1 < size < count]
    if topology.chip.network.kind == "nodes" and sizes:
        nodes = count // sizes[0]
        between = sizes[0] * 2 ** (nodes.bit_length() // 2)
        sizes += [between] if sizes[0] < between < count and count % between == 0 else []
    return list(dict.fromkeys(sizes))[:2]


def _fits_into(topology: Topology, mesh: Mapping[str, int]) -> bool:
    try:
        place_axes(topology, mesh)
    except ValueError:
        return False
    return True
