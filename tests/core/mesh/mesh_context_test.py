"""Whatever mesh is set around a program it works, and a sharding that fits no mode is explained."""

import contextlib

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from manualpar import Batch, assert_same_as_one_device, fsdp, make_mesh
from tests.one_device import train_on_one_device, train_program
from tests.tiny import square_loss

RNG = np.random.default_rng(0)
BATCH = Batch(*(RNG.normal(size=(8, 16)).astype(np.float32) for _ in range(2)))


class Says(nn.Module):
    """Two products, and between them what a test has the model say."""

    say: object = None

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(16, name="up")(x))
        return nn.Dense(16, name="down")(self.say(h) if self.say else h)


def build(model, mesh, builder=fsdp, **options):
    if builder is fsdp:
        options.setdefault("min_weight_size", 0)
    return builder(model, optax.sgd(0.1), square_loss, mesh=mesh, batch=BATCH, **options)


def explicit_mesh(devices):
    return jax.make_mesh((2, 4), ("data", "model"), (AxisType.Explicit,) * 2, devices=devices)


def test_other_errors_of_a_model_pass_as_they_are(devices8):
    def fail(h):
        raise KeyError("its own")

    for mode in ("auto", "explicit", "manual"):
        with pytest.raises(KeyError, match="its own"):
            build(Says(fail), make_mesh({"data": 8}, devices8), mode=mode)


@pytest.fixture(scope="module")
def reference():
    return train_on_one_device(Says(), optax.sgd(0.1), [BATCH] * 2, square_loss)


def assert_trains(program, batches, reference, is_set):
    with is_set():
        state, losses = train_program(program, batches)
    np.testing.assert_allclose(jax.device_get(losses), reference.losses, rtol=1e-5)
    for x, expected in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(reference.params), strict=True
    ):
        np.testing.assert_allclose(jax.device_get(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", "auto", "explicit"])
def test_a_program_under_the_explicit_mesh_that_jax_makes(devices8, reference, mode):
    mesh = explicit_mesh(devices8)
    with jax.set_mesh(mesh):
        program = build(Says(), mesh, mode=mode)
        batch = jax.device_put(BATCH, program.batch_sharding)
    assert_trains(program, [batch] * 2, reference, lambda: jax.set_mesh(mesh))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", "auto", "explicit", "auto-unconstrained"])
@pytest.mark.parametrize("is_explicit", [False, True])
def test_any_mesh_set_or_not_set(devices8, reference, mode, is_explicit):
    mesh = explicit_mesh(devices8)
    if not is_explicit:
        mesh = make_mesh({"data": 2, "model": 4}, devices8)
    for is_set in (contextlib.nullcontext, lambda: jax.set_mesh(mesh)):
        with is_set():
            program = build(Says(), mesh, mode=mode, num_minibatches=2)
            state = program.init(jax.random.key(0))
            total, count = program.eval_step(state, BATCH)["loss"]
            np.testing.assert_allclose(total / count, reference.losses[0], rtol=1e-5)
        for batch in (BATCH, jax.device_put(BATCH, program.batch_sharding)):
            assert_trains(program, [batch] * 2, reference, is_set)


def test_another_mesh_that_is_set_does_not_reach_the_program(devices8, reference):
    mesh = make_mesh({"data": 2, "model": 4}, devices8)
    with jax.set_mesh(explicit_mesh(devices8)):
        program = build(Says(), mesh)
        state = program.init(jax.random.key(0))
        _, metrics = program.train_step(state, BATCH)
        total, count = jax.device_get(metrics["loss"])
        assert_same_as_one_device(program, BATCH, jax.random.key(0))
    np.testing.assert_allclose(total / count, reference.losses[0], rtol=1e-5)
