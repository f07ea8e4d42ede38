"""Tables of the tensors in a model's files from which each parameter is made.

A `Rule` gives a parameter's tensor, and how the dims of both correspond, in the notation of einops:
`D N H -> (N H) D`. A tensor may contain several parameters, see `Rule.part`. A parameter may
consist of several tensors, stacked along its leading dims: the layers of a scan, and experts. So
each parameter has a list of `TensorPiece`s, each with a tensor and its place in the parameter. This
module opens no file and needs no device.

Symbols: `V` tokens of the vocabulary, `D` hidden features, `N` query heads, `K` key and value
heads, `H` features of a head, `F` features inside an MLP, `E` experts.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from manualpar.models.pretrained.family import Rule
from manualpar.models.pretrained.llama4 import RULES as LLAMA4_RULES

# -------------------------------------------------------------------------------------------------
# The tensors of dense families whose files differ from Llama's.
#
# See `manualpar.models.pretrained.tensor_names` for the form of the tables.


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


# -------------------------------------------------------------------------------------------------


# For each dim of a tensor, the dims of the parameter that are merged in it, the outermost first.
MergedDims = tuple[tuple[str, ...], ...]


class TensorPiece(NamedTuple):
    """A tensor that is a part of a parameter.

    Attributes:
      tensor: The tensor's name.
      entry: The tensor's index along the leading dims of the parameter.
      dims: The names of the parameter's other dims.
      merged: For each dim of the tensor, the dims among `dims` that are merged in it.
      within: If the tensor contains several parameters: the dim, the first of the parameter's
        entries along it, and the number of all entries, see `Rule.part`.
    """

    tensor: str
    entry: tuple[int, ...]
    dims: tuple[str, ...]
    merged: MergedDims
    within: tuple[str, int, int] | tuple[()] = ()

    def tensor_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the tensor for given sizes of the dims in `dims`."""
        size_of = dict(zip(self.dims, sizes, strict=True))
        if self.within:
            size_of[self.within[0]] = self.within[2]
        return tuple(math.prod(size_of[name] for name in names) for names in self.merged)


# The rules of parameters outside of layers. `LAYER` has the rules of parameters in a layer, whose
# tensors have the prefix `model.layers.{layer}.`.
TOP: Mapping[str, Rule] = {
    "embedding": Rule("model.embed_tokens.weight", "V D -> V D"),
    "final_norm/scale": Rule("model.norm.weight"),
    "head": Rule("lm_head.weight", "D V -> V D"),
}
LAYER: Mapping[str, Rule] = {
    "attention_norm/scale": Rule("input_layernorm.weight"),
    "attention/query/kernel": Rule("self_attn.q_proj.weight", "D N H -> (N H) D"),
    "attention/key/kernel": Rule("self_attn.k_proj.weight", "D K H -> (K H) D"),
    "attention/value/kernel": Rule("self_attn.v_proj.weight", "D K H -> (K H) D"),
    "attention/query/bias": Rule("self_attn.q_proj.bias", "N H -> (N H)"),
    "attention/key/bias": Rule("self_attn.k_proj.bias", "K H -> (K H)"),
    "attention/value/bias": Rule("self_attn.v_proj.bias", "K H -> (K H)"),
    "attention/out/kernel": Rule("self_attn.o_proj.weight", "N H D -> D (N H)"),
    "attention/query_norm/scale": Rule("self_attn.q_norm.weight"),
    "attention/key_norm/scale": Rule("self_attn.k_norm.weight"),
    "mlp_norm/scale": Rule("post_attention_layernorm.weight"),
    "mlp/gate/kernel": Rule("mlp.gate_proj.weight", "D F -> F D"),
    "mlp/up/kernel": Rule("mlp.up_proj.weight", "D F -> F D"),
    "mlp/down/kernel": Rule("mlp.down_proj.weight", "F D -> D F"),
    "experts/router": Rule("mlp.gate.weight", "D E -> E D"),
    "experts/gate": Rule("mlp.experts.{E}.gate_proj.weight", "D F -> F D"),
    "experts/up": Rule("mlp.experts.{E}.up_proj.weight", "D F -> F D"),
    "experts/down": Rule("mlp.experts.{E}.down_proj.weight", "F D -> D F"),
    "experts/bias": Rule("mlp.gate.e_score_correction_bias"),  # Not in `params`.
    "experts/shared_gate": Rule("mlp.shared_experts.gate_proj.weight", "D F -> F D"),
    "experts/shared_up": Rule("mlp.shared_experts.up_proj.weight", "D F -> F D"),
    "experts/shared_down": Rule("mlp.shared_experts.down_proj.weight", "F D -> D F"),
}
GEMMA: Mapping[str, Rule] = {
    "attention_post_norm/scale": Rule("post_attention_layernorm.weight"),
    "mlp_norm/scale": Rule("pre_feedforward_layernorm.weight"),
    "mlp_post_norm/scale": Rule("post_feedforward_layernorm.weight"),
}
MIXTRAL: Mapping[str, Rule] = {
    "experts/router": Rule("block_sparse_moe.gate.weight", "D E -> E D"),
    "experts/gate": Rule("block_sparse_moe.experts.{E}.w1.weight", "D F -> F D"),
    "experts/up": Rule("block_sparse_moe.experts.{E}.w3.weight", "D F -> F D"),
    "experts/down": Rule("block_sparse_moe.experts.{E}.w2.weight", "F D -> D F"),
}
QWEN2_MOE: Mapping[str, Rule] = {
    "experts/shared_gate": Rule("mlp.shared_expert.gate_proj.weight", "D F -> F D"),
    "experts/shared_up": Rule("mlp.shared_expert.up_proj.weight", "D F -> F D"),
    "experts/shared_down": Rule("mlp.shared_expert.down_proj.weight", "F D -> D F"),
    "experts/shared_router": Rule("mlp.shared_expert_gate.weight", "D E -> E D"),
}
GPT_OSS: Mapping[str, Rule] = {
    "attention/out/bias": Rule("self_attn.o_proj.bias"),
    "attention/sinks": Rule("self_attn.sinks"),
    "experts/router": Rule("mlp.router.weight", "D E -> E D"),
    "experts/logit_bias": Rule("mlp.router.bias"),
    "experts/gate": Rule("mlp.experts.gate_up_proj", "E D F -> E D (F c)", ("c", "0", "2")),
    "experts/up": Rule("mlp.experts.gate_up_proj", "E D F -> E D (F c)", ("c", "1", "2")),
    "experts/down": Rule("mlp.experts.down_proj", "E F D -> E F D"),
    "experts/gate_bias": Rule("mlp.experts.gate_up_proj_bias", "E F -> E (F c)", ("c", "0", "2")),
    "experts/up_bias": Rule("mlp.experts.gate_up_proj_bias", "E F -> E (F c)", ("c", "1", "2")),
    "experts/down_bias": Rule("mlp.experts.down_proj_bias", "E D -> E D"),
}
# Multi-head latent attention. With a latent of queries, `WITH_QUERY_LATENT` is added.
DEEPSEEK: Mapping[str, Rule] = {
    "attention/latent/kernel": Rule("self_attn.kv_a_proj_with_mqa.weight", "D R -> R D"),
    "attention/latent_norm/scale": Rule("self_attn.kv_a_layernorm.weight"),
    "attention/expand/kernel": Rule("self_attn.kv_b_proj.weight", "R N H -> (N H) R"),
    "attention/query_latent/kernel": Rule("self_attn.q_a_proj.weight", "D Q -> Q D"),
    "attention/query_latent_norm/scale": Rule("self_attn.q_a_layernorm.weight"),
}
WITH_QUERY_LATENT: Mapping[str, Rule] = {
    "attention/query/kernel": Rule("self_attn.q_b_proj.weight", "Q N H -> (N H) Q"),
}
# The rules that differ from `LAYER` in some families, by the `model_type` of the family.
OWN: Mapping[str, Mapping[str, Rule]] = {
    **DENSE_RULES,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4_RULES,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
}
# Tensors in old files that are ignored, because their values follow from the config.
COMPUTED = re.compile(
    r"(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$"
)
_LAYER = re.compile(r"(layer_(?P<own>\d+)|layers/layer_(?P<of_group>\d+)|layers)/")
_STACKED = re.compile(r"\{\w+\}")


def pieces_of_transformer(
    family: str, shapes: Mapping[str, Sequence[int]], *, skip_unknown: bool = False
) -> dict[str, list[TensorPiece]]:
    """Returns the tensors that the parameters of a `Transformer` consist of.

    A layer outside of the scan, `layer_{i}`, has the number `i` in the files. The scanned layers
    have the remaining numbers, in order. If the scan runs over groups of layers, each group has one
    layer for each `layers/layer_{j}`, see `manualpar.models.transformer.layer_place`.

    Args:
      family: The `model_type` of the config.
      shapes: The shape of each parameter on one device, by its path.
      skip_unknown: Whether to leave out parameters that have no tensor in files of the family.
    """
    modules = {path: found for path in shapes if (found := _LAYER.match(path))}
    own = {int(found["own"]) for found in modules.values() if found["own"]}
    scanned = {found[0] for found in modules.values() if not found["own"]}
    unused = (number for number in itertools.count() if number not in own)
    lengths = {shapes[path][0] for path, found in modules.items() if not found["own"]}
    in_scan = list(itertools.islice(unused, max(lengths, default=0) * len(scanned)))
    rules = {**TOP, **LAYER, **BIASES, **OWN.get(family, {})}
    if any(path.endswith("attention/query_latent/kernel") for path in shapes):
        rules |= WITH_QUERY_LATENT
    prefix = PREFIXES.get(family, "model.layers")
    sizes = _sizes(shapes)
    pieces = {}
    for path, shape in shapes.items():
        found = modules.get(path)
        name = path[found.end() :] if found else path
        rule = rules.get(name)
        if rule is None and skip_unknown:
            continue
        if rule is None:
            raise ValueError(
                f"the parameter {path} has no tensor in files of the family {family!r}; expected a "
                "Transformer with the fields of that family, or names= that name all parameters."
            )
        if found is None:
            pieces[path] = pieces_of(rule, shape, sizes)
        elif found["own"]:
            own_rule = rule._replace(tensor=f"{prefix}.{found['own']}.{rule.tensor}")
            pieces[path] = pieces_of(own_rule, shape, sizes)
        else:
            numbers = in_scan[int(found["of_group"] or 0) :: len(scanned)]
            pieces[path] = [
                piece._replace(entry=(entry, *piece.entry))
                for entry, number in enumerate(numbers)
                for piece in pieces_of(
                    rule._replace(tensor=f"{prefix}.{number}.{rule.tensor}"), shape[1:], sizes
                )
            ]
    return pieces


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the sizes of the dims that parts of tensors need, see `Rule.part`."""
    sizes = {}
    for path, shape in shapes.items():
        if path.endswith("attention/query/kernel"):
            sizes["N"] = shape[-2]
        elif path.endswith("attention/key/kernel"):
            sizes["K"] = shape[-2]
    return sizes


def pieces_of(
    rule: Rule, shape: Sequence[int], sizes: Mapping[str, int] | None = None
) -> list[TensorPiece]:
    """Returns the tensors that a rule assigns to a parameter of this shape.

    `sizes` has the sizes of dims of other parameters, for rules with a part.
    """
    stacked = len(_STACKED.findall(rule.tensor))
    names = tuple(f"d{dim}" for dim in range(len(shape) - stacked))
    left, arrow, right = rule.dims.partition("->")
    dims = tuple(left.split()) if arrow else names
    words = re.findall(r"\(([^()]*)\)|(\S+)", right) if arrow else [("", name) for name in names]
    merged = tuple(tuple((inside or single).split()) for inside, single in words)
    within: tuple[str, int, int] | tuple[()] = ()
    inside = {*itertools.chain(*merged)}
    if rule.part:
        dim, before, total = rule.part
        known = {**(sizes or {}), **dict(zip(dims, shape[stacked:], strict=False))}
        first, number = (
            sum(int(one) if one.isdigit() else known[one] for one in terms)
            for terms in (before, total)
        )
        within = dim, first, number
        inside -= {dim} - set(dims)
    if len(dims) != len(names) or sorted(dims) != sorted(inside):
        raise ValueError(
            f"the rule {rule.tensor!r} has the dims {rule.dims!r}, expected {len(names)} names, an "
            "arrow and the same names, such as 'D N H -> (N H) D'."
        )
    ranges = [range(size) for size in shape[:stacked]]
    return [
        TensorPiece(_fill(rule.tensor, entry), entry, dims, merged, within)
        for entry in itertools.product(*ranges)
    ]


def spelling(family: str, embedding: str, stored: Collection[str]) -> Callable[[str], str]:
    """Returns the function from the name of a tensor to its name in some files.

    Files of multimodal models have prefixes before the names of the text model, and some old files
    lack the prefix of the class with the head.

    Args:
      family: The `model_type` of the text model.
    """
    base = PREFIXES.get(family, "model.layers").partition(".")[0] + "."

    def in_wrapper(name: str) -> str:
        return f"model.language_model.{name.removeprefix(base)}" if name.startswith(base) else name

    for spell in (str, in_wrapper, "language_model.{}".format, lambda x: x.removeprefix(base)):
        if spell(embedding) in stored:
            return spell
    return str


def _fill(tensor: str, numbers: Sequence[int]) -> str:
    rest = iter(numbers)
    return _STACKED.sub(lambda _: str(next(rest)), tensor)
