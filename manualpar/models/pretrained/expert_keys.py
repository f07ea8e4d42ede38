"""Reads and writes the keys of a `config.json` for experts and for latent attention."""

import math
import re
from collections.abc import Mapping
from typing import Any

from manualpar.models.pretrained.families import DENSE_FIRST
from manualpar.models.pretrained.keys import LARGEST, Keys
from manualpar.models.pretrained.llama4 import read_experts_of_llama4

# Families with experts in all layers, and no keys for dense layers.
WITHOUT_DENSE_LAYERS = ("mixtral", "gpt_oss")


# The keys, of several versions, with the number of layers that predict more than the next token.
MORE_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def predicts_more(tensor: str, config: Mapping[str, Any]) -> bool:
    """Returns whether a tensor belongs to a layer that predicts more than the next token.

    Files of DeepSeek-V3 and GLM-4.5 have such layers after the model's own layers.
    """
    found, number = _LAYER.match(tensor), config.get("num_hidden_layers")
    more = next((config[key] for key in MORE_LAYERS if config.get(key)), 0)
    if not found or type(number) is not int or type(more) is not int:
        return False
    return number <= int(found[1]) < number + more


def read_experts(keys: Keys, family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields for dense layers and shared experts in a model with experts."""
    if fields.get("normalize_gates") and fields["experts_per_token"] == 1:
        raise keys.refuse(
            "num_experts_per_tok", 1, "at least 2, because one normalized gate is always 1"
        )
    if family == "deepseek_v2":
        method = keys.take("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise keys.refuse("topk_method", method, "'greedy' or 'group_limited_greedy'")
    if family == "gpt_oss":  # Two keys of OpenAI's own code.
        keys.left.pop("initial_context_length", None)
        top_k = fields["experts_per_token"]
        if (given := keys.take("experts_per_token", top_k)) != top_k:
            raise keys.refuse("experts_per_token", given, f"num_experts_per_tok={top_k}")
    if family == "llama4_text":
        return read_experts_of_llama4(keys, fields)
    if family in WITHOUT_DENSE_LAYERS:
        return {}
    size = keys.take("intermediate_size", fields["mlp_size"])
    num_layers, more = fields["num_layers"], dict[str, Any]()
    if family in DENSE_FIRST:
        default, default_shared = DENSE_FIRST[family]
        dense = keys.take("first_k_dense_replace", default)
        fits = "fewer than all layers"
        keys.check("first_k_dense_replace", dense, int, lambda x: 0 <= x < num_layers, fits)
        shared = keys.take("n_shared_experts", default_shared)
        shared = 0 if shared is None else shared
        keys.check("n_shared_experts", shared, int, lambda x: 0 <= x < LARGEST, "0 or more")
        more["shared_experts_size"] = shared * fields["mlp_size"]
    else:
        dense, more["experts_every"] = _dense_layers_of_qwen(keys, num_layers)
    are_dense = dense or more.get("experts_every", 1) > 1
    if are_dense:
        keys.check("intermediate_size", size, int, lambda x: 0 < x < LARGEST, "1 or more")
    return more | {"dense_layers": dense, "dense_mlp_size": size if are_dense else 0}


def _dense_layers_of_qwen(keys: Keys, num_layers: int) -> tuple[int, int]:
    """Reads how many layers at the beginning have no experts, and the distance of the others."""
    only, step = keys.take("mlp_only_layers", []) or [], keys.take("decoder_sparse_step", 1)
    keys.check("decoder_sparse_step", step, int, lambda x: x > 0, "1 or more")
    if not isinstance(only, list):
        raise keys.refuse("mlp_only_layers", only, "a list of layers")
    sparse = [i for i in range(num_layers) if i not in only and (i + 1) % step == 0]
    if not sparse and step > num_layers:
        raise keys.refuse("decoder_sparse_step", step, f"up to num_hidden_layers={num_layers}")
    if not sparse:
        raise keys.refuse("mlp_only_layers", only, "a layer that has experts")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else min(step, sparse[0] + 1)
    dense = sparse[0] // every * every
    if sparse != list(range(dense + every - 1, num_layers, every)):
        raise keys.refuse(
            "mlp_only_layers",
            only,
            "the first layers, such as [0, 1], and then experts in every n-th layer",
        )
    return dense, every


def read_latent(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the size of heads with latent attention, and YaRN's factor of its scores."""
    for key in ("head_dim", "qk_head_dim"):
        keys.left.pop(key, None)  # Sums of other keys, which transformers writes.
    size = keys.take("qk_nope_head_dim", 128)
    keys.check("qk_nope_head_dim", size, int, lambda x: 0 < x < LARGEST, "1 or more")
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"] or fields["num_heads"]
    if kv_heads != heads:
        raise keys.refuse("num_key_value_heads", kv_heads, f"num_attention_heads={heads}")
    size += fields["latent_rotary_size"]
    given = keys.get("rope_parameters", None) or keys.get("rope_scaling", None) or {}
    mscale = 1.0
    if isinstance(given, dict) and given.get("rope_type", given.get("type", "default")) == "yarn":
        all_dims, factor = given.get("mscale_all_dim") or 0.0, given.get("factor", 1.0)
        keys.check("rope_scaling.mscale_all_dim", all_dims, float, lambda x: x >= 0, "0 or more")
        keys.check("rope_scaling.factor", factor, float, lambda x: x >= 1, "1 or more")
        mscale = 0.1 * all_dims * math.log(factor) + 1.0
    return {"head_size": size, "attention_scale": size**-0.5 * mscale**2}


def write_experts(name: str, fields: Mapping[str, Any], config: dict[str, Any]) -> None:
    """Adds the keys of a family for experts and for latent attention to a config."""
    dense = fields.get("dense_layers", 0)
    if name in DENSE_FIRST:
        config["first_k_dense_replace"] = dense
        config["n_shared_experts"] = fields.get("shared_experts_size", 0) // fields["mlp_size"]
    elif "moe_intermediate_size" in config:
        config["mlp_only_layers"] = list(range(dense))
        config["decoder_sparse_step"] = fields["experts_every"]
    if name == "deepseek_v2":
        grouped = fields["expert_groups"] > 1
        config["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    if "kv_lora_rank" in config:
        size = fields["head_size"]
        config["qk_nope_head_dim"] = size - fields["latent_rotary_size"]
        config["q_lora_rank"] = fields["latent_query_rank"] or None
        if fields["rope_scaling"] == "yarn" and (log := math.log(fields["rope_factor"])):
            mscale = (fields["attention_scale"] * size**0.5) ** 0.5
            config["rope_scaling"]["mscale_all_dim"] = round((mscale - 1) / (0.1 * log), 6)
    if name == "gpt_oss" and not fields["rope_scaling"]:
        # Without this object transformers would scale rotations.
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": fields["rope_base"]}
