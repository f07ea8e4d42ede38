"""Penalties and cuts are those of transformers' `generate`, on every mesh."""

import itertools

import jax
import numpy as np
import pytest

from manualpar.models.generation import Generator
from manualpar.training.load_run import load_directory

pytestmark = pytest.mark.slow
INTEROP = "pip install -e '.[interop]'"
VOCABULARY, EOS = 48, 1
STOPS = (EOS, 10, 18, 25, 33, 39, 47)  # Tokens that end answers, so that many are short.
PROMPTS = ([5, 6, 7, 9, 5, 6], [11, 12, 13], [2, 3, 2, 3, 2, 3, 2, 40, 41])
# Our options, and those of transformers that mean the same.
GREEDY = {
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "rewarded repetition": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": (
        {"logit_bias": {3: 4.0, 7: -100.0}, "repetition_penalty": 1.2},
        {"sequence_bias": [[[3], 4.0], [[7], -100.0]], "repetition_penalty": 1.2},
    ),
}
MESHES = ({"data": 1}, {"data": 2, "model": 4}, {"data": 8})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama of transformers, whose answers end after some tokens, and its directory."""
    torch = pytest.importorskip("torch", reason=INTEROP)
    transformers = pytest.importorskip("transformers", reason=INTEROP)
    import tokenizers

    path = tmp_path_factory.mktemp("llama")
    words = {"<s>": 0, "</s>": EOS, **{f"w{n}": n for n in range(2, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(path)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(path)
    return theirs, path


def _generators(path):
    for axes in MESHES:
        trained = load_directory(path, mesh=axes)
        yield trained, Generator(trained.program, stop_tokens=STOPS)


def _theirs(model, prompt, options):
    import torch

    made = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(STOPS),
        **options,
    )
    found = [row[len(prompt) :].tolist() for row in made]
    return [list(itertools.takewhile(lambda x: x not in STOPS, row)) for row in found]


def _assert_same(model, path, pairs):
    expected = {
        name: [answer for prompt in PROMPTS for answer in _theirs(model, prompt, theirs)]
        for name, (_, theirs) in pairs.items()
    }
    plain = [answer for prompt in PROMPTS for answer in _theirs(model, prompt, {})]
    for trained, generator in _generators(path):
        for name, (ours, _) in list(pairs.items())[: None if trained.program.mesh.size == 1 else 3]:
            answers = generator.generate(trained.state, PROMPTS, max_tokens=9, **ours)
            assert [answer.tokens for answer in answers] == expected[name], name
            assert len(answers[0].log_probabilities) == len(answers[0].tokens)
    return expected, plain


def test_penalties_and_biases_are_theirs(model):
    expected, plain = _assert_same(*model, GREEDY)
    assert all(found != plain for found in expected.values())


def test_probabilities_after_every_cut_are_theirs():
    """The distribution of a draw, from logits, the settings and the tokens before."""
    torch = pytest.importorskip("torch", reason=INTEROP)
    logits_process = pytest.importorskip("transformers.generation.logits_process", reason=INTEROP)
    from manualpar.models.generation.drawing import (
        Drawing,
        history_of,
        keep_likeliest,
        make_penalties,
        penalize,
    )

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (6, VOCABULARY)).astype(np.float32)
    tokens = rng.integers(0, VOCABULARY, (6, 20)).astype(np.int32)
    for settings in (
        {"min_p": 0.2},
        {"top_k": 9, "min_p": 0.05},
        {"top_p": 0.8, "min_p": 0.1},
        {"min_p": 1.0},
    ):
        penalties = make_penalties(VOCABULARY, 1.3, 0.0, 0.0, {4: 2.5})
        history = history_of(tokens, np.full(6, 20), VOCABULARY)
        drawing = Drawing(0.7, **settings).as_arrays()
        kept = keep_likeliest(penalize(logits, history, penalties) / 0.7, drawing)
        theirs = logits_process.LogitsProcessorList(
            [
                logits_process.SequenceBiasLogitsProcessor([[[4], 2.5]]),
                logits_process.RepetitionPenaltyLogitsProcessor(1.3),
                logits_process.TemperatureLogitsWarper(0.7),
            ]
        )
        if "top_k" in settings:
            theirs.append(logits_process.TopKLogitsWarper(settings["top_k"]))
        if "top_p" in settings:
            theirs.append(logits_process.TopPLogitsWarper(settings["top_p"]))
        theirs.append(logits_process.MinPLogitsWarper(settings["min_p"]))
        expected = theirs(torch.from_numpy(tokens).long(), torch.from_numpy(logits)).numpy()
        np.testing.assert_array_equal(np.isinf(kept), np.isinf(expected))
        np.testing.assert_allclose(
            jax.nn.softmax(kept),
            np.exp(expected) / np.exp(expected).sum(1, keepdims=True),
            rtol=1e-5,
        )
