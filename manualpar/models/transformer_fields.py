"""Sizes, operation counts and checks that follow from the fields of a `Transformer`.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `H` features of a head,
`V` rows of the embedding, `L` layers.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from manualpar.layers.attention.context import Context
from manualpar.layers.field_groups import refuse, refuse_unknown
from manualpar.models.layer_config import ACTIVATIONS, Mlp
from manualpar.models.layer_stack import REMAT_POLICIES, is_global, size_of_group

if TYPE_CHECKING:
    from manualpar.models.transformer import Transformer


def size_of_head(model: "Transformer") -> int:
    """Returns the features of a head, `H`."""
    return model.head_size or model.hidden_size // model.num_heads


def size_of_rotation(model: "Transformer") -> int:
    """Returns the features of a head that are rotated."""
    return model.attention.latent.rotary_size or size_of_head(model)


def size_of_value(model: "Transformer") -> int:
    """Returns the features of a head's value."""
    return model.attention.latent.value_size or size_of_head(model)


def attention_weights(model: "Transformer") -> int:
    """Counts the weights of a layer's attention that multiply each token."""
    D, N, H, V = model.hidden_size, model.num_heads, size_of_head(model), size_of_value(model)
    latent = model.attention.latent
    if not latent.rank:
        return 2 * D * H * (N + (model.num_kv_heads or N))  # Query and out; key and value.
    query = latent.query_rank * (D + N * H) if latent.query_rank else D * N * H
    of_keys = latent.rank * N * (H - latent.rotary_size + V)
    return query + D * (latent.rank + latent.rotary_size) + of_keys + N * V * D


def size_of_vocabulary(model: "Transformer") -> int:
    """Returns the rows of the embedding, `V`: a multiple of `vocab_multiple`."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def window_of(model: "Transformer", layer: int) -> int:
    """Returns how many positions a query in layer `layer` sees at most; 0 for all."""
    attention = model.attention
    return 0 if is_global(layer, attention.global_every) else attention.window or attention.chunk


def layers_by_window(model: "Transformer") -> tuple[tuple[int, int], ...]:
    """Counts the layers of each kind: pairs of a window (see `window_of`) and a layer count."""
    every = model.attention.global_every
    of_global = model.num_layers // every if every else 0
    of_local = model.attention.window or model.attention.chunk
    return (of_local, model.num_layers - of_global), (0, of_global)


def layers_with_experts(model: "Transformer") -> int:
    """Counts the layers that have experts."""
    return sum(map(model.experts.in_layer, range(model.num_layers)))


def flops_per_token(model: "Transformer", sequence_length: int) -> int:
    """Counts the floating point operations of training on a token, for MFU.

    The count follows appendix B of PaLM (Chowdhery et al., https://arxiv.org/abs/2204.02311): `6 P`
    for the `P` weights that a token is multiplied with, and `12 L N H S` for attention's two
    products of every query with every key (`6 L N (H + H') S` if a value has `H'` features).
    Recomputation does not count. Scores hidden by a causal mask or by document borders count as if
    they were computed. The experts that a token chooses count, even if they have no room for the
    token. Shared experts count too. Norms, softmax and the lookup of embeddings do not count.

    Args:
      model: The model.
      sequence_length: Positions of a sequence; `S` is this number, or a layer's window or chunk if
        that is smaller.

    Returns:
      Multiplications and additions of one token's forward and backward pass.

    Raises:
      ValueError: A field of the model is out of range.
    """
    check_transformer(model)
    size = size_of_head(model)
    experts, mlp = model.experts, (3 if model.mlp.gated else 2) * model.mlp_size
    dense = 3 * (experts.dense_mlp_size or model.mlp_size)
    if experts.num_experts:
        mlp = experts.top_k * mlp + experts.num_experts
        mlp += 3 * experts.shared_size + experts.shared_is_gated
    sparse = layers_with_experts(model) if experts.num_experts else model.num_layers
    mlps = (model.num_layers - sparse) * dense + sparse * mlp
    weights = model.hidden_size * (mlps + size_of_vocabulary(model))
    weights += model.num_layers * attention_weights(model)
    kinds = layers_by_window(model)
    seen = sum(layers * min(sequence_length, window or sequence_length) for window, layers in kinds)
    return 6 * weights + 6 * model.num_heads * (size + size_of_value(model)) * seen


def check_transformer(model: "Transformer") -> None:
    """Refuses, with a ValueError, fields that are out of range or do not fit each other."""
    sizes = ("vocab_size", "vocab_multiple", "num_layers", "hidden_size", "num_heads", "mlp_size")
    for field in sizes:
        if getattr(model, field) < 1:
            refuse(model, field, "at least 1")
    if not model.head_size and model.hidden_size % model.num_heads:
        refuse(model, "hidden_size", f"a multiple of num_heads={model.num_heads}, or set head_size")
    if model.head_size < 0 or size_of_head(model) % 2:
        given = "" if model.head_size else f" (hidden_size // num_heads is {size_of_head(model)})"
        refuse(model, "head_size", f"an even number: features are rotated in pairs{given}")
    if model.num_kv_heads < 0 or model.num_heads % (model.num_kv_heads or 1):
        refuse(
            model,
            "num_kv_heads",
            f"a divisor of num_heads={model.num_heads}, or 0 for the same number",
        )
    for field in ("dropout_rate", "label_smoothing"):
        if not 0 <= getattr(model, field) < 1:
            refuse(model, field, "from 0 to less than 1")
    if not model.logit_soft_cap >= 0:
        refuse(model, "logit_soft_cap", "more than 0, such as 30, or 0 for none")
    if not model.z_loss >= 0:
        refuse(model, "z_loss", "0 for none, or more, such as 1e-4")
    if not -1 <= model.bos_token < model.vocab_size:
        refuse(model, "bos_token", f"less than vocab_size={model.vocab_size}, or -1 for none")
    refuse_unknown(model, "activation", tuple(ACTIVATIONS))
    refuse_unknown(model, "remat", tuple(REMAT_POLICIES))
    if not jnp.issubdtype(jnp.dtype(model.dtype), jnp.floating):
        refuse(model, "dtype", "a floating dtype such as 'bfloat16'")
    _check_groups(model)


def _check_groups(model: "Transformer") -> None:
    """Refuses groups that do not fit the model, or each other."""
    attention, experts, split, context = model.attention, model.experts, model.split, model.context

    latent = attention.latent

    def refuse_in(group: str, field: str, expected: str) -> None:
        value = getattr(getattr(model, group), field)
        raise ValueError(f"Transformer: {group}.{field} is {value!r}, expected {expected}.")

    if experts.num_experts and model.activation != "silu":
        refuse(model, "activation", "'silu' with experts, because experts support no other")
    if experts.num_experts and model.mlp != Mlp():
        refuse(model, "mlp", "Mlp() with experts, which support no other")
    if (experts.num_experts or latent.rank) and not model.norm.pre:
        refuse_in("norm", "pre", "True with experts or attention.latent")
    if latent.rank and model.norm.shared:
        refuse_in("norm", "shared", "False with attention.latent")
    if model.norm.shared and not model.mlp.parallel:
        refuse_in("norm", "shared", "False without mlp.parallel")
    if model.rotary.learned and (attention.unrotated_global or model.rotary.features):
        refuse_in("rotary", "learned", "0 with rotary.features or attention.unrotated_global")
    if latent.rank and (model.rotary.learned or model.rotary.features):
        field = "learned" if model.rotary.learned else "features"
        refuse_in("rotary", field, "0 with attention.latent, whose rotary_size is rotated")
    if latent.rank and attention.unrotated_global:
        refuse_in("attention", "unrotated_global", "False with attention.latent")
    if attention.score_growth and not attention.unrotated_global:
        refuse_in("attention", "score_growth", "0 without attention.unrotated_global")
    if attention.rotated_norm and model.rotary.learned:
        refuse_in("attention", "rotated_norm", "False with rotary.learned, without rotations")
    if model.rotary.local_base and attention.unrotated_global:
        refuse_in("rotary", "local_base", "0 with attention.unrotated_global")
    if attention.wide_query_key_norm and (model.norm.kind == "layer" or model.norm.offset):
        refuse_in("attention", "wide_query_key_norm", "False with this norm: it is an RMSNorm")
    if split.axis and model.annotate:
        refuse(
            model,
            "annotate",
            f"False with split.axis={split.axis!r}: logical axis rules choose how parameters "
            "are stored, but split.axis fixes how split parameters are stored",
        )
    if latent.rank:
        if model.num_kv_heads not in (0, model.num_heads):
            expected = f"num_heads={model.num_heads}, or 0"
            refuse(model, "num_kv_heads", expected)
        if size_of_head(model) <= latent.rotary_size:
            expected = f"more than attention.latent.rotary_size={latent.rotary_size}"
            refuse(model, "head_size", expected)
        if split.overlap != "none":
            refuse_in("split", "overlap", "'none' with attention.latent")
    if context.axis and context.axis == split.axis:
        refuse_in("context", "axis", f"another axis than split.axis={split.axis!r}")
    if model.rotary.local_base and not attention.global_every:
        refuse_in("rotary", "local_base", "0 without attention.global_every")
    rotary, scaling = model.rotary, model.rotary.scaling
    if rotary.features > size_of_head(model):
        refuse_in("rotary", "features", f"at most the {size_of_head(model)} features of a head")
    pairs = (rotary.features or size_of_head(model)) // 2
    for factors in (scaling.short_factors, scaling.long_factors):
        if factors and len(factors) != pairs:
            refuse_in("rotary", "scaling", f"a factor for each of {pairs} pairs")
    if scaling.kind == "dynamic" and pairs < 2:
        refuse_in("rotary", "scaling", "no 'dynamic' scaling of a single pair of features")
    computes_blocks = context.axis and context.how in ("ring", "gather")
    if computes_blocks and attention.kind not in ("", "blockwise"):
        refuse_in("attention", "kind", f"'' or 'blockwise' with context.how={context.how!r}")
    if not 0 <= experts.dense_layers < model.num_layers:
        expected = f"less than num_layers={model.num_layers}, or 0 for none"
        refuse_in("experts", "dense_layers", expected)
    if experts.dense_layers % (size := size_of_group(attention, experts)):
        expected = f"a multiple of {size} (attention.global_every={attention.global_every}, "
        expected += f"experts.every={experts.every}), whole groups"
        refuse_in("experts", "dense_layers", expected)
    if experts.num_experts and not layers_with_experts(model):
        refuse_in("experts", "every", f"up to num_layers={model.num_layers}")


def heads_of_device(model: "Transformer", sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns how many query heads and key heads a device has on mesh axes of these sizes."""
    parts = sizes.get(model.split.axis or "", 1)
    # If there are fewer heads than devices, devices share heads.
    queries, keys = model.num_heads, model.num_kv_heads or model.num_heads
    return max(queries // parts, 1), max(keys // parts, 1)


def context_on(model: "Transformer", sizes: Mapping[str, int], platform: str) -> Context:
    """Returns a model's context on devices, with the communication that `"auto"` stands for.

    Args:
      model: The model.
      sizes: The sizes of the mesh axes.
      platform: The platform of the devices, such as `"gpu"`; `""` if it is not known.
    """
    devices = sizes.get(model.context.axis or "", 1)
    return model.context.on_platform(platform, devices, *heads_of_device(model, sizes))


def check_lengths(model: "Transformer", prompts: Iterable[int], max_tokens: int) -> None:
    """Refuses answers of `max_tokens` tokens whose positions the model cannot represent.

    Args:
      model: The model.
      prompts: The number of tokens of each prompt.
      max_tokens: The most tokens of an answer.

    Raises:
      ValueError: An answer is longer than the table of learned positions. Or the kind of scaling is
        `"longrope"`, and an answer crosses the original length: the keys that are kept have been
        rotated by the factors of short sequences.
    """
    rotary, scaling = model.rotary, model.rotary.scaling
    for index, length in enumerate(prompts):
        longest = length + max_tokens - 1  # The last token of an answer is no input.
        if rotary.learned and longest > rotary.learned:
            most = f"rotary.learned={rotary.learned}, the length of the table of positions"
        elif scaling.kind == "longrope" and length <= scaling.original_length < longest:
            most = f"rotary.scaling.original_length={scaling.original_length} (or a longer prompt)"
        else:
            continue
        raise ValueError(
            f"generate: prompt {index} has {length} tokens and max_tokens is {max_tokens}, "
            f"expected at most {most}, of both together."
        )


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
