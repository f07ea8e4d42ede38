"""The tables of Llama 4's text model, see `manualpar.models.pretrained.families`.

Every n-th layer has no positions and sees all earlier ones. The other layers rotate, and attend
within chunks. Every n-th layer, or each, has experts, one of which computes a token.
"""

from collections.abc import Mapping
from typing import Any

from manualpar.models.pretrained.dense_families import (
    read_biases,
    read_unrotated_layers,
    write_biases,
)
from manualpar.models.pretrained.family import (
    COMMON,
    EXPERTS,
    FULL,
    LARGEST,
    SIZES,
    Family,
    Keys,
    Rule,
)

CHUNKED = "chunked_attention"


def _prepare(keys: Keys) -> None:
    """Removes the kinds of layers, after a check that they follow from other keys."""
    types = keys.take("layer_types", None)
    if types is None:
        return
    if not isinstance(types, list) or len(types) != keys.get("num_hidden_layers", None):
        raise keys.refuse("layer_types", types, "the kinds of num_hidden_layers layers")
    every = read_unrotated_layers(Keys(keys.left, keys.where), len(types))
    if types != [FULL if every and (i + 1) % every == 0 else CHUNKED for i in range(len(types))]:
        expected = f"{CHUNKED!r} where no_rope_layers has a 1, and otherwise {FULL!r}"
        raise keys.refuse("layer_types", types, expected)


def _read(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    every = read_unrotated_layers(keys, layers)
    asked = keys.take("attn_temperature_tuning", True)
    if type(asked) not in (bool, int):  # The first files say 4 and mean true.
        raise keys.refuse("attn_temperature_tuning", asked, "true or false")
    more = read_biases(keys, fields) | {"global_every": every, "unrotated_global": every > 0}
    if not every or not asked:
        more["score_growth"] = 0.0
    return more


def read_experts_of_llama4(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads which layers have experts, and the sizes of the shared expert and of dense MLPs."""
    if (top_k := fields["experts_per_token"]) != 1:
        raise keys.refuse("num_experts_per_tok", top_k, "1, because gates multiply inputs")
    layers, step = fields["num_layers"], keys.take("interleave_moe_layer_step", 1)
    size = keys.take("intermediate_size_mlp", 16_384)
    keys.check("interleave_moe_layer_step", step, int, lambda x: 0 < x <= layers, "1 or more")
    keys.check("intermediate_size_mlp", size, int, lambda x: 0 < x < LARGEST, "1 or more")
    found = keys.take("moe_layers", None)
    if found is not None:
        step = found[0] + 1 if isinstance(found, list) and found and type(found[0]) is int else 1
    expected = list(range(step - 1, layers, step)) if step > 0 else []
    if found not in (None, expected):
        raise keys.refuse("moe_layers", found, "every n-th layer, such as [1, 3, 5]")
    return {
        "experts_every": step,
        "dense_mlp_size": size if step > 1 else 0,
        "shared_experts_size": fields["mlp_size"],
    }


def _write(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, every, step = fields["num_layers"], fields["global_every"], fields["experts_every"]
    rotated = [int(not every or (i + 1) % every != 0) for i in range(layers)]
    return {
        "no_rope_layers": rotated,
        "no_rope_layer_interval": every or layers + 1,
        "layer_types": [CHUNKED if is_rotated else FULL for is_rotated in rotated],
        "intermediate_size": fields["mlp_size"],
        "intermediate_size_mlp": fields["dense_mlp_size"] or fields["mlp_size"],
        "interleave_moe_layer_step": step,
        "moe_layers": list(range(step - 1, layers, step)),
        "attn_temperature_tuning": fields["score_growth"] > 0,
        "attn_scale": fields["score_growth"] or 0.1,
        **write_biases(fields),
    }


LLAMA4 = Family(
    "Llama4ForCausalLM",
    {
        **SIZES,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "use_qk_norm": "rotated_norm",
        "attention_chunk_size": "attention_chunk",
        "attn_scale": "score_growth",
        "floor_scale": "score_growth_length",
    },
    fixed={
        **EXPERTS,
        "expert_gates": "sigmoid",
        "normalize_gates": False,
        "gates_on_inputs": True,
        "rotary_interleaved": True,
    },
    defaults={
        **COMMON,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    prepare=_prepare,
    read=_read,
    write=_write,
)
FFN = "feed_forward"
GATE_UP = f"{FFN}.experts.gate_up_proj", "E D F -> E D F"
RULES: Mapping[str, Rule] = {
    **{
        f"mlp/{name}/kernel": Rule(f"{FFN}.{name}_proj.weight", dims)
        for name, dims in (("gate", "D F -> F D"), ("up", "D F -> F D"), ("down", "F D -> D F"))
    },
    "experts/router": Rule(f"{FFN}.router.weight", "D E -> E D"),
    "experts/gate": Rule(*GATE_UP, ("F", "0", "FF")),
    "experts/up": Rule(*GATE_UP, ("F", "F", "FF")),
    "experts/down": Rule(f"{FFN}.experts.down_proj", "E F D -> E F D"),
    "experts/shared_gate": Rule(f"{FFN}.shared_expert.gate_proj.weight", "D F -> F D"),
    "experts/shared_up": Rule(f"{FFN}.shared_expert.up_proj.weight", "D F -> F D"),
    "experts/shared_down": Rule(f"{FFN}.shared_expert.down_proj.weight", "F D -> D F"),
}
