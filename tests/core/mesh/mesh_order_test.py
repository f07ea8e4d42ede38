"""Which device stands where: on hosts, on slices, in a torus, and in an order of one's own."""

import collections
import itertools
import math
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from manualpar.core.mesh.mesh import arrange_devices, describe_links, in_order, make_mesh
from tests.core.mesh.devices import Device


def devices_of(num_processes, each):
    return [Device(i, process=i // each) for i in range(num_processes * each)]


def slices_of(num_slices, *shape):
    """TPUs v5p, four a process."""
    places = itertools.product(range(num_slices), *map(range, shape))
    return [
        Device(i, process=i // 4, slice_index=place[0], coords=tuple(place[1:]), kind="TPU v5p")
        for i, place in enumerate(places)
    ]


def links_of(axes, devices, order=()):
    return describe_links(Mesh(arrange_devices(axes, devices, order), tuple(axes)))


def _letters(links):
    return dict(re.findall(r"(\w+): .*?along (\w+)", links))


def test_names_decide_the_order_and_others_keep_their_place():
    written = ("model", "expert", "context", "data_minor", "data", "stage", "replica")
    axes = {axis: size for size, axis in enumerate(written, 2)}
    assert list(in_order(axes).items()) == list(reversed(axes.items()))
    assert list(in_order({"model": 2, "pod": 3, "data": 4})) == ["data", "pod", "model"]
    assert list(in_order({"a": 2, "b": 2})) == ["a", "b"]
    assert list(in_order({"model": 2, "data": 4}, ("model", "data"))) == ["model", "data"]


@pytest.mark.parametrize(
    ("axes", "num_processes", "links"),
    [
        ({"replica": 2, "data": 4}, 2, "replica: across hosts, data: within a host"),
        ({"data": 8}, 2, "data: 4 within a host x 2 across"),
        ({"data": 8}, 8, "data: across hosts"),
        ({"data": 4, "model": 2}, 2, "data: 2 within a host x 2 across, model: within a host"),
        ({"model": 2, "data": 4}, 2, "model: within a host, data: 2 within a host x 2 across"),
        ({"data": 2, "model": 4}, 4, "data: across hosts, model: 2 within a host x 2 across"),
        ({"data": 2, "stage": 4}, 2, "data: within a host, stage: 2 within a host x 2 across"),
        (
            {"model": 2, "context": 2, "stage": 2},
            2,
            "model: within a host, context: within a host, stage: across hosts",
        ),
        ({"data": 1, "replica": 2, "expert": 4}, 2, "replica: across hosts, expert: within a host"),
    ],
)
def test_the_first_axes_of_the_order_go_across_hosts(axes, num_processes, links):
    devices = devices_of(num_processes, 8 // num_processes)
    array = arrange_devices(axes, devices[::-1])  # In whatever order they come.
    assert array.shape == tuple(axes.values())
    assert sorted(array.flat, key=id) == sorted(devices, key=id)
    assert describe_links(Mesh(array, tuple(axes))) == f"{num_processes} hosts; {links}"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("sizes", "across"), [((2, 4), (2, 1)), ((4, 2, 3), (4, 2, 1))])
def test_without_a_torus_the_order_is_that_of_jax(platform, sizes, across):
    count = math.prod(across)
    is_gpu = platform == "gpu"
    numbers = reversed(range(math.prod(sizes)))
    devices = [Device(i, process=i % count, kind=platform, is_described=is_gpu) for i in numbers]
    expected = mesh_utils.create_hybrid_device_mesh(
        [size // outer for size, outer in zip(sizes, across, strict=True)],
        across,
        devices,
        process_is_granule=True,
    )
    axes = dict(zip("abc", sizes, strict=False))
    assert (arrange_devices(axes, devices) == expected).all()


@hypothesis.given(st.data())
def test_an_axis_leaves_a_host_only_where_it_must(data):
    sizes = data.draw(st.permutations([2, 3, 4, 1]))
    axes = dict(
        zip(data.draw(st.permutations(["stage", "data", "own", "model"])), sizes, strict=True)
    )
    num_hosts = data.draw(st.sampled_from([2, 3, 4, 6, 8, 12]))
    array = arrange_devices(axes, devices_of(num_hosts, 24 // num_hosts))
    hosts = np.vectorize(lambda device: device.process_index)(array)
    left = num_hosts
    for axis in in_order(axes):
        dim = list(axes).index(axis)
        for line in np.moveaxis(hosts, dim, -1).reshape(-1, axes[axis]).tolist():
            assert len(set(line)) == math.gcd(axes[axis], left)
            assert len(set(collections.Counter(line).values())) == 1
            assert line == sorted(line)
        left //= math.gcd(axes[axis], left)
    assert left == 1


def test_an_order_of_ones_own_moves_devices_and_no_axis():
    devices = devices_of(2, 4)
    axes = {"data": 2, "model": 4}
    array = arrange_devices(axes, devices, ("model", "data"))
    assert array.shape == (2, 4)
    assert [[device.process_index for device in row] for row in array] == [[0, 0, 1, 1]] * 2
    links = links_of(axes, devices, ("model", "data"))
    assert links == "2 hosts; data: within a host, model: 2 within a host x 2 across"


def test_hosts_of_unequal_size_still_make_a_mesh():
    devices = devices_of(2, 6)[:8]
    array = arrange_devices({"model": 2, "data": 4}, devices[::-1])
    assert list(array.T.flat) == devices[5::-1] + devices[:5:-1]
    links = describe_links(Mesh(array, ("model", "data")))
    assert links == "2 hosts; model: within a host, data: across hosts unevenly"


def test_on_one_host_that_is_no_torus_devices_stand_as_they_come(devices8):
    mesh = make_mesh({"model": 2, "stage": 2, "data": 2})
    assert list(mesh.devices.flat) == devices8
    assert describe_links(mesh) == ""
    mesh = make_mesh({"model": 4, "data": 2}, devices8, order=("data", "model"))
    assert dict(mesh.shape) == {"model": 4, "data": 2}
    assert list(mesh.devices.T.flat) == devices8


def test_in_a_torus_the_last_axis_of_the_order_chooses_first():
    devices = slices_of(1, 4, 4, 4)
    links = links_of({"model": 16, "data": 4}, devices)
    assert links == "model: in a ring of neighbours along xy, data: in a ring of neighbours along z"
    links = links_of({"model": 4, "stage": 4, "data": 4}, devices)
    assert _letters(links) == {"model": "x", "stage": "z", "data": "y"}
    links = links_of({"model": 4, "stage": 4, "data": 4}, devices, ("model", "data", "stage"))
    assert _letters(links) == {"model": "z", "stage": "x", "data": "y"}


def test_a_dimension_of_a_torus_may_be_split():
    links = links_of({"data": 32, "model": 2}, slices_of(1, 4, 4, 4))
    assert links == "data: along xyz with up to 2 hops, model: between neighbours along x"


def test_slices_are_hosts_where_there_are_several():
    devices = slices_of(2, 2, 2, 4)
    assert links_of({"model": 4, "stage": 2, "data": 4}, devices) == (
        "2 slices; model: within a slice in a ring of neighbours along xy, stage: across slices, "
        "data: within a slice in a line of neighbours along z with 3 hops back"
    )
    assert links_of({"data": 32}, devices) == (
        "2 slices; data: 16 within a slice x 2 across in a ring of neighbours along xyz"
    )


@pytest.mark.parametrize(
    ("num_machines", "each", "is_described", "links"),
    [
        (1, 1, False, ""),
        (1, 4, False, ""),
        (2, 1, False, "2 hosts; replica: across hosts, data: within a host"),
        (2, 4, False, "2 hosts; replica: across hosts, data: within a host"),
        # Of a topology for the compiler; each machine is a process of the only slice.
        (1, 4, True, "2 hosts; replica: across hosts, data: within a host"),
    ],
)
def test_hosts_of_gpus_are_machines_and_not_processes(num_machines, each, is_described, links):
    devices = [
        Device(
            number,
            process=number // each,
            slice_index=number * num_machines // 8,
            kind="NVIDIA H100 80GB HBM3",
            is_described=is_described,
        )
        for number in range(8)
    ]
    assert links_of({"replica": 2, "data": 4}, devices) == links


def test_gpus_without_a_slice_have_a_host_for_each_process():
    devices = [Device(i, process=i // 4, kind="NVIDIA A30") for i in range(8)]
    for device in devices:
        del device.slice_index
    assert links_of({"data": 8}, devices) == "2 hosts; data: 4 within a host x 2 across"
