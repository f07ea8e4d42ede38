"""What a config says of fine-tuning reaches the program that it makes."""

import sys
import types

import pytest

from configs import fsdp, lora_lm
from manualpar.data import load_tokenizer
from manualpar.errors import MissingExtraError
from manualpar.inspect import ledger
from manualpar.training.config import complete_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.data.trained_tokenizer import write_tokenizer


def _config(**model):
    config = fsdp.get_config()
    with config.unlocked(), config.ignore_type():
        config.model.update({"hidden_size": 16, "num_layers": 1, **model})
    return config


def test_a_config_names_adapters_and_nothing_else_is_trained(devices8):
    program = prepare(_config(lora=("output_dense:4",), lora_alpha=8.0)).program
    trained = {info.path: info.shape for info, place in program.parameters if place.trainable}
    assert trained == {"output_dense/lora_a": (16, 4), "output_dense/lora_b": (4, 10)}
    assert program.model.interface.low_rank.alpha == 8


def test_a_config_names_what_is_stored_in_int8(devices8):
    program = prepare(_config(int8=("output*/kernel:8",), lora=("output_dense:4",))).program
    shapes = {info.path: (str(info.dtype), info.shape) for info, _ in program.parameters}
    assert shapes["output_dense/kernel_codes"] == ("int8", (16, 10))
    assert shapes["output_dense/kernel_scales"] == ("float32", (16, 2))
    assert "output_dense/lora_a" in shapes


def _flops(config):
    experiment = prepare(config)
    return experiment.task.flops_per_example, experiment.program


def test_model_flops_leave_out_gradients_that_nobody_asks_for(devices8):
    del devices8
    sizes = 64 * 16, 16 * 10
    assert _flops(_config())[0] == 6 * sum(sizes)
    config = _config()
    with config.unlocked():
        config.optimizer.trainable = ("output_dense/*",)
    # Forward, and the gradient of the last kernel; none of its inputs.
    assert _flops(config)[0] == 2 * sum(sizes) + 2 * sizes[1]
    adapted = _config(lora=("output_dense:4",), lora_alpha=8.0)
    assert _flops(adapted)[0] == 2 * sum(sizes) + 4 * 16 * 4 + 6 * 4 * 10


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"model.lora": ("*/attention/*:2", "*/mlp/*:3"), "model.lora_alpha": 4.0},
        {"optimizer.trainable": ("head",)},
        {"optimizer.trainable": ("*/attention/*",), "model.remat": "full"},
    ],
    ids=str,
)
def test_model_flops_of_a_transformer_are_those_of_its_step(fields, scan_layers, devices8):
    del devices8
    config = lora_lm.get_config()
    small = {
        "model.lora": (),
        "model.hidden_size": 16,
        "model.num_heads": 2,
        "model.mlp_size": 32,
        "model.scan_layers": scan_layers,
        "model.attention": "xla",  # Which computes nothing again.
        "data.sequence_length": 16,
    }
    with config.unlocked():
        config.update_from_flattened_dict({"optimizer.trainable": (), **small, **fields})
    flops, program = _flops(config)
    phases = ledger(program, compile=False).flops_by_phase()
    step = 8 * (phases["forward"] + phases["backward"]) / config.data.batch_size
    assert flops == pytest.approx(step)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": "jsonl", "path": "/no/such"}, r"^config\.data\.path is '/no/such', which"),
        ({"source": "tokens", "tokenizer": "t"}, r"^config\.data\.tokenizer is 't', expected ''"),
        (
            {"mixture": ("1 text x",)},
            r"because config\.data\.mixture has entries; or set config\.data\.mixture=\(\)\.$",
        ),
    ],
)
def test_an_error_about_the_data_names_the_field_of_the_config(fields, words):
    config = complete_config(lora_lm.get_config())
    config.data.update(fields)
    with pytest.raises(ValueError, match=words):
        make_task(config)


def test_a_note_and_a_missing_extra_name_the_field_of_the_config(monkeypatch):
    config = complete_config(lora_lm.get_config())
    config.data.update({"source": "mixture", "mixture": ("1 jsonl /no/such",)})
    with pytest.raises(ValueError, match=r"^config\.data\.path is '/no/such'") as raised:
        make_task(config)
    assert raised.value.__notes__ == ["in the entry 'jsonl /no/such' of config.data.mixture"]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"^config\.data\.source='digits' needs scikit-"):
        make_task(fsdp.get_config())


def test_the_prompt_of_a_sample_has_bos_once(tmp_path, monkeypatch):
    config = complete_config(lora_lm.get_config())
    (tmp_path / "text.txt").write_text("the river runs to the sea\n" * 2000)
    tokenizer = write_tokenizer(tmp_path / "t.json", special=["<s>"])
    config.data.update(
        {"source": "text", "path": str(tmp_path / "text.txt"), "sequence_length": 16}
    )
    config.data.update({"tokenizer": tokenizer, "parse_special": True})
    prompts = []
    monkeypatch.setattr(
        "manualpar.training.task.sample_tokens",
        lambda apply_fn, params, prompt, **options: prompts.append(list(prompt)) or [],
    )
    state = types.SimpleNamespace(apply_fn=None, params=None, collections={})
    for text in ("<s>the", "the"):
        config.sample.update({"prompt": text, "num_tokens": 1})
        sample = make_task(config).sample
        assert sample is not None
        assert sample(state, None) == text
    assert prompts[0] == prompts[1]
    assert prompts[0].count(load_tokenizer(tokenizer).bos_token) == 1
