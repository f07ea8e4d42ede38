"""The Language Model Evaluation Harness says of a model here what it says of the same in torch."""

import json

import numpy as np
import pytest

from manualpar.data import load_tokenizer
from manualpar.generation import Generator
from manualpar.generation.lm_eval_model import lm_eval_model
from manualpar.generation.stored_run import load_directory

pytestmark = pytest.mark.slow

WORDS = ["<s>", "</s>", "a", "b", "c", "d", "e", " ", ".", "ab", "cd", "de", "?", "yes", "no"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
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
    post = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = post
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
    return [
        ConfigurableTask(config={"task": name, **data, **kind, "metadata": {"version": 1}})
        for name, kind in kinds.items()
    ]


def _in_torch(directory, max_length):
    """The same model in torch, one request at a time, with what the harness has for windows."""
    import torch
    import transformers
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    model = transformers.LlamaForCausalLM.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    def score(context, completion):
        tokens = torch.tensor([(context + completion)[-max_length - 1 :]])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0].log_softmax(-1)[-len(completion) :]
        wanted = torch.tensor(completion)
        total = logits.gather(1, wanted[:, None]).sum().item()
        return total, bool((logits.argmax(-1) == wanted).all())

    class InTorch(LM):
        def loglikelihood(self, requests):
            return [score([0, *encode(x)], encode(y)) for x, y in (r.args for r in requests)]

        def loglikelihood_rolling(self, requests):
            found = []
            for request in requests:
                windows = get_rolling_token_windows(encode(request.args[0]), 0, max_length, 1)
                found.append(sum(score(*make_disjoint_window(each))[0] for each in windows))
            return found

        def generate_until(self, requests):
            raise NotImplementedError

    return InTorch()


def _samples(results, task):
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def test_the_harness_finds_the_same_here_and_in_torch(directory, tasks, devices8):
    del devices8
    import lm_eval

    trained = load_directory(directory, mesh={"data": 4, "model": 2})
    tokenizer = load_tokenizer(str(directory))
    generator = Generator(trained.program, tokenizer, batch_size=8)
    ours = lm_eval_model(generator, trained.state, max_length=32)
    theirs = _in_torch(directory, max_length=32)
    options = {"tasks": tasks, "bootstrap_iters": 0, "log_samples": True}
    found, expected = (lm_eval.simple_evaluate(model, **options) for model in (ours, theirs))
    for got, wanted in zip(_samples(found, "choices"), _samples(expected, "choices"), strict=True):
        np.testing.assert_allclose(
            [float(x[0]) for x in got], [float(x[0]) for x in wanted], atol=1e-3
        )
        assert [x[1] for x in got] == [x[1] for x in wanted]
    rolling = [np.ravel(_samples(results, "rolling")) for results in (found, expected)]
    np.testing.assert_allclose(*[x.astype(float) for x in rolling], rtol=1e-4)
