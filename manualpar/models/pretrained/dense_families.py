"""Tables of dense model families, see `manualpar.models.pretrained.families`."""

from collections.abc import Mapping
from typing import Any

from manualpar.models.pretrained.family import COMMON, FULL, NO_BIAS, SIZES, Family, Keys

LAYER_NORM = {"norm_kind": "layer"}
LAYER_NORM_SIZES: Mapping[str, str] = {
    **{key: field for key, field in SIZES.items() if key != "rms_norm_eps"},
    "layer_norm_eps": "norm_epsilon",
}
OLMO: Mapping[str, Any] = {
    "query_key_norm": True,
    "wide_query_key_norm": True,
    "pre_norms": False,
    "post_norms": True,
}
# Of the layers of Cohere, attention and MLP read the same norm.
COHERE: Mapping[str, Any] = {**LAYER_NORM, "shared_norm": True, "parallel_mlp": True}
GRANITE: Mapping[str, str] = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# GPT-2 and GPT-NeoX have biases in all products and norms.
WITH_BIASES: Mapping[str, Any] = {
    **LAYER_NORM,
    "norm_bias": True,
    "gated_mlp": False,
    "mlp_bias": True,
}


def read_biases(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the key for the biases of all products of attention."""
    del fields
    has_bias = keys.take("attention_bias", False) or False
    keys.check("attention_bias", has_bias, bool, lambda x: True, "true or false")
    return {"qkv_bias": has_bias, "attention_out_bias": has_bias}


def write_biases(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key of `read_biases`."""
    return {"attention_bias": fields["qkv_bias"]}


def read_unrotated_layers(keys: Keys, layers: int) -> int:
    """Reads which layers have no positions: returns `n` for every n-th layer, and 0 for none."""
    every = keys.take("no_rope_layer_interval", 4)
    keys.check("no_rope_layer_interval", every, int, lambda x: 1 < x < 2**31, "2 or more")
    rotated = keys.take("no_rope_layers", None) or [
        int((i + 1) % every != 0) for i in range(layers)
    ]
    if not isinstance(rotated, list) or len(rotated) < layers:
        raise keys.refuse("no_rope_layers", rotated, f"1 or 0 for each of {layers} layers")
    rotated = rotated[:layers]
    if all(rotated):
        return 0
    every = rotated.index(0) + 1
    if rotated != [int((i + 1) % every != 0) for i in range(layers)] or every < 2:
        raise keys.refuse("no_rope_layers", rotated, "0 for every n-th layer, and 1 for the others")
    return every


def _read_smollm3(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["attention_window"]:
        raise keys.refuse("sliding_window", fields["attention_window"], "null with no_rope_layers")
    every = read_unrotated_layers(keys, fields["num_layers"])
    biases = read_biases(keys, fields)
    return {**biases, "global_every": every, "unrotated_global": True} if every else biases


def _write_smollm3(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, every = fields["num_layers"], fields["global_every"]
    rotated = [int(not every or (i + 1) % every != 0) for i in range(layers)]
    return {
        "no_rope_layers": rotated,
        "no_rope_layer_interval": every or layers + 1,
        "layer_types": ["full_attention"] * layers,
        **write_biases(fields),
    }


def _prepare_granite4(keys: Keys) -> None:
    """Refuses Mamba layers and experts, and removes the keys of both."""
    types = keys.take("layer_types", keys.take("layers_block_type", "mamba in all layers"))
    if not isinstance(types, list) or not {*map(str, types)} <= {"attention", FULL}:
        expected = "'attention' in all layers; a Transformer has no Mamba layers"
        raise keys.refuse("layer_types", types, expected)
    keys.left["layer_types"] = [FULL] * len(types)
    if experts := keys.take("num_local_experts", 8):
        expected = "0: a Transformer reads only the dense models of Granite 4"
        raise keys.refuse("num_local_experts", experts, expected)
    if (kind := keys.take("position_embedding_type", None)) != "rope":
        raise keys.refuse("position_embedding_type", kind, "'rope'")
    unread = "intermediate_size", "num_experts_per_tok", "time_step_limit", "init_method"
    for key in [key for key in keys.left if key in unread or key.startswith("mamba_")]:
        del keys.left[key]


def _write_granite4(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    return {
        "layer_types": ["attention"] * layers,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,  # Must divide sizes, without Mamba layers too.
        **write_biases(fields),
    }


def _read_cohere2(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Marks the layers that see all positions, which have no positions."""
    if fields["global_every"]:
        return {**read_biases(keys, fields), "unrotated_global": True}
    if not fields["attention_window"]:
        raise keys.refuse("layer_types", "full_attention", "some layers with a window")
    return read_biases(keys, fields)


def _read_gpt2(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    size = keys.take("n_inner", None)
    size = 4 * fields["hidden_size"] if size is None else size
    keys.check("n_inner", size, int, lambda x: 0 < x < 2**31, "1 or more, or null")
    for key in list(keys.left):
        if key.startswith("summary_"):  # Of a head that classifies.
            del keys.left[key]
    keys.left.pop("n_ctx", None)  # A copy of `n_positions` in old files.
    return {"mlp_size": size}


def _write_gpt2(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"n_inner": fields["mlp_size"]}


def _read_neox(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the old names of the rotation's keys, and whether MLPs are parallel."""
    del fields
    for old, new in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
        if (value := keys.take(old, None)) is not None:
            keys.left.setdefault(new, value)
    parallel = keys.take("use_parallel_residual", True)
    keys.check("use_parallel_residual", parallel, bool, lambda x: True, "true or false")
    has_bias = keys.take("attention_bias", True)
    keys.check("attention_bias", has_bias, bool, lambda x: True, "true or false")
    return {"parallel_mlp": parallel, "qkv_bias": has_bias, "attention_out_bias": has_bias}


def _write_neox(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": fields["parallel_mlp"],
        "attention_bias": fields["qkv_bias"],
        "rotary_pct": (fields["rotary_features"] or fields["head_size"]) / fields["head_size"],
        "rotary_emb_base": fields["rope_base"],
    }


DENSE_FAMILIES: Mapping[str, Family] = {
    "gemma": Family(
        "GemmaForCausalLM",
        SIZES,
        fixed={"norm_offset": True, "scale_embedding": True},
        defaults={**COMMON, "head_dim": 256, "tie_word_embeddings": True},
        must_be={**NO_BIAS, "use_bidirectional_attention": None},
        activation="gelu_pytorch_tanh",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        SIZES,
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": None,
            "sliding_window": None,
        },
        must_be=NO_BIAS,
        windows="all",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        SIZES,
        fixed=OLMO,
        defaults={**COMMON, "rms_norm_eps": 1e-5, "num_key_value_heads": None},
        must_be=NO_BIAS,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        SIZES,
        fixed=OLMO,
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": None,
            "sliding_window": 4096,
        },
        must_be=NO_BIAS,
        windows="by turns",
        window_every=4,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        SIZES,
        defaults={
            **COMMON,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        must_be={"mlp_bias": False},
        windows="all if asked",
        read=_read_smollm3,
        write=_write_smollm3,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {**SIZES, **GRANITE},
        defaults={**COMMON, "num_key_value_heads": None, **dict.fromkeys(GRANITE, 1.0)},
        must_be={"mlp_bias": False},
        reciprocal="logits_scaling",
        read=read_biases,
        write=write_biases,
    ),
    # The dense models of Granite 4; the others have Mamba layers.
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **{key: field for key, field in SIZES.items() if key != "intermediate_size"},
            "shared_intermediate_size": "mlp_size",
            **GRANITE,
        },
        defaults={
            **COMMON,
            "num_key_value_heads": None,
            "shared_intermediate_size": 1024,
            **dict.fromkeys(GRANITE, 1.0),
        },
        must_be={"normalization_function": "rmsnorm"},
        reciprocal="logits_scaling",
        prepare=_prepare_granite4,
        read=read_biases,
        write=_write_granite4,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        SIZES,
        defaults={**COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "glm": Family(
        "GlmForCausalLM",
        {**SIZES, "attention_bias": "qkv_bias"},
        defaults={**COMMON, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {**SIZES, "attention_bias": "qkv_bias"},
        fixed={"post_norms": True},
        defaults={**COMMON, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    ),
    "cohere": Family(
        "CohereForCausalLM",
        {**LAYER_NORM_SIZES, "logit_scale": "logit_scale"},
        fixed=COHERE,
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
        },
        must_be={"use_qk_norm": False},
        read=read_biases,
        write=write_biases,
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {**LAYER_NORM_SIZES, "logit_scale": "logit_scale"},
        fixed=COHERE,
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
        },
        windows="by turns",
        window_every=4,
        read=_read_cohere2,
        write=write_biases,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_positions": "learned_positions",
            "layer_norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "tied_head",
        },
        fixed={**WITH_BIASES, "qkv_bias": True, "attention_out_bias": True},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
        must_be={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "reorder_and_upcast_attn": False,
        },
        activation_key="activation_function",
        activation="gelu_new",
        read=_read_gpt2,
        write=_write_gpt2,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {
            key: field
            for key, field in LAYER_NORM_SIZES.items()
            if key not in ("head_dim", "num_key_value_heads")
        },
        fixed=WITH_BIASES,
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": False},
        must_be={"is_decoder": False},
        activation="gelu",
        read=_read_neox,
        write=_write_neox,
    ),
}
