"""Draws: from the right tokens, with the right probabilities, the same for the same key."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, fsdp, make_mesh
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.generation import Generator
from manualpar.models.generation.drawing import (
    Drawing,
    draw_tokens,
    history_of,
    keep_likeliest,
    make_penalties,
    note,
    penalize,
    sample_tokens,
)
from tests.models.generation.programs import SIZES, make_program, make_state

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


# -------------------------------------------------------------------------------------------------
# Sampling: what is drawn is what the model predicts, for as long as one likes.


VOCABULARY = 10
MODEL = Transformer(
    vocab_size=VOCABULARY, num_layers=1, hidden_size=16, num_heads=2, mlp_size=16, bos_token=0
)


class Counter(nn.Module):
    """Predicts, with certainty or nearly, the latest token plus how many come before it."""

    certainty: float = 50.0

    @nn.compact
    def __call__(self, tokens, train):
        assert not train
        one = self.param("one", nn.initializers.ones, ())
        seen = jnp.arange(tokens.shape[1])[None, :] * one.astype(jnp.int32)
        return self.certainty * jax.nn.one_hot((tokens + seen) % VOCABULARY, VOCABULARY)


def _sample(prompt, model=None, **kwargs):
    model = model or Counter()
    defaults = {"num_tokens": 6, "sequence_length": 8, "temperature": 0, "rng": jax.random.key(0)}
    params = {"one": jnp.ones(())}
    return sample_tokens(model.apply, params, prompt, **{**defaults, **kwargs})


def _count(prompt, num_tokens, sequence_length):
    """What `Counter` goes on with."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        seen = min(len(tokens), sequence_length) - 1
        tokens.append((tokens[-1] + seen) % VOCABULARY)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [0, 0.5])
@pytest.mark.parametrize("length", [1, 3, 7, 8])
def test_it_goes_on_as_the_model_predicts_also_beyond_the_window(length, temperature):
    prompt = [7, 2, 5, 1, 1, 3, 0, 4][:length]
    tokens = _sample(prompt, temperature=temperature)
    chex.assert_shape(tokens, (6,))
    chex.assert_type(tokens, jnp.int32)
    assert tokens.tolist() == _count(prompt, 6, 8)


@pytest.mark.slow
def test_of_a_long_prompt_the_end_is_seen():
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 30)
    assert _sample(prompt).tolist() == _count(prompt.tolist(), 6, 8)
    params = _params()
    options = {"num_tokens": 5, "sequence_length": 8, "temperature": 0, "rng": jax.random.key(0)}
    chex.assert_trees_all_equal(
        sample_tokens(MODEL.apply, params, prompt, **options),
        sample_tokens(MODEL.apply, params, prompt[-8:], **options),
    )


def test_several_prompts_go_on_each_by_itself():
    prompts = np.array([[7, 2], [1, 1], [0, 9]])
    tokens = _sample(prompts)
    chex.assert_shape(tokens, (3, 6))
    assert tokens.tolist() == [_count(prompt, 6, 8) for prompt in prompts.tolist()]
    drawn = _sample(np.array([[7, 2]] * 2), Counter(certainty=0.0), temperature=1.0, num_tokens=40)
    assert drawn[0].tolist() != drawn[1].tolist()


def _params():
    return jax.jit(MODEL.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))["params"]


@pytest.mark.slow
def test_temperature_zero_takes_the_likeliest_token_of_the_whole_text_so_far():
    params, prompt = _params(), [3, 0, 1]
    options = {"num_tokens": 5, "sequence_length": 8, "temperature": 0}
    keys = [jax.random.key(seed) for seed in (0, 1)]
    tokens, same = (sample_tokens(MODEL.apply, params, prompt, rng=key, **options) for key in keys)
    assert tokens.tolist() == same.tolist()
    for token in tokens.tolist():
        logits = jax.jit(MODEL.apply)({"params": params}, jnp.array([prompt]))
        assert token == logits[0, -1].argmax()
        prompt = [*prompt, token]


def test_seeds_repeat_and_differ():
    fair = Counter(certainty=0.0)
    first, again, other = (
        _sample([1], fair, temperature=1.0, num_tokens=40, rng=jax.random.key(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_tokens_are_drawn_with_the_probabilities_that_the_temperature_makes():
    for temperature in (1.0, 2.0):
        draws = _sample(
            np.full((4000, 1), 3), Counter(certainty=2.0), temperature=temperature, num_tokens=1
        )
        weight = np.exp(2.0 / temperature)
        expected = weight / (weight + VOCABULARY - 1)
        assert (draws == 3).mean() == pytest.approx(expected, abs=0.03)


def test_it_compiles_once_for_prompts_and_temperatures():
    calls = []

    def apply_fn(variables, tokens, train):
        calls.append(tokens.shape)
        return Counter().apply(variables, tokens, train)

    params = {"one": jnp.ones(())}
    for prompt, temperature in (([1], 0), ([1, 2, 3], 0.5), ([2, 2], 1.0)):
        sample_tokens(
            apply_fn,
            params,
            prompt,
            num_tokens=3,
            sequence_length=4,
            temperature=temperature,
            rng=jax.random.key(0),
        )
    assert calls == [(1, 4)]


@pytest.mark.slow
def test_parameters_may_be_sharded(devices8):
    batch = Batch(inputs=np.zeros((8, 8), np.int32), labels=np.zeros((8, 8), np.int32))
    program = fsdp(
        MODEL,
        optax.sgd(0.1),
        language_model_loss,
        mesh=make_mesh({"data": 8}, devices8),
        batch=batch,
        min_weight_size=0,
    )
    state = program.init(jax.random.key(0))
    options = {"num_tokens": 12, "sequence_length": 8, "temperature": 0, "rng": state.rng}
    tokens = sample_tokens(state.apply_fn, state.params, [[3, 1], [0, 2]], **options)
    assert tokens.sharding.is_fully_replicated
    assert len(tokens.devices()) == 8
    whole = jax.device_get(state.params)
    options["rng"] = jax.random.key(0)
    expected = sample_tokens(MODEL.apply, whole, [[3, 1], [0, 2]], **options)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.slow
def test_with_a_cache_the_same_tokens_are_drawn(devices8):
    del devices8
    program = make_program(Transformer(**SIZES), {"data": 4})
    state, prompts = make_state(program), [[3, 1, 4], [3, 1, 4]]
    generator = Generator(program, stop_tokens=())
    answers = generator.generate(state, prompts, max_tokens=8, temperature=1.0, seed=3)
    options = {"num_tokens": 8, "sequence_length": 11, "rng": jax.random.key(3)}
    drawn = sample_tokens(state.apply_fn, state.params, prompts, temperature=1.0, **options)
    assert drawn.tolist() == [answer.tokens for answer in answers]
    assert answers[0].tokens != answers[1].tokens
