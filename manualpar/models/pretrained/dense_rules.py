"""The tensors of dense families whose files differ from Llama's.

See `manualpar.models.pretrained.tensor_names` for the form of the tables.
"""

from collections.abc import Mapping

from manualpar.models.pretrained.tensor_rule import Rule

# The name of the layers in files of a family; `model.layers` in all other families.
PREFIXES: Mapping[str, str] = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}

BIASES: Mapping[str, Rule] = {
    "attention/out/bias": Rule("self_attn.o_proj.bias"),
    "mlp/gate/bias": Rule("mlp.gate_proj.bias"),
    "mlp/up/bias": Rule("mlp.up_proj.bias"),
    "mlp/down/bias": Rule("mlp.down_proj.bias"),
}
FUSED_MLP: Mapping[str, Rule] = {
    "mlp/gate/kernel": Rule("mlp.gate_up_proj.weight", "D F -> F D", ("F", "0", "FF")),
    "mlp/up/kernel": Rule("mlp.gate_up_proj.weight", "D F -> F D", ("F", "F", "FF")),
}
FUSED_ATTENTION: Mapping[str, Rule] = {
    f"attention/{name}/kernel": Rule(
        "self_attn.qkv_proj.weight", f"D {dim} H -> ({dim} H) D", (dim, before, "NKK")
    )
    for name, dim, before in (("query", "N", "0"), ("key", "K", "N"), ("value", "K", "NK"))
}
# Norms only after attention and MLP.
POST_NORMS: Mapping[str, Rule] = {
    "attention_post_norm/scale": Rule("post_attention_layernorm.weight"),
    "mlp_post_norm/scale": Rule("post_feedforward_layernorm.weight"),
    "attention/query_norm/scale": Rule("self_attn.q_norm.weight", "N H -> (N H)"),
    "attention/key_norm/scale": Rule("self_attn.k_norm.weight", "K H -> (K H)"),
}
# Its one MLP has the name of a shared expert.
GRANITE4: Mapping[str, Rule] = {
    "mlp/gate/kernel": Rule("shared_mlp.input_linear.weight", "D F -> F D", ("F", "0", "FF")),
    "mlp/up/kernel": Rule("shared_mlp.input_linear.weight", "D F -> F D", ("F", "F", "FF")),
    "mlp/down/kernel": Rule("shared_mlp.output_linear.weight", "F D -> D F"),
}
GLM: Mapping[str, Rule] = {**FUSED_MLP, **BIASES}
GLM4: Mapping[str, Rule] = {
    **GLM,
    "attention_post_norm/scale": Rule("post_self_attn_layernorm.weight"),
    "mlp_norm/scale": Rule("post_attention_layernorm.weight"),
    "mlp_post_norm/scale": Rule("post_mlp_layernorm.weight"),
}


def _thirds(tensor: str, kernel: str, bias: str) -> dict[str, Rule]:
    """Returns the rules of queries, keys and values in one tensor of three equal parts."""
    rules = {}
    for number, name in enumerate(("query", "key", "value")):
        part = "c", str(number), "3"
        rules[f"attention/{name}/kernel"] = Rule(f"{tensor}.weight", kernel, part)
        rules[f"attention/{name}/bias"] = Rule(f"{tensor}.bias", bias, part)
    return rules


GPT2: Mapping[str, Rule] = {
    "embedding": Rule("transformer.wte.weight", "V D -> V D"),
    "positions": Rule("transformer.wpe.weight"),
    "final_norm/scale": Rule("transformer.ln_f.weight"),
    "final_norm/bias": Rule("transformer.ln_f.bias"),
    "attention_norm/scale": Rule("ln_1.weight"),
    "attention_norm/bias": Rule("ln_1.bias"),
    "mlp_norm/scale": Rule("ln_2.weight"),
    "mlp_norm/bias": Rule("ln_2.bias"),
    **_thirds("attn.c_attn", "D N H -> D (c N H)", "N H -> (c N H)"),
    "attention/out/kernel": Rule("attn.c_proj.weight", "N H D -> (N H) D"),
    "attention/out/bias": Rule("attn.c_proj.bias"),
    "mlp/up/kernel": Rule("mlp.c_fc.weight"),
    "mlp/up/bias": Rule("mlp.c_fc.bias"),
    "mlp/down/kernel": Rule("mlp.c_proj.weight"),
    "mlp/down/bias": Rule("mlp.c_proj.bias"),
}
GPT_NEOX: Mapping[str, Rule] = {
    "embedding": Rule("gpt_neox.embed_in.weight", "V D -> V D"),
    "head": Rule("embed_out.weight", "D V -> V D"),
    "final_norm/scale": Rule("gpt_neox.final_layer_norm.weight"),
    "final_norm/bias": Rule("gpt_neox.final_layer_norm.bias"),
    "attention_norm/scale": Rule("input_layernorm.weight"),
    "attention_norm/bias": Rule("input_layernorm.bias"),
    "mlp_norm/scale": Rule("post_attention_layernorm.weight"),
    "mlp_norm/bias": Rule("post_attention_layernorm.bias"),
    **_thirds("attention.query_key_value", "D N H -> (N c H) D", "N H -> (N c H)"),
    "attention/out/kernel": Rule("attention.dense.weight", "N H D -> D (N H)"),
    "attention/out/bias": Rule("attention.dense.bias"),
    "mlp/up/kernel": Rule("mlp.dense_h_to_4h.weight", "D F -> F D"),
    "mlp/up/bias": Rule("mlp.dense_h_to_4h.bias"),
    "mlp/down/kernel": Rule("mlp.dense_4h_to_h.weight", "F D -> D F"),
    "mlp/down/bias": Rule("mlp.dense_4h_to_h.bias"),
}
DENSE_RULES: Mapping[str, Mapping[str, Rule]] = {
    "phi3": {**FUSED_ATTENTION, **FUSED_MLP},
    "glm": GLM,
    "glm4": GLM4,
    "granitemoehybrid": GRANITE4,
    "olmo2": POST_NORMS,
    "olmo3": POST_NORMS,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}
