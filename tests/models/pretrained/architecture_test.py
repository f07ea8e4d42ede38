"""What a `config.json` says is a model of sizes that there are, or refused by its key."""

import json
import os

import pytest

from benchmarks.malformed_models import DOTS, FLOATS, INTEGERS, LARGE, LLAMA, MAY_BE_0
from manualpar.models.pretrained import read_architecture
from manualpar.models.pretrained.architecture import parse_architecture
from manualpar.models.pretrained.model_config import complete_fields


def refused(config, key):
    with pytest.raises(ValueError, match=f"^config.json: .*{key} is ") as caught:
        parse_architecture(config)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("base", [LLAMA, DOTS], ids=["llama", "dots1"])
def test_a_size_that_no_model_has_is_refused_by_its_key(base):
    assert complete_fields(parse_architecture(base))["num_layers"] == 2
    for key in (key for key, value in base.items() if type(value) is int):
        for value in (*INTEGERS, float("inf")):
            if type(value) is not int or value or key not in MAY_BE_0:
                refused({**base, key: value}, key)
    refused({**base, "num_hidden_layers": LARGE}, "num_hidden_layers")
    refused({**base, "num_attention_heads": 17}, "hidden_size")
    for value in (*FLOATS, float("inf"), float("nan")):
        refused({**base, "rms_norm_eps": value}, "rms_norm_eps")
        scaling = {"rope_type": "linear", "factor": value}
        refused({**base, "rope_scaling": scaling}, "rope_scaling.factor")
        if value:  # Otherwise it says nothing.
            refused({**base, "rope_theta": value}, "rope_theta")


def test_dense_layers_and_rotated_features_are_refused_by_their_own_key():
    qwen = {
        **LLAMA,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    assert complete_fields(parse_architecture(qwen))["num_experts"] == 4
    refused({**qwen, "mlp_only_layers": [0, 1]}, "mlp_only_layers")
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0\.5, expected 1"):
        parse_architecture({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}})


def test_only_the_dense_models_of_granite_4_are_read():
    sizes = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    granite = {
        **sizes,
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 24,
        "position_embedding_type": "rope",
        "mamba_n_heads": 128,
        "init_method": "mup",
        "logits_scaling": 4,
    }
    fields = complete_fields(parse_architecture(granite))
    assert (fields["mlp_size"], fields["logit_scale"]) == (24, 0.25)
    for key, value in (
        ("layer_types", ["attention", "mamba"]),
        ("layer_types", None),
        ("num_local_experts", 64),
        ("position_embedding_type", "nope"),
    ):
        refused({**granite, key: value}, key)
    with pytest.raises(ValueError, match="no Mamba layers"):
        parse_architecture({key: x for key, x in granite.items() if key != "layer_types"})


def test_a_path_is_a_text_or_a_path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_architecture(str(tmp_path)) == read_architecture(tmp_path)
    with os.scandir(tmp_path.parent) as entries:  # Whose entries are os.PathLike.
        (entry,) = [entry for entry in entries if entry.name == tmp_path.name]
    assert read_architecture(entry) == read_architecture(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has no config.json"):
        read_architecture(str(tmp_path))
