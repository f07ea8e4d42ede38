"""Layers of experts of other families are those of transformers, and so are their gradients."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.layers import MoE

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch", reason="pip install -e '.[interop]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")

D, E, F = 16, 12, 8
OF_LAYER: dict[str, Any] = {
    "hidden_size": D,
    "moe_intermediate_size": F,
    "n_routed_experts": E,
    "num_experts_per_tok": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
SHARED: dict[str, Any] = {"top_k": 3, "capacity_factor": None, "shared_size": 2 * F}
SHARED |= {"gate_scale": 2.5}
SIGMOID = {"gates": "sigmoid", "router_bias": True}
# The layer of a family with multi-head latent attention, and ours.
LAYERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v2-greedy": ("DeepseekV2", "Moe", {}, {"normalize_gates": False}),
    "deepseek_v2-groups": (
        *("DeepseekV2", "Moe"),
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {"normalize_gates": False, "groups": 4, "groups_per_token": 2, "group_score": "best"},
    ),
    "deepseek_v3": (
        *("DeepseekV3", "MoE"),
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        SIGMOID | {"groups": 4, "groups_per_token": 2},
    ),
    "deepseek_v3-sums": (
        *("DeepseekV3", "MoE"),
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        SIGMOID | {"normalize_gates": False},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_experts_and_its_gradients_are_those_of_transformers(name):
    family, suffix, theirs, ours = LAYERS[name]
    model_type = name.partition("-")[0]
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    config = getattr(transformers, f"{family}Config")(**OF_LAYER, **theirs)
    torch.manual_seed(0)
    layer = getattr(module, f"{family}{suffix}")(config)
    for x in layer.parameters():
        x.data = torch.randn_like(x) * x.shape[-1] ** -0.5
    for x in layer.buffers():
        x.data = torch.randn_like(x) * 0.3
    tokens, probe = torch.randn(2, 4, 16, D)
    tokens.requires_grad_()
    expected = layer(tokens)
    (expected * probe).sum().backward()

    variables, of_x = _variables(layer, lambda x: x.detach()), tokens.detach().numpy()
    moe = MoE(E, F, **SHARED, **ours)

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda p, x: moe.apply({**variables, "params": p}, x), params, x)
        return y, pullback(jnp.asarray(probe.numpy()))

    got, (params, x) = run(variables["params"], of_x)
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x, tokens.grad.numpy(), rtol=1e-4, atol=1e-5)
    grads = _variables(layer, lambda x: x.grad if x.requires_grad else x)["params"]
    assert params.keys() == grads.keys()
    for path, want in grads.items():
        np.testing.assert_allclose(params[path], want, rtol=1e-4, atol=2e-5, err_msg=path)


def _variables(layer: Any, take: Any) -> Any:
    """What `MoE` has, of the tensors of a layer or of their gradients."""
    named = [*layer.named_parameters(), *layer.named_buffers()]
    x = {path: take(tensor).numpy() for path, tensor in named}
    gate, up = np.split(x["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=-1)
    params = {"router": x["gate.weight"].T, "gate": gate, "up": up}
    params["down"] = x["experts.down_proj"].swapaxes(1, 2)
    for part in ("gate", "up", "down"):
        params[f"shared_{part}"] = x[f"shared_experts.{part}_proj.weight"].T
    bias = x.get("gate.e_score_correction_bias")
    return {"params": params} | ({} if bias is None else {"router": {"bias": bias}})
