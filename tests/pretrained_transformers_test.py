"""Models that transformers makes and saves are loaded here, and written so that it loads them."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from manualpar import make_mesh
from manualpar.models import Transformer
from manualpar.pretrained import export_hf, load_hf, read_architecture
from manualpar.pretrained.families import FAMILIES
from tests.pretrained_load_test import program_of

pytest.importorskip("transformers", reason="pip install -e '.[interop]'")
pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 45,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# What makes each family its own; a second entry is a second model.
MODELS = {
    "llama": {"rope_parameters": LLAMA3, "head_dim": 6, "rms_norm_eps": 1e-5},
    "llama-tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        **EXPERTS,
        "num_experts": 4,
        "head_dim": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "dots1": {
        **EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
}


def make_files(name, directory):
    """A random model of transformers, saved in several files; norms and biases are random too."""
    import torch
    import transformers

    torch.manual_seed(0)
    family = name.partition("-")[0]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **MODELS[name]})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in [*theirs.parameters(), *theirs.buffers()]:
            if tensor.ndim == 1 and tensor.dtype == torch.float32:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    theirs.save_pretrained(directory, max_shard_size="20KB")
    return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()


def read(directory):
    return {k: x for path in directory.glob("*.safetensors") for k, x in load_file(path).items()}


def test_every_family_is_tried():
    assert {name.partition("-")[0] for name in MODELS} == FAMILIES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_logits_files_and_generated_tokens_are_theirs(name, tmp_path):
    import torch
    import transformers

    theirs = make_files(name, tmp_path / "theirs")
    fields = read_architecture(tmp_path / "theirs").fields
    experts = {"expert_axis": "expert"} if fields.get("num_experts") else {}
    axes = {"data": 2, "expert": 2, "model": 2} if experts else {"data": 4, "model": 2}
    model = Transformer(**fields, split_axis="model", vocab_multiple=2, **experts)
    mesh, batch_axes = make_mesh(axes), tuple(axis for axis in axes if axis != "model")
    program = program_of(model, mesh, axis_name=batch_axes, pad=True)
    state = load_hf(program, tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 45, (2, 16)).astype(np.int32)
    logits = jax.jit(model.apply)(program.whole(state), tokens)[..., :45]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)

    like = export_hf(program, state, tmp_path / "like", like=tmp_path / "theirs")
    alone = export_hf(program, state, tmp_path / "alone", max_shard_bytes=8000)
    written = json.loads((alone / "config.json").read_text())
    assert written["model_type"] == name.partition("-")[0]
    original, prompt = read(tmp_path / "theirs"), torch.from_numpy(tokens).long()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = theirs.generate(prompt, **options)
    for ours in (like, alone):
        found = read(ours)
        assert found.keys() == original.keys()
        for key, x in original.items():
            assert (found[key].dtype, found[key].shape) == (x.dtype, x.shape), key
            assert found[key].tobytes() == x.tobytes(), key
        again, info = transformers.AutoModelForCausalLM.from_pretrained(
            ours, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert torch.equal(again.generate(prompt, **options), texts)
