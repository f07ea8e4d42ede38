import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from manualpar.sharding.axes import axis_tuple, check_mesh_has
from manualpar.sharding.mesh import (
    abstract_mesh,
    arrange_devices,
    axes_across_hosts,
    describe_hosts,
    make_mesh,
)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"data": -1}, {"data": 8}),
        ({"replica": 2, "data": -1}, {"replica": 2, "data": 4}),
        ({"data": -1, "model": 8}, {"data": 1, "model": 8}),
        ({"a": 2, "b": 2, "c": 2}, {"a": 2, "b": 2, "c": 2}),
        ({"data": 4}, {"data": 4}),
    ],
)
def test_sizes(devices8, axes, shape):
    mesh = make_mesh(axes, devices8)
    assert dict(mesh.shape) == shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == devices8[: mesh.size]


def test_given_devices_are_used_in_order(devices8):
    assert list(make_mesh({"data": -1}, devices8[3:5]).devices) == devices8[3:5]


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ({}, ValueError, "axes is empty"),
        ({"data": 0}, ValueError, "axis 'data' has size 0, expected a positive size or -1"),
        ({"data": -2}, ValueError, "size -2"),
        ({"a": -1, "b": -1}, ValueError, "more than one -1"),
        ({"data": 16}, ValueError, "needs 16 devices, got 8"),
        ({"replica": 3, "data": -1}, ValueError, "does not divide the 8 devices"),
        ({"data": 2.0}, TypeError, "expected a name with an integer size"),
        ({"data": True}, TypeError, "expected a name with an integer size"),
        ({1: 8}, TypeError, "expected a name with an integer size"),
    ],
)
def test_bad_axes_are_refused(devices8, axes, error, message):
    with pytest.raises(error, match=message):
        make_mesh(axes, devices8)
    with pytest.raises(error, match=message):
        abstract_mesh(axes, 8)


def test_a_mesh_of_devices_that_nobody_has(devices8):
    mesh = abstract_mesh({"replica": 2, "data": -1}, 4096)
    assert dict(mesh.shape) == {"replica": 2, "data": 2048}
    assert mesh.axis_types == make_mesh({"a": 2, "b": -1}, devices8).axis_types


def test_an_axis_that_a_mesh_lacks_is_given_to_it(devices8):
    mesh = make_mesh({"model": 8}, devices8)
    with pytest.raises(ValueError, match=r"Build it with make_mesh\({'data': 1, 'model': 8}\)"):
        check_mesh_has("fsdp", mesh, ("data",))
    missing = r"names \['replica', 'data'\].*make_mesh\({'replica': 1, 'data': 1, 'model': 8}\)"
    with pytest.raises(ValueError, match=missing):
        check_mesh_has("hsdp", mesh, ("replica", "data"))
    check_mesh_has("fsdp", make_mesh({"data": 1, "model": 8}, devices8), ("data",))


def test_too_few_devices_say_how_to_have_more():
    with pytest.raises(ValueError, match=r"needs 1024 devices, got \d+\. JAX has started with"):
        make_mesh({"data": 1024})


def test_axis_tuple():
    assert axis_tuple(None) == ()
    assert axis_tuple("data") == ("data",)
    assert axis_tuple(["replica", "data"]) == ("replica", "data")


def test_make_mesh_uses_all_devices_by_default(devices8):
    assert make_mesh({"data": -1}).size == jax.device_count()


# Several hosts.


class Device:
    """Stands for a device of some process."""

    def __init__(self, process, number, *, platform="cpu", slice_index=0):
        self.process_index, self.slice_index = process, slice_index
        self.platform, self.device_kind = platform, platform
        self.id = number

    def __repr__(self):
        return f"{self.process_index}.{self.id}"


def devices_of(num_processes, each, **kwargs):
    return [Device(i // each, i, **kwargs) for i in range(num_processes * each)]


@pytest.mark.parametrize(
    ("sizes", "num_processes", "across"),
    [
        ((2, 4), 2, [True, False]),
        ((8,), 2, [True]),
        ((4, 2), 2, [True, False]),
        ((2, 4), 4, [True, True]),
        ((1, 2, 4), 2, [False, True, False]),
    ],
)
def test_major_axes_go_across_hosts(sizes, num_processes, across):
    devices = devices_of(num_processes, 8 // num_processes)
    array = arrange_devices(sizes, devices[::-1])  # In whatever order they come.
    assert array.shape == sizes
    assert sorted(array.flat, key=id) == sorted(devices, key=id)
    hosts = np.vectorize(lambda device: device.process_index)(array)
    found = [bool((hosts != np.take(hosts, [0], axis=dim)).any()) for dim in range(len(sizes))]
    assert found == across
    assert (np.diff(hosts.reshape(-1)) >= 0).all()


def test_sizes_that_do_not_fit_the_hosts_still_make_a_mesh():
    devices = devices_of(2, 6)
    assert list(arrange_devices((3, 4), devices).flat) == devices
    uneven = devices_of(2, 6)[:8]
    assert list(arrange_devices((2, 4), uneven[::-1]).flat) == uneven[5::-1] + uneven[:5:-1]


def test_slices_are_hosts_where_there_are_several():
    devices = [Device(i // 2, i, slice_index=i // 4) for i in range(8)]
    array = arrange_devices((2, 4), devices)
    assert [[device.slice_index for device in row] for row in array] == [[0] * 4, [1] * 4]


def test_one_host_is_described_by_nothing(devices8):
    mesh = make_mesh({"replica": 2, "data": 4}, devices8)
    assert axes_across_hosts(mesh) == ()
    assert describe_hosts(mesh) == ""
