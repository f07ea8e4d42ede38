"""Answers with a cache on any mesh are those of forward passes of one device without one."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, Pipeline, data_parallel, fsdp, hsdp, lora, make_mesh, zero
from manualpar.data.tokenizer import ByteTokenizer, load_tokenizer
from manualpar.models import Classifier, Transformer
from manualpar.models.cross_entropy import (
    classification_loss,
)
from manualpar.models.flat_fields import nest_fields, with_fields
from manualpar.models.generation import Generator
from tests.data.trained_tokenizer import write_tokenizer
from tests.models.generation.programs import FAMILIES, SIZES, make_program, make_state

PROMPTS = ([5, 1, 2, 0, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18])
EXPERTS = {"expert_axis": "expert", **FAMILIES["experts"]}
SPLIT = {"split_axis": "model"}
MESHES = [
    ("grouped, documents, tied", fsdp, {"data": 8}, {}),
    (
        "grouped, documents, tied",
        fsdp,
        {"data": 2, "model": 4},
        {**SPLIT, "sequence_parallel": True},
    ),
    ("window", data_parallel, {"data": 8}, {}),
    ("window", functools.partial(zero, stage=1), {"data": 4, "model": 2}, SPLIT),
    ("two kinds", fsdp, {"data": 4}, {}),
    ("two kinds", hsdp, {"replica": 2, "data": 2, "model": 2}, SPLIT),
    ("sinks", fsdp, {"data": 4, "model": 2}, SPLIT),
    ("chunks", fsdp, {"data": 4, "model": 2}, SPLIT),
    ("latent", fsdp, {"data": 8}, {}),
    ("latent", fsdp, {"data": 2, "model": 4}, {**SPLIT, "sequence_parallel": True}),
    ("experts", fsdp, {"data": 4, "model": 2}, SPLIT),
    ("experts", fsdp, {"data": 2, "expert": 4}, {"expert_axis": "expert"}),
    ("experts", fsdp, {"data": 2, "expert": 2, "model": 2}, {"expert_axis": "expert", **SPLIT}),
]


def _without_cache(model, params, prompt, max_tokens):
    """The likeliest tokens and their logarithmic probabilities, a forward pass for each."""
    apply = jax.jit(model.apply)
    tokens, found = np.zeros((1, len(prompt) + max_tokens), np.int32), []
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), tokens.shape[1]):
        logits = jax.nn.log_softmax(apply({"params": params}, tokens)[0, place - 1])
        tokens[0, place] = jnp.argmax(logits)
        found.append(float(logits[tokens[0, place]]))
    return tokens[0, len(prompt) :].tolist(), found


def _assert_same_as_without_cache(name, builder, axes, fields, max_tokens):
    fields_of_family = {**SIZES, **FAMILIES[name], "capacity_factor": 0.0}
    plain = Transformer(**nest_fields(fields_of_family))
    program = make_program(with_fields(plain, **fields), axes, builder)
    state = make_state(program)
    generator = Generator(program, stop_tokens=())
    answers = generator.generate(state, PROMPTS, max_tokens=max_tokens)
    params = jax.device_get(state.params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        # A prompt is one document, even if it contains BOS.
        model = plain.clone(remat="none", bos_token=-1)
        tokens, expected = _without_cache(model, params, prompt, max_tokens)
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.log_probabilities, expected, atol=1e-5)


def test_answers_are_those_without_a_cache(devices8, caplog):
    """Draws too, and nothing is compiled anew for other prompts, settings and tokens."""
    del devices8
    name, axes = "grouped, documents, tied", {"data": 2, "model": 2}
    plain = Transformer(**{**SIZES, **FAMILIES[name]})
    program = make_program(with_fields(plain, split_axis="model"), axes)
    state, generator = make_state(program), Generator(program, stop_tokens=())
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        (answer,) = generator.generate(state, PROMPTS[:1], max_tokens=4)
        drawn = generator.generate(state, PROMPTS[:2], max_tokens=9, temperature=2.0, top_k=30)
        again = list(generator.stream(state, PROMPTS[:1], max_tokens=9, temperature=2.0, top_k=30))
    compiled = [line.split()[1] for line in caplog.messages if line.startswith("Compiling")]
    own = [name for name in compiled if name in ("jit(_prefill)", "jit(_decode)")]
    assert own == ["jit(_prefill)", "jit(_decode)"]
    # A row draws the same alone.
    assert [piece.token for piece in again] == drawn[0].tokens
    assert answer.tokens != drawn[0].tokens[:4]
    tokens, expected = _without_cache(
        plain.clone(bos_token=-1), jax.device_get(state.params), PROMPTS[0], 4
    )
    assert answer.tokens == tokens
    np.testing.assert_allclose(answer.log_probabilities, expected, atol=1e-5)
    # A token that has come stops the answer before it, and so does the beginning of its text.
    stopped = generator.generate(state, PROMPTS[:1], max_tokens=4, stop=[answer.tokens[2]])[0]
    cut = answer.tokens.index(answer.tokens[2])
    assert (stopped.tokens, stopped.ending) == (answer.tokens[:cut], "stop")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "builder", "axes", "fields"), MESHES)
def test_every_family_on_its_meshes_answers_as_without_a_cache(
    name, builder, axes, fields, devices8
):
    del devices8
    _assert_same_as_without_cache(name, builder, axes, fields, max_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
def test_adapters_of_latents_answer_as_without_a_cache(axes, devices8):
    """The kernel that queries absorb has its adapter too."""
    del devices8
    plain = Transformer(**nest_fields({**SIZES, **FAMILIES["latent"]}))
    targets = {"*/attention/*": 2}
    program = make_program(
        lora(with_fields(plain, **(SPLIT if "model" in axes else {})), targets, alpha=8), axes
    )
    params = program.whole(program.init(jax.random.key(0)))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype) / 4, params)
    answers = Generator(program, stop_tokens=()).generate(
        program.init_from(params), PROMPTS, max_tokens=8
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        adapted = lora(plain.clone(bos_token=-1), targets, alpha=8)
        tokens, expected = _without_cache(adapted, params, prompt, 8)
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.log_probabilities, expected, atol=1e-5)


@pytest.mark.slow
def test_samples_and_penalties_are_the_same_on_every_mesh(devices8):
    """OpenAI's penalties too, which the tests with transformers do not have."""
    del devices8
    model, found = Transformer(**SIZES), []
    options = (
        {"temperature": 1.0, "min_p": 0.1, "samples": 3, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4, "logit_bias": {3: 1.0, 5: -1e9}},
    )
    for axes, fields in (({"data": 1}, {}), ({"data": 4}, {}), ({"data": 2, "model": 2}, SPLIT)):
        program = make_program(with_fields(model, **fields), axes)
        state, generator = make_state(program), Generator(program, batch_size=8)
        made = [generator.generate(state, PROMPTS, max_tokens=6, **each) for each in options]
        found.append([[answer.tokens for answer in answers] for answers in made])
        one = {**options[0], "samples": 1}
        again = generator.generate(state, PROMPTS, max_tokens=6, **one)
    assert found[0] == found[1] == found[2]
    samples, penalized = found[0]
    assert [len(samples), len(penalized)] == [9, 3]
    # The first sample does not depend on the number of samples, and the others differ from it.
    assert [answer.tokens for answer in again] == samples[::3]
    assert samples[0] != samples[1] != samples[2] != samples[0]
    assert not any(5 in tokens for tokens in penalized)


@pytest.mark.slow
def test_the_same_key_draws_the_same_tokens_on_every_mesh(devices8):
    del devices8
    model, found = Transformer(**SIZES), []
    for axes, fields in (({"data": 1}, {}), ({"data": 4}, {}), ({"data": 2, "model": 2}, SPLIT)):
        program = make_program(with_fields(model, **fields), axes)
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 6}
        answers = Generator(program, batch_size=2).generate(make_state(program), PROMPTS, **options)
        found.append([answer.tokens for answer in answers])
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == len(PROMPTS)


class _Fixed:
    """Steps that answer every row with the same tokens."""

    def __init__(self, tokens, model=None, row_devices=2):
        self.model, self.row_devices = (
            model or Transformer(vocab_size=260, bos_token=256),
            row_devices,
        )
        self._tokens, self.shapes = tokens, []
        self.bos_token = self.model.bos_token

    def adopt(self, state):
        return state

    def put_rows(self, x):
        return np.asarray(x) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    def prefill(self, params, collections, tokens, lengths, keys, drawing, *, size):
        self.shapes.append((tokens.shape, size))
        return self.decode(params, collections, (0, len(tokens)), drawing)

    def decode(self, params, collections, rows, drawing):
        from manualpar.models.generation.cached_steps import Drawn

        place, number = rows
        token = np.full(number, self._tokens[place % len(self._tokens)])
        return (place + 1, number), Drawn(token, np.zeros(number, np.float32))


def _generator(text, monkeypatch, **options):
    steps = _Fixed(list(text) if isinstance(text, bytes) else text)
    monkeypatch.setattr("manualpar.models.generation.generator.CachedSteps", lambda program: steps)
    return Generator(None, ByteTokenizer(), **options), steps


class _State:
    params, collections = {}, {}


def test_strings_and_tokens_stop_an_answer(monkeypatch):
    generator, steps = _generator("añb END c".encode() + b"!" * 50, monkeypatch)
    (answer,) = generator.generate(_State, ["hey"], max_tokens=30, stop=["END"])
    assert (answer.text, answer.ending) == ("añb ", "stop")
    assert steps.shapes == [((2, 16), 48)]
    (answer,) = generator.generate(_State, ["hey"], max_tokens=3)
    assert (answer.text, answer.ending, len(answer.tokens)) == ("añ", "length", 3)
    (answer,) = generator.generate(_State, ["hey"], max_tokens=30, stop=[ord("b")])
    assert (answer.text, answer.ending) == ("añ", "stop")
    generator, _ = _generator([97, 256, 98], monkeypatch)
    (answer,) = generator.generate(_State, [[1, 2]])
    assert (answer.text, answer.tokens, answer.ending) == ("a", [97], "stop")


def test_many_prompts_run_in_batches_and_come_back_in_their_order(monkeypatch):
    generator, steps = _generator([97], monkeypatch, batch_size=3)
    assert generator.batch_size == 4
    prompts = [[1] * length for length in (40, 2, 3, 17, 1, 5, 60)]
    answers = generator.generate(_State, prompts, max_tokens=4)
    assert [answer.text for answer in answers] == ["aaaa"] * 7
    assert steps.shapes == [((4, 16), 16), ((4, 64), 64)]


def test_a_prompt_begins_as_the_tokenizer_has_it(monkeypatch, tmp_path):
    generator, _ = _generator([97], monkeypatch)
    bos = generator.tokenizer.bos_token
    assert generator.encode("a") == [bos, ord("a")]
    assert generator.encode_pair("a", "b") == ([bos, ord("a")], [ord("b")])
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "begins_with_bos", False)
        assert generator.encode("a") == [ord("a")]
        assert generator.encode("") == [bos]
        assert generator.encode_pair("", "b") == ([bos], [ord("b")])
    # A text that spells BOS, which is read as a token, has it once, as a document.
    named = write_tokenizer(tmp_path / "t.json", special=["<s>"])
    generator.tokenizer = load_tokenizer(named, parse_special=True)
    assert generator.encode("<s>a") == generator.encode("a")
    assert generator.encode_pair("<s>a", "b") == generator.encode_pair("a", "b")


STAGES = {"pipeline": Pipeline("stage")}
ADOPTED = [
    ("stage axis 'stage'", {}, {"data": 2, "stage": 2}, STAGES),
    ("context axis 'context'", {"context_axis": "context"}, {"data": 2, "context": 2}, {}),
    ("mode is 'auto'", SPLIT, {"data": 2, "model": 2}, {"mode": "auto"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("said", "fields", "axes", "options"), ADOPTED)
def test_another_program_generates_where_the_given_one_cannot(
    said, fields, axes, options, devices8
):
    del devices8
    plain, settings = Transformer(**SIZES), {"max_tokens": 6, "temperature": 1.0, "seed": 3}
    program = make_program(plain, {"data": 1})
    state, generator = make_state(program), Generator(program, stop_tokens=())
    expected = generator.generate(state, PROMPTS, **settings)
    if "context" in axes:
        options = {**options, "context_axis": "context"}
    other = make_program(with_fields(plain, **fields), axes, **options)
    with pytest.warns(UserWarning, match=f"{said}, so a program of fsdp in mode 'manual'"):
        generator = Generator(other, stop_tokens=())
    state = other.init_from(jax.device_get(state.params))
    for _ in range(2):
        answers = generator.generate(state, PROMPTS, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert generator.steps.adopt(state) is generator.steps.adopt(state)


@pytest.mark.slow
def test_a_model_that_cannot_generate_is_refused(devices8):
    del devices8
    batch = Batch(inputs=np.zeros((2, 4), np.float32), labels=np.zeros(2, np.int32))
    classifier = Classifier(hidden_size=4, num_layers=1, num_classes=3)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    program = data_parallel(classifier, optax.sgd(0.1), classification_loss, mesh=mesh, batch=batch)
    with pytest.raises(TypeError, match="the model is a Classifier, expected a Transformer"):
        Generator(program)
