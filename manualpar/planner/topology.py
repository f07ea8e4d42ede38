"""Devices that nobody here has: `v5p:8x8x4`, `2xv5e:16x16`, `h100:128`; and where mesh axes lie.

A topology is a chip and a shape: of TPUs the shape of a slice in chips, with a factor for several
slices; of GPUs their number, in nodes of eight. Mesh axes are laid onto it in the order of the
mesh, the last one onto the fastest part.

`place_axes` says for every tuple of mesh axes how fast a ring over it is. In a torus a mesh axis
takes whole dimensions where the sizes allow it: `k` dimensions carry `k` rings at once. A dimension
closed to a ring carries data both ways; one that is open, or of size two, counts one link. Axes
that share a dimension take its inner and its outer part: the outer one's neighbours are apart, and
their rings share links. What does not fit into a slice or a node crosses the slow network, which
all devices of the slice or node that are on the axis use together.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from manualpar.planner.hardware import CHIPS, Chip, Network, chip_named

EXAMPLES = "such as v5p:8x8x4, 2xv5e:16x16 (two slices) or h100:128"
_PATTERN = re.compile(r"(?:(\d+)x)?([a-zA-Z][\w-]*):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices and how they are joined.

    Attributes:
      chip: Their kind.
      shape: Of TPUs the dimensions of a slice, in chips; of GPUs how many there are.
      num_slices: How many slices; 1 for GPUs.
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_chips(self) -> int:
        """How many chips there are."""
        return self.num_slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """How many `jax.Device`s there are."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def slice_name(self) -> str:
        """The name of one slice, as `jax.experimental.topologies` takes it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def name(self) -> str:
        """The name that `parse_topology` takes."""
        return f"{self.num_slices}x{self.slice_name}" if self.num_slices > 1 else self.slice_name


@dataclasses.dataclass(frozen=True)
class Path:
    """How fast a ring over mesh axes is.

    Attributes:
      fast: Bytes a second that a device sends within a slice or a node; infinite if it is alone.
      inside: Devices of the ring in a slice or a node.
      outside: Slices or nodes that the ring goes through.
      slow: Bytes a second that a device sends to other slices or nodes.
      steps: How many times the fast latency a collective waits.
      torus_dims: Dimensions of the torus that the ring fills, each whole.
    """

    fast: float
    inside: int
    outside: int
    slow: float
    steps: int
    torus_dims: tuple[int, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether it leaves a slice or a node."""
        return self.outside > 1

    def seconds(self, network: Network, sent: float, times: int = 1) -> float:
        """How long collectives take.

        A ring over `n` groups of `s` devices that sends `b` bytes a device moves `b S / (S - 1)`
        (`S = n s`) around; of that `(n - 1) / n` enters a group through its `s` slow links, while
        the rest goes on inside.

        Args:
          network: The network.
          sent: The bytes that a device sends for all of them, by `ring_bytes`.
          times: How many there are.
        """
        size = self.inside * self.outside
        if size == 1:
            return 0.0
        whole = sent * size / (size - 1)
        fast = sent / (self.fast * network.efficiency) if self.inside > 1 else 0.0
        crossing = whole * (self.outside - 1) / self.outside / self.inside
        slow = crossing / (self.slow * network.efficiency)
        waits = self.steps * network.latency + (self.outside - 1) * network.slow_latency
        return max(fast, slow) + times * (network.launch + waits)


def parse_topology(name: str) -> Topology:
    """Understands the name of a topology.

    Args:
      name: `[<slices>x]<chip>:<shape>`.

    Returns:
      The topology.

    Raises:
      ValueError: It is none; the message says what was expected.
    """
    found = _PATTERN.fullmatch(name)
    if not found:
        raise ValueError(
            f"topology {name!r} is not understood, expected a chip and a shape {EXAMPLES}."
        )
    slices, chip_name, shape_text = found.groups()
    try:
        chip = chip_named(chip_name)
    except ValueError as error:
        raise ValueError(f"topology {name!r}: {error}") from error
    shape, num_slices = tuple(map(int, shape_text.split("x"))), int(slices or 1)
    _check_shape(name, chip, shape, num_slices)
    topology = Topology(chip, shape, num_slices)
    in_slice = topology.num_devices // num_slices
    if in_slice > chip.max_devices:
        raise ValueError(
            f"topology {name!r} has {in_slice} devices in a slice, expected at most "
            f"{chip.max_devices} of {chip.name}; several slices are written 2x{chip.name}:...."
        )
    return topology


def _check_shape(name: str, chip: Chip, shape: tuple[int, ...], num_slices: int) -> None:
    """Refuses a shape that the chip's network does not have."""
    network = chip.network
    if 0 in shape or num_slices == 0:
        raise ValueError(f"topology {name!r} has a size of 0, expected positive ones, {EXAMPLES}.")
    if network.kind == "torus" and len(shape) != network.dims:
        example = "x".join("4" * network.dims)
        raise ValueError(
            f"topology {name!r} has {len(shape)} dimensions, expected {network.dims} for "
            f"{chip.name}, such as {chip.name}:{example}."
        )
    if network.kind == "nodes":
        if len(shape) != 1 or num_slices > 1:
            raise ValueError(
                f"topology {name!r}: expected a number of devices for {chip.name}, such as "
                f"{chip.name}:{4 * network.node_size}."
            )
        if shape[0] > network.node_size and shape[0] % network.node_size:
            raise ValueError(
                f"topology {name!r} has {shape[0]} devices, expected whole nodes of "
                f"{network.node_size}, or fewer than one."
            )


def topology_of_size(chip: Chip, num_devices: int) -> Topology | None:
    """A topology of so many devices, as nearly a cube as can be; `None` if there is none.

    Args:
      chip: The kind.
      num_devices: How many, a power of two.

    Returns:
      Of GPUs so many; of TPUs a slice whose dimensions are powers of two, the last the largest, or
      several slices of the largest size.
    """
    network = chip.network
    if network.kind == "nodes":
        whole = num_devices <= network.node_size or num_devices % network.node_size == 0
        return Topology(chip, (num_devices,)) if whole else None
    chips, rest = divmod(num_devices, chip.devices_per_chip)
    if rest or chips < 1 or chips & (chips - 1):
        return None
    largest = 2 ** int(math.log2(chip.max_devices // chip.devices_per_chip))
    slices = max(1, chips // largest)
    shape = [1] * network.dims
    exponent = (chips // slices).bit_length() - 1
    for i in range(exponent):
        shape[-1 - i % network.dims] *= 2
    return Topology(chip, tuple(shape), slices)


def chip_names() -> tuple[str, ...]:
    """The names that a topology can begin with."""
    return tuple(chip.name for chip in CHIPS)


def place_axes(topology: Topology, mesh: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Lays mesh axes onto a topology.

    Args:
      topology: The topology.
      mesh: The sizes of the axes, the major one first; their product is `topology.num_devices`.

    Returns:
      For each axis the parts of levels that it takes: pairs of a level and a size. Level 0 is what
      is between slices or nodes, then come the dimensions of the torus, or the node, and last the
      devices of a chip.

    Raises:
      ValueError: The sizes do not fit.
    """
    if math.prod(mesh.values()) != topology.num_devices:
        raise ValueError(
            f"mesh {dict(mesh)} has {math.prod(mesh.values())} devices, expected the "
            f"{topology.num_devices} of {topology.name}."
        )
    left = list(levels_of(topology))
    placed: dict[str, list[tuple[int, int]]] = {}
    for axis in reversed(list(mesh)):
        needed, parts = mesh[axis], []
        exact = _whole_levels(left, needed)
        order = exact if exact is not None else range(len(left) - 1, -1, -1)
        for level in order:
            part = math.gcd(needed, left[level])
            if part > 1:
                parts.append((level, part))
                needed, left[level] = needed // part, left[level] // part
        if needed > 1:
            raise ValueError(
                f"mesh {dict(mesh)}: axis {axis!r} of size {mesh[axis]} does not lie in "
                f"{topology.name}, expected a product of parts of its dimensions."
            )
        placed[axis] = parts
    return {axis: placed[axis] for axis in mesh}


def levels_of(topology: Topology) -> tuple[int, ...]:
    """The sizes of the levels of a topology, the slowest first, see `place_axes`."""
    chip, network = topology.chip, topology.chip.network
    if network.kind == "torus":
        return (topology.num_slices, *topology.shape, chip.devices_per_chip)
    inside = min(network.node_size, topology.shape[0])
    return (topology.shape[0] // inside, inside)


def _whole_levels(left: list[int], needed: int) -> list[int] | None:
    """The fastest levels that, each taken whole, make an axis; `None` if there are none."""
    for bits in range(1, 2 ** len(left)):
        levels = [i for i in range(len(left)) if bits >> (len(left) - 1 - i) & 1 and left[i] > 1]
        if levels and math.prod(left[i] for i in levels) == needed:
            return levels
    return None


def path_over(topology: Topology, mesh: Mapping[str, int], axes: tuple[str, ...]) -> Path:
    """How fast a ring over mesh axes is.

    Args:
      topology: The topology.
      mesh: The sizes of the axes.
      axes: The axes that the ring goes over together.

    Returns:
      The path.
    """
    placed, chip = place_axes(topology, mesh), topology.chip
    network, sizes = chip.network, levels_of(topology)
    taken: dict[int, int] = {}
    for axis in axes:
        for level, part in placed[axis]:
            taken[level] = taken.get(level, 1) * part
    outside = taken.pop(0, 1)
    inside = math.prod(taken.values())
    if network.kind == "nodes":
        fast = network.bandwidth
        return Path(fast, inside, outside, network.slow_bandwidth, max(inside - 1, 0))
    bandwidth, steps, whole = 0.0, 0, []
    for level, part in sorted(taken.items()):
        if level == len(sizes) - 1 and chip.devices_per_chip > 1:
            continue  # The devices of a chip: their link is not the bottleneck.
        size = sizes[level]
        if part == size:
            whole.append(size)
        closed = part == size and _is_closed(topology, size)
        # Parts of a dimension are taken from the inside: the last axes are its neighbours.
        stride = _stride(placed, axes, level, list(mesh))
        bandwidth += network.bandwidth * (2 if closed else 1) / stride
        steps += (part // 2 if closed else part - 1) * stride
    fast = bandwidth or network.bandwidth * 2 * network.dims
    return Path(fast, inside, outside, network.slow_bandwidth, steps, tuple(whole))


def _is_closed(topology: Topology, size: int) -> bool:
    """Whether a dimension of so many chips is a ring; of a 3D torus all are, or none."""
    network = topology.chip.network
    sizes = topology.shape if network.dims == 3 else (size,)
    return size > 2 and all(each % network.ring_sizes == 0 for each in sizes)


def _stride(
    placed: Mapping[str, list[tuple[int, int]]], axes: tuple[str, ...], level: int, order: list[str]
) -> int:
    """How far apart neighbours on `axes` are in a level: what faster axes take of it."""
    last = max(order.index(axis) for axis in axes)
    return math.prod(part for axis in order[last + 1 :] for at, part in placed[axis] if at == level)
