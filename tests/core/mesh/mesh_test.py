import jax
import pytest
from jax.sharding import AbstractDevice, AxisType

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.mesh.mesh import abstract_mesh, make_mesh, mesh_of, platform_of


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


def test_a_mesh_of_devices_that_nobody_has(devices8):
    mesh = abstract_mesh({"replica": 2, "data": -1}, 4096)
    assert dict(mesh.shape) == {"replica": 2, "data": 2048}
    assert mesh.axis_types == make_mesh({"a": 2, "b": -1}, devices8).axis_types


def test_the_platform_of_a_mesh(devices8):
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    assert platform_of(make_mesh({"data": -1}, devices8)) == "cpu"
    assert platform_of(mesh_of({"data": -1}, 16)) == ""
    mesh = mesh_of({"data": -1, "model": 2}, [gpu] * 16)
    assert (platform_of(mesh), dict(mesh.shape)) == ("gpu", {"data": 8, "model": 2})
    assert mesh_of({"data": -1}, devices8[:2]) == make_mesh({"data": -1}, devices8[:2])


def test_axis_tuple():
    assert axis_tuple(None) == ()
    assert axis_tuple("data") == ("data",)
    assert axis_tuple(["replica", "data"]) == ("replica", "data")


def test_make_mesh_uses_all_devices_by_default(devices8):
    assert make_mesh({"data": -1}).size == jax.device_count()
