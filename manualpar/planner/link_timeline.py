"""Models every directed link of a torus as a separate resource.

In a permutation, each source sends its data to its target, first along x, then y, then z. In a
dimension that is closed to a ring, the data go the shorter way around. All links on this way carry
the data. The permutation takes as long as the link that carries the most bytes, and starts when all
of its links are free. So permutations in opposite directions run at the same time, and a
permutation between devices that are not neighbours occupies several links. An all-to-all is a
permutation of all pairs of its devices. Any other collective takes as long as if it used all links,
but occupies only the links along the dimensions that its devices span. A collective that crosses
slices occupies all links.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from manualpar.inspect.compiled import CompiledCollective
from manualpar.inspect.hlo import Groups, Instruction, permuted_pairs
from manualpar.planner.compiled_timeline import ALL_LINKS, SendModel, WireSeconds
from manualpar.planner.topology import Topology, is_closed

TorusPlace = tuple[int, ...]  # The slice of a device, then its coordinates in the torus.
Link = tuple[TorusPlace, int, int]  # From a place along a dimension, in a direction: 1 or -1.


def wire_by_links(
    topology: Topology,
    places: Sequence[Sequence[int]],
    wire_seconds: WireSeconds,
    *,
    apart: bool = True,
) -> SendModel:
    """Builds a function that returns which links a collective occupies, and for how long.

    Args:
      topology: A torus.
      places: The slice and the coordinates of each device, in the order of the program.
      wire_seconds: The time of a collective that uses all links.
      apart: Whether each link is a separate resource. If not, every collective occupies all links,
        and a permutation takes `wire_seconds`.
    """
    network, devices = topology.chip.network, [tuple(place) for place in places]
    bandwidth = network.bandwidth * network.efficiency * topology.chip.devices_per_chip
    sizes = [max(at) + 1 for at in zip(*devices, strict=True)]
    closed = [is_closed(topology, size) for size in sizes]

    def links_along(dims: set[int]) -> frozenset[Link]:
        return frozenset((at, dim, step) for at in devices for dim in dims for step in (1, -1))

    @functools.cache
    def load(pairs: tuple[tuple[int, int], ...]) -> tuple[Counter[Link], int]:
        """Counts the pairs whose data each link carries, and the links of the longest way."""
        ways = [list(_way(devices[a], devices[b], sizes, closed)) for a, b in pairs]
        return Counter(link for way in ways for link in way), max(map(len, ways), default=0)

    def wire(
        collective: CompiledCollective, instruction: Instruction, groups: Groups
    ) -> tuple[Collection[Link], float]:
        is_crossing = any(len({devices[i][0] for i in group}) > 1 for group in groups)
        if is_crossing:
            return links_along(set(range(1, len(sizes)))), wire_seconds(collective)
        if collective.kind == "all_to_all":
            loads, hops = load(_all_pairs(groups))
            each = collective.operand_bytes / max(map(len, groups), default=1)
        elif collective.kind == "permute" and apart:
            loads, hops = load(tuple(permuted_pairs(instruction)))
            each = collective.operand_bytes
        else:
            return links_along(_dims_spanned(devices, groups)), wire_seconds(collective)
        sent = max(loads.values(), default=0) * each
        return loads, network.launch + hops * network.latency + sent / bandwidth

    def wire_of_all(*sent: Any) -> tuple[Collection[str], float]:
        return (ALL_LINKS,), wire(*sent)[1]

    return wire if apart else wire_of_all


def _all_pairs(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple(pair for group in groups for pair in itertools.permutations(group, 2))


def _dims_spanned(devices: Sequence[TorusPlace], groups: Groups) -> set[int]:
    """Returns the dimensions in which the devices of some group differ."""
    along = [zip(*(devices[i] for i in group), strict=True) for group in groups]
    return {dim for places in along for dim, at in enumerate(places) if len(set(at)) > 1}


def _way(
    source: TorusPlace, target: TorusPlace, sizes: Sequence[int], closed: Sequence[bool]
) -> Iterator[Link]:
    """Yields the links from a device to another device of its slice, dimension by dimension."""
    at = list(source)
    for dim in range(1, len(sizes)):
        ahead = (target[dim] - at[dim]) % sizes[dim]
        is_ahead = target[dim] > at[dim]
        if closed[dim]:
            is_ahead = ahead <= sizes[dim] / 2
        step = 1 if is_ahead else -1
        while at[dim] != target[dim]:
            yield (tuple(at), dim, step)
            at[dim] = (at[dim] + step) % sizes[dim]
