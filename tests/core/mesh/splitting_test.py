import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import fold_rng_over_axis

AXES = ("data", ("data", "model"), ("model", "data"), "model")


def folded_bits(mesh, axis_name, key):
    """The random bits that each device's folded key gives, one row a device."""
    everywhere = P(tuple(mesh.axis_names))

    def on_device(key):
        return jax.random.bits(fold_rng_over_axis(key, axis_name), (1, 2))

    shard_map = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=everywhere)
    return np.asarray(jax.jit(shard_map)(key)).reshape(*mesh.devices.shape, 2)


@pytest.mark.parametrize("axis_name", AXES)
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_keys_differ_along_the_axes_and_only_there(mesh8, axis_name, make_key):
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not set(names) <= set(mesh8.axis_names):
        pytest.skip("the mesh has no such axis")
    bits = folded_bits(mesh8, axis_name, make_key(0))
    others = [dim for dim, axis in enumerate(mesh8.axis_names) if axis not in names]
    folded_size = int(np.prod([mesh8.shape[axis] for axis in names]))
    assert len({tuple(row) for row in bits.reshape(-1, 2)}) == folded_size
    for dim in others:
        np.testing.assert_array_equal(bits, np.broadcast_to(bits.take([0], axis=dim), bits.shape))


def test_folding_does_not_give_back_the_key(devices8):
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices8[:1])
    plain = jax.random.bits(jax.random.key(0), (2,))
    assert not jnp.array_equal(folded_bits(mesh, "data", jax.random.key(0))[0], plain)
