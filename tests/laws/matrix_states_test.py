"""Statistics of matrices in an optimizer's state, `[D, D]` for a kernel `[D, F]`, are sharded too.

Shampoo and SOAP keep two of them for each matrix, more numbers than the weights have.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, abstract_mesh, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect.state_layout import state_bytes
from manualpar.training.checkpoints import Checkpoints
from tests.one_device import train_on_one_device, train_program
from tests.tiny import square_loss

WIDTH, INNER, LAYERS = 16, 24, 3
RNG = np.random.default_rng(0)
BATCHES = [Batch(*(RNG.normal(size=(24, WIDTH)).astype(np.float32) for _ in "xy")) for _ in "abc"]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH, name="down")(nn.tanh(nn.Dense(INNER, name="up")(x))), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(WIDTH, name="out")(x)


class ShampooState(NamedTuple):
    left: optax.Params
    right: optax.Params


def shampoo(rate=0.05, beta=0.9, epsilon=1e-2):
    """Shampoo (Gupta et al., 2018) of the last two dims of kernels, and SGD of biases."""
    names = functools.partial(jax.tree_util.keystr, simple=True, separator="/")

    def is_matrix(path):
        return names(path).endswith("kernel")

    def init(params):
        def eye(side, path, x):
            size = x.shape[side] if is_matrix(path) else 0
            return jnp.zeros((*x.shape[:-2], size, size)) + jnp.eye(size) * epsilon

        return ShampooState(
            *(jax.tree.map_with_path(functools.partial(eye, side), params) for side in (-2, -1))
        )

    def inverse_root(x):
        values, vectors = jnp.linalg.eigh(x)
        powers = jnp.maximum(values, epsilon)[..., None, :] ** -0.25
        return jnp.einsum("...ij,...kj->...ik", vectors * powers, vectors)

    def update(grads, state, params=None):
        del params

        def accumulate(dims, path, g, x):
            if not is_matrix(path):
                return x
            return beta * x + (1 - beta) * jnp.einsum(dims, g, g)

        sides = zip(("...ij,...kj->...ik", "...ji,...jk->...ik"), state, strict=True)
        state = ShampooState(
            *(
                jax.tree.map_with_path(functools.partial(accumulate, dims), grads, side)
                for dims, side in sides
            )
        )

        def precondition(path, g, left, right):
            if is_matrix(path):
                g = inverse_root(left) @ g @ inverse_root(right)
            return -rate * g

        return jax.tree.map_with_path(precondition, grads, *state), state

    return optax.GradientTransformation(init, update)


@functools.cache
def reference():
    with jax.numpy_rank_promotion("allow"):
        return train_on_one_device(Stack(), shampoo(), BATCHES, square_loss)


def build(name, mesh=None, **options):
    axes = {"replica": 2, "data": 4} if name == "hsdp" else {"data": 8}
    builders = {"zero": functools.partial(zero, stage=1), "fsdp": fsdp, "hsdp": hsdp}
    options |= {} if name == "dp" else {"min_weight_size": 200}
    builder = builders.get(name, data_parallel)
    mesh = mesh or make_mesh(axes)
    return builder(Stack(), shampoo(), square_loss, mesh=mesh, batch=BATCHES[0], **options)


def numbers(program):
    """How many numbers of the optimizer's state a device has."""
    return state_bytes(program.abstract_state.opt_state)[0] // 4


# For each layer two matrices of 16 x 24, and one of 16 x 16 at the end.
ALL = LAYERS * 2 * (WIDTH**2 + INNER**2) + 2 * WIDTH**2


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fsdp", 8),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("dp", 1), ("zero", 8), ("hsdp", 4))),
    ],
)
def test_statistics_are_divided_and_steps_equal_one_device(devices8, name, parts):
    with jax.numpy_rank_promotion("allow"):
        program = build(name)
        state, losses = train_program(program, BATCHES)
    assert numbers(program) == ALL // parts
    np.testing.assert_allclose(losses, reference().losses, rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, program.whole(state)["params"], reference().params)


@pytest.mark.slow
def test_a_checkpoint_moves_statistics_to_another_mesh(devices8, tmp_path):
    """From eight devices to three, where statistics are padded."""
    with jax.numpy_rank_promotion("allow"):
        program = build("fsdp")
        state, _ = train_program(program, BATCHES[:2])
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(program, state, step=2, extra={})
        other = build("fsdp", make_mesh({"data": 3}, devices8[:3]), pad=True)
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(other, report=lambda line: None)
        moved, _ = other.train_step(restored.state, BATCHES[2])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, other.whole(moved)["params"], reference().params)


def test_factored_moments_stay_replicated_and_memories_of_steps_are_divided():
    mesh = abstract_mesh({"data": 8}, 8)

    def program(tx):
        options = {"mesh": mesh, "batch": BATCHES[0], "min_weight_size": 16}
        return fsdp(Stack(), tx, square_loss, **options)

    factored = program(optax.adafactor(0.1, min_dim_size_to_factor=8)).abstract_state.opt_state
    rows = [x for x in jax.tree.leaves(factored) if x.shape == (LAYERS, WIDTH)]
    assert any(not any(x.sharding.spec) for x in rows)
    memory = program(optax.lbfgs(0.1, memory_size=5)).abstract_state.opt_state
    kept = [x for x in jax.tree.leaves(memory) if x.shape == (5, LAYERS, WIDTH, INNER)]
    assert kept
    assert all("data" in x.sharding.spec for x in kept)
