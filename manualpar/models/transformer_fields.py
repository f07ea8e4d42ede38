"""Sizes, operation counts and checks that follow from the fields of a `Transformer`.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `H` features of a head,
`V` rows of the embedding, `L` layers.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp

from manualpar.layers.attention.context import CONTEXT_ATTENTIONS
from manualpar.layers.attention.kinds import ATTENTION_KINDS
from manualpar.layers.moe.routing import Gates, GroupScore
from manualpar.layers.ring_chunks import LAYER_OVERLAPS
from manualpar.models.layer_stack import REMAT_POLICIES, is_global
from manualpar.models.rotary import ROTARY_KINDS
from manualpar.models.transformer_layer import ACTIVATIONS

if TYPE_CHECKING:
    from manualpar.models.transformer import Transformer


def size_of_head(model: "Transformer") -> int:
    """Returns the features of a head, `H`."""
    return model.head_size or model.hidden_size // model.num_heads


def size_of_vocabulary(model: "Transformer") -> int:
    """Returns the rows of the embedding, `V`: a multiple of `vocab_multiple`."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def window_of(model: "Transformer", layer: int) -> int:
    """Returns how many positions a query in layer `layer` sees; 0 for all."""
    return 0 if is_global(layer, model.global_every) else model.attention_window


def layers_by_window(model: "Transformer") -> tuple[tuple[int, int], ...]:
    """Counts the layers of each kind: pairs of a window (see `window_of`) and a layer count."""
    of_global = model.num_layers // model.global_every if model.global_every else 0
    return (model.attention_window, model.num_layers - of_global), (0, of_global)


def flops_per_token(model: "Transformer", sequence_length: int) -> int:
    """Counts the floating point operations of training on a token, for MFU.

    The count follows appendix B of PaLM (Chowdhery et al., https://arxiv.org/abs/2204.02311): `6 P`
    for the `P` weights that a token is multiplied with, and `12 L N H S` for attention's two
    products of every query with every key. Recomputation does not count. Scores hidden by a causal
    mask or by document borders count as if they were computed. The experts that a token chooses
    count, even if they have no room for it, and so do shared experts. Norms, softmax and the lookup
    of embeddings do not count.

    Args:
      model: The model.
      sequence_length: Positions of a sequence; `S` is this number, or a layer's window.

    Returns:
      Multiplications and additions of one token's forward and backward pass.

    Raises:
      ValueError: A field of the model is out of range.
    """
    check_transformer(model)
    size = size_of_head(model)
    heads = 2 * model.num_heads + 2 * (model.num_kv_heads or model.num_heads)  # q, out; k, v.
    mlp, dense = 3 * model.mlp_size, 3 * (model.dense_mlp_size or model.mlp_size)
    if model.num_experts:
        mlp = model.experts_per_token * mlp + model.num_experts
        mlp += 3 * model.shared_experts_size + model.shared_gate
    mlps = model.dense_layers * dense + (model.num_layers - model.dense_layers) * mlp
    inside = model.num_layers * heads * size + mlps
    weights = model.hidden_size * (inside + size_of_vocabulary(model))
    kinds = layers_by_window(model)
    seen = sum(layers * min(sequence_length, window or sequence_length) for window, layers in kinds)
    return 6 * weights + 12 * model.num_heads * size * seen


def check_transformer(model: "Transformer") -> None:
    """Refuses, with a ValueError, fields that are out of range or do not fit each other."""

    def refuse(field: str, expected: str) -> None:
        value = getattr(model, field)
        raise ValueError(f"Transformer: {field} is {value!r}, expected {expected}.")

    sizes = ("vocab_size", "vocab_multiple", "num_layers", "hidden_size", "num_heads", "mlp_size")
    for field in sizes:
        if getattr(model, field) < 1:
            refuse(field, "at least 1")
    if not model.head_size and model.hidden_size % model.num_heads:
        refuse("hidden_size", f"a multiple of num_heads={model.num_heads}, or set head_size")
    if model.head_size < 0 or size_of_head(model) % 2:
        given = "" if model.head_size else f" (hidden_size // num_heads is {size_of_head(model)})"
        refuse("head_size", f"an even number, because rotations turn pairs{given}")
    if model.num_kv_heads < 0 or model.num_heads % (model.num_kv_heads or 1):
        refuse(
            "num_kv_heads", f"a divisor of num_heads={model.num_heads}, or 0 for the same number"
        )
    if not model.rope_base > 1:
        refuse("rope_base", "more than 1, such as 10000")
    _check_rotary_scaling(model, refuse)
    if not model.norm_epsilon > 0:
        refuse("norm_epsilon", "more than 0, such as 1e-6")
    if model.num_experts and model.activation != "silu":
        refuse("activation", "'silu' with num_experts, because experts support no other")
    for field in ("dropout_rate", "label_smoothing"):
        if not 0 <= getattr(model, field) < 1:
            refuse(field, "from 0 to less than 1")
    if not model.logit_soft_cap >= 0:
        refuse("logit_soft_cap", "more than 0, such as 30, or 0 for none")
    if not model.z_loss >= 0:
        refuse("z_loss", "0 for none, or more, such as 1e-4")
    if not -1 <= model.bos_token < model.vocab_size:
        refuse("bos_token", f"less than vocab_size={model.vocab_size}, or -1 for none")
    if model.num_experts < 0:
        refuse("num_experts", "the number of experts, or 0 for an MLP")
    if model.num_experts and not 1 <= model.experts_per_token <= model.num_experts:
        refuse("experts_per_token", f"from 1 to num_experts={model.num_experts}")
    if not model.capacity_factor >= 0:
        refuse("capacity_factor", "more than 0, such as 1.25, or 0 for room for all tokens")
    _check_experts(model, refuse)
    if model.sequence_parallel and not model.split_axis:
        refuse("sequence_parallel", "False, or a split_axis such as 'model' that splits positions")
    if model.split_axis and model.annotate:
        refuse(
            "annotate",
            f"False with split_axis={model.split_axis!r}: rules choose how parameters are stored, "
            "but split_axis fixes how split parameters are stored",
        )
    if model.overlap != "none" and not model.sequence_parallel:
        refuse(
            "overlap", "'none' without sequence_parallel, because only its collectives can overlap"
        )
    if model.context_axis and model.context_axis == model.split_axis:
        refuse("context_axis", f"another axis than split_axis={model.split_axis!r}")
    if model.attention_window < 0:
        refuse("attention_window", "at least 1, such as 4096, or 0 for all positions")
    if model.global_every < 0 or model.global_every == 1:
        refuse("global_every", "at least 2, such as 6, or 0 for layers that are all alike")
    if model.global_every and not model.attention_window:
        refuse("global_every", "0 without attention_window, which the other layers need")
    if model.local_rope_base and not (model.global_every and model.local_rope_base > 1):
        refuse("local_rope_base", "more than 1 with global_every, or 0 for rope_base")
    if not model.attention_scale >= 0:
        refuse("attention_scale", "more than 0, such as 0.0625, or 0 for head_size ** -0.5")
    if not model.attention_soft_cap >= 0:
        refuse("attention_soft_cap", "more than 0, such as 50, or 0 for none")
    has_own = model.context_axis and model.context_attention != "ulysses"
    if has_own and model.attention not in ("", "blockwise"):
        refuse("attention", f"'' or 'blockwise' with context_attention={model.context_attention!r}")
    choices = (
        ("activation", ACTIVATIONS),
        ("expert_gates", get_args(Gates)),
        ("expert_group_score", get_args(GroupScore)),
        ("rope_scaling", ("", *ROTARY_KINDS)),
        ("remat", REMAT_POLICIES),
        ("attention", ATTENTION_KINDS),
        ("overlap", LAYER_OVERLAPS),
        ("context_attention", CONTEXT_ATTENTIONS),
    )
    for field, known in choices:
        if getattr(model, field) not in known:
            refuse(field, f"one of {', '.join(map(repr, known))}")
    if not jnp.issubdtype(jnp.dtype(model.dtype), jnp.floating):
        refuse("dtype", "a floating dtype such as 'bfloat16'")


def expert_options(model: "Transformer") -> dict[str, Any]:
    """Returns the fields of `MoE` for choosing, weighing and sharing experts."""
    return {
        "gates": model.expert_gates,
        "normalize_gates": model.normalize_gates,
        "gate_scale": model.gate_scale,
        "router_bias": model.router_bias,
        "groups": model.expert_groups,
        "groups_per_token": model.expert_groups_per_token,
        "group_score": model.expert_group_score,
        "shared_size": model.shared_experts_size,
        "shared_is_gated": model.shared_gate,
    }


def _check_experts(model: "Transformer", refuse: Callable[[str, str], None]) -> None:
    if not model.num_experts:
        without = {"expert_axis": "", "router_bias": False, "expert_groups": 1}
        without |= {"shared_experts_size": 0, "dense_layers": 0}
        for field, value in without.items():
            if getattr(model, field) != value:
                refuse(field, f"{value!r} without num_experts")
        return
    if not model.gate_scale > 0:
        refuse("gate_scale", "more than 0, such as 2.5, or 1 for the gates as they are")
    if model.expert_groups < 1 or model.num_experts % model.expert_groups:
        refuse("expert_groups", f"a divisor of num_experts={model.num_experts}, or 1 for none")
    size = model.num_experts // model.expert_groups
    fewest = -(-model.experts_per_token // size)
    if not fewest <= model.expert_groups_per_token <= model.expert_groups:
        refuse(
            "expert_groups_per_token",
            f"from {fewest} to expert_groups={model.expert_groups}, because a token chooses "
            f"{model.experts_per_token} experts and {size} are in a group",
        )
    if model.expert_groups > 1 and size < 2 and model.expert_group_score == "best_two":
        refuse("expert_group_score", "'best' with groups of one expert")
    if model.shared_experts_size < 0:
        refuse("shared_experts_size", "at least 1, or 0 for no shared experts")
    if model.shared_gate and not model.shared_experts_size:
        refuse("shared_gate", "False without shared_experts_size")
    if not 0 <= model.dense_layers < model.num_layers:
        refuse("dense_layers", f"less than num_layers={model.num_layers}, or 0 for none")
    if model.global_every and model.dense_layers % model.global_every:
        refuse("dense_layers", f"a multiple of global_every={model.global_every}, a group")
    if model.dense_mlp_size < 0 or (model.dense_mlp_size and not model.dense_layers):
        refuse("dense_mlp_size", "0 without dense_layers, or the features of their MLPs")


def _check_rotary_scaling(model: "Transformer", refuse: Callable[[str, str], None]) -> None:
    if not model.rope_factor >= 1:
        refuse("rope_factor", "at least 1, because rotations become slower by this factor")
    if not model.rope_scaling and model.rope_factor != 1:
        refuse("rope_factor", "1 without rope_scaling")
    if not 0 < model.rope_low_factor < model.rope_high_factor:
        refuse("rope_low_factor", f"between 0 and rope_high_factor={model.rope_high_factor}")
    if model.rope_original_length < 1:
        refuse("rope_original_length", "at least 1, such as 8192")


def tokens_and_documents(inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens and the documents of packed inputs.

    Raises:
      ValueError: The inputs have other names, or their arrays do not fit each other.
    """
    if set(inputs) != {"tokens", "documents"}:
        raise ValueError(
            f"Transformer: inputs have {', '.join(sorted(inputs)) or 'nothing'}, expected 'tokens' "
            "and 'documents', or only the array of tokens."
        )
    tokens, documents = inputs["tokens"], inputs["documents"]
    is_integer = jnp.issubdtype(documents.dtype, jnp.integer)
    if not is_integer or documents.shape != tokens.shape:
        raise ValueError(
            f"Transformer: documents are {documents.dtype}{list(documents.shape)}, expected "
            f"integers {list(tokens.shape)}, one for each token."
        )
    return tokens, documents
