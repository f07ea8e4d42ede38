"""Tables that map the keys of `config.json` to fields of a `Transformer`, for each model family.

`model_type` names the family. A `Family` lists the field of each key, the fields that have the same
value in all models of the family, and the default of each optional key. Rotary positions and
windows need code, which is in `manualpar.models.pretrained.family` and `.architecture`.
"""

from collections.abc import Mapping
from typing import Any

from manualpar.models.pretrained.dense_families import DENSE_FAMILIES, read_biases, write_biases
from manualpar.models.pretrained.family import (
    COMMON,
    EXPERT_SIZES,
    EXPERTS,
    GEMMA,
    NO_BIAS,
    SIZES,
    Family,
)
from manualpar.models.pretrained.llama4 import LLAMA4

# The routing of DeepSeek's models, with dense layers first and shared experts.
DEEPSEEK_EXPERTS: Mapping[str, str] = {
    "n_routed_experts": "num_experts",
    "routed_scaling_factor": "gate_scale",
    "n_group": "expert_groups",
    "topk_group": "expert_groups_per_token",
}
SIGMOID: Mapping[str, Any] = {
    **EXPERTS,
    "expert_gates": "sigmoid",
    "router_bias": True,
    "expert_group_score": "best_two",
}
LATENT: Mapping[str, str] = {
    **{key: field for key, field in EXPERT_SIZES.items() if key != "head_dim"},
    "kv_lora_rank": "latent_rank",
    "q_lora_rank": "latent_query_rank",
    "qk_rope_head_dim": "latent_rotary_size",
    "v_head_dim": "latent_value_size",
}
LATENT_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Families with `first_k_dense_replace` dense layers, and `n_shared_experts` shared experts: the
# defaults of these keys.
DENSE_FIRST: Mapping[str, tuple[int, int]] = {
    "dots1": (0, 0),
    "deepseek_v2": (0, 2),
    "deepseek_v3": (3, 1),
    "glm4_moe": (1, 1),
}
# `model_type` -> why a `Transformer` cannot be such a model.
UNSUPPORTED: Mapping[str, str] = {
    "gemma4": "heads of two sizes, keys shared by layers, and an embedding in each layer",
    "gemma4_text": "heads of two sizes, keys shared by layers, and an embedding in each layer",
    "granite_swa": "a base of rotations for each layer, and groups whose first layer sees all",
    "deepseek_v32": "an index that chooses the keys that each query sees",
}
# `model_type` -> the family that has the same models.
ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        SIZES,
        defaults={**COMMON, "num_key_value_heads": None},
        must_be={"mlp_bias": False},
        read=read_biases,
        write=write_biases,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        SIZES,
        defaults={**COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        SIZES,
        fixed={"qkv_bias": True},
        defaults={**COMMON, "max_window_layers": 28},
        windows="last if asked",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        SIZES,
        fixed={"query_key_norm": True},
        defaults={**COMMON, "head_dim": 128, "max_window_layers": 28},
        must_be=NO_BIAS,
        windows="last if asked",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **SIZES,
            "query_pre_attn_scalar": "attention_scale",
            "attn_logit_softcapping": "attention_soft_cap",
            "final_logit_softcapping": "logit_soft_cap",
        },
        fixed=GEMMA,
        defaults={
            **COMMON,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        must_be={**NO_BIAS, "use_bidirectional_attention": None},
        windows="by turns",
        window_every=2,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scale_key="query_pre_attn_scalar",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **SIZES,
            "query_pre_attn_scalar": "attention_scale",
            "final_logit_softcapping": "logit_soft_cap",
        },
        fixed={**GEMMA, "query_key_norm": True},
        defaults={
            **COMMON,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            # Files of multimodal models lack the values that are the defaults of transformers.
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "final_logit_softcapping": None,
            "sliding_window": 4096,
        },
        must_be={**NO_BIAS, "use_bidirectional_attention": False},
        ignored={
            "attn_logit_softcapping": "transformers stores it and never applies it in Gemma 3",
        },
        windows="by turns",
        window_every=6,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        scale_key="query_pre_attn_scalar",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {**SIZES, "num_experts_per_tok": "experts_per_token", "num_local_experts": "num_experts"},
        fixed={**EXPERTS, "normalize_gates": True},
        defaults={**COMMON, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "sliding_window": None},
        windows="all",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {
            **EXPERT_SIZES,
            "num_experts": "num_experts",
            "shared_expert_intermediate_size": "shared_experts_size",
        },
        fixed={**EXPERTS, "qkv_bias": True, "shared_gate": True},
        defaults={**COMMON, "norm_topk_prob": False},
        must_be={"qkv_bias": True},
        windows="listed",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**EXPERT_SIZES, "num_experts": "num_experts"},
        fixed={**EXPERTS, "query_key_norm": True},
        defaults={**COMMON, "norm_topk_prob": False},
        must_be=NO_BIAS,
        windows="all if asked",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **SIZES,
            "num_experts_per_tok": "experts_per_token",
            "num_local_experts": "num_experts",
            "swiglu_alpha": "swiglu_alpha",
            "swiglu_limit": "swiglu_limit",
        },
        fixed={
            **EXPERTS,
            "qkv_bias": True,
            "attention_out_bias": True,
            "attention_sinks": True,
            "expert_biases": True,
        },
        defaults={
            **COMMON,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        must_be={"attention_bias": True},
        windows="by turns",
        window_every=2,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        {
            **EXPERT_SIZES,
            **DEEPSEEK_EXPERTS,
        },
        fixed={**SIGMOID, "query_key_norm": True},
        defaults={
            **COMMON,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "use_sliding_window": True,
            "max_window_layers": 62,
            "sliding_window": 4096,
        },
        must_be=NO_BIAS,
        windows="last if asked",
    ),
    **DENSE_FAMILIES,
    "llama4_text": LLAMA4,
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        {
            **EXPERT_SIZES,
            **DEEPSEEK_EXPERTS,
            "use_qk_norm": "query_key_norm",
            "attention_bias": "qkv_bias",
        },
        fixed=SIGMOID,
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "attention_bias": False,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**LATENT, **DEEPSEEK_EXPERTS, "rope_interleave": "rotary_interleaved"},
        fixed=SIGMOID,
        defaults={
            **LATENT_DEFAULTS,
            "num_key_value_heads": 128,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "rope_interleave": True,
        },
        must_be={
            **NO_BIAS,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        {
            key: field
            for key, field in {**LATENT, **DEEPSEEK_EXPERTS}.items()
            if key != "norm_topk_prob"
        },
        fixed={
            **EXPERTS,
            "normalize_gates": False,
            "rotary_interleaved": True,
            "expert_group_score": "best",
        },
        defaults={
            **LATENT_DEFAULTS,
            "num_key_value_heads": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        must_be={
            **NO_BIAS,
            "mlp_bias": False,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
    ),
}
# Keys that do not affect the function that a trained model computes, or that repeat other keys:
# metadata, training settings, special tokens, and options of the library transformers.
UNUSED_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "ep_size",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Keys of other programs, each with the reason why it changes no result. They are ignored with a
# warning that names them.
INERT_KEYS: Mapping[str, str] = {
    "is_llama_config": "a mark of the program that trained SmolLM2; no library reads it",
    "unsloth_version": "the version of the program that wrote the file",
    "unsloth_fixed": "a mark that Unsloth has mended the tokenizer",
    "unsloth_training_ready": "a mark of Unsloth",
    "neftune_noise_alpha": "noise that NEFTune adds to embeddings in training only",
    "max_sequence_length": "the longest sequence in training, which no model's code reads",
    "model_max_length": "a limit of the tokenizer",
    "max_seq_len": "the longest sequence in training, which no model's code reads",
    "seq_length": "the longest sequence in training, which no model's code reads",
    "_flash_attn_2_enabled": "chooses an implementation of attention",
    "use_flash_attn": "chooses an implementation of attention",
    "attn_implementation": "chooses an implementation of attention",
    "custom_generate": "names a Python file for generation",
    "task_specific_params": "options of pipelines of transformers",
    "tokenizer_class": "names the tokenizer's class",
    "finetuning_task": "a label of the training data",
    "trl_version": "the version of a program that wrote the file",
    "axolotl_version": "the version of a program that wrote the file",
    "initializer_scale": "a setting of initialization",
}
# The models around a text model -> what is left out when the text model is read.
WRAPPERS: Mapping[str, str] = {
    "gemma3": "the vision tower and its projector",
    "llama4": "the vision tower and its projector",
    "mistral3": "the vision tower and its projector",
    "llava": "the vision tower and its projector",
    "llava_next": "the vision tower and its projector",
    "llava_next_video": "the vision tower and its projector",
    "internvl": "the vision tower and its projector",
    "vipllava": "the vision tower and its projector",
    "aya_vision": "the vision tower and its projector",
    "voxtral": "the audio tower and its projector",
    "ultravox": "the audio tower and its projector",
}
