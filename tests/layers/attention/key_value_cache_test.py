"""The cache of keys: which position is where, and the same attention as without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.layers.attention import attention
from manualpar.layers.attention.blockwise_attention import Scoring
from manualpar.layers.attention.key_value_cache import (
    Past,
    Prompts,
    append,
    attend_to_kept,
    keep_prompts,
    kept_positions,
)


def test_a_slot_holds_the_latest_position_that_is_its_own():
    slots = 4
    for length in range(11):
        expected = [-1] * slots
        for position in range(length):
            expected[position % slots] = position
        found = kept_positions(jnp.array([length]), slots)[0]
        assert [max(position, -1) for position in found.tolist()] == expected


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(4, 2.0), Scoring(chunk=5)])
def test_rows_of_all_lengths_attend_as_without_a_cache(scoring):
    rng = np.random.default_rng(0)
    B, S, K, G, H = 3, 12, 2, 2, 4
    query, key, value = (
        jnp.asarray(rng.normal(size=(B, S, heads, H)), jnp.float32) for heads in (K * G, K, K)
    )
    attention_of = jax.jit(functools.partial(attention, **scoring._asdict()))
    expected = attention_of(query, key, value)
    lengths = np.array([9, 6, 1])
    prompts = Prompts(jnp.asarray(lengths), 16)
    cache = jax.jit(lambda *xs: tuple(keep_prompts(x, prompts, scoring) for x in xs))(key, value)
    assert cache[0].shape == (B, scoring.window or scoring.chunk or 16, K, H)
    attend = jax.jit(attend_to_kept, static_argnums=5)
    for step in range(3):
        places = np.arange(B), lengths + step
        new = [jnp.asarray(np.asarray(x)[places])[:, None] for x in (query, key, value)]
        past = Past(jnp.asarray(places[1]))
        out = attend(*new, cache, past, scoring)
        np.testing.assert_allclose(out[:, 0], np.asarray(expected)[places], atol=2e-6)
        cache = jax.jit(append)(cache, tuple(new[1:]), past.position)
