"""Chats and preferences are those of the library TRL, where it is installed."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from manualpar import Batch, fsdp, make_mesh
from manualpar.data import load_tokenizer
from manualpar.data.chat import Chats
from manualpar.data.packing import learned_of, tokens_of
from manualpar.data.preferences import preference_examples
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.models.finetuning.preferences import WithReference, preference_loss
from manualpar.models.pretrained import load_hf, read_architecture
from tests.data.trained_tokenizer import write_tokenizer

LENGTH, BETA = 64, 0.3
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"Is {number} even?"}],
        "chosen": [{"role": "assistant", "content": "Yes"}],
        "rejected": [{"role": "assistant", "content": "No" + "!" * number}],
    }
    for number in range(4)
]
of_trl = pytest.mark.filterwarnings("ignore")


def _folder(path: Path) -> Path:
    path.mkdir()
    write_tokenizer(path / "tokenizer.json", special=["<|im_start|>", "<|im_end|>"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": CHATML,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _model(seed: int, folder: Path) -> Any:
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=304, **sizes, **heads, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    for x in model.parameters():
        x.data = torch.randn_like(x) * 0.3
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@of_trl
def test_pairs_have_the_tokens_and_the_loss_of_trl(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    folder = _folder(tmp_path / "tokenizer")
    options = {"max_length": LENGTH, "report_to": [], "use_cpu": True, "bf16": False}
    trainer = trl.DPOTrainer(
        model=_model(0, tmp_path / "policy"),
        ref_model=_model(1, tmp_path / "reference"),
        args=trl.DPOConfig(
            str(tmp_path / "dpo"), beta=BETA, per_device_train_batch_size=len(PAIRS), **options
        ),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    pairs = preference_examples(PAIRS, load_tokenizer(str(folder)), LENGTH)
    for number, row in enumerate(trainer.train_dataset):
        pair = pairs[number]
        for side, name in enumerate(("chosen_ids", "rejected_ids")):
            is_learned = pair.mask[side] != 0
            assert pair.labels[side][is_learned].tolist() == row[name]
            prompt = pair.inputs[side][: is_learned.argmax() + 1].tolist()
            assert prompt == row["prompt_ids"]

    expected = float(
        trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    )
    model = Transformer(**read_architecture(tmp_path / "policy").fields)
    tokens = np.zeros((1, LENGTH), np.int32)
    program = fsdp(
        *(model, optax.identity(), language_model_loss),
        mesh=make_mesh({"data": 1}, jax.devices()[:1]),
        batch=Batch(tokens, tokens),
        min_weight_size=2**20,
    )
    params = {
        name: program.whole(load_hf(program, tmp_path / name))["params"]
        for name in ("policy", "reference")
    }
    batch = jax.tree.map(lambda *x: np.stack(x), *(pairs[n] for n in range(len(PAIRS))))
    loss, metrics = preference_loss(BETA)(
        params, WithReference(model).apply, batch, jax.random.key(0)
    )
    assert abs(expected - np.log(2)) > 0.05
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert metrics["loss"][1] == len(PAIRS)


@pytest.mark.slow
@of_trl
def test_a_prompt_and_its_completion_have_the_tokens_of_trl(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    folder = _folder(tmp_path / "tokenizer")
    trainer = trl.SFTTrainer(
        model=_model(0, tmp_path / "model"),
        args=trl.SFTConfig(
            str(tmp_path / "sft"), max_length=LENGTH, report_to=[], use_cpu=True, bf16=False
        ),
        train_dataset=datasets.Dataset.from_list(
            [{"prompt": pair["prompt"], "completion": pair["rejected"]} for pair in PAIRS]
        ),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    chats = Chats(load_tokenizer(str(folder)))
    ours = chats.examples([{"messages": pair["prompt"] + pair["rejected"]} for pair in PAIRS])
    for example, row in zip(ours, trainer.train_dataset, strict=True):
        assert isinstance(example, np.ndarray)
        assert tokens_of(example).tolist() == row["input_ids"]
        learned = np.where(learned_of(example), tokens_of(example), -100)
        assert learned.tolist() == row["labels"]
