"""Sampling: what is drawn is what the model predicts, for as long as one likes."""

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
from manualpar.models.generation.drawing import sample_tokens
from tests.models.generation.programs import SIZES, make_program, make_state

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
