"""What the study of zero bubble stands on: its bounds, and backward passes taken apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from benchmarks.zero_bubble import EQUAL, bound, bubble, fill, least_time, split_backward
from manualpar.layers.pipeline.schedules import make_table


def test_the_least_bubble_is_the_bound_if_s_weights_may_wait():
    stages, microbatches = 2, 4
    shares = [
        bubble(least_time(stages, microbatches, EQUAL, waiting=waiting), microbatches, EQUAL)
        for waiting in range(3)
    ]
    least = bound(stages, microbatches, EQUAL)
    assert shares[2] == pytest.approx(least)
    assert shares[1] > least
    assert shares[0] == pytest.approx(make_table("1f1b", stages, microbatches).bubble)
    assert least == pytest.approx(make_table("1f1b", stages, microbatches, 3).bubble)


def test_filled_tables_reach_the_bound_and_textbook_1f1b_idles():
    table = fill(4, 8, has_weights=True)
    assert bubble(table.time(EQUAL), 8, EQUAL) == pytest.approx(bound(4, 8, EQUAL))
    assert (max(table.kept), table.waiting) == (7, [1, 2, 3, 4])
    half = fill(4, 8, has_weights=False)
    assert bubble(half.time((1, 2)), 8, (1, 2)) == pytest.approx(0.4)
    assert half.kept == [4, 3, 2, 1]


@pytest.mark.slow
def test_a_backward_pass_in_two_has_the_same_gradients():
    def run(params, x):
        for weight in params:
            x = x + jnp.tanh(x @ weight)
        return x

    params = list(jax.random.normal(jax.random.key(0), (2, 4, 4)))
    x, dy = jax.random.normal(jax.random.key(1), (2, 3, 4))
    _, pull = jax.vjp(run, params, x)
    kept, structure = jax.tree.flatten(pull)
    expected = jax.tree.leaves(pull(dy))
    backward = jax.make_jaxpr(lambda kept, dy: jax.tree.unflatten(structure, kept)(dy))(kept, dy)
    split = split_backward(backward)
    given = [*kept, dy]
    dx, *passed = jaxpr_as_fun(split.inputs)(*given)
    grads = jaxpr_as_fun(split.weights)(*(given[i] for i in split.reads), *passed)
    for got, want in zip([*grads, dx], expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(split.passed) == 2  # The gradients inside of both tanh.
