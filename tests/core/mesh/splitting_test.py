import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from manualpar import fold_rng_over_axis

AXES = ("data", ("data", "model"), ("model", "data"), "model")


def folded_bits(mesh, axis_names, *keys):
    """The random bits of each device's folded keys, one row a device: a list for each axis name."""
    everywhere = P(tuple(mesh.axis_names))

    def on_device(*keys):
        return [
            [jax.random.bits(fold_rng_over_axis(key, name), (1, 2)) for key in keys]
            for name in axis_names
        ]

    shard_map = jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=everywhere)
    return jax.tree.map(
        lambda x: np.asarray(x).reshape(*mesh.devices.shape, 2), jax.jit(shard_map)(*keys)
    )


def test_keys_differ_along_the_axes_and_only_there(mesh8):
    def axes_of(axis_name):
        return (axis_name,) if isinstance(axis_name, str) else axis_name

    known = [name for name in AXES if set(axes_of(name)) <= set(mesh8.axis_names)]
    assert known
    typed_and_raw = jax.random.key(0), jax.random.PRNGKey(0)
    folded = folded_bits(mesh8, known, *typed_and_raw)
    for axis_name, both in zip(known, folded, strict=True):
        names = axes_of(axis_name)
        others = [dim for dim, axis in enumerate(mesh8.axis_names) if axis not in names]
        folded_size = int(np.prod([mesh8.shape[axis] for axis in names]))
        for bits in both:
            assert len({tuple(row) for row in bits.reshape(-1, 2)}) == folded_size
            for dim in others:
                same = np.broadcast_to(bits.take([0], axis=dim), bits.shape)
                np.testing.assert_array_equal(bits, same)


def test_folding_does_not_give_back_the_key(devices8):
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices8[:1])
    plain = jax.random.bits(jax.random.key(0), (2,))
    ((bits,),) = folded_bits(mesh, ["data"], jax.random.key(0))
    assert not jnp.array_equal(bits[0], plain)
