"""Small random models of transformers, saved, and what a step of ours must make of them.

A model is made with transformers and saved, and so is a second one whose parameters are the
gradients that torch computes. Both are loaded here. A metric for each position says how probable
labels are there, so that it comes from the program itself, on pipelines too.
"""

import copy
import functools
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from manualpar import Batch, Pipeline, Program, fsdp, make_mesh
from manualpar.models import Context, Split, Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.pretrained import load_hf, read_architecture

VOCABULARY, B, S = 60, 8, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,  # Its row of the embedding would have no gradient.
}


TEXTS = ("Gemma3", "Llama4")  # Whose text models have configs of their own.
ABSENT = "absent"  # The value of a key in `SIZES` that a family does not have.


class Saved(NamedTuple):
    """A model that is saved.

    Attributes:
      directory: Where it is.
      of_grads: Where the same model is with its gradients as its parameters.
      logits: Its logits of `make_batch`.
      model: The torch module.
    """

    directory: Path
    of_grads: Path
    logits: np.ndarray
    model: Any


def make_batch() -> Batch:
    """A batch whose mask numbers the positions."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (B, S + 1), dtype=np.int32)
    mask = np.tile(np.arange(S, dtype=np.float32), (B, 1))
    return Batch(tokens[:, :-1], tokens[:, 1:], mask)


def saved(family: str, fields: Mapping[str, Any]) -> Saved:
    """A model of a family, such as `Llama`, with these fields besides `SIZES`; made once."""
    return _saved(family, json.dumps(dict(fields)))


@functools.cache
def _saved(family: str, fields: str) -> Saved:
    import torch
    import transformers

    config_class = getattr(transformers, f"{family}{'Text' * (family in TEXTS)}Config")
    options = SIZES | json.loads(fields)
    config = config_class(**{key: x for key, x in options.items() if x != ABSENT})
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager", dtype=torch.float32).eval()
    scale = 0.0 if family.startswith("Gemma") else 1.0
    # Of what is no parameter a router's bias is random too; frequencies and scales stay.
    biases = [(path, x) for path, x in model.named_buffers() if path.endswith("bias")]
    for path, x in [*model.named_parameters(), *biases]:
        noise = torch.randn_like(x)
        if "norm" in path or ".ln_" in path:
            x.data = scale * (not path.endswith("bias")) + 0.3 * noise
        else:
            x.data = noise * (0.3 if path.endswith("bias") else x.shape[-1] ** -0.5)
    directories = [
        Path(tempfile.mkdtemp(prefix=f"{family}_{part}_")) for part in ("model", "grads")
    ]
    model.save_pretrained(directories[0], max_shard_size="20KB")  # In several files.
    batch = make_batch()
    inputs, labels = torch.tensor(batch.inputs).long(), torch.tensor(batch.labels).long()
    logits = model(inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    of_grads = copy.deepcopy(model)
    for x, original in zip(of_grads.parameters(), model.parameters(), strict=True):
        x.data = original.grad.float()
    of_grads.save_pretrained(directories[1])
    return Saved(directories[0], directories[1], logits.detach().numpy(), model)


def program_of(directory: Path, mesh: dict[str, int], **fields: Any) -> Program:
    """A program of the model in a directory, whose SGD step shows the gradient itself."""
    split = {axis: axis for axis in ("model", "context") if axis in mesh}
    known = read_architecture(directory).flat_fields
    experts = {"expert_axis": "expert"} if known.get("num_experts") else {}
    model = Transformer(
        **nest_fields({**known, **experts, **fields}),
        vocab_multiple=8,
        split=Split(split.get("model"), sequence_parallel="model" in mesh and "stage" not in mesh),
        context=Context(split.get("context")),
    )
    options: dict[str, Any] = {"pipeline": Pipeline()} if "stage" in mesh else {}
    options |= {"axis_name": ("data", "expert")} if "expert" in mesh else {}
    number = math.prod(mesh.values())
    return fsdp(
        model,
        optax.sgd(1.0),
        _loss,
        mesh=make_mesh(mesh, jax.devices()[:number]),
        batch=make_batch(),
        min_weight_size=16,
        num_minibatches=2 if "stage" in mesh else 1,
        context_axis=split.get("context"),
        **options,
    )


def _loss(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """The mean cross entropy, and as metrics that of each position."""
    del rng
    losses, _ = apply_fn({"params": params}, batch.inputs, train=True, labels=batch.labels)
    metrics = {"loss": (losses.sum(), losses.size)}
    for position in range(S):
        is_here = batch.mask == position
        metrics[f"at {position}"] = (jnp.where(is_here, losses, 0).sum(), is_here.sum())
    return losses.mean(), metrics


def logits_of(directory: Path, **fields: Any) -> np.ndarray:
    """Those of a model on one device."""
    program = program_of(directory, {"data": 1}, **fields)
    state = load_hf(program, directory)
    variables = jax.device_get({"params": state.params, **state.collections})
    variables = jax.device_put(variables, jax.devices()[0])
    model = program.abstract_state.apply_fn.__self__
    return np.asarray(jax.jit(model.apply)(variables, make_batch().inputs))[..., :VOCABULARY]


def assert_step_is_that_of_torch(model: Saved, mesh: dict[str, int], **fields: Any) -> None:
    """Asserts the loss at each position and the gradient of every leaf of a step on a mesh."""
    program = program_of(model.directory, mesh, **fields)
    state, grads = load_hf(program, model.directory), load_hf(program, model.of_grads)
    before = jax.device_get(state.params)
    state, metrics = program.train_step(state, make_batch())
    found = jax.device_get([metrics[f"at {position}"] for position in range(S)])
    assert [count for _, count in found] == [B] * S
    losses = np.array([total / B for total, _ in found])
    np.testing.assert_allclose(losses, _losses(model.logits).mean(0), rtol=1e-5, atol=1e-5)
    changes = jax.tree.map(np.subtract, before, jax.device_get(state.params))
    expected = jax.device_get(grads.params)
    chex.assert_trees_all_equal_shapes(changes, expected)
    # Without rotations the biases of keys have no gradient, only rounding errors.
    least = 1e-3 * max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(changes), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(got - want).max() / max(np.abs(want).max(), least)
        assert error < 1e-4, (jax.tree_util.keystr(path), error)


def _losses(logits: np.ndarray) -> np.ndarray:
    """The cross entropy at each position, in float64."""
    logits = logits.astype(np.float64)
    chosen = np.take_along_axis(logits, make_batch().labels[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - chosen


WINDOW = 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
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
    # Scalings whose sequences are longer than those of pretraining.
    "yarn": ("Qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "dynamic": (
        "Llama",
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0},
        },
    ),
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
# Families with fields of their own, see `manualpar.models.pretrained.dense_families`.
PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [3.0, 5.0],
    "partial_rotary_factor": 0.5,
}
GPT2_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_positions": 32,
    **dict.fromkeys(("intermediate_size", "num_key_value_heads"), ABSENT),
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 8}),
    "phi3": (
        "Phi3",
        {
            "hidden_size": 32,
            "rope_parameters": PHI3_ROPE,
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 32,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "granite": ("Granite", GRANITE),
    "granite4": (
        "GraniteMoeHybrid",
        GRANITE
        | {
            "shared_intermediate_size": 24,
            "num_local_experts": 0,
            "layer_types": ["attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "ministral": ("Ministral", {"sliding_window": WINDOW, "head_dim": 4}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "cohere": ("Cohere", {"attention_bias": True}),
    "cohere2": ("Cohere2", {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": ABSENT}),
}
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 3}
YARN_OF_EXPERTS = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
}
LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size": 12,
    "intermediate_size_mlp": 24,
    "head_dim": 8,
    "attention_chunk_size": WINDOW,
    "no_rope_layer_interval": 2,
    "floor_scale": 3,
    "attn_scale": 0.4,
}
# Those of Qwen and dots.llm1 have a dense layer first; the routing of the last is DeepSeek's.
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5, "num_hidden_layers": 2}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 5,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN_OF_EXPERTS | {"truncate": False},
        },
    ),
    "llama4, like Scout": (
        "Llama4",
        LLAMA4
        | {
            "num_hidden_layers": 5,
            "rope_parameters": LLAMA3 | {"high_freq_factor": 1.0},
        },
    ),
    "llama4, like Maverick": (
        "Llama4",
        LLAMA4
        | {
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_bias": True,
        },
    ),
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
    "qwen3_moe, every second layer": (
        "Qwen3Moe",
        OF_EXPERTS | {"num_experts": 8, "num_hidden_layers": 5, "decoder_sparse_step": 2},
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
    "glm4_moe": (
        "Glm4Moe",
        OF_EXPERTS
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 8,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        OF_EXPERTS
        | LATENT
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "v_head_dim": 10,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        OF_EXPERTS
        | LATENT
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 12,
            "v_head_dim": 4,
            "num_mtp_layers": 0,
            "rope_parameters": YARN_OF_EXPERTS | {"mscale": 0.9, "mscale_all_dim": 0.8},
        },
    ),
}
MODELS = FAMILIES | DENSE | WITH_EXPERTS
