"""A decoder-only transformer: a language model over packed documents.

A strategy shards the parameters and the batch over data axes without changes in this code. If the
mesh has the axis `split.axis`, each device computes a part of every layer, see `transformer_layer`,
and of the vocabulary, see `manualpar.layers.vocabulary`. If the mesh has the axis `context.axis`,
each device has a part of every sequence, see `manualpar.layers.attention.context`.

A layer is `x += attention(norm(x)); x += mlp(norm(x))`, pre-norm as in LLaMA (Touvron et al.,
https://arxiv.org/abs/2302.13971): RMSNorm (https://arxiv.org/abs/1910.07467), rotary positions (Su
et al., https://arxiv.org/abs/2104.09864), grouped-query attention
(https://arxiv.org/abs/2305.13245) and a gated MLP, SwiGLU (https://arxiv.org/abs/2002.05202).
Fields turn this layer into the layers of other families, such as Qwen's and Gemma's, see
`docs/families.md`.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `K` key and value heads,
`H` features of a head, `F` features inside the MLP, `V` tokens of the vocabulary, `L` layers.

Invariants: the logits at a position depend on no later token, and on no token of another document.
Parameters, norms, rotations, the softmax of attention and the logits are float32 for every `dtype`.
Positions count from the beginning of the sequence, not of a document, because attention depends
only on differences of positions.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import In
from jax.typing import DTypeLike

from manualpar.core.modes.layer_loops import AUTO, AUTO_WRITTEN_OUT, CHOICES, REMAT_POLICIES
from manualpar.core.parameters.placement import MatrixDims
from manualpar.layers import enter, split, split_lookup
from manualpar.layers.attention.context import Context
from manualpar.layers.attention.key_value_cache import CACHE, NEW_KEYS, Past, Prompts
from manualpar.layers.boundaries import bound_axes, platform_traced_for
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.model_fields import config_field, refuse, refuse_unknown
from manualpar.layers.moe.experts import Experts
from manualpar.layers.moe.routing import BIAS, COUNTS, LOSSES
from manualpar.models.flat_fields import understand_flat_names
from manualpar.models.layer_config import (
    ACTIVATIONS,
    Activation,
    Attention,
    LayerConfig,
    LowPrecision,
    Mlp,
    Norm,
    Scales,
    Split,
    marked,
    split_dims,
)
from manualpar.models.rotary import NO_SCALING, Rotary, rotary_angles
from manualpar.models.transformer_layer import (
    OVERWRITTEN,
    Documents,
    Layer,
    Stream,
    halve,
    normalize,
)

# -------------------------------------------------------------------------------------------------
# Runs the layers of a `Transformer`: unrolled (*written out*), or one layer in an `nn.scan` loop.
#
# Layers may be of two kinds (Beltagy et al., https://arxiv.org/abs/2004.05150), in groups of
# `global_every` layers. The last layer of a group is *global* and sees all positions. The other
# layers are *local* and see a window or a chunk. Or only the last of `experts.every` layers has
# experts. A loop then runs over groups. In a model with experts, the first `dense_layers` layers
# have an MLP in place of experts, and come before the loop.
#
# Invariants: layer `i` has the same parameters whether layers are written out or scanned, see
# `layer_place`. Remat recomputes single layers, not groups.
#
# Symbols: `B` examples, `S` positions, `D` hidden features, `H` features of a head, `L` layers.


# The values of the model's `remat`.
REMATS = ("auto", *REMAT_POLICIES)


class Angles(NamedTuple):
    """The angles of rotary positions of the two kinds of layers, see `rotary_angles`.

    Both are `float32[S, H/2]`; `float32[B, S, H/2]` if each sequence has positions of its own; or
    `None` if the layers are not rotated.
    """

    of_global: jax.Array | None
    of_local: jax.Array | None


class LayerPlace(NamedTuple):
    """Where the parameters of a layer are.

    Attributes:
      path: The names of the modules that contain the parameters.
      entry: The layer's entry in dim 0 of each leaf; `None` if the leaves belong to this layer
        only.
    """

    path: tuple[str, ...]
    entry: int | None


def size_of_group(attention: Attention, experts: Experts) -> int:
    """Returns the length of the groups of layers that a loop runs over; 1 if layers are alike."""
    return math.lcm(max(attention.global_every, 1), experts.every)


def is_global(layer: int, global_every: int) -> bool:
    """Returns whether a layer sees all positions, in a model whose other layers see a window."""
    return bool(global_every) and (layer + 1) % global_every == 0


def layer_place(model: "Transformer", layer: int) -> LayerPlace:
    """Locates the parameters of layer `layer` of a model, counted from 0.

    The parameters are in `layer_{i}` if layers are written out, and in an entry of `layers` if
    layers are scanned. With two kinds of layers, `layers/layer_{j}` has layer `j` of every group.
    Remaining layers that do not fill a group come after the scan and are written out. Dense layers
    come before the scan and are written out too.
    """
    if layer not in scanned_layers(model):
        return LayerPlace((f"layer_{layer}",), None)
    size = size_of_group(model.attention, model.experts)
    group, index = divmod(layer - model.experts.dense_layers, size)
    inner = (f"layer_{index}",) if size > 1 else ()
    return LayerPlace(("layers", *inner), group)


def scanned_layers(model: "Transformer") -> range:
    """Returns the numbers of the layers in the `nn.scan` loop; empty if all are written out."""
    if not model.scan_layers:
        return range(0)
    size, dense = size_of_group(model.attention, model.experts), model.experts.dense_layers
    number = (model.num_layers - dense) // size * size
    return range(dense, dense + number)


class LayerGroup(nn.Module):
    """A group of layers of several kinds, such as local layers, and a global layer at the end.

    Attributes:
      config: The config of all layers, from which the config of each kind is made.
      remat: See `Transformer`.
    """

    config: LayerConfig
    remat: str

    @nn.compact
    def __call__(
        self,
        x_BSD: Stream,
        angles: Angles,
        document_BS: Documents,
        rows: Prompts | Past | None = None,
    ) -> tuple[Stream, None]:
        """Runs the layers of a group; see `Layer`."""
        layer = _layer_class(self.remat, in_loop=True)
        for index in range(size_of_group(self.config.attention, self.config.experts)):
            config, angles_SH = _of_kind(self.config, angles, index)
            x_BSD, _ = layer(config, name=f"layer_{index}")(x_BSD, angles_SH, document_BS, rows)
        return x_BSD, None


def run_layers(
    model: "Transformer",
    config: LayerConfig,
    x_BSD: jax.Array,
    angles: Angles,
    document_BS: Documents,
    rows: Prompts | Past | None = None,
) -> jax.Array:
    """Runs all layers, which become submodules of the calling module.

    Args:
      config: The layers' config; the local layers' config if there are two kinds.
      x_BSD: The residual stream, see `Layer`.
      angles: The angles of both kinds; all layers use `of_global` if there is only one kind.
      document_BS: See `Layer`.
      rows: See `Transformer`.

    Communication:
      The communication of the layers.
    """
    in_loop = scanned_layers(model)
    written_out = _layer_class(model.remat, in_loop=False)

    def run(x_BSD: Stream, layers: range) -> Stream:
        for index in layers:
            own_config, angles_SH = _of_kind(config, angles, index)
            layer = written_out(own_config, name=f"layer_{index}")
            x_BSD, _ = layer(x_BSD, angles_SH, document_BS, rows)
        return x_BSD

    stream: Stream = x_BSD
    is_halved = config.split.overlap == "dual_batch" and rows is None
    if is_halved and not model.is_initializing() and _is_split(config.split.axis):
        # The loop carries the pair, because splitting and joining it in each layer would copy it.
        stream = halve(x_BSD)
        document_BS = halve(document_BS) if isinstance(document_BS, jax.Array) else None
    stream = run(stream, range(in_loop.start))
    if in_loop:
        stream = _run_loop(model, config, stream, angles, document_BS, rows)
    stream = run(stream, range(in_loop.stop, model.num_layers))
    return jnp.concatenate(stream) if isinstance(stream, tuple) else stream


def _is_split(axis: str | None) -> bool:
    """Returns whether layers are split over the axis; refuses two halves in other modes."""
    if bound_axes("Transformer", axis):
        return True
    if axis in jax.sharding.get_abstract_mesh().axis_names:
        raise ValueError(
            "Transformer: split.overlap is 'dual_batch', expected 'none' or mode='manual', because "
            "in other modes XLA chooses when activations are sent."
        )
    return False


def _run_loop(
    model: "Transformer",
    config: LayerConfig,
    x_BSD: Stream,
    angles: Angles,
    document_BS: Documents,
    rows: Prompts | Past | None,
) -> Stream:
    size = size_of_group(config.attention, config.experts)
    layer: Any = _layer_class(model.remat, in_loop=True)
    # The loop begins after the dense layers at the beginning.
    inside: dict[str, Any] = {"dense_layers": 0}
    if config.experts.every == 1:
        inside["dense_mlp_size"] = 0
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, **inside))
    arguments: tuple[Any, ...] = (config,)
    if size > 1:
        layer, arguments = LayerGroup, (config, model.remat)
    variable_axes: dict[Any, Any] = {"params": 0}
    if rows is not None:
        variable_axes |= {CACHE: 0, NEW_KEYS: 0}
    if config.experts.num_experts:
        variable_axes |= {LOSSES: 0, COUNTS: 0}
    if config.attention.notes_largest:
        variable_axes[OVERWRITTEN] = 0
    if config.experts.router_bias:
        # Layers only read the bias. If the loop returned the bias, layers would seem to change it.
        variable_axes[BIAS] = 0 if model.is_initializing() else In(0)
    layers = nn.scan(
        layer,
        variable_axes=variable_axes,
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=len(scanned_layers(model)) // size,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    of_all: Any = angles if size > 1 else angles.of_global
    x_BSD, _ = layers(*arguments, name="layers")(x_BSD, of_all, document_BS, rows)
    return x_BSD


def _layer_class(remat: str, *, in_loop: bool) -> Any:
    if remat == "auto" and platform_traced_for() in CHOICES:
        mark = AUTO if in_loop else AUTO_WRITTEN_OUT
        return nn.remat(Layer, policy=mark, prevent_cse=False)
    if remat in ("auto", "none"):
        return Layer
    # In a loop XLA cannot merge a recomputation with the first computation, so no barrier is
    # needed.
    return nn.remat(Layer, policy=REMAT_POLICIES[remat], prevent_cse=not in_loop)


def _of_kind(
    config: LayerConfig, angles: Angles, layer: int
) -> tuple[LayerConfig, jax.Array | None]:
    """Returns the config and the angles of the layer with index `layer`."""
    if config.experts.num_experts and not config.experts.in_layer(layer):
        mlp_size = config.experts.dense_mlp_size or config.mlp_size
        config = dataclasses.replace(config, experts=Experts(), mlp_size=mlp_size)
    how = config.attention
    if not how.global_every:
        return config, angles.of_global
    if is_global(layer, how.global_every):
        of_local: dict[str, Any] = {"window": 0, "chunk": 0, "global_every": 0}
        seeing_all = dataclasses.replace(how, unrotated_global=False, **of_local)
        return dataclasses.replace(config, attention=seeing_all), angles.of_global
    if how.unrotated_global or config.rotary.scales_local:
        return config, angles.of_local
    unscaled = dataclasses.replace(config.rotary, scaling=NO_SCALING)
    return dataclasses.replace(config, rotary=unscaled), angles.of_local


# -------------------------------------------------------------------------------------------------
# Sizes, operation counts and checks that follow from the fields of a `Transformer`.
#
# Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `H` features of a
# head, `V` rows of the embedding, `L` layers.


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
    refuse_unknown(model, "remat", REMATS)
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
    if attention.notes_largest:
        bounded = "query_key_norm", "wide_query_key_norm", "rotated_norm", "soft_cap"
        for field in (name for name in bounded if getattr(attention, name)):
            refuse_in("attention", field, "none with notes_largest (qk_clip): it bounds scores")
        if latent.rank:
            refuse_in("attention", "latent", "none with notes_largest (qk_clip)")
        if context.axis:
            refuse_in("context", "axis", "none with notes_largest (qk_clip): keys are elsewhere")
        if split.overlap == "dual_batch":
            refuse_in("split", "overlap", "'none' or 'ring' with notes_largest (qk_clip)")
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
        if split.overlap == "ring":
            refuse_in("split", "overlap", "'none' or 'dual_batch' with attention.latent")
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
    model.low_precision.check(_products_of(model))


def _products_of(model: "Transformer") -> list[str]:
    """Returns the names of the products that `LowPrecision.layers` may match."""
    names = ["query", "out"] if model.attention.latent.rank else ["query", "key", "value", "out"]
    names = [f"attention/{name}" for name in names]
    with_experts = layers_with_experts(model) if model.experts.num_experts else 0
    if with_experts < model.num_layers:
        names += ["mlp/gate"] if model.mlp.gated else []
        names += ["mlp/up", "mlp/down"]
    return [*names, "experts"] if with_experts else names


def heads_of_device(model: "Transformer", sizes: Mapping[str, int]) -> tuple[int, int]:
    """Returns how many query heads and key heads a device has on mesh axes of these sizes."""
    parts = sizes.get(model.split.axis or "", 1)
    # If there are fewer heads than devices, devices share heads.
    queries, keys = model.num_heads, model.num_kv_heads or model.num_heads
    return max(queries // parts, 1), max(keys // parts, 1)


def context_on(model: "Transformer", sizes: Mapping[str, int], platform: str) -> Context:
    """Returns a model's context on devices, with the communication that `"auto"` stands for.

    Args:
      platform: The platform of the devices, such as `"gpu"`; `""` if it is not known.
    """
    devices = sizes.get(model.context.axis or "", 1)
    return model.context.on_platform(platform, devices, *heads_of_device(model, sizes))


def check_lengths(model: "Transformer", prompts: Iterable[int], max_tokens: int) -> None:
    """Refuses answers of `max_tokens` tokens whose positions the model cannot represent.

    With the scaling `"longrope"`, an answer must not cross the original length, because the keys
    that are kept have been rotated by the factors of short sequences.

    Args:
      prompts: The number of tokens of each prompt.
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
    """Returns the tokens and the documents of packed inputs."""
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


# -------------------------------------------------------------------------------------------------


# The dtypes that a config may have.
DTYPES = ("bfloat16", "float16", "float32")


@understand_flat_names
class Transformer(nn.Module):
    """A causal language model.

    Its parameters are `embedding` `[V, D]`, `final_norm/scale` `[D]`, `head` `[D, V]` unless the
    head is tied, and for every layer `attention_norm/scale` `[D]`, `attention/query/kernel`
    `[D, N, H]`, `attention/key/kernel` and `attention/value/kernel` `[D, K, H]`,
    `attention/out/kernel` `[N, H, D]`, `mlp_norm/scale` `[D]`, `mlp/gate/kernel` and
    `mlp/up/kernel` `[D, F]`, `mlp/down/kernel` `[F, D]`. A layer with experts has the parameters of
    a `MoE`, `experts`, in place of `mlp`. The layers are `layer_0`, `layer_1`, .... Scanned layers
    are `layers`, each leaf has a leading dimension `L`, and the first `experts.dense_layers` layers
    are separate. Latent attention has the parameters of a `LatentAttention`. Some fields of the
    model add `attention/query/bias` `[N, H]`, `attention/key/bias` and `attention/value/bias`
    `[K, H]`; `attention/out/bias` `[D]`; `attention/sinks` `[N]`; `attention/query_norm/scale` and
    `attention/key_norm/scale` `[H]`; `attention_post_norm/scale` and `mlp_post_norm/scale` `[D]`.
    Scanned layers of two kinds form groups, see `manualpar.models.transformer`.

    Initial weights are normally distributed with variance 1 / inputs. For weights whose product is
    added to the residual stream, the variance is divided by 2 L, so that the stream does not grow
    with depth (Radford et al., "Language models are unsupervised multitask learners", 2.3).

    Fields that belong together are a group, a frozen dataclass that the layers get unchanged.
    `manualpar.models.flat_fields.with_fields` changes single fields of a model.

    Attributes:
      vocab_size: Tokens of the vocabulary.
      num_layers: The number of layers, `L`.
      hidden_size: Features between layers, `D`.
      num_heads: The number of query heads, `N`.
      num_kv_heads: The number of key and value heads, `K`, a divisor of `num_heads`. 0 stands for
        `num_heads`.
      mlp_size: Features inside the MLP, `F`, or inside each expert.
      head_size: Features of a head, `H`, an even number; 0 for `hidden_size // num_heads`.
      activation: The activation of the MLP's gates: `"silu"`, or `"gelu"`, GELU approximated by
        tanh.
      attention: How the layers attend, for example only to a window, see `Attention`.
      rotary: The rotary positions, see `Rotary`.
      norm: The norms, see `Norm`.
      mlp: The MLPs, see `Mlp`.
      scales: Constant factors of embedding, layers and logits, see `Scales`.
      experts: The experts that replace MLPs, see `Experts`; none by default.
      split: How each layer is split over devices, see `Split`; by default layers are not split.
      context: How sequences are split over devices, see `Context`; by default sequences are not
        split. Pass the same axis to the program's builder as `context_axis`. The mesh may lack this
        axis.
      low_precision: The products that are computed in float8 or int8, see `LowPrecision`; none by
        default.
      tied_head: Whether the transposed embedding is also the head.
      scale_embedding: Whether the rows of the embedding are multiplied with `sqrt(D)`.
      vocab_multiple: The vocabulary is padded to `V`, the next multiple of this number, so that the
        number of devices along `split.axis` divides `V`. The logits of the padding are -inf.
      logit_soft_cap: The bound of the logits, see `head_logits`; 0 for none.
      label_smoothing: The share of each label's probability that is spread over all tokens in
        training, see `split_cross_entropy`. It has an effect only in a call with `labels`.
      z_loss: The factor of the z-loss, the squared logarithm of the softmax's denominator, which is
        added to the loss in training. It has an effect only in a call with `labels`.
      dropout_rate: Share of the outputs of attention and MLP that is dropped in training.
      dtype: The floating-point dtype of the computation, or the name of this dtype.
      remat: The part of a layer that is computed again in the backward pass: `"none"`, `"full"` for
        the whole layer, `"dots"` for everything except its products with weights. With `"auto"` the
        program chooses on GPUs and TPUs what is fastest and fits into memory, and may unroll the
        loop over layers, see `manualpar.core.modes.layer_loops`; on CPUs it is `"none"`.
      scan_layers: Whether one layer is compiled and run in a loop, instead of each layer.
      bos_token: The token that begins a document; -1 if each sequence is one document. Attention
        does not cross document borders. The tokens before the first such token are a document too.
      annotate: Whether the dims of parameters have names, for logical axis rules: `vocab`, `embed`,
        `heads`, `kv_heads`, `mlp`, and `layers` for the dim of scanned layers.
    """

    vocab_size: int = 260
    num_layers: int = config_field(4, "", 1, required=True)
    hidden_size: int = config_field(192, "", 1, required=True)
    num_heads: int = config_field(6, "", 1, required=True)
    num_kv_heads: int = config_field(0, "", 1, required=True)
    mlp_size: int = config_field(512, "", 1, required=True)
    head_size: int = config_field(0, "", 0)
    activation: Activation = config_field("silu", choices=tuple(ACTIVATIONS))
    attention: Attention = Attention()
    rotary: Rotary = Rotary()
    norm: Norm = Norm()
    mlp: Mlp = Mlp()
    scales: Scales = Scales()
    experts: Experts = Experts()
    split: Split = Split()
    context: Context = Context()
    low_precision: LowPrecision = LowPrecision()
    tied_head: bool = config_field(False, required=True)
    scale_embedding: bool = config_field(False)
    vocab_multiple: int = config_field(1, "", 1, required=True)
    logit_soft_cap: float = config_field(0.0, "", 0, required=True)
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dropout_rate: float = config_field(0.0, "", 0, below=1, required=True)
    dtype: DTypeLike = config_field("float32", choices=DTYPES, required=True)
    remat: str = config_field("auto", choices=REMATS, required=True)
    scan_layers: bool = config_field(True, required=True)
    bos_token: int = -1
    annotate: bool = False

    # Evaluation uses these values, because both fields apply only to training, see
    # `manualpar.core.model.apply_fn`.
    evaluation_fields: ClassVar[Mapping[str, Any]] = {"label_smoothing": 0.0, "z_loss": 0.0}
    matrix_dims: ClassVar[Mapping[str, MatrixDims]] = dict.fromkeys(
        ("embedding", "positions", "head"), MatrixDims((0,), (1,), hidden=False)
    )

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array | Mapping[str, jax.Array],
        train: bool = False,
        labels: jax.Array | None = None,
        rows: Prompts | Past | None = None,
    ) -> Any:
        """Computes the logits of each next token, or their cross entropy.

        Args:
          tokens: `int32[B, S]`, from 0 to `vocab_size - 1`; any other number makes its sequence
            NaN. Or a dict of `tokens` and `documents`. `documents` is `int32[B, S]`, the document
            number of each position, and replaces `bos_token`.
          train: Whether to drop activations, which needs a `dropout` key, and to smooth labels and
            add the z-loss.
          labels: `int[B, S]`, the token after each position; `None` for logits.
          rows: For generation, see `manualpar.layers.attention.key_value_cache`: `Prompts` if the
            tokens are complete prompts, or `Past` if `tokens` are one new token for each row,
            `int32[B, 1]`. With `Past` the call reads the keys and values of earlier tokens from the
            collection `cache`. New keys and values go to the collection `new_keys`.

        Returns:
          Without labels `float32[B, S, V]`: at position `s` the unnormalised log-probabilities of
          token `s + 1`. A `shard_map` that binds `split.axis` and `context.axis` gets this device's
          part, `[B/data, S/context, V/split]`, see `split_cross_entropy`. With labels the pair that
          `head_cross_entropy` returns, `float32` and `bool[B/data, S/context]`: the losses in nats,
          and whether the largest logit is the label's. So a large vocabulary needs no array of all
          logits. With `rows` the logits at the last token of each row, `float32[B, V]`.

        Raises:
          ValueError: `tokens` or a field of the model is out of range; the message names it.

        Communication:
          Over `split.axis`, if it is bound: `split_lookup` once, `enter` twice for each layer and
          once for the head, and `leave` twice for each layer. Over `context.axis`:
          `Context.attention` for each layer. With labels, `head_cross_entropy` in addition.
        """
        check_transformer(self)
        documents = None
        if isinstance(tokens, Mapping):
            tokens, documents = tokens_and_documents(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"Transformer: tokens are {tokens.dtype}{list(tokens.shape)}, expected integers "
                "[batch, sequence]; give one sequence a leading dimension of 1."
            )
        config = self._layer_config(train=train)
        config.context.check_split(tokens)
        where = self.split.axis, self.split.sequence_dim
        vocabulary, std = size_of_vocabulary(self), self.hidden_size**-0.5
        # An embedding that is not the head has variance 1, like the sum that all layers add to it.
        embedding_VD = self._table(
            "embedding", ("vocab", "embed"), vocabulary, std if self.tied_head else 1.0
        )
        known = tokens
        if vocabulary > self.vocab_size:
            known = jnp.where(tokens < self.vocab_size, tokens, -1)
        x_BSD = split_lookup(embedding_VD, known, *where)
        # The cast comes after the lookup, so that gradients of equal tokens are summed in float32.
        x_BSD = x_BSD.astype(config.dtype)
        if self.scale_embedding:
            x_BSD = x_BSD * jnp.asarray(self.hidden_size**0.5, config.dtype)
        if self.scales.embedding != 1:
            x_BSD = x_BSD * jnp.asarray(self.scales.embedding, config.dtype)
        document_BS = None
        if isinstance(rows, Past):
            positions = rows.position[:, None]
        else:
            positions = config.context.positions(tokens.shape[1])
            document_BS = documents
            if documents is None and self.bos_token >= 0:
                document_BS = config.context.cumsum(tokens == self.bos_token)
        if self.rotary.learned:
            x_BSD = x_BSD + self._learned_positions(positions, x_BSD, rows)
        angles = self._angles(positions, self._length(tokens, rows))
        x_BSD = run_layers(self, config, x_BSD, angles, document_BS, rows)
        if isinstance(rows, Prompts):
            x_BSD = jnp.take_along_axis(x_BSD, rows.length[:, None, None] - 1, axis=1)
        x_BSD = normalize(x_BSD, "final_norm", config)
        if self.scales.logits != 1:
            x_BSD = x_BSD * jnp.asarray(self.scales.logits, config.dtype)
        x_BSD = enter(x_BSD, *where)
        head_DV = embedding_VD.T
        if not self.tied_head:
            head_DV = self._table("head", ("embed", "vocab"), vocabulary, std)
        of_head: Any = {"axis": self.split.axis, "vocab_size": self.vocab_size}
        of_head["soft_cap"] = self.logit_soft_cap or None
        if labels is None:
            logits = head_logits(x_BSD, head_DV, **of_head)
            return logits if rows is None else logits[:, 0]
        if train:
            of_head |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return head_cross_entropy(x_BSD, head_DV, labels, **of_head)

    def _learned_positions(
        self, positions: jax.Array, x_BSD: jax.Array, of_rows: Prompts | Past | None
    ) -> jax.Array:
        """Returns the learned rows of the positions, for this device's part of the stream.

        After the table there are zeros in the padding of prompts, and NaN for a new token.
        """
        length, number = self.rotary.learned, positions.size * self.context.size
        if of_rows is None and number > length:
            raise ValueError(
                f"Transformer: tokens have {number} positions, expected at most "
                f"rotary.learned={length}, the length of the table of positions."
            )
        init = marked(nn.initializers.normal(0.02), (None, "embed"), annotate=self.annotate)
        table_PD = self.param("positions", init, (length, self.hidden_size), jnp.float32)
        axes = bound_axes("Transformer", self.split.axis)
        size = x_BSD.shape[1]
        if self.split.sequence_parallel and axes and positions.ndim == 1:
            start = jax.lax.axis_index(axes) * size
            positions = jax.lax.dynamic_slice_in_dim(positions, start, size)
        after = 0.0 if isinstance(of_rows, Prompts) else jnp.nan
        rows = jnp.take(table_PD, positions, axis=0, mode="fill", fill_value=after)
        rows = rows if rows.ndim == 3 else rows[None]
        return rows.astype(x_BSD.dtype)

    def _length(self, tokens: jax.Array, rows: Prompts | Past | None) -> int | jax.Array:
        """Returns the number of positions of a sequence, or of each row in generation."""
        if isinstance(rows, Past):
            return rows.position + 1
        if isinstance(rows, Prompts):
            return rows.length
        return tokens.shape[1] * self.context.size

    def _angles(self, positions: jax.Array, length: int | jax.Array) -> Angles:
        rotary, size = self.rotary, size_of_rotation(self)
        if rotary.learned:
            return Angles(None, None)
        options: dict[str, Any] = {"scaling": rotary.scaling, "length": length}
        angles_SH = rotary_angles(
            positions, size, base=rotary.base, features=rotary.features, **options
        )
        if not self.attention.global_every:
            return Angles(angles_SH, angles_SH)
        base = rotary.local_base or rotary.base
        if self.attention.unrotated_global:
            return Angles(None, angles_SH)
        if not rotary.scales_local:
            options = {}
        local_SH = rotary_angles(positions, size, base=base, features=rotary.features, **options)
        return Angles(angles_SH, local_SH)

    def _layer_config(self, *, train: bool) -> LayerConfig:
        return LayerConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_size=size_of_head(self),
            mlp_size=self.mlp_size,
            activation=self.activation,
            annotate=self.annotate,
            dropout_rate=self.dropout_rate if train else 0.0,
            added_scale=(2 * self.num_layers) ** -0.5,
            dtype=jnp.dtype(self.dtype),
            attention=self.attention,
            rotary=self.rotary,
            norm=self.norm,
            mlp=self.mlp,
            scales=self.scales,
            experts=self.experts,
            split=self.split,
            context=self.context,
            low_precision=self.low_precision,
        )

    def _table(self, name: str, dim_names: tuple[str, ...], rows: int, std: float) -> jax.Array:
        """Makes the parameter `name`; each device along `split.axis` has some of the vocabulary."""
        init = marked(nn.initializers.normal(std), dim_names, annotate=self.annotate)
        if self.split.axis:
            init = split(init, split_dims(dim_names, self.split.axis))
        sizes = {"vocab": rows, "embed": self.hidden_size}
        table: jax.Array = self.param(name, init, tuple(sizes[dim] for dim in dim_names))
        return table
