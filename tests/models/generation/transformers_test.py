"""Penalties, cuts, ends and defaults are those of transformers' `generate`."""

import itertools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from manualpar.data import load_tokenizer
from manualpar.data.chat import Chats
from manualpar.models import Transformer
from manualpar.models.generation import Generator
from manualpar.models.pretrained import export_hf
from manualpar.training.load_run import load_directory, own_settings
from tests.data.chats import write_chat_tokenizer
from tests.models.generation.programs import make_program

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


@pytest.fixture
def directory(model, tmp_path):
    """A copy of the model's directory, whose files can be changed."""
    shutil.copytree(model[1], tmp_path / "model")
    return tmp_path / "model"


def _change(path, **fields):
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | fields))


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "both"])
def test_answers_end_at_every_end_that_the_files_name(model, directory, where):
    import torch

    (directory / "generation_config.json").unlink()
    ends = {"config.json": list(STOPS), "both": list(STOPS[:3])}.get(where, EOS)
    _change(directory / "config.json", eos_token_id=ends)
    if where != "config.json":
        _change(directory / "generation_config.json", eos_token_id=list(STOPS), pad_token_id=0)
    trained = load_directory(directory, mesh={"data": 1})
    generator = Generator(trained.program)
    generator.stop_tokens |= trained.own.stop_tokens
    theirs = type(model[0]).from_pretrained(directory).eval()
    for prompt in PROMPTS:
        (answer,) = generator.generate(trained.state, [prompt], max_tokens=9)
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=9, pad_token_id=0)
        found = made[0][len(prompt) :].tolist()
        assert answer.tokens == list(itertools.takewhile(lambda x: x not in STOPS, found))


def test_the_settings_of_a_model_are_its_defaults(model, directory):
    """As `generate` of transformers chooses them, with and without draws."""
    import transformers

    for fields in (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": True, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
        {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2},
        {},
    ):
        path = directory / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": EOS, **fields}))
        theirs, _ = model[0]._prepare_generation_config(
            transformers.GenerationConfig.from_pretrained(directory)
        )
        ours = own_settings(directory, VOCABULARY).drawing
        assert ours.get("temperature", 0) == (theirs.temperature if theirs.do_sample else 0)
        assert ours.get("repetition_penalty", 1.0) == theirs.repetition_penalty
        if theirs.do_sample:
            defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
            found = {name: ours.get(name, default) for name, default in defaults.items()}
            assert found == {name: getattr(theirs, name) or defaults[name] for name in defaults}
    path.write_text(json.dumps({"num_beams": 4, "top_p": 0.5}))
    said = own_settings(directory, VOCABULARY).described
    assert said == "top_p=0.5; without num_beams=4, which has no counterpart here"
    for fields, words in (
        ({"top_p": 2.0}, "top_p is 2.0, expected"),
        ({"temperature": "hot"}, "has temperature='hot', expected a number"),
        ({"do_sample": "yes"}, "has do_sample='yes', expected true or false"),
    ):
        path.write_text(json.dumps({"do_sample": True, **fields}))
        with pytest.raises(ValueError, match=words):
            own_settings(directory, VOCABULARY)
    path.write_text(json.dumps({"eos_token_id": [1, -1]}))
    with pytest.warns(UserWarning, match="ignored the eos_token_id -1"):
        assert own_settings(directory, VOCABULARY).stop_tokens == {1}


def test_a_tied_config_with_another_head_is_untied(model, directory, tmp_path):
    import torch

    _change(directory / "config.json", tie_word_embeddings=True)
    theirs = type(model[0]).from_pretrained(directory).eval()
    with pytest.warns(UserWarning, match=r"but lm_head.weight is not model.embed_tokens.weight"):
        trained = load_directory(directory, mesh={"data": 1})
    tokens = np.array([PROMPTS[0]], np.int32)
    apply = jax.jit(trained.program.model.interface.module.apply)
    ours = apply({"params": jax.device_get(trained.state.params)}, tokens)
    expected = theirs(torch.tensor(tokens).long()).logits.detach().numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    with pytest.warns(UserWarning, match=r"but lm_head.weight is not"):
        export_hf(trained.program, trained.state, tmp_path / "out", like=directory)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    again = type(model[0]).from_pretrained(tmp_path / "out").eval()
    found = again(torch.tensor(tokens).long()).logits.detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("has_config", [True, False])
def test_an_export_without_another_directory_ends_where_its_chats_end(tmp_path, has_config):
    """In transformers: ends, special tokens, template and the tokens of texts."""
    transformers = pytest.importorskip("transformers", reason=INTEROP)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    named = Path(write_chat_tokenizer(tmp_path / "t", CHATML, special, eos_token="<|endoftext|>"))
    if not has_config:
        (named / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(str(named if has_config else named / "tokenizer.json"))
    model = Transformer(
        vocab_size=tokenizer.vocab_size,
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        mlp_size=16,
        bos_token=tokenizer.bos_token,
    )
    program = make_program(model, {"data": 1})
    out = export_hf(
        program,
        program.init(jax.random.key(0)),
        tmp_path / "out",
        tokenizer=named if has_config else named / "tokenizer.json",
        template="" if has_config else None,
    )
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, None)
    ends = transformers.GenerationConfig.from_pretrained(out)
    assert ends.eos_token_id == ([0, 2] if has_config else 0)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert (theirs.bos_token_id or 0, theirs.eos_token_id) == (0, 0)
    begin = [0] if tokenizer.begins_with_bos else []
    assert theirs("It is not so.").input_ids == [*begin, *tokenizer.encode("It is not so.")]
    assert load_tokenizer(str(out)).begins_with_bos == tokenizer.begins_with_bos
    if has_config:
        chat = [{"role": "user", "content": "It is"}]
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered == "<|im_start|>user\nIt is<|im_end|>\n<|im_start|>assistant\n"
        chats = Chats(tokenizer)
        chats.prompt({"messages": chat})
        assert chats.end_tokens == {2}
