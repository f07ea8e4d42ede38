import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.core.tracing.batch_dims import NotUnderstoodError, SliceWalk

L, D, F = 3, 4, 6
X = np.random.default_rng(0).normal(size=(L, D, F)).astype(np.float32)


def run_slice(function, x, dims):
    """Runs a function on the first slice of the batch `dims`; returns the labels of its result."""
    closed = jax.make_jaxpr(function)(x)
    labels = tuple((d,) if d in dims else () for d in range(x.ndim))
    first = x[tuple(slice(1) if d in dims else slice(None) for d in range(x.ndim))]
    walk = SliceWalk(dict(enumerate(x.shape)))
    ((found,), (out,)) = walk.run(closed.jaxpr, closed.consts, [labels], [first])
    return found, np.asarray(out)


def newton_schulz(x):
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(2):
        gram = x @ x.T
        x = 2 * x - (gram + 0.5 * gram @ gram) @ x
    return x


def scanned(x):
    def body(carry, c):
        i, x = carry
        gram = jnp.einsum("ldf,lef->lde", x, x)
        other = jax.lax.cond(i == 0, lambda g: g, lambda g: 0.5 * g, gram)
        return (i + 1, c * x + jnp.einsum("lde,lef->ldf", other, x)), None

    return jax.lax.scan(body, (0, x), jnp.array([1.0, 0.5]))[0][1]


UNDERSTOOD = {
    "matrices": jax.vmap(newton_schulz),
    "a loop with a branch": scanned,
    "transposed": lambda x: jnp.swapaxes(jax.vmap(newton_schulz)(jnp.swapaxes(x, 1, 2)), 1, 2),
    "polar": lambda x: jnp.matmul(*(lambda u, s, v: (u, v))(*jnp.linalg.svd(x, False))),
    "masked": lambda x: jnp.where(jnp.sum(x, (1, 2), keepdims=True) > 0, x, jnp.zeros_like(x)),
    "with a constant": lambda x: jnp.einsum("ldf,de->lef", x, jnp.eye(D) + 1),
    "diagonal": lambda x: x * jnp.eye(D, F)[None] + jnp.full((L, D, F), 2.0),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_function_of_each_slice_is_run_on_one(name):
    function = UNDERSTOOD[name]
    labels, out = run_slice(function, X, {0})
    assert labels == ((0,), (), ())
    np.testing.assert_allclose(out, function(X)[:1], rtol=1e-5, atol=1e-6)


MIXING = {
    "a sum": lambda x: x / x.sum(),
    "a mean of slices": lambda x: x - x.mean(0, keepdims=True),
    "a product": lambda x: jnp.einsum("ldf,mdf->lm", x, x),
    "reversed": lambda x: x[::-1],
    "sorted": lambda x: jnp.sort(x, axis=0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "joined": lambda x: (x.reshape(L * D, F) + 1).T @ jnp.ones((L * D, 2)),
    "other slices": lambda x: x + x.reshape(D, L, F).transpose(1, 0, 2),
    "a loop over slices": lambda x: jax.lax.scan(lambda c, y: (c + y, c), 0 * x[0], x)[1],
    "a constant of slices": lambda x: x * jnp.arange(L, dtype=x.dtype)[:, None, None],
}


@pytest.mark.parametrize("name", MIXING)
def test_a_function_that_mixes_slices_is_not_understood(name):
    with pytest.raises(NotUnderstoodError):
        run_slice(MIXING[name], X, {0})


def test_two_batch_dims_may_be_joined_with_each_other():
    x = X.reshape(L, 2, 2, F)

    def function(x):
        return jax.vmap(newton_schulz)(x.reshape(2 * L, 2, F)).reshape(x.shape)

    assert run_slice(function, x, {0, 1})[0] == ((0,), (1,), (), ())
    with pytest.raises(NotUnderstoodError):
        run_slice(function, x, {0})


def test_transposes_that_undo_each_other_are_left_out():
    def run(x):
        walk = SliceWalk({0: 6, 1: 4})
        closed = jax.make_jaxpr(lambda x: 2 * jnp.swapaxes(x[None], 1, 2))(x.T)
        return walk.run(closed.jaxpr, (), [((), ())], [walk.transpose(x, (1, 0))])[1]

    jaxpr = jax.make_jaxpr(run)(jnp.ones((4, 6))).jaxpr
    used = jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True])[0]
    assert not [eqn for eqn in used.eqns if eqn.primitive.name == "transpose"]


STEPS = {
    "transpose": lambda x: jnp.transpose(x, [*range(1, x.ndim), 0]),
    "swap": lambda x: jnp.swapaxes(x, -1, -2),
    "flatten": lambda x: x.reshape(x.shape[0], -1) if x.ndim > 2 else x,
    "merge": lambda x: x.reshape(-1, x.shape[-1]),
    "split": lambda x: x.reshape(*x.shape[:-1], 2, -1) if x.shape[-1] % 2 == 0 else x,
    "gram": lambda x: x @ jnp.swapaxes(x, -1, -2),
    "sum": lambda x: x / (1 + jnp.square(x).sum(-1, keepdims=True)),
    "shift": lambda x: x + jnp.ones_like(x),
    "row": lambda x: x * jnp.arange(x.shape[-1], dtype=x.dtype),
}


@hypothesis.settings(max_examples=8)
@hypothesis.given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
def test_a_random_program_runs_on_a_slice_or_is_not_understood(names):
    def function(x):
        for name in names:
            x = STEPS[name](x)
        return x

    with jax.numpy_rank_promotion("allow"):
        try:
            labels, out = run_slice(function, X, {0})
        except NotUnderstoodError:
            return
        whole = np.asarray(function(X))
    first = tuple(slice(1) if label else slice(None) for label in labels)
    np.testing.assert_allclose(out, whole[first], rtol=1e-4, atol=1e-5)
