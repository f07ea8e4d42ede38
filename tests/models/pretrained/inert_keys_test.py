"""Keys that change no result are a warning; keys that change it are refused."""

import pytest

from manualpar.models import Attention, Transformer
from manualpar.models.pretrained.architecture import (
    architecture_of,
    parse_architecture,
    write_config,
)
from manualpar.models.pretrained.families import INERT_KEYS, UNUSED_KEYS

SIZES = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GEMMA = {**SIZES, "head_dim": 8, "num_key_value_heads": 2}


def test_a_key_that_no_library_reads_is_a_warning_with_the_reason():
    with pytest.warns(UserWarning, match=r"is_llama_config \(a mark of .*unsloth_version \(the"):
        read = parse_architecture(SIZES | {"is_llama_config": True, "unsloth_version": "2025.1"})
    assert read == parse_architecture(SIZES)
    with pytest.raises(ValueError, match="attention_chunk_size is 8, expected no such key"):
        parse_architecture(SIZES | {"attention_chunk_size": 8})
    assert not UNUSED_KEYS & INERT_KEYS.keys()
    assert all(reason and reason.strip() == reason for reason in INERT_KEYS.values())


def test_a_cap_may_be_null_and_gemma_3_never_applies_it():
    gemma2 = GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": None}
    assert parse_architecture(gemma2).flat_fields["attention_soft_cap"] == 0
    gemma3 = GEMMA | {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}
    with pytest.warns(UserWarning, match=r"attn_logit_softcapping .*never applies it in Gemma 3"):
        fields = parse_architecture(gemma3).fields
    model = Transformer(**fields)
    assert not model.attention.soft_cap
    assert write_config(architecture_of(model), family="gemma3_text")
    capped = model.clone(attention=Attention(window=4096, global_every=6, soft_cap=50.0))
    with pytest.raises(ValueError, match=r"gemma3_text has another .*attention_soft_cap"):
        write_config(architecture_of(capped), family="gemma3_text")


def test_the_text_model_of_a_multimodal_model_is_read():
    text = {key: value for key, value in GEMMA.items() if key != "model_type"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    with pytest.warns(UserWarning, match=r"all of .* except its text model .the vision tower"):
        read = parse_architecture(config)
    assert (read.family, read.wrapper) == ("gemma3_text", "gemma3")
    assert read.flat_fields == parse_architecture({**text, "model_type": "gemma3_text"}).flat_fields
