"""Scans of a user's own that start from flax's `initialize_carry`, against one device."""

import functools
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh
from manualpar.core.model.interface import interface_of
from manualpar.core.model.loops import varying_linen_carries
from manualpar.core.parameters.collectives import varying_axes
from tests.one_device import slow_unless
from tests.tiny import square_loss

WIDTH = 8
OVER_TIME = {
    "variable_broadcast": "params",
    "split_rngs": {"params": False},
    "in_axes": 1,
    "out_axes": 1,
}


class Lifted(nn.Module):
    """A cell's class in a scan."""

    @nn.compact
    def __call__(self, x):
        cell = nn.scan(nn.OptimizedLSTMCell, **OVER_TIME)(WIDTH)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return nn.Dense(4)(cell(carry, x)[1].mean(1))


class OneWay(nn.Module):
    """A method in a scan, and a carry made by a cell that belongs to no module."""

    @functools.partial(nn.transforms.scan, **OVER_TIME)
    @nn.compact
    def __call__(self, carry, x):
        return nn.LSTMCell(WIDTH)(carry, x)

    def initial(self, shape):
        return nn.LSTMCell(WIDTH, parent=None).initialize_carry(jax.random.key(0), shape)


class BothWays(nn.Module):
    @nn.compact
    def __call__(self, x):
        forward, backward = OneWay(), OneWay()
        carry = forward.initial(x[:, 0].shape)
        ys = forward(carry, x)[1] + backward(carry, jnp.flip(x, 1))[1]
        return nn.Dense(4)(ys.mean(1))


class Function(nn.Module):
    """A function of a cell in a scan; what it ends with is used."""

    @nn.compact
    def __call__(self, x):
        cell = nn.GRUCell(WIDTH)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        over_time = nn.scan(lambda cell, carry, x: cell(carry, x), **OVER_TIME)
        return nn.Dense(4)(over_time(cell, carry, x)[0])


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x[..., None]
        cell = nn.scan(nn.ConvLSTMCell, **OVER_TIME)(4, kernel_size=(3,))
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return nn.Dense(4)(cell(carry, x)[1].mean((1, 2)))


class OwnNNX(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(8, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        carry = self.cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0))
        axes = {"in_axes": (None, nnx.Carry, 1), "out_axes": (nnx.Carry, 1)}
        over_time = nnx.scan(lambda cell, carry, x: cell(carry, x), **axes)
        return self.head(over_time(self.cell, carry, x)[1].mean(1))


MODELS = {
    "lifted class": Lifted(),
    "both ways": BothWays(),
    "function": Function(),
    "convolution": Convolution(),
    "nnx": OwnNNX,
}
INPUTS, LABELS = jax.random.normal(jax.random.key(1), (2, 32, 3, 8))
BATCH = Batch(INPUTS, LABELS[:, 0, :4])
PROGRAMS = {
    "minibatches": (fsdp, {"data": 8}, {"num_minibatches": 2, "use_scan": True}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {}),
    "data parallel": (data_parallel, {"data": 4, "model": 2}, {}),
    "auto": (fsdp, {"data": 8}, {"mode": "auto"}),
    "explicit": (fsdp, {"data": 8}, {"mode": "explicit"}),
}
FAST = {("nnx", "minibatches")}


def cases():
    for model in MODELS:
        for program in PROGRAMS:
            yield slow_unless(FAST, model, program)


@functools.cache
def on_one_device(name):
    """The parameters after a step of SGD with plain flax."""
    model = interface_of(MODELS[name])
    init_rng, rng = jax.random.split(jax.random.key(0))
    params = model.init({"params": init_rng}, INPUTS)["params"]
    grads = jax.jit(jax.grad(lambda p: square_loss(p, model.apply, BATCH, rng)[0]))(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "program"), list(cases()))
def test_a_scan_from_flaxs_own_carry_trains_as_on_one_device(devices8, name, program):
    builder, axes, options = PROGRAMS[program]
    if builder is not data_parallel:
        options = {"min_weight_size": 0, **options}
    program = builder(
        MODELS[name], optax.sgd(0.5), square_loss, mesh=make_mesh(axes), batch=BATCH, **options
    )
    state, _ = program.train_step(program.init(jax.random.key(0)), BATCH)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6),
        jax.device_get(state.params),
        on_one_device(name),
    )


def test_only_the_calls_own_thread_gets_other_carries(devices8):
    def make_carry():
        return nn.LSTMCell(3).initialize_carry(jax.random.key(0), (2, 3))

    def on_device(x):
        with varying_linen_carries(x), ThreadPoolExecutor(1) as pool:
            assert varying_axes(make_carry()[0]) == {"data"}
            np.testing.assert_array_equal(pool.submit(make_carry).result()[0], np.zeros((2, 3)))
        assert varying_axes(make_carry()[0]) == frozenset()
        return x

    mesh, spec = make_mesh({"data": 8}), PartitionSpec("data")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.eval_shape(run, jax.ShapeDtypeStruct((8, 2), jnp.float32))


def test_flaxs_classes_are_as_they_were_after_calls_that_overlap():
    """The first to begin ends first, as calls in two threads may."""
    before = vars(nn.GRUCell)["initialize_carry"]
    first, second = varying_linen_carries(()), varying_linen_carries(())
    first.__enter__()
    second.__enter__()
    assert vars(nn.GRUCell)["initialize_carry"] is not before
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert vars(nn.GRUCell)["initialize_carry"] is before
