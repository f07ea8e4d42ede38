"""Small random models of each family, as transformers computes them, are the same on every mesh."""

import copy
from typing import Any

import numpy as np
import pytest

from tests.models.pretrained.transformers_models import (
    assert_step_is_that_of_torch,
    logits_of,
    make_batch,
    saved,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch", reason="pip install -e '.[interop]'")
pytest.importorskip("transformers", reason="pip install -e '.[interop]'")

WINDOW = 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Two groups of layers and one that is left over; no scale is what the sizes would say.
GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
GEMMA3_LAYERS = (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 6, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": (
        "Qwen2",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma2": ("Gemma2", GEMMA | {"num_hidden_layers": 5, "attn_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {"num_hidden_layers": 7, "layer_types": GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPES},
    ),
}
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3}
# Those of Qwen and dots.llm1 have a dense layer first; the routing of the last is DeepSeek's.
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5, "num_hidden_layers": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        OF_EXPERTS
        | {
            "num_experts": 8,
            "shared_expert_intermediate_size": 12,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        OF_EXPERTS
        | {"num_experts": 8, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "dots1": (
        "Dots1",
        OF_EXPERTS
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "head_dim": 4,
        },
    ),
}
MODELS = FAMILIES | WITH_EXPERTS
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"data": 8},
    "model": {"data": 2, "model": 4},
    "context": {"data": 2, "context": 4},
    "stage": {"data": 2, "model": 2, "stage": 2},
}
EXPERT_MESHES = MESHES | {
    "model": {"data": 2, "expert": 2, "model": 2},
    "context": {"data": 2, "expert": 2, "context": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name):
    model = saved(*MODELS[name])
    for scan_layers in (True, False):
        logits = logits_of(model.directory, scan_layers=scan_layers)
        np.testing.assert_allclose(logits, model.logits, rtol=1e-5, atol=1e-5)
    if name in WITH_EXPERTS:
        return  # Where logits of routers are rounded, tokens go to other experts.
    # In bfloat16 both round, at places that differ: ours is no farther from what is exact.
    with torch.no_grad():
        theirs = copy.deepcopy(model.model).to(torch.bfloat16)
        rounded = theirs(torch.tensor(make_batch().inputs).long()).logits.float().numpy()
    found = logits_of(model.directory, dtype="bfloat16"), rounded
    errors = [np.abs(x - model.logits).mean() for x in found]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_a_mesh_is_that_of_transformers(name, mesh, devices8):
    del devices8
    meshes = EXPERT_MESHES if name in WITH_EXPERTS else MESHES
    assert_step_is_that_of_torch(saved(*MODELS[name]), meshes[mesh])
