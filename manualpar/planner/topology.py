"""Topologies of devices, such as `v5p:8x8x4`, `2xv5e:16x16`, `h100:128`, and mesh axes on them.

A topology is a chip and a shape. For TPUs the shape is the dimensions of a slice, in chips, and a
prefix gives the number of slices. For GPUs the shape is the number of GPUs, in nodes of eight, or
the number of nodes and of GPUs in a node: `h100:16` and `h100:2x8` are the same GPUs. Mesh axes are
placed on the topology in the order in which they are given
(`manualpar.core.mesh.mesh.in_order`), the last axis on the fastest links.

`ring_over` computes the speed of a ring over mesh axes. In a torus a mesh axis takes complete
dimensions if the sizes allow it: `k` dimensions carry `k` rings at once. A dimension that is closed
to a ring carries data in both directions; a dimension that is open, or of size two, counts one
link. If several axes share a dimension, the last of them takes its inner part. Neighbours along the
other axes are then not adjacent, and the rings of these axes share links. If an axis does not fit
into a slice or node, its ring crosses the slow network. The devices of the ring that are in one
slice or node then share its slow links.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from jax.sharding import AbstractDevice

from manualpar.core.mesh.mesh import closed_sides, sizes_across
from manualpar.planner.hardware import Chip, Network, chip_named

EXAMPLES = "such as v5p:8x8x4, 2xv5e:16x16 (two slices), h100:128 or h100:2x4 (two nodes of four)"
_PATTERN = re.compile(r"(?:(\d+)x)?([a-zA-Z][\w-]*):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, and how the network joins them.

    For TPUs `shape` has the dimensions of a slice, in chips. For GPUs it has the number of GPUs, or
    the number of nodes and of GPUs in a node. All nodes form one slice.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_chips(self) -> int:
        """The number of chips of all slices."""
        return self.num_slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """The number of `jax.Device`s."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def abstract_devices(self) -> list[AbstractDevice]:
        """The devices that `prepare` takes to trace a program."""
        return [self.chip.abstract_device] * self.num_devices

    @property
    def slice_name(self) -> str:
        """The name of one slice, for `jax.experimental.topologies`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def name(self) -> str:
        """The name that `parse_topology` takes."""
        return f"{self.num_slices}x{self.slice_name}" if self.num_slices > 1 else self.slice_name


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring over mesh axes, and its speed.

    Attributes:
      fast: Bytes per second that a device sends within a slice or a node.
      inside: The number of devices of the ring in a slice or a node.
      outside: The number of slices or nodes that the ring goes through.
      steps: The number of hops within a slice or a node, each of which costs a latency.
      torus_dims: Dimensions of the torus that the ring fills completely.
    """

    network: Network
    fast: float
    inside: int
    outside: int
    steps: int
    torus_dims: tuple[int, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether the ring leaves a slice or a node."""
        return self.outside > 1

    def seconds(self, sent: float, times: int = 1) -> float:
        """Returns the time of `times` runs of a collective that send `sent` bytes in all.

        All devices of a slice or a node share its slow links, see `crossing_bytes`.
        """
        network = self.network
        if self.inside * self.outside == 1:
            return 0.0
        fast = sent / (self.fast * network.efficiency) if self.inside > 1 else 0.0
        slow = self.crossing_bytes(sent) / (network.slow_bandwidth * network.efficiency)
        waits = self.steps * network.latency + (self.outside - 1) * network.slow_latency
        return max(fast, slow) + times * (network.launch + waits)

    def crossing_bytes(self, sent: float) -> float:
        """Returns the bytes per device that enter a slice or a node, if each sends `sent` bytes.

        Let a ring go over `n` groups (slices or nodes) of `s` devices, `S = n s`. If each device
        sends `b` bytes (`ring_bytes`), `b S / (S - 1)` bytes go around the ring. Of these bytes
        `(n - 1) / n` enter a group through its `s` slow links, and the rest stays inside.
        """
        size = self.inside * self.outside
        if self.outside == 1:
            return 0.0
        return sent * size / (size - 1) * (self.outside - 1) / self.outside / self.inside


def parse_topology(name: str) -> Topology:
    """Parses the name of a topology, `[<slices>x]<chip>:<shape>`; a `ValueError` names mistakes."""
    found = _PATTERN.fullmatch(name)
    if not found:
        raise ValueError(
            f"topology {name!r} is not understood, expected a chip and a shape {EXAMPLES}."
        )
    try:
        chip = chip_named(found[2])
    except ValueError as error:
        raise ValueError(f"topology {name!r}: {error}") from error
    topology = Topology(chip, tuple(map(int, found[3].split("x"))), int(found[1] or 1))
    if problem := _problem(topology):
        raise ValueError(f"topology {name!r} {problem}")
    return topology


def _problem(topology: Topology) -> str:
    """Says why the chip's network cannot have the topology's shape; "" if it can."""
    chip, shape, network = topology.chip, topology.shape, topology.chip.network
    if topology.num_devices == 0:
        return f"has a size of 0, expected positive ones, {EXAMPLES}."
    if network.kind == "torus" and len(shape) != network.dims:
        return (
            f"has {len(shape)} dimensions, expected {network.dims} for {chip.name}, such as "
            f"{chip.name}:{'x'.join('4' * network.dims)}."
        )
    if network.kind == "nodes" and (len(shape) > 2 or topology.num_slices > 1):
        return (
            f"has slices or three dimensions, expected a number of devices for {chip.name}, such "
            f"as {chip.name}:{4 * network.node_size}, or nodes and devices of a node, such as "
            f"{chip.name}:4x{network.node_size}."
        )
    if network.kind == "nodes" and len(shape) == 2 and shape[1] > network.node_size:
        return (
            f"has {shape[1]} devices in a node, expected at most {network.node_size} of "
            f"{chip.name}; the number of nodes comes first, as in {chip.name}:4x8."
        )
    if network.kind == "nodes" and len(shape) == 1 and not _fills_nodes(network, shape[0]):
        return (
            f"has {shape[0]} devices, expected a multiple of {network.node_size} (full nodes), or "
            "fewer devices than one node has."
        )
    in_slice = topology.num_devices // topology.num_slices
    if in_slice > chip.max_devices:
        return (
            f"has {in_slice} devices in a slice, expected at most {chip.max_devices} of "
            f"{chip.name}; several slices are written 2x{chip.name}:...."
        )
    return ""


def _fills_nodes(network: Network, num_devices: int) -> bool:
    return num_devices <= network.node_size or num_devices % network.node_size == 0


def topology_of_size(chip: Chip, num_devices: int) -> Topology | None:
    """Returns a topology of `num_devices`; `None` if there is none.

    GPUs must fill nodes. The number of TPU chips must be a power of two. The chips fill one slice
    whose dimensions are powers of two, as cubic as possible; or several slices of the largest size.
    """
    network = chip.network
    if network.kind == "nodes":
        return Topology(chip, (num_devices,)) if _fills_nodes(network, num_devices) else None
    chips, rest = divmod(num_devices, chip.devices_per_chip)
    if rest or chips < 1 or chips & (chips - 1):
        return None
    largest = 2 ** int(math.log2(chip.max_devices // chip.devices_per_chip))
    slices = max(1, chips // largest)
    shape = [1] * network.dims
    for i in range(int(math.log2(chips // slices))):
        shape[-1 - i % network.dims] *= 2
    return Topology(chip, tuple(shape), slices)


def levels_of(topology: Topology) -> tuple[int, ...]:
    """Returns the sizes of the levels of a topology, the slowest first.

    Level 0 joins slices or nodes. Then come the dimensions of the torus, or the node, and last the
    devices of a TPU chip.
    """
    chip, network = topology.chip, topology.chip.network
    if network.kind == "torus":
        return (topology.num_slices, *topology.shape, chip.devices_per_chip)
    if len(topology.shape) == 2:
        return topology.shape
    inside = min(network.node_size, topology.shape[0])
    return (topology.shape[0] // inside, inside)


def place_axes(topology: Topology, mesh: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Places mesh axes on a topology; the first axis of `mesh` gets the slowest links.

    The first axes go across slices or nodes as far as the sizes allow, like in `make_mesh`.

    Returns:
      Axis -> the parts of levels that the axis takes: pairs of a level, see `levels_of`, and the
      size of the part.
    """
    if math.prod(mesh.values()) != topology.num_devices:
        raise ValueError(
            f"mesh {dict(mesh)} has {math.prod(mesh.values())} devices, expected the "
            f"{topology.num_devices} of {topology.name}."
        )
    num_hosts, *levels = levels_of(topology)
    across = dict(zip(mesh, sizes_across(mesh.values(), num_hosts), strict=True))
    left = [1, *levels]
    placed: dict[str, list[tuple[int, int]]] = {}
    for axis in reversed(list(mesh)):
        needed = mesh[axis] // across[axis]
        parts = [(0, across[axis])] if across[axis] > 1 else []
        for level in _complete_levels(left, needed) or range(len(left) - 1, -1, -1):
            part = math.gcd(needed, left[level])
            if part > 1:
                parts.append((level, part))
                needed, left[level] = needed // part, left[level] // part
        if needed > 1:
            raise ValueError(
                f"mesh {dict(mesh)}: axis {axis!r} of size {mesh[axis]} does not fit into "
                f"{topology.name}, expected a product of parts of its dimensions."
            )
        placed[axis] = parts
    return {axis: placed[axis] for axis in mesh}


def describe_axes(topology: Topology, mesh: Mapping[str, int]) -> str:
    """Names the networks over which each axis goes, and the sizes of the parts that it takes.

    Returns:
      Words such as `data 4 over InfiniBand and 2 over NVLink, model 4 over NVLink`.
    """
    fast, slow = topology.chip.network.names
    described = []
    for axis, parts in place_axes(topology, mesh).items():
        inside = "x".join(str(part) for level, part in sorted(parts) if level)
        words = [f"{part} over {slow}" for level, part in parts if level == 0]
        words += [f"{inside} over {fast}"] if inside else []
        described += [f"{axis} {' and '.join(words)}"] if words else []
    return ", ".join(described)


def _complete_levels(left: list[int], needed: int) -> list[int]:
    """Returns the fastest complete levels whose sizes multiply to `needed`; [] if none do."""
    for bits in range(1, 2 ** len(left)):
        levels = [i for i in range(len(left)) if bits >> (len(left) - 1 - i) & 1 and left[i] > 1]
        if levels and math.prod(left[i] for i in levels) == needed:
            return levels
    return []


def ring_over(topology: Topology, mesh: Mapping[str, int], axes: tuple[str, ...]) -> Ring:
    """Returns one ring over some axes of a mesh; refuses a mesh that does not fit."""
    placed, chip = place_axes(topology, mesh), topology.chip
    network, sizes = chip.network, levels_of(topology)
    taken: dict[int, int] = {}
    for axis in axes:
        for level, part in placed[axis]:
            taken[level] = taken.get(level, 1) * part
    outside = taken.pop(0, 1)
    inside = math.prod(taken.values())
    if network.kind == "nodes":
        steps = max(inside - 1, 0)
        return Ring(network, network.bandwidth, inside, outside, steps)
    order = list(mesh)
    faster = order[max((order.index(axis) for axis in axes), default=0) + 1 :]
    bandwidth, steps, filled_dims = 0.0, 0, []
    for level, part in sorted(taken.items()):
        if level == len(sizes) - 1 and chip.devices_per_chip > 1:
            continue  # The link between the devices of a chip is not the bottleneck.
        size = sizes[level]
        filled_dims += [size] if part == size else []
        is_ring = part == size and is_closed(topology, size)
        # Faster axes take the inner part of a dimension, so neighbours on `axes` are `stride`
        # apart.
        stride = math.prod(part for axis in faster for at, part in placed[axis] if at == level)
        bandwidth += network.bandwidth * (2 if is_ring else 1) / stride
        steps += (part // 2 if is_ring else part - 1) * stride
    fast = bandwidth or network.bandwidth * 2 * network.dims
    return Ring(network, fast, inside, outside, steps, tuple(filled_dims))


def is_closed(topology: Topology, size: int) -> bool:
    """Returns whether a dimension of `size` chips is closed to a ring.

    In a 3D torus, either all dimensions are closed, or none.
    """
    is_flat = topology.chip.network.dims == 2
    sides = (size,) if is_flat else topology.shape
    return size > 2 and closed_sides(sides, is_flat=is_flat)[0]
