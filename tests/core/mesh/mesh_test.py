import jax
import pytest
from jax.sharding import AxisType

from manualpar.core.mesh.axes import axis_tuple, check_mesh_has
from manualpar.core.mesh.mesh import abstract_mesh, make_mesh


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
        ({"replica": 3, "data": -1}, ValueError, "expected a divisor of the number of devices, 8"),
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
    match = r"Build the mesh with make_mesh\({'data': 1, 'model': 8}\)"
    with pytest.raises(ValueError, match=match):
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
