"""The loops of a double buffer against the loop that one would write: values, gradients, memory."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.layers.double_buffer import DoubleBuffer

L = 4


def _layer(weights, keys, carry, shared):
    """Uses one weight twice and one not at all; hands on an integer; returns two things besides."""
    (w, v, _), (key,), (x, count), (mask, scale) = weights, keys, carry, shared
    y = jnp.where(mask, jnp.tanh(x @ w) * scale, x)
    y = y + jnp.cos(y) @ w.T * v[None] + 0.1 * jax.random.normal(key, y.shape) * y
    return [y, count + 1], [count * 2, y.sum()]


def _arguments(length=L):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = ((length, 3, 3), (length, 3), (length, 2))
    shards = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
    carry = [jax.random.normal(keys[3], (5, 3)), jnp.zeros((), jnp.int32)]
    mask, scale = jnp.arange(15).reshape(5, 3) % 4 > 0, jax.random.normal(keys[4], (5, 3))
    return shards, [jax.random.split(keys[5], length)], carry, [mask, scale]


GATHERS = (lambda w: 2 * w, lambda v: v[::-1], lambda u: u)


def _by_hand(shards, keys, carry, shared):
    ys = []
    for i in range(len(shards[0])):
        weights = [gather(shard[i]) for gather, shard in zip(GATHERS, shards, strict=True)]
        carry, y = _layer(weights, [key[i] for key in keys], carry, shared)
        ys.append(y)
    return carry, [jnp.stack(y) for y in zip(*ys, strict=True)]


def _buffer(policy=None, length=L, unroll=1, scatter_late=False):
    policy = policy or jax.checkpoint_policies.everything_saveable
    layer = jax.checkpoint(_layer, policy=policy, prevent_cse=False)
    return DoubleBuffer(layer, GATHERS, length, unroll, scatter_late)


def _objective(run, shards, x, scale, keys, count, mask):
    (x, count), (counts, sums) = run(shards, keys, [x, count], [mask, scale])
    return jnp.square(x).sum() + (sums * jnp.arange(len(sums))).sum() + counts.sum() + count


def _grads(run, arguments, wrap=lambda f: f):
    shards, keys, (x, count), (mask, scale) = arguments

    def objective(shards, x, scale):
        return wrap(functools.partial(_objective, run, keys=keys, count=count, mask=mask))(
            shards, x, scale
        )

    return jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2)))(shards, x, scale)


@pytest.mark.parametrize(
    ("length", "policy", "scatter_late"),
    [
        (L, "nothing_saveable", False),
        (L, "everything_saveable", True),
        (1, "nothing_saveable", True),
        (2, "nothing_saveable", True),
        pytest.param(1, "everything_saveable", False, marks=pytest.mark.slow),
        pytest.param(2, "everything_saveable", False, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_those_of_the_loop_by_hand(length, policy, scatter_late):
    arguments = _arguments(length)
    buffer = _buffer(getattr(jax.checkpoint_policies, policy), length, min(2, length), scatter_late)
    chex.assert_trees_all_close(jax.jit(buffer)(*arguments), _by_hand(*arguments), rtol=1e-5)
    chex.assert_trees_all_close(
        _grads(buffer, arguments), _grads(_by_hand, arguments), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_inside_of_a_checkpoint_it_is_the_same(policy):
    arguments = _arguments()
    wrap = functools.partial(jax.checkpoint, policy=policy)
    expected = _grads(_by_hand, arguments)
    chex.assert_trees_all_close(_grads(_buffer(), arguments, wrap), expected, rtol=1e-4, atol=1e-5)


def test_it_can_be_vectorised():
    arguments = _arguments()
    shards, keys, (x, count), shared = arguments
    xs = jnp.stack([x, 2 * x])

    def grad(run):
        def objective(x):
            return _objective(run, shards, x, shared[1], keys, count, shared[0])

        return jax.jit(jax.vmap(jax.grad(objective)))(xs)

    chex.assert_trees_all_close(grad(_buffer()), grad(_by_hand), rtol=1e-4, atol=1e-5)


def test_what_is_kept_are_neither_weights_nor_keys_nor_what_is_shared():
    shards, keys, carry, shared = _arguments()
    buffer = _buffer(jax.checkpoint_policies.nothing_saveable)
    _, vjp = jax.vjp(lambda shards: buffer(shards, keys, carry, shared), shards)
    stacked = [x for x in jax.tree.leaves(vjp) if x.shape[:1] == (L,)]
    # Each layer's input; the shards and the keys, once, as they were handed in.
    expected = [(L,), (L, 2), (L, 3), (L, 3, 3), (L, 5, 3)]
    assert sorted(x.shape for x in stacked) == expected
    handed_in = [*shards, *keys]
    assert sum(any(x is y for y in handed_in) for x in stacked) == len(handed_in)


def test_what_has_no_gradient_is_given_none():
    shards, keys, (x, count), shared = _arguments()
    buffer = _buffer()

    def objective(x):
        return _objective(buffer, shards, x, shared[1], keys, count, shared[0])

    jaxpr = str(jax.make_jaxpr(jax.grad(objective))(x))
    expected = jax.grad(
        lambda x: _objective(_by_hand, shards, x, shared[1], keys, count, shared[0])
    )(x)
    np.testing.assert_allclose(jax.jit(jax.grad(objective))(x), expected, rtol=1e-4, atol=1e-5)
    assert "dynamic_update_slice" not in jaxpr  # Of gradients of shards.
