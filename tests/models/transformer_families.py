"""Fields that make a `Transformer` as different as families are, for tests on meshes."""

from typing import Any

# Qwen's: biases, and norms of queries and keys.
QWEN: dict[str, Any] = {"qkv_bias": True, "query_key_norm": True, "norm_epsilon": 1e-5}
# Gemma's, in layers of two kinds: a group of them, and one that is left over.
GEMMA: dict[str, Any] = {
    "num_layers": 3,
    "global_every": 2,
    "attention_window": 3,
    "local_rope_base": 100.0,
    "rope_scaling": "linear",
    "rope_factor": 4.0,
    "norm_offset": True,
    "post_norms": True,
    "query_key_norm": True,
    "activation": "gelu",
    "scale_embedding": True,
    "tied_head": True,
    "attention_scale": 0.3,
    "attention_soft_cap": 4.0,
    "logit_soft_cap": 6.0,
}
# OLMo's: norms after attention and MLP, and of queries and keys over all heads.
OLMO: dict[str, Any] = {
    "query_key_norm": True,
    "wide_query_key_norm": True,
    "pre_norms": False,
    "post_norms": True,
}
# Cohere's: attention and MLP read one LayerNorm.
COHERE: dict[str, Any] = {"norm_kind": "layer", "shared_norm": True, "parallel_mlp": True}
# GPT-2's: biases everywhere, learned positions, and no gates.
GPT2: dict[str, Any] = {
    "norm_kind": "layer",
    "norm_bias": True,
    "gated_mlp": False,
    "mlp_bias": True,
    "qkv_bias": True,
    "attention_out_bias": True,
    "learned_positions": 8,
}
# gpt-oss's: sinks, biases, and layers of two kinds.
GPT_OSS: dict[str, Any] = {
    "qkv_bias": True,
    "attention_out_bias": True,
    "attention_sinks": True,
    "attention_window": 3,
    "global_every": 2,
}
GPT_OSS_EXPERTS: dict[str, Any] = {
    "expert_biases": True,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.702,
}
# DeepSeek's: latent attention; values have other sizes than keys.
LATENT: dict[str, Any] = {
    "latent_rank": 6,
    "latent_query_rank": 10,
    "latent_rotary_size": 4,
    "latent_value_size": 4,
    "head_size": 10,
    "rotary_interleaved": True,
}
# Llama 4's: chunks, layers without positions whose scores grow, norms after rotation, and gates
# that multiply the inputs of experts.
LLAMA4: dict[str, Any] = {
    "num_layers": 3,
    "global_every": 2,
    "unrotated_global": True,
    "attention_chunk": 3,
    "rotated_norm": True,
    "score_growth": 0.7,
    "score_growth_length": 2,
    "rotary_interleaved": True,
}
LLAMA4_EXPERTS: dict[str, Any] = {
    "expert_gates": "sigmoid",
    "normalize_gates": False,
    "gates_on_inputs": True,
    "experts_per_token": 1,
    "shared_experts_size": 8,
}
