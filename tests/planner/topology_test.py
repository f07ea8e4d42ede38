"""Names of topologies, and how fast rings over mesh axes are that lie on them."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from manualpar.planner.hardware import CHIPS, chip_named
from manualpar.planner.topology import (
    describe_axes,
    levels_of,
    parse_topology,
    place_axes,
    ring_over,
    topology_of_size,
)

GB = 1e9


@pytest.mark.parametrize(
    ("name", "devices", "slices"),
    [
        ("v5p:8x8x4", 256, 1),
        ("2xv5e:16x16", 512, 2),
        ("h100:128", 128, 1),
        ("h100:2x4", 8, 1),
        ("tpu7x:2x2x1", 8, 1),
    ],
)
def test_a_name_is_understood(name, devices, slices):
    topology = parse_topology(name)
    assert (topology.num_devices, topology.num_slices, topology.name) == (devices, slices, name)


@pytest.mark.parametrize("count", [2**k for k in range(3, 13)])
@pytest.mark.parametrize("chip", CHIPS, ids=[chip.name for chip in CHIPS])
def test_there_is_a_topology_of_each_power_of_two(chip, count):
    topology = topology_of_size(chip, count)
    assert topology is not None
    assert topology.num_devices == count
    assert parse_topology(topology.name) == topology
    assert math.prod(levels_of(topology)) == count


def test_there_is_none_of_other_sizes():
    assert topology_of_size(chip_named("v5e"), 24) is None
    assert topology_of_size(chip_named("h100"), 12) is None


@hypothesis.given(st.data())
def test_axes_take_all_of_a_topology_and_nothing_twice(data):
    chip = data.draw(st.sampled_from(CHIPS))
    exponent = data.draw(st.integers(3, 12))
    topology = topology_of_size(chip, 2**exponent)
    cuts = sorted(data.draw(st.lists(st.integers(0, exponent), min_size=2, max_size=2)))
    parts = (cuts[0], cuts[1] - cuts[0], exponent - cuts[1])
    mesh = dict(zip("abc", (2**k for k in parts), strict=True))
    placed = place_axes(topology, mesh)
    taken = dict.fromkeys(range(len(levels_of(topology))), 1)
    for axis, levels in placed.items():
        assert math.prod(part for _, part in levels) == mesh[axis]
        for level, part in levels:
            taken[level] *= part
    assert tuple(taken.values()) == levels_of(topology)
    for axis in mesh:
        ring = ring_over(topology, mesh, (axis,))
        assert ring.inside * ring.outside == mesh[axis]


# One link of v5e carries 50 GB/s, of v5p 100. Rings: 16 on v5e, whole cubes of four on v5p.
@pytest.mark.parametrize(
    ("name", "mesh", "axes", "fast", "steps"),
    [
        ("v5e:16x16", {"data": 256}, ("data",), 200, 16),  # two rings, both ways
        ("v5e:4x8", {"data": 32}, ("data",), 100, 10),  # two open lines
        ("v5e:16x16", {"replica": 16, "data": 16}, ("data",), 100, 8),
        ("v5e:16x16", {"replica": 16, "data": 16}, ("replica", "data"), 200, 16),
        ("v5p:8x8x4", {"data": 256}, ("data",), 600, 10),  # three rings
        ("v5p:2x2x4", {"data": 16}, ("data",), 300, 5),  # less than a cube: three lines
        ("v5p:8x8x4", {"replica": 4, "data": 64}, ("replica",), 200, 2),  # the dimension of 4
        # Half a dimension: the inner half is a line, the outer one's neighbours are 4 apart.
        ("v5p:8x8x4", {"replica": 2, "data": 128}, ("replica",), 25, 4),
        ("v5p:8x8x4", {"replica": 2, "data": 128}, ("data",), 500, 9),
    ],
)
def test_a_ring_has_the_links_of_its_dimensions(name, mesh, axes, fast, steps):
    ring = ring_over(parse_topology(name), mesh, axes)
    assert ring.fast == pytest.approx(fast * GB)
    assert ring.steps == steps
    assert not ring.is_slow


def test_nodes_share_their_network_cards():
    # 1 GB gathered on two nodes of eight: half of it enters a node, through eight cards of 50 GB/s
    # of which 80% are reached: 1.5625 ms. Meanwhile 15/16 GB pass NVLink at 0.8 x 450 GB/s.
    topology = parse_topology("h100:16")
    ring = ring_over(topology, {"data": 16}, ("data",))
    assert (ring.inside, ring.outside) == (8, 2)
    nvlink = 15 / 16 / (0.8 * 450)
    assert ring.seconds(1e9 * 15 / 16) == pytest.approx(nvlink + 15e-6 + 7 * 1e-6 + 5e-6)
    # With one device of each node on the ring, each has its card alone: half a GB through it.
    ring = ring_over(topology, {"replica": 2, "data": 8}, ("replica",))
    assert (ring.inside, ring.outside) == (1, 2)
    assert ring.seconds(1e9 / 2) == pytest.approx(0.5 / (0.8 * 50) + 15e-6 + 5e-6)


def test_slices_are_joined_by_the_slow_network():
    topology = parse_topology("2xv5e:16x16")
    mesh = {"replica": 2, "data": 256}
    assert not ring_over(topology, mesh, ("data",)).is_slow
    ring = ring_over(topology, mesh, ("replica",))
    assert (ring.inside, ring.outside, ring.network.slow_bandwidth) == (1, 2, 3.125 * GB)
    assert ring_over(topology, {"data": 512}, ("data",)).outside == 2


def test_a_ring_of_one_takes_no_time():
    topology = parse_topology("h100:8")
    ring = ring_over(topology, {"replica": 1, "data": 8}, ("replica",))
    assert ring.seconds(1e9, times=3) == 0


@pytest.mark.parametrize(
    ("name", "mesh", "words"),
    [
        (
            "h100:32",  # As many nodes as devices along model.
            {"data": 8, "model": 4},
            "data 4 over InfiniBand and 2 over NVLink, model 4 over NVLink",
        ),
        (
            "2xv5e:16x16",
            {"replica": 2, "data": 64, "expert": 1, "model": 4},
            "replica 2 over DCN, data 16x4 over ICI, model 4 over ICI",
        ),
        ("h100:1", {"data": 1}, ""),
    ],
)
def test_the_network_of_each_axis_is_named(name, mesh, words):
    assert describe_axes(parse_topology(name), mesh) == words
