"""Draws: from the right tokens, with the right probabilities, the same for the same key."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.models.generation.drawing import (
    Drawing,
    draw_tokens,
    history_of,
    keep_likeliest,
    make_penalties,
    note,
    penalize,
)

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))
draw = jax.jit(draw_tokens)


def _kept(**options):
    kept = jax.jit(keep_likeliest)(LOGITS[None], Drawing(**options).as_arrays())[0]
    assert (kept[kept > -np.inf] == LOGITS[kept > -np.inf]).all()
    return np.flatnonzero(kept > -np.inf).tolist()


def test_the_likeliest_tokens_are_kept():
    assert _kept(top_k=2) == [1, 3]
    assert _kept(top_k=9) == [0, 1, 2, 3, 4]
    assert _kept(top_p=0.39) == [1]
    assert _kept(top_p=0.41) == [1, 3]
    assert _kept(top_p=0.71) == [1, 3, 4]
    assert _kept(top_p=1e-6) == [1]
    assert _kept(min_p=0.3) == [1, 3, 4]
    assert _kept(min_p=0.9, top_k=4) == [1]
    # Of the two that top_k keeps the first has 4/7.
    assert _kept(top_k=2, top_p=0.5) == [1]
    assert _kept(top_k=2, top_p=0.6) == [1, 3]


def test_draws_have_the_probabilities_that_the_settings_make():
    rows = 4000
    logits, position = np.tile(LOGITS, (rows, 1)), np.zeros(rows, np.int32)
    keys = jax.random.split(jax.random.key(0), rows)
    for drawing, expected in (
        (Drawing(1.0), np.exp(LOGITS)),
        (Drawing(2.0), np.exp(LOGITS / 2) / np.exp(LOGITS / 2).sum()),
        (Drawing(1.0, top_k=2), np.array([0, 4, 0, 3, 0]) / 7),
    ):
        tokens = draw(logits, keys, position, drawing.as_arrays())
        found = np.bincount(tokens, minlength=5) / rows
        np.testing.assert_allclose(found, expected, atol=0.03)
        assert (found[expected == 0] == 0).all()
    assert (draw(logits, keys, position, Drawing().as_arrays()) == 1).all()


def test_a_draw_follows_from_key_and_position_alone():
    keys, logits = jax.random.split(jax.random.key(3), 40), np.zeros((40, 5), np.float32)
    position, drawing = np.arange(40, dtype=np.int32), Drawing(1.0).as_arrays()
    all_rows = draw(logits, keys, position, drawing)
    np.testing.assert_array_equal(
        draw(logits[7:9], keys[7:9], position[7:9], drawing), all_rows[7:9]
    )
    assert (draw(logits, keys, position + 1, drawing) != all_rows).any()
    assert len(set(np.asarray(all_rows).tolist())) > 1


def test_rows_keep_their_own_dtype():
    tokens = draw(
        jnp.zeros((2, 3)),
        jax.random.split(jax.random.key(0)),
        jnp.zeros(2, jnp.int32),
        Drawing().as_arrays(),
    )
    assert tokens.dtype == jnp.int32


def test_penalties_are_subtracted_and_multiplied_in_their_order():
    logits = np.array([[2.0, -2.0, 1.0, 0.5]], np.float32)
    penalties = make_penalties(4, 2.0, 0.25, 0.5, {2: 1.0, 3: -math.inf})
    history = history_of(np.array([[0, 3, 3]]), np.array([1]), 4)
    for _ in range(2):
        history = note(history, np.array([1]))
    # In the prompt: 2 / 2. In the answer twice: -2 * 2 - 2 * 0.25 - 0.5. The padding is no token.
    found = penalize(logits, history, penalties)
    np.testing.assert_allclose(found, [[1.0, -5.0, 2.0, -math.inf]])
    assert make_penalties(4, 1.0, 0.0, 0.0, {2: 0.0}) is None
