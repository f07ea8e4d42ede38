"""What enters and leaves the split part of a layer: values and gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.layers import enter, leave

AXES = ("model", "expert")
B, S, D, F = 2, 8, 4, 8


def loss_and_grads(x, into, out, weights, *, axis, sequence_dim=None):
    """Of a block whose hidden features are split over `axis`; positions have their own weights."""

    def loss(x, into, out):
        hidden = jnp.tanh(enter(x, axis, sequence_dim) @ into)
        return (jnp.sin(leave(hidden @ out, axis, sequence_dim)) * weights).sum()

    value, grads = jax.value_and_grad(loss, range(3))(x, into, out)
    varying = tuple(jax.typeof(value).mat.varying)
    return jax.lax.psum(value, varying) if varying else value, grads


@pytest.mark.parametrize("sequence_dim", [None, 1, -2])
def test_a_block_over_two_axes_is_that_of_one_device(devices8, sequence_dim):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, S, D), (D, F), (F, D), (B, S, D))
    arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    step = functools.partial(loss_and_grads, axis=AXES)
    expected = jax.jit(step)(*arrays)
    of_x = P("data") if sequence_dim is None else P("data", AXES)
    specs = (of_x, P(None, AXES), P(AXES))
    run = jax.shard_map(
        functools.partial(step, sequence_dim=sequence_dim),
        mesh=make_mesh({"data": 2, "model": 2, "expert": 2}, devices8),
        in_specs=(*specs, of_x),
        out_specs=(P(), specs),
        check_vma=True,
    )
    chex.assert_trees_all_close(jax.jit(run)(*arrays), expected, rtol=1e-5, atol=1e-5)
