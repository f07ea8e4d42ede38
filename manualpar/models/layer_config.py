"""The configuration of a `Transformer`'s layers: groups of fields that model and layers share.

`Experts` is in `manualpar.layers.moe.experts`, `Context` in `manualpar.layers.attention.context`.
"""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.errors import suggest
from manualpar.layers import SplitDense
from manualpar.layers.attention.blockwise_attention import Scoring
from manualpar.layers.attention.causal_attention import (
    ATTENTION_KINDS,
    WITH_SINKS,
    AttentionKind,
)
from manualpar.layers.attention.context import Context
from manualpar.layers.low_precision import MATMULS, Matmul
from manualpar.layers.model_fields import (
    MOST_WRITTEN_OUT,
    FieldGroup,
    config_field,
    flat_field,
    refuse,
    refuse_unknown,
)
from manualpar.layers.moe.experts import Experts
from manualpar.layers.ring import LAYER_OVERLAPS, LayerOverlap
from manualpar.models.rotary import NO_ROTARY, Rotary

# The activation functions for the gates of the MLP.
Activation = Literal["silu", "gelu", "exact_gelu"]
ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,  # GELU approximated by tanh.
    "exact_gelu": functools.partial(nn.gelu, approximate=False),
}


@dataclasses.dataclass(frozen=True, repr=False)
class Latent(FieldGroup):
    """The sizes of multi-head latent attention, see `manualpar.models.transformer_layer`.

    The head size of the model is the size of queries and keys, with the rotated features.

    Attributes:
      rank: The features of the latent from which keys and values are computed; 0 for ordinary
        attention.
      query_rank: The features of the latent from which queries are computed; 0 for none.
      rotary_size: How many features of each query and key are rotated; all heads share these
        features of the keys.
      value_size: The features of a value.
    """

    rank: int = config_field(0, "latent_rank", 0)
    query_rank: int = config_field(0, "latent_query_rank", 0)
    rotary_size: int = config_field(0, "latent_rotary_size", 0)
    value_size: int = config_field(0, "latent_value_size", 0)

    def __post_init__(self) -> None:
        if self.rank < 0:
            refuse(self, "rank", "at least 1, such as 512, or 0 for ordinary attention")
        if self.query_rank < 0:
            refuse(self, "query_rank", "at least 1, such as 1536, or 0 for none")
        for field in ("rotary_size", "value_size"):
            if self.rank and getattr(self, field) < 1:
                refuse(self, field, "at least 1 with rank")
        for field in ("query_rank", "rotary_size", "value_size"):
            if not self.rank and getattr(self, field):
                refuse(self, field, "0 without rank")
        if self.rotary_size % 2:
            refuse(self, "rotary_size", "an even number, because features are rotated in pairs")


@dataclasses.dataclass(frozen=True, repr=False)
class Attention(FieldGroup):
    """The settings of attention in all layers.

    Attributes:
      kind: The implementation of attention, see `manualpar.layers.attention.attention`: `"splash"`,
        `"cudnn"`, `"triton"`, `"blockwise"`, `"xla"`, or `""` for the best on the devices of the
        mesh.
      window: How many positions a query sees, up to and including its own; 0 for all.
      global_every: The length of a group of layers, of which the last layer sees all positions and
        the others see the window or the chunk; 0 if all layers are alike.
      chunk: The length of the chunks into which sequences are divided from their beginning. A query
        sees the positions of its own chunk up to its own position; 0 for no chunks.
      soft_cap: The bound `c` of scores: `c * tanh(score / c)`; 0 for none.
      scale: The factor of the products of queries and keys; 0 for `H ** -0.5`.
      query_key_norm: Whether the features of each query and of each key are normalized before they
        are rotated.
      qkv_bias: Whether queries, keys and values have biases.
      out_bias: Whether the last product of attention has a bias.
      wide_query_key_norm: Whether the norms of queries and keys run over the features of all heads,
        each with a scale of its own.
      unrotated_global: Whether the last layer of a group of `global_every` layers has no positions.
        All layers may then see all positions.
      rotated_norm: Whether each query and each key is divided by the root mean square of its
        features after it is rotated. Layers without rotations do not divide.
      score_growth: How fast scores grow in layers without positions, see `unrotated_global`: a
        query at position `s` is multiplied by `1 + score_growth * log(1 + n)`, where `n` is
        `(s + 1) / score_growth_length`, rounded down; 0 for no growth (Nakanishi,
        https://arxiv.org/abs/2501.19399).
      score_growth_length: See `score_growth`.
      sinks: Whether each query head has a learned score, its *sink*, that takes a share of the
        softmax: the weights of the keys sum to less than 1 (Xiao et al.,
        https://arxiv.org/abs/2309.17453). The kinds `"splash"` and `"xla"` have no sinks.
      latent: The sizes of multi-head latent attention, see `Latent`; none by default.
      notes_largest: Whether each layer notes the largest score of each head in a step, for
        `qk_clip`. It computes the scores a second time, at most 16 blocks of queries after another.
    """

    kind: AttentionKind = config_field("", "attention", choices=ATTENTION_KINDS, required=True)
    window: int = config_field(0, "attention_window", 0, required=True)
    global_every: int = config_field(0, "global_every", 0, below=MOST_WRITTEN_OUT)
    soft_cap: float = config_field(0.0, "attention_soft_cap", 0, required=True)
    scale: float = config_field(0.0, "attention_scale", 0)
    query_key_norm: bool = config_field(False)
    qkv_bias: bool = config_field(False)
    out_bias: bool = config_field(False, "attention_out_bias")
    wide_query_key_norm: bool = config_field(False)
    unrotated_global: bool = config_field(False)
    chunk: int = config_field(0, "attention_chunk", 0)
    rotated_norm: bool = config_field(False)
    score_growth: float = config_field(0.0, "", 0)
    score_growth_length: int = config_field(8192, "", 1)
    sinks: bool = config_field(False, "attention_sinks")
    latent: Latent = Latent()
    notes_largest: bool = flat_field(False, "notes_largest_scores")

    def __post_init__(self) -> None:
        if self.window < 0:
            refuse(self, "window", "at least 1, such as 4096, or 0 for all positions")
        if self.global_every < 0 or self.global_every == 1:
            refuse(
                self, "global_every", "at least 2, such as 6, or 0 for layers that are all alike"
            )
        if self.unrotated_global and not self.global_every:
            refuse(self, "unrotated_global", "False without global_every")
        if self.wide_query_key_norm and not self.query_key_norm:
            refuse(self, "wide_query_key_norm", "False without query_key_norm")
        if self.global_every and not (self.window or self.chunk or self.unrotated_global):
            expected = "0 without window or chunk, because the other layers need one"
            refuse(self, "global_every", expected)
        if self.chunk < 0 or (self.chunk and self.window):
            refuse(self, "chunk", "at least 1, such as 8192, or 0; and 0 with a window")
        if self.rotated_norm and self.query_key_norm:
            refuse(self, "rotated_norm", "False with query_key_norm")
        if not self.score_growth >= 0:
            refuse(self, "score_growth", "more than 0, such as 0.1, or 0 for no growth")
        if self.score_growth_length < 1:
            refuse(self, "score_growth_length", "at least 1, such as 8192")
        if not self.scale >= 0:
            refuse(self, "scale", "more than 0, such as 0.0625, or 0 for head_size ** -0.5")
        if not self.soft_cap >= 0:
            refuse(self, "soft_cap", "more than 0, such as 50, or 0 for none")
        refuse_unknown(self, "kind", ATTENTION_KINDS)
        if self.latent.rank:
            for field in ("query_key_norm", "qkv_bias", "out_bias", "sinks", "rotated_norm"):
                if getattr(self, field):
                    refuse(self, field, "False with a latent, whose queries and keys have none")
        if self.sinks and self.kind not in WITH_SINKS:
            refuse(self, "kind", "a kind that has sinks: 'cudnn', 'triton', 'blockwise', or ''")

    @property
    def scoring(self) -> Scoring:
        """Which keys a query sees, and the bound of scores."""
        return Scoring(self.window or None, self.soft_cap or None, self.chunk or None)


NormKind = Literal["rms", "layer"]
NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)


@dataclasses.dataclass(frozen=True, repr=False)
class Mlp(FieldGroup):
    """The MLPs of layers without experts.

    Attributes:
      gated: Whether the activation of one product multiplies a second product, as in SwiGLU.
      bias: Whether the products have biases.
      parallel: Whether the MLP reads the layer's input, as attention does, and not the sum of both.
    """

    gated: bool = config_field(True, "gated_mlp")
    bias: bool = config_field(False, "mlp_bias")
    parallel: bool = config_field(False, "parallel_mlp")


@dataclasses.dataclass(frozen=True, repr=False)
class Scales(FieldGroup):
    """Constant factors (Granite, https://arxiv.org/abs/2405.04324).

    Attributes:
      embedding: The factor of the rows of the embedding.
      residual: The factor of the outputs of attention and MLP, before they are added to the stream.
      logits: The factor of the logits.
    """

    embedding: float = config_field(1.0, "embedding_scale", 0)
    residual: float = config_field(1.0, "residual_scale", 0)
    logits: float = config_field(1.0, "logit_scale", 0)

    def __post_init__(self) -> None:
        for field in ("embedding", "residual", "logits"):
            if not getattr(self, field) > 0:
                refuse(self, field, "more than 0, or 1 for no factor")


@dataclasses.dataclass(frozen=True, repr=False)
class Norm(FieldGroup):
    """The norms of the residual stream, of queries and of keys.

    Attributes:
      kind: Either `"rms"` for RMSNorm, or `"layer"` for LayerNorm, which subtracts the mean (Ba et
        al., https://arxiv.org/abs/1607.06450).
      bias: Whether a bias is added after the scale, for `"layer"`.
      epsilon: The number that every norm adds to the mean of squares.
      offset: Whether norms multiply by `1 + scale`, where `scale` begins with 0.
      post: Whether the outputs of attention and MLP are normalized too, before they are added to
        the stream.
      pre: Whether the inputs of attention and MLP are normalized.
      shared: Whether attention and a parallel MLP read the result of one norm.
    """

    kind: NormKind = config_field("rms", "norm_kind", choices=NORM_KINDS)
    bias: bool = config_field(False, "norm_bias")
    epsilon: float = config_field(1e-6, "norm_epsilon", 0, below=1)
    offset: bool = config_field(False, "norm_offset")
    post: bool = config_field(False, "post_norms")
    pre: bool = config_field(True, "pre_norms")
    shared: bool = config_field(False, "shared_norm")

    def __post_init__(self) -> None:
        refuse_unknown(self, "kind", NORM_KINDS)
        if self.kind == "layer" and self.offset:
            refuse(self, "offset", "False with kind='layer'")
        if self.kind == "rms" and self.bias:
            refuse(self, "bias", "False with kind='rms'")
        if not self.pre and (self.shared or not self.post):
            refuse(self, "pre", "True, or post without shared")
        if not self.epsilon > 0:
            refuse(self, "epsilon", "more than 0, such as 1e-6")


# `LayerOverlap`, and what only a whole layer can do.
SplitOverlap = LayerOverlap | Literal["dual_batch"]
SPLIT_OVERLAPS: tuple[SplitOverlap, ...] = (*LAYER_OVERLAPS, "dual_batch")


@dataclasses.dataclass(frozen=True, repr=False)
class Split(FieldGroup):
    """How each layer is split over devices.

    Attributes:
      axis: The mesh axis over which each layer is split; `None` for none. The mesh may lack the
        axis.
      sequence_parallel: Whether the residual stream is split over `axis` too, along its positions.
        The number of devices must divide the number of positions.
      overlap: `"ring"`: attention and MLP send chunks of the sequence around a ring of devices
        while they compute; this needs `sequence_parallel`. `"dual_batch"`: in training on a mesh
        with `axis`, two halves of a device's batch go through each layer side by side, so that one
        computes while the other is sent; this needs mode `manual`, and an even number of sequences
        of a minibatch on each device. `"none"`: one collective before or after each product.
        Experts and head always use one collective.
    """

    axis: str | None = flat_field(None, "split_axis")
    sequence_parallel: bool = flat_field(False, "sequence_parallel")
    overlap: SplitOverlap = flat_field("none", "overlap")

    def __post_init__(self) -> None:
        if self.sequence_parallel and not self.axis:
            refuse(self, "sequence_parallel", "False, or set axis, such as 'model', too")
        if self.overlap == "ring" and not self.sequence_parallel:
            refuse(
                self,
                "overlap",
                "'none' or 'dual_batch' without sequence_parallel, because only the collectives of "
                "sequence parallelism can go around a ring",
            )
        if self.overlap == "dual_batch" and not self.axis:
            refuse(self, "overlap", "'none', or set axis, such as 'model', too")
        refuse_unknown(self, "overlap", SPLIT_OVERLAPS)

    @property
    def sequence_dim(self) -> int | None:
        """The dim along which the residual stream is split; `None` if the stream is not split."""
        return 1 if self.sequence_parallel else None


@dataclasses.dataclass(frozen=True, repr=False)
class LowPrecision(FieldGroup):
    """The products of layers that are computed in few bits, see `float8_dot_general`.

    Embedding, head, routers, norms, the products of attention's scores and values, the latents of
    latent attention, and adapters stay as they are.

    Attributes:
      matmul: The format of products with kernels: `"float8"` or `"int8"`; `""` for `dtype`.
      layers: Which products have this format: globs on `attention/query`, `attention/key`,
        `attention/value`, `attention/out`, `mlp/gate`, `mlp/up`, `mlp/down`, and `experts`.
    """

    matmul: Matmul = config_field("", choices=MATMULS)
    layers: tuple[str, ...] = config_field(("*",), "matmul_layers")

    def __post_init__(self) -> None:
        refuse_unknown(self, "matmul", MATMULS)
        if not self.layers or not isinstance(self.layers, tuple):
            refuse(self, "layers", "a tuple of one or more globs such as ('mlp/*',)")
        if not self.matmul and self.layers != ("*",):
            refuse(self, "layers", "('*',) without matmul")

    def of_product(self, name: str) -> Matmul:
        """Returns the format of the product `name`, such as `mlp/up`."""
        return self.matmul if any(fnmatch.fnmatchcase(name, x) for x in self.layers) else ""

    def is_float8(self, *names: str) -> bool:
        """Returns whether all products `names` are in float8."""
        return all(self.of_product(name) == "float8" for name in names)

    def check(self, names: Sequence[str]) -> None:
        """Refuses a glob that matches no product of a model, whose products are `names`."""
        for glob in self.layers if self.matmul else ():
            if not fnmatch.filter(names, glob):
                refuse(
                    self,
                    "layers",
                    f"globs on {', '.join(map(repr, names))}, but {glob!r} matches none"
                    f"{suggest(glob, names)}",
                )


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The configuration of a layer, which a `Transformer` makes from its own fields in each call.

    Attributes:
      hidden_size: Features between layers.
      num_heads: Query heads.
      num_kv_heads: Key and value heads, at least 1.
      head_size: Features of a head, at least 2.
      mlp_size: Features inside the MLP, or inside an expert.
      dropout_rate: The dropout rate; 0 outside of training.
      added_scale: The factor of the initial weights of a layer's last products, such as `out` and
        `down`, which are added to the residual stream.
      dtype: The dtype of the computation.
      activation: See `ACTIVATIONS`.
      annotate: Whether the dims of parameters have names.
      attention: See `Attention`.
      rotary: See `Rotary`; without scaling if the layer is not scaled.
      norm: See `Norm`.
      mlp: See `Mlp`.
      scales: See `Scales`.
      experts: See `Experts`.
      split: See `Split`.
      context: How sequences are split over devices.
      low_precision: See `LowPrecision`.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    dropout_rate: float
    added_scale: float
    dtype: jnp.dtype
    activation: Activation = "silu"
    annotate: bool = False
    attention: Attention = Attention()
    rotary: Rotary = NO_ROTARY
    norm: Norm = Norm()
    mlp: Mlp = Mlp()
    scales: Scales = Scales()
    experts: Experts = Experts()
    split: Split = Split()
    context: Context = Context()
    low_precision: LowPrecision = LowPrecision()


def reads_float8(config: Any) -> tuple[bool, bool]:
    """Returns whether only products in float8 read what attention and the MLP enter.

    `config` is a `LayerConfig`, or a `Transformer`, whose fields have the same names. The keys and
    values of latent attention are not among its products.
    """
    is_float8 = config.low_precision.is_float8
    of_mlp = is_float8("mlp/up") and (not config.mlp.gated or is_float8("mlp/gate"))
    if config.attention.latent.rank:
        return is_float8("attention/query"), of_mlp
    of_attention = is_float8("attention/query", "attention/key", "attention/value")
    return of_attention and (of_mlp or not config.norm.shared), of_mlp


# -------------------------------------------------------------------------------------------------
# Products and norms of layers that may be split over a mesh axis, and the names of their dims.


# The logical names of the dims that are split over the axis.
SPLIT_DIMS = frozenset({"vocab", "heads", "kv_heads", "mlp"})

DimNames = tuple[str | None, ...]


def marked(init: Any, dim_names: DimNames, *, annotate: bool) -> Any:
    """Adds the names of a parameter's dims to its initializer if `annotate` is set."""
    return nn.with_logical_partitioning(init, dim_names) if annotate else init


def split_dims(dim_names: DimNames, axis: str | None) -> DimNames:
    """Returns `axis` for each dim name that layers split, and `None` for all other dims."""
    return tuple(axis if name in SPLIT_DIMS else None for name in dim_names)


class _UsedInFloat32(nn.Module):
    """A module that uses its parameters in float32, though they may be gathered in bfloat16.

    Devices along an axis may have different positions. Then autodiff sums the gradients of the
    parameters in the dtype in which they meet the positions. Without the cast jax 0.12 sums them in
    bfloat16, and jax 0.10 in float32.
    """

    @nn.nowrap
    def param(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a parameter as flax does, and returns it in float32 or wider."""
        value: Any = super().param(*args, **kwargs)
        return value.astype(jnp.promote_types(value.dtype, jnp.float32))


class RMSNorm(_UsedInFloat32, nn.RMSNorm):
    """Flax's RMSNorm, with its scale in float32."""


class LayerNorm(_UsedInFloat32, nn.LayerNorm):
    """Flax's LayerNorm, with its scale and bias in float32."""


def make_product(
    config: LayerConfig,
    shape: tuple[int, ...],
    dim_names: DimNames,
    *,
    contracted: int = 1,
    scale: float = 1.0,
    use_bias: bool = False,
    name: str,
) -> SplitDense:
    """Makes a `SplitDense` layer; the variance of its initial weights is `scale**2 / inputs`.

    `name` has the name of the part of the layer, such as `mlp/up`.
    """
    dims, names = range(len(shape)), split_dims(dim_names, config.split.axis)
    is_row = any(names[:contracted])
    init = nn.initializers.variance_scaling(
        scale**2, "fan_in", "normal", dims[:contracted], dims[contracted:]
    )
    return SplitDense(
        shape,
        names,
        contracted,
        use_bias=use_bias,
        kernel_init=marked(init, dim_names, annotate=config.annotate),
        bias_init=marked(nn.initializers.zeros, dim_names[contracted:], annotate=config.annotate),
        dtype=config.dtype,
        sequence_dim=config.split.sequence_dim if is_row else None,
        overlap="ring" if is_row and config.split.overlap == "ring" else "none",
        shared="kv_heads" in dim_names,
        matmul=config.low_precision.of_product(name),
        name=name.rpartition("/")[2],
    )
