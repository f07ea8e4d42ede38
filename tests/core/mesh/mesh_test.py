import collections
import itertools
import math
import os
import re
import subprocess
import sys
import textwrap

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AxisType, Mesh

from manualpar.core.mesh.axes import axis_tuple
from manualpar.core.mesh.mesh import (
    abstract_mesh,
    arrange_devices,
    arrange_in_torus,
    describe_along,
    describe_links,
    describe_mesh,
    in_order,
    make_mesh,
    mesh_of,
    platform_of,
    ring_through,
)
from manualpar.planner.topology import is_closed, parse_topology
from tests.core.mesh.devices import Device
from tests.paths import ROOT


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


# -------------------------------------------------------------------------------------------------
# Devices are simulated where that was asked for or the CPU is all there is.


@pytest.mark.slow
def test_the_number_of_devices_is_the_one_asked_for():
    # A process of its own: the number is fixed once there are devices.
    script = """
        import os
        import jax
        from manualpar.core.mesh.mesh import simulate_devices

        def chosen():
            return jax.config.values["jax_num_cpu_devices"], jax.config.values["jax_platforms"]

        platforms = jax.config.values["jax_platforms"]
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
        simulate_devices(None)
        assert chosen() == (-1, platforms), "XLA_FLAGS already says how many"
        del os.environ["XLA_FLAGS"]
        simulate_devices(None)
        assert chosen() == (8, platforms), chosen()
        jax.config.update("jax_num_cpu_devices", 5)
        simulate_devices(None)
        assert chosen() == (5, platforms), "the program already says how many"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
        simulate_devices(2)
        assert chosen() == (2, "cpu"), chosen()
        assert len(jax.devices()) == 2
    """
    run_alone(script)


STARTED = """
    import os
    import jax
    from manualpar import make_mesh
    from manualpar.core.mesh.mesh import simulate_devices

    def message(function, *args):
        try:
            function(*args)
        except (RuntimeError, ValueError) as error:
            assert "restart the process (in a notebook, the kernel)" in str(error), error
            assert "jax.config.update('jax_num_cpu_devices', 8)" in str(error), error
            return f"{type(error).__name__}: {error}"
        return ""
"""


@pytest.mark.slow
def test_a_process_that_has_started_with_one_device_says_what_to_restart():
    run_alone(
        STARTED
        + """
    assert jax.numpy.zeros(1) == 0  # JAX has its devices now.
    assert "RuntimeError: simulate_devices: it is too late for 8" in message(simulate_devices, 8)
    assert "it is too late for 8 devices" in message(simulate_devices, None)
    simulate_devices(1)  # As it is.
    assert "needs 8 devices, got 1. JAX has started with 1 cpu" in message(make_mesh, {"data": 8})
    assert make_mesh({"data": -1}).size == 1  # Nobody has asked for more.
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        os.environ[name] = "8" if "NUM" in name else "--xla_force_host_platform_device_count=8"
        assert "asks for 8 devices, got 1" in message(make_mesh, {"data": -1})
        assert make_mesh({"data": -1}, jax.devices()).size == 1
        del os.environ[name]
    """
    )


@pytest.mark.slow
def test_a_process_that_has_started_with_enough_devices_has_nothing_to_say():
    run_alone(
        STARTED
        + """
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    assert jax.device_count() == 8
    simulate_devices(8)
    simulate_devices(None)
    assert make_mesh({"data": -1}).size == 8
    """
    )


def run_alone(script):
    """Runs a program in a process of its own, where nobody has said how many devices there are."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


def test_a_mesh_is_described_in_a_line(devices8):
    mesh = jax.make_mesh((2, 4), ("replica", "data"), devices=devices8)
    assert describe_mesh(mesh) == "replica=2, data=4 on 8 simulated cpu devices"
    alone = jax.make_mesh((1,), ("data",), devices=devices8[:1])
    assert describe_mesh(alone) == "data=1 on 1 cpu device"


# -------------------------------------------------------------------------------------------------
# Which device stands where: on hosts, on slices, in a torus, and in an order of one's own.


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


# -------------------------------------------------------------------------------------------------
# Rings of neighbours on every slice that has them, and the words for it.


SLICES = ["v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v6e:2x4", "v6e:4x4"]
SLICES += ["v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v4:2x2x4"]


def torus_devices(name, origin=0):
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
    devices = torus_devices(name, origin=4)
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
    topology, devices = parse_topology(name), torus_devices(name)
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
    line = describe_links(Mesh(arrange_devices(axes, torus_devices(name)), tuple(axes)))
    assert line == f"a: {words[0]}, b: {words[1]}"


def test_each_of_several_slices_is_a_ring():
    devices = [
        Device(d.id, process=d.process_index, slice_index=i, coords=d.coords, kind=d.device_kind)
        for i in range(2)
        for d in torus_devices("v5e:2x4")
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
    devices = torus_devices("v5e:2x4")[:7]
    for device in devices:
        device.coords = device.coords if known else None
    array = arrange_devices({"data": 7}, devices)
    assert list(array) == devices
    words = "along xy with up to 3 hops" if known else "in an unknown order (no coordinates)"
    assert describe_links(Mesh(array, ("data",))) == f"data: {words}"
