"""Stacks of NNX layers: made by nnx.vmap, run by a loop, gathered a layer at a time."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import fsdp, make_mesh
from tests.core.model.nnx_stacks import BATCHES, LAYERS, Stack
from tests.core.model.nnx_training import in_modes, sent, train, with_params
from tests.tiny import TOLERANCE, loss_fn


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(12, use_bias=False, name="out")(
            nn.silu(nn.Dense(32, name="up")(x))
        ), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        block = nn.remat(LinenBlock, prevent_cse=False)
        x, _ = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )(name="layers")(x, None)
        return nn.Dense(5, name="head")(x)


def build(model, mesh, **options):
    options = {"min_weight_size": 16, "mesh": mesh, "batch": BATCHES[0], **options}
    return fsdp(model, optax.sgd(0.1), loss_fn, **options)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["nnx.scan", pytest.param("jax.lax.scan", marks=pytest.mark.slow)])
@in_modes("manual")
def test_a_stack_trains_and_sends_as_linens(devices8, loop, mode):
    mesh = make_mesh({"data": 8}, devices8)
    linen = build(LinenStack(), mesh, mode=mode)
    program = build(functools.partial(Stack, loop=loop), mesh, mode=mode)
    dims = {info.path: info.loop_dims for info, _ in program.parameters}
    assert dims == {info.path: info.loop_dims for info, _ in linen.parameters}
    assert sent(program) == sent(linen)
    start = linen.init(jax.random.key(0))
    state = with_params(program, jax.device_get(start.params))
    _, expected = train(linen, start, BATCHES)
    _, losses = train(program, state, BATCHES)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


@pytest.mark.slow
def test_a_layer_in_a_stack_of_as_many_layers_as_it_has_features(devices8):
    mesh = make_mesh({"data": 4}, devices8[:4])
    make = functools.partial(Stack, layers=12, bias=True)
    one = build(make, make_mesh({"data": 1}, devices8[:1]))
    program = build(make, mesh)
    dims = {info.path: (info.loop_dims, place.names) for info, place in program.parameters}
    # Which of two dims of one size a loop takes away cannot be seen: neither is sharded.
    assert dims["layers/up/kernel"] == ({0, 1}, (None, None, "data"))
    assert dims["layers/up/bias"] == ({0}, (None, "data"))
    assert dims["layers/out/bias"] == ({0, 1}, (None, None))
    _, expected = train(one, one.init(jax.random.key(0)), BATCHES)
    _, losses = train(program, program.init(jax.random.key(0)), BATCHES)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


class Kept(nnx.Module):
    """A block with all that is no parameter."""

    def __init__(self, rngs):
        self.up = nnx.Linear(12, 12, rngs=rngs)
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.up(x)))


class KeptStack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs):
            return Kept(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)[:, :5]


@in_modes("manual")
def test_statistics_and_masks_in_a_stack(devices8, mode):
    program = build(KeptStack, make_mesh({"data": 4}, devices8[:4]), mode=mode)
    state = program.init(jax.random.key(0))
    assert state.collections["batch_stats"]["layers"]["norm"]["mean"].shape == (LAYERS, 12)
    new, _ = train(program, state, BATCHES)
    means = new.collections["batch_stats"]["layers"]["norm"]["mean"]
    assert jnp.abs(means).min() > 0
    one, other = (float(program.eval_step(new, BATCHES[0])["loss"][0]) for _ in range(2))
    assert one == other


class Transposed(nnx.Module):
    """A stack along the last dim of its parameters, of another model's size."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (12, 12, 4)))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 2), out_axes=nnx.Carry)
        def run(x, kernel):
            return x + x @ kernel[...]

        return run(x, self.kernel)[:, :5]


@pytest.mark.slow
def test_loops_over_another_dim(devices8):
    one = build(Transposed, make_mesh({"data": 1}, devices8[:1]))
    program = build(Transposed, make_mesh({"data": 4}, devices8[:4]))
    ((info, place),) = program.parameters
    assert (info.loop_dims, place.names) == ({2}, ("data", None, None))
    _, expected = train(one, one.init(jax.random.key(0)), BATCHES)
    _, losses = train(program, program.init(jax.random.key(0)), BATCHES)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)
