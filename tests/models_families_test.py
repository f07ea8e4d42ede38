"""Small random models of each family, as transformers computes them, are the same on every mesh."""

import copy
from typing import Any

import numpy as np
import pytest

from tests.transformers_models import (
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
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "gemma2": ("Gemma2", GEMMA | {"num_hidden_layers": 5, "attn_logit_softcapping": 4.0}),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {"num_hidden_layers": 7, "layer_types": GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPES},
    ),
}
MESHES: dict[str, dict[str, int]] = {
    "fsdp": {"data": 8},
    "model": {"data": 2, "model": 4},
    "context": {"data": 2, "context": 4},
    "stage": {"data": 2, "model": 2, "stage": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name):
    model = saved(*FAMILIES[name])
    for scan_layers in (True, False):
        logits = logits_of(model.directory, scan_layers=scan_layers)
        np.testing.assert_allclose(logits, model.logits, rtol=1e-5, atol=1e-5)
    # In bfloat16 both round, at places that differ: ours is no farther from what is exact.
    with torch.no_grad():
        theirs = copy.deepcopy(model.model).to(torch.bfloat16)
        rounded = theirs(torch.tensor(make_batch().inputs).long()).logits.float().numpy()
    found = logits_of(model.directory, dtype="bfloat16"), rounded
    errors = [np.abs(x - model.logits).mean() for x in found]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_on_a_mesh_is_that_of_transformers(name, mesh, devices8):
    del devices8
    assert_step_is_that_of_torch(saved(*FAMILIES[name]), MESHES[mesh])
