"""What a config says of fine-tuning reaches the program that it makes."""

import re

import pytest

from configs import fsdp
from manualpar.training.experiment import prepare


def _config(**model):
    config = fsdp.get_config()
    with config.unlocked(), config.ignore_type():
        config.model.update({"hidden_size": 16, "num_layers": 1, **model})
    return config


def test_a_config_names_adapters_and_nothing_else_is_trained(devices8):
    program = prepare(_config(lora=("output_dense:4",), lora_alpha=8.0)).program
    trained = {info.path: info.shape for info, place in program.parameters if place.trainable}
    assert trained == {"output_dense/lora_a": (16, 4), "output_dense/lora_b": (4, 10)}
    assert program.step.model.adapter.low_rank.alpha == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora": ("output_dense",)}, "config.model.lora has 'output_dense', expected a glob"),
        ({"lora": ("output_dense:0",)}, "has 'output_dense:0', expected a glob on module paths"),
        ({"lora": ("a:1", "a:2")}, "config.model.lora has 'a:2', which is there already, expected"),
        (
            {"lora": ("output_dense:2",), "lora_alpha": 0.0},
            "config.model.lora_alpha is 0, expected",
        ),
        ({"lora": ("output:2",)}, "targets has 'output': 2, which matches no module"),
    ],
)
def test_targets_that_mean_nothing_are_refused(model, message, devices8):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(_config(**model))
