"""Rings of neighbours on every slice that has them, and the words for it."""

import itertools
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from manualpar.core.mesh.mesh import (
    arrange_devices,
    arrange_in_torus,
    describe_along,
    describe_links,
    ring_through,
)
from manualpar.planner.topology import is_closed, parse_topology
from tests.core.mesh.devices import Device

SLICES = ["v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v6e:2x4", "v6e:4x4"]
SLICES += ["v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v4:2x2x4"]


def devices_of(name, origin=0):
    """The devices of a slice, four neighbours on each host, which come first."""
    topology = parse_topology(name)
    shape = (*topology.shape, 1)[:3]
    places = sorted(
        itertools.product(*map(range, shape)),
        key=lambda place: ([i // 2 for i in place[1::-1]], place[2], place[1], place[0]),
    )
    return [
        Device(
            i,
            process=i // 4,
            coords=tuple(c + origin for c in place),
            kind=topology.chip.device_kind,
        )
        for i, place in enumerate(places)
    ]


def apart(first, second):
    return sum(abs(a - b) for a, b in zip(first.coords, second.coords, strict=True))


@pytest.mark.parametrize("name", SLICES)
def test_one_axis_over_a_slice_is_a_ring_of_neighbours(name):
    devices = devices_of(name, origin=4)
    array = arrange_devices({"data": len(devices)}, devices[::-1])
    assert sorted(array, key=id) == sorted(devices, key=id)
    assert [apart(array[i - 1], array[i]) for i in range(len(array))] == [1] * len(array)
    words = describe_links(Mesh(array, ("data",)))
    assert words.startswith("data: in a ring of neighbours along xy")


@pytest.mark.parametrize("shape", [*itertools.product((1, 2, 3, 4), repeat=3)])
def test_a_ring_visits_each_place_once_and_its_neighbours(shape):
    ring = ring_through(shape)
    assert sorted(ring) == sorted(np.ndindex(*shape))
    hops = [
        sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(ring)
    ]
    long_sides = [size for size in shape if size > 1]
    if len(long_sides) > 1 and any(size % 2 == 0 for size in long_sides):
        hops += [sum(abs(a - b) for a, b in zip(ring[-1], ring[0], strict=True))]
    assert set(hops) <= {1} or len(long_sides) == 1


def hops_around(array, dim, sides):
    """The sum of all hops along a dimension; `sides` are 0 where there is no link around."""
    total = 0
    for line in np.moveaxis(array, dim, -1).reshape(-1, array.shape[dim]):
        for first, second in zip(line, np.roll(line, -1), strict=True):
            for a, b, side in zip(first.coords, second.coords, sides, strict=True):
                total += min(abs(a - b), side - abs(a - b)) if side else abs(a - b)
    return total


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.data())
def test_no_axis_has_more_hops_than_in_the_order_of_jax(data):
    name = data.draw(st.sampled_from([*SLICES, "v5e:16x16"]))
    topology, devices = parse_topology(name), devices_of(name)
    exponent = int(math.log2(len(devices)))
    cuts = sorted(data.draw(st.lists(st.integers(0, exponent), min_size=2, max_size=2)))
    sizes = [2**k for k in (cuts[0], cuts[1] - cuts[0], exponent - cuts[1])]
    array = arrange_in_torus(sizes, devices)
    assert sorted(array.flat, key=id) == sorted(devices, key=id)
    usual = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    shape = (*topology.shape, 1)[:3]
    sides = [size if is_closed(topology, size) else 0 for size in shape]
    ours, theirs = (
        [hops_around(order, dim, sides) for dim in (2, 1, 0)] for order in (array, usual)
    )
    assert ours <= theirs
    if ours == theirs:
        assert (array == usual).all()


RING, LINE = "in a ring of neighbours along", "in a line of neighbours along"


@pytest.mark.parametrize(
    ("name", "axes", "words"),
    [
        ("v5e:2x4", {"a": 4, "b": 2}, (f"{LINE} y with 3 hops back", "between neighbours along x")),
        ("v5e:2x4", {"a": 2, "b": 4}, ("along xy with up to 4 hops", f"{RING} xy")),
        ("v5e:8x8", {"a": 8, "b": 8}, (f"{LINE} y with 7 hops back", f"{LINE} x with 7 hops back")),
        ("v5e:16x16", {"a": 16, "b": 16}, (f"{RING} y", f"{RING} x")),
        ("v5p:2x2x4", {"a": 4, "b": 4}, (f"{LINE} z with 3 hops back", f"{RING} xy")),
    ],
)
def test_the_line_of_the_mesh_says_how_axes_go_through_the_torus(name, axes, words):
    line = describe_links(Mesh(arrange_devices(axes, devices_of(name)), tuple(axes)))
    assert line == f"a: {words[0]}, b: {words[1]}"


def test_each_of_several_slices_is_a_ring():
    devices = [
        Device(d.id, process=d.process_index, slice_index=i, coords=d.coords, kind=d.device_kind)
        for i in range(2)
        for d in devices_of("v5e:2x4")
    ]
    array = arrange_devices({"data": 16}, devices)
    assert [device.slice_index for device in array] == [0] * 8 + [1] * 8
    for ring in (array[:8], array[8:]):
        assert [apart(ring[i - 1], ring[i]) for i in range(8)] == [1] * 8


def test_two_devices_of_a_chip_are_next_to_each_other():
    devices = [
        Device(i, coords=(x, y, 0), kind="TPU7x")
        for i, (x, y, _) in enumerate(itertools.product(range(2), repeat=3))
    ]
    for i, device in enumerate(devices):
        device.core_on_chip = i % 2
    array = arrange_in_torus([8], devices)
    assert [apart(array[i - 1], array[i]) for i in range(8)] == [1, 0] * 4
    array = arrange_in_torus([4, 2], devices)
    assert describe_along(array, np.zeros((4, 2)), 1) == "within a chip"


@pytest.mark.parametrize("known", [True, False])
def test_devices_of_which_too_little_is_known_stand_as_they_come(known):
    devices = devices_of("v5e:2x4")[:7]
    for device in devices:
        device.coords = device.coords if known else None
    array = arrange_devices({"data": 7}, devices)
    assert list(array) == devices
    words = "along xy with up to 3 hops" if known else "in an unknown order (no coordinates)"
    assert describe_links(Mesh(array, ("data",))) == f"data: {words}"
