"""The Language Model Evaluation Harness says of a model here what it says of the same in torch."""

import json

import numpy as np
import pytest

from manualpar.data import load_tokenizer
from manualpar.models.generation import Generator
from manualpar.models.generation.lm_eval_model import lm_eval_model
from manualpar.training.load_run import load_directory

pytestmark = pytest.mark.slow

# The stop strings of tasks that have texts written.
ANSWERS = {"free": [], "stopped": ["a", "yes"], "stopped by several tokens": ["bc", "d "]}
WORDS = ["<s>", "</s>", "a", "b", "c", "d", "e", " ", ".", "ab", "cd", "de", "?", "yes", "no"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="BOS before a prompt"),
        pytest.param(False, id="none", marks=pytest.mark.long),
    ],
)
def directory(request, tmp_path_factory):
    """A small Llama of transformers with random weights and a tokenizer."""
    interop = "pip install -e '.[interop]'"
    torch = pytest.importorskip("torch", reason=interop)
    transformers = pytest.importorskip("transformers", reason=interop)
    pytest.importorskip("lm_eval", reason=interop)
    import tokenizers

    path = tmp_path_factory.mktemp("llama")
    vocabulary = {word: index for index, word in enumerate([*WORDS, "<unk>"])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    split = tokenizers.Regex("yes|no|ab|cd|de|.")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(split, "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    if request.param:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.6,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of each kind over a local file."""
    from lm_eval.api.task import ConfigurableTask

    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = []
    for _ in range(12):
        text = "".join(rng.choice(WORDS[2:12], rng.integers(3, 90)))
        lines.append({"text": text, "answer": int(rng.integers(2))})
    path.write_text("\n".join(map(json.dumps, lines)))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{text[:20]}}?",
    }
    choices = {
        "output_type": "multiple_choice",
        "doc_to_choice": ["yes", "no", "ab.cd"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    }
    kinds = {"choices": choices, "rolling": rolling}
    for name, until in ANSWERS.items():
        kinds[name] = {
            "output_type": "generate_until",
            "doc_to_target": "yes",
            "generation_kwargs": {"until": until, "do_sample": False, "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        }
    return [
        ConfigurableTask(config={"task": name, **data, **kind, "metadata": {"version": 1}})
        for name, kind in kinds.items()
    ]


def _samples(results, task):
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def test_the_harness_finds_the_same_here_and_in_torch(directory, tasks, devices8):
    del devices8
    pytest.importorskip("accelerate", reason="pip install -e '.[interop]'")
    import lm_eval
    from lm_eval.models import huggingface

    trained = load_directory(directory, mesh={"data": 4, "model": 2})
    tokenizer = load_tokenizer(str(directory))
    # Here an answer ends at a BOS too, and theirs goes on behind it.
    stop_tokens = [tokenizer.end_token]
    generator = Generator(trained.program, tokenizer, batch_size=8, stop_tokens=stop_tokens)
    ours = lm_eval_model(generator, trained.state, max_length=32)
    options = {"bootstrap_iters": 0, "log_samples": True}
    found = lm_eval.simple_evaluate(ours, tasks=tasks, **options)
    expected = {"samples": {}}
    for task in tasks:
        # Theirs has a second BOS before a document, and scores it, unless it is told not to.
        told = {"add_bos_token": False} if task.config.task == "rolling" else {}
        theirs = huggingface.HFLM(
            str(directory), max_length=32, dtype="float32", device="cpu", batch_size=6, **told
        )
        expected["samples"] |= lm_eval.simple_evaluate(theirs, tasks=[task], **options)["samples"]
    for got, wanted in zip(_samples(found, "choices"), _samples(expected, "choices"), strict=True):
        np.testing.assert_allclose(
            [float(x[0]) for x in got], [float(x[0]) for x in wanted], atol=1e-3
        )
        assert [x[1] for x in got] == [x[1] for x in wanted]
    rolling = [np.ravel(_samples(results, "rolling")) for results in (found, expected)]
    np.testing.assert_allclose(*[x.astype(float) for x in rolling], rtol=1e-4)
    for name in ANSWERS:
        found_texts, wanted_texts = (_samples(results, name) for results in (found, expected))
        assert found_texts == wanted_texts
        assert len(set(map(tuple, found_texts))) > 3
