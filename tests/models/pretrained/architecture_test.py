"""What a `config.json` says is a model of sizes that there are, or refused by its key."""

import json
import os

import pytest

from benchmarks.malformed_models import DOTS, FLOATS, INTEGERS, LARGE, LLAMA, MAY_BE_0
from manualpar.models.pretrained import read_architecture
from manualpar.models.pretrained.architecture import (
    complete_fields,
    parse_architecture,
    write_config,
)


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
    for value in (*FLOATS, float("inf"), float("nan"), 1e300, 1e-320):
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


def test_llama_4_is_read_as_published():
    """Scout's keys, and Maverick's layers; the text model is in a multimodal model."""
    text = {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4,
        "for_llm_compressor": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    }
    with pytest.warns(UserWarning, match="'llama4' except its text model"):
        scout = parse_architecture({"model_type": "llama4", "text_config": text})
    fields = complete_fields(scout)
    expected = {
        "attention_chunk": 8192,
        "global_every": 4,
        "unrotated_global": True,
        "score_growth": 0.1,
        "score_growth_length": 8192,
        "rotated_norm": True,
        "rotary_interleaved": True,
        "rope_base": 500_000.0,
        "gates_on_inputs": True,
        "expert_gates": "sigmoid",
        "experts_every": 1,
        "shared_experts_size": 8192,
        "dense_mlp_size": 0,
    }
    assert {key: fields[key] for key in expected} == expected
    assert complete_fields(parse_architecture(write_config(fields, family="llama4_text"))) == fields
    maverick = {
        **text,
        "model_type": "llama4_text",
        "moe_layers": list(range(1, 48, 2)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "layer_types": [*["chunked_attention"] * 3, "full_attention"] * 12,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    }
    fields = complete_fields(parse_architecture(maverick))
    assert (fields["experts_every"], fields["dense_mlp_size"]) == (2, 16_384)
    assert (fields["rotated_norm"], fields["score_growth"]) == (False, 0)
    assert complete_fields(parse_architecture(write_config(fields, family="llama4_text"))) == fields
    rotated = parse_architecture({**text, "model_type": "llama4_text", "no_rope_layers": [1] * 48})
    assert (rotated.flat_fields["global_every"], rotated.flat_fields["score_growth"]) == (0, 0)
    for key, value in (
        ("moe_layers", [0, 1, 3]),
        ("moe_layers", []),
        ("moe_layers", [1, True]),
        ("no_rope_layers", [0] * 48),
        ("layer_types", ["full_attention"] * 48),
        ("layer_types", ["chunked_attention"] * 3),
        ("attn_temperature_tuning", "yes"),
        ("num_experts_per_tok", 2),
        ("attention_chunk_size", None),
        ("interleave_moe_layer_step", 49),
        ("intermediate_size_mlp", "16384"),
        ("attn_scale", -1.0),
    ):
        refused({**maverick, key: value}, key)


def test_a_path_is_a_text_or_a_path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_architecture(str(tmp_path)) == read_architecture(tmp_path)
    with os.scandir(tmp_path.parent) as entries:  # Whose entries are os.PathLike.
        (entry,) = [entry for entry in entries if entry.name == tmp_path.name]
    assert read_architecture(entry) == read_architecture(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has no config.json"):
        read_architecture(str(tmp_path))
