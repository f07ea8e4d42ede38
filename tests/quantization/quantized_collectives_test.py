"""What devices know after a collective of codes is what the codes say, on all of them alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.inspect import trace_collectives
from manualpar.quantization import quantized_collectives
from manualpar.quantization.quantized_collectives import make_quantizer
from tests.one_device import slow_unless

MESHES = {
    "8": ({"data": 8}, ("data",)),
    "4 2": ({"data": 4, "node": 2}, ("data", "node")),
    "2 of 4": ({"data": 2, "model": 4}, ("data",)),
    "1 of 8": ({"data": 1, "model": 8}, ("data",)),
}
# Code -> the largest code, or the precision of a bfloat16.
LARGEST = {"int8": 126, "int4": 6.9, "bfloat16": 256}
FAST = {("4 2", "int8", 1), ("8", "int4", 0), ("4 2", "bfloat16", 1)}
CASES = [
    slow_unless(FAST, mesh, code, dim) for mesh in MESHES for code in LARGEST for dim in (0, 1)
]


def decoded(x, code):
    """What the codes of an array say that is sent as one row."""
    quantizer = make_quantizer(code)
    return np.asarray(quantizer.unpack(quantizer.pack(jnp.ravel(x)), x.size)).reshape(x.shape)


def on_mesh(devices, shape, axes, function, *, out_specs):
    mesh = make_mesh(shape, devices)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=P(axes), out_specs=out_specs, check_vma=True)
    )


@pytest.mark.parametrize(("mesh", "code", "dim"), CASES)
def test_all_devices_gather_what_the_codes_of_the_shards_say(devices8, mesh, code, dim):
    shape, axes = MESHES[mesh]
    size = int(np.prod([shape[axis] for axis in axes]))
    rounds = [(axis,) for axis in reversed(axes)]
    x = np.random.default_rng(0).normal(size=(size, 6, 40, 3)).astype(np.float32)

    def on_device(x):
        return make_quantizer(code).gather(x[0], dim, rounds)[None]

    copies = on_mesh(devices8, shape, axes, on_device, out_specs=P(axes))(x)
    expected = np.concatenate([decoded(each, code) for each in x], dim)
    np.testing.assert_array_equal(copies, np.broadcast_to(expected, copies.shape))


@pytest.mark.parametrize(("mesh", "code", "dim"), CASES)
@pytest.mark.parametrize(
    "sizes", [pytest.param((4, 5, 7), marks=pytest.mark.slow), (3, 64, 8)]
)  # Blocks end with runs of 512 or not.
def test_each_device_has_its_shard_of_the_sum_of_codes(devices8, mesh, code, dim, sizes):
    shape, axes = MESHES[mesh]
    size = int(np.prod([shape[axis] for axis in axes]))
    sizes = [n * (size if i == dim else 1) for i, n in enumerate(sizes)]
    x = np.random.default_rng(0).normal(size=(size, *sizes)).astype(np.float32)

    def on_device(x):
        total, lost = make_quantizer(code).scatter_sum(x[0], dim, axes)
        return total[None], lost[None]

    run = on_mesh(devices8, shape, axes, on_device, out_specs=(P(axes), P(axes)))
    totals, lost = jax.device_get(run(x))
    parts = np.stack([np.stack(np.split(each, size, dim)) for each in x])  # From, to.
    sent = np.stack([np.stack([decoded(part, code) for part in each]) for each in parts])
    np.testing.assert_allclose(totals, sent.sum(0), rtol=1e-5, atol=1e-5)
    left_out = np.stack([np.concatenate(list(each), dim) for each in parts - sent])
    np.testing.assert_allclose(lost, left_out, rtol=1e-5, atol=1e-6)
    kind = [(c.kind, c.dtype) for c in trace_collectives(run.trace(x))]
    assert kind == [("all_to_all", jnp.bfloat16 if code == "bfloat16" else jnp.uint8)]


def test_many_terms_are_summed_in_one_operation(devices8, monkeypatch):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

    def total():
        def on_device(x):
            return make_quantizer("bfloat16").scatter_sum(x[0], 0, ("data",))[0]

        return on_mesh(devices8, {"data": 8}, ("data",), on_device, out_specs=P("data"))(x)

    one_by_one = total()
    monkeypatch.setattr(quantized_collectives, "MOST_TERMS", 7)
    np.testing.assert_allclose(total(), one_by_one, rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "code", "size"),
    [
        slow_unless({("4 2", "int8", 37)}, mesh, code, size)
        for mesh in MESHES
        for code in LARGEST
        for size in (37, 1, 520)
    ],
)
def test_a_mean_is_the_same_everywhere_and_what_is_lost_makes_up_for_it(devices8, mesh, code, size):
    shape, axes = MESHES[mesh]
    devices = int(np.prod([shape[axis] for axis in axes]))
    x = np.random.default_rng(0).normal(size=(devices, size)).astype(np.float32)

    def on_device(x):
        mean, lost = make_quantizer(code).mean(x[0], axes)
        return mean, lost[None]  # By its type the mean is the same on all devices.

    mean, lost = on_mesh(devices8, shape, axes, on_device, out_specs=(P(), P(axes)))(x)
    np.testing.assert_allclose(mean + lost.mean(0), x.mean(0), rtol=1e-5, atol=1e-6)
    assert np.abs(mean - x.mean(0)).max() <= np.abs(x).max() / LARGEST[code]
    copies = [np.asarray(shard.data) for shard in mean.addressable_shards]
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("feedback", [True, False])
def test_with_what_was_lost_added_the_next_time_many_means_are_right_on_average(devices8, feedback):
    x = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    x *= np.exp(np.random.default_rng(1).normal(size=300))

    def on_device(x):
        def send(carry, _):
            lost, total = carry
            mean, new = make_quantizer("int4").mean(x[0] + lost, ("data",))
            return (new if feedback else lost, total + mean), None

        zero = jnp.zeros_like(x[0])
        start = (zero, jnp.zeros(zero.shape))
        (_, total), _ = jax.lax.scan(send, start, length=50)
        return total / 50

    mean = on_mesh(devices8, {"data": 8}, ("data",), on_device, out_specs=P())(x)
    error = np.linalg.norm(mean - x.mean(0)) / np.linalg.norm(x.mean(0))
    assert error < 0.02 if feedback else error > 0.05
