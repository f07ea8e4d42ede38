"""A layer of the transformer: attention and an MLP or experts, each added to the residual stream.

Attention, MLP and experts may be split over a mesh axis, as in Megatron-LM (Shoeybi et al.,
https://arxiv.org/abs/1909.08053): each device computes some of the heads and some of the MLP's
features. Attention and MLP call `enter` and `leave` once each, so that a layer and its gradient
have four all-reduces of the residual stream. With `sequence_dim` the residual stream and its norms
are split along their positions (https://arxiv.org/abs/2205.05198). With `overlap="ring"` attention
and MLP then compute while they send, see `manualpar.layers.ring`. With `overlap="dual_batch"` two
halves of the device's batch go through a layer side by side, see the last section. Sequences may
also be split over a context axis; only attention and experts have code for such sequences, see
`manualpar.layers.attention.context`.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `K` key and value heads,
`H` features of a head, `F` features inside the MLP. `axis` in a shape stands for the number of
devices along `config.split.axis`.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fm32
from flax.traverse_util import flatten_dict

from manualpar.core.parameters.collectives import gather_invariant, varying_axes
from manualpar.core.parameters.placement import MatrixDims
from manualpar.core.tracing.scopes import COLLECTIONS_SCOPE, HALVES
from manualpar.core.trees import path_keys
from manualpar.layers import MoE, enter, split
from manualpar.layers.attention.key_value_cache import (
    CACHE,
    LATENT,
    NEW_KEYS,
    Past,
    Prompts,
    attend_to_kept,
    keep_prompts,
)
from manualpar.layers.boundaries import bound_axes, mean_square_of_heads
from manualpar.layers.moe.routing import COUNTS, LOSSES
from manualpar.layers.ring import Chunks, enter_ring, whole_sequence
from manualpar.models.layer_config import (
    ACTIVATIONS,
    Attention,
    DimNames,
    LayerConfig,
    LayerNorm,
    RMSNorm,
    make_product,
    marked,
    reads_float8,
    split_dims,
)
from manualpar.models.rotary import rotate, scaled

# The kinds of chips on which a layer's input is behind a barrier: v5p. By the planner's estimates
# of compiled steps this saves 5% on `v5p:2x2x4` (32 layers of 4,096; 4% for 8 of 2,048). On
# `v5e:4x4` it would save 2%, on `v6e:4x4` nothing, and on `v5e:2x4` it would cost 3%.
APART = frozenset({"TPU v5", "TPU v5p"})


# The residual stream and the documents of a device's batch, or of its two halves, see the last
# section.
Halves = tuple[jax.Array, jax.Array]
Stream = jax.Array | Halves
Documents = jax.Array | Halves | None


class Layer(nn.Module):
    """Attention and an MLP or experts, each added to the residual stream.

    Attributes:
      config: The config of the layer.
      gathers_float8: Whether inputs that only products in float8 read are gathered as codes, see
        `enter`. A program with `gather_code="float8"` sets it.
    """

    config: LayerConfig
    gathers_float8: bool = False

    @nn.compact
    def __call__(
        self,
        x_BSD: Stream,
        angles_SH: jax.Array | None,
        document_BS: Documents,
        rows: Prompts | Past | None = None,
    ) -> tuple[Stream, None]:
        """Runs the layer; returns the new residual stream, and a `None` that `nn.scan` requires.

        The stream is `[B, S, D]`, or `[B, S/axis, D]` if it is split, or a pair of halves, and then
        `document_BS` is a pair too. A position attends only to positions with the same number in
        `document_BS`; `None` stands for one document. Without angles nothing is rotated. With
        `rows`, keys and values are kept in collections, see `Transformer`.
        """
        if isinstance(x_BSD, tuple):
            return run_halves(self, x_BSD, angles_SH, document_BS), None
        assert not isinstance(document_BS, tuple)
        config, x_BSD = self.config, _behind_barrier(x_BSD)
        drop = nn.Dropout(config.dropout_rate, deterministic=not config.dropout_rate)
        scale, norm = config.scales.residual, config.norm
        of_attention, of_mlp = (self.gathers_float8 and x for x in reads_float8(config))

        def added(x_BSD: jax.Array, y_BSD: jax.Array) -> jax.Array:
            y_BSD = y_BSD if scale == 1 else y_BSD * jnp.asarray(scale, y_BSD.dtype)
            return x_BSD + drop(y_BSD)

        if config.attention.latent.rank:
            attention: Any = LatentAttention(config, name="attention")
            into_BSD: Any = normalize(x_BSD, "attention_norm", config)
        else:
            attention = SelfAttention(config, name="attention")
            into_BSD = enter_normalized(x_BSD, "attention_norm", config, float8=of_attention)
        y_BSD = attention(into_BSD, angles_SH, document_BS, rows)
        if norm.post:
            y_BSD = normalize(y_BSD, "attention_post_norm", config)
        summed_BSD = added(x_BSD, y_BSD)
        read_BSD = x_BSD if config.mlp.parallel else summed_BSD
        if config.experts.num_experts:
            y_BSD = _experts(config)(normalize(read_BSD, "mlp_norm", config))
        else:
            if not norm.shared:
                into_BSD = enter_normalized(read_BSD, "mlp_norm", config, float8=of_mlp)
            y_BSD = GatedMLP(config, name="mlp")(into_BSD)
        if norm.post:
            y_BSD = normalize(y_BSD, "mlp_post_norm", config)
        return added(summed_BSD, y_BSD), None


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; groups of query heads share a key and value head."""

    config: LayerConfig

    @nn.compact
    def __call__(
        self,
        x_BSD: jax.Array | Chunks,
        angles_SH: jax.Array | None,
        document_BS: jax.Array | None,
        rows: Prompts | Past | None = None,
    ) -> jax.Array:
        """Computes attention from the result of `enter_normalized`; `Layer` adds the output."""
        config, hidden_size = self.config, self.config.hidden_size
        how = config.attention
        query = (hidden_size, config.num_heads, config.head_size), ("embed", "heads", None)
        key = (hidden_size, config.num_kv_heads, config.head_size), ("embed", "kv_heads", None)
        out = (config.num_heads, config.head_size, hidden_size), ("heads", None, "embed")

        def project(shape: tuple[int, ...], dim_names: DimNames, name: str) -> jax.Array:
            product = make_product(
                config, shape, dim_names, use_bias=how.qkv_bias, name=f"attention/{name}"
            )
            return whole_sequence(product(x_BSD))

        query_BSNH, key_BSKH = project(*query, "query"), project(*key, "key")
        if how.wide_query_key_norm:
            query_BSNH = WideNorm(config, "heads", name="query_norm")(query_BSNH)
            key_BSKH = WideNorm(config, "kv_heads", name="key_norm")(key_BSKH)
        elif how.query_key_norm:
            query_BSNH = _norm("query_norm", None, config)(query_BSNH)
            key_BSKH = _norm("key_norm", None, config)(key_BSKH)
        # Attention multiplies scores by `H ** -0.5`, so `how.scale` is divided by this factor.
        scale = how.scale * config.head_size**0.5 or 1.0
        if angles_SH is None:
            if how.score_growth:
                query_BSNH = self._grown(query_BSNH, rows)
            query_BSNH = scaled(query_BSNH, scale)
        elif how.rotated_norm:
            unit = nn.RMSNorm(config.norm.epsilon, dtype=config.dtype, use_scale=False)
            query_BSNH, key_BSKH = (
                unit(rotate(x, angles_SH, rotary=config.rotary)) for x in (query_BSNH, key_BSKH)
            )
            query_BSNH = scaled(query_BSNH, scale)
        else:
            query_BSNH = rotate(query_BSNH, angles_SH, scale=scale, rotary=config.rotary)
            key_BSKH = rotate(key_BSKH, angles_SH, rotary=config.rotary)
        if how.notes_largest:
            query_BSNH = note_largest_scores(self, config, query_BSNH, key_BSKH, document_BS)
        value_BSKH = project(*key, "value")
        sinks_N = _sinks(self, config)
        if isinstance(rows, Past):
            kept: Any = self.get_variable(CACHE, "key"), self.get_variable(CACHE, "value")
            mixed_BSNH = attend_to_kept(
                query_BSNH, key_BSKH, value_BSKH, kept, rows, how.scoring, sinks_N
            )
        else:
            # Parameters do not depend on the implementation of attention. So initialization uses an
            # implementation that runs on every device.
            mixed_BSNH = config.context.attention(
                query_BSNH,
                key_BSKH,
                value_BSKH,
                document_BS,
                kind="" if self.is_initializing() else how.kind,
                sinks=sinks_N,
                **how.scoring._asdict(),
            )
        if rows is not None:
            for name, x in (("key", key_BSKH), ("value", value_BSKH)):
                if isinstance(rows, Prompts):
                    x = keep_prompts(x, rows, how.scoring)
                self.put_variable(NEW_KEYS, name, x)
        of_out: Any = {
            "scale": config.added_scale,
            "use_bias": how.out_bias,
            "name": "attention/out",
        }
        leave = make_product(config, *out, contracted=2, **of_out)
        return leave(mixed_BSNH)

    def _grown(self, query_BSNH: jax.Array, rows: Prompts | Past | None) -> jax.Array:
        """Multiplies queries by the factors that grow with their positions."""
        how = self.config.attention
        if isinstance(rows, Past):
            positions = rows.position[:, None]
        else:
            positions = self.config.context.positions(query_BSNH.shape[1])[None]
        number = jnp.floor((positions.astype(jnp.float32) + 1) / how.score_growth_length)
        factor = 1 + how.score_growth * jnp.log1p(number)
        return (query_BSNH.astype(jnp.float32) * factor[..., None, None]).astype(query_BSNH.dtype)


# -------------------------------------------------------------------------------------------------
# QK-clip (Kimi K2, https://arxiv.org/abs/2507.20534): heads whose scores grow too large in a step
# get smaller kernels of queries and keys after the update.
#
# A layer notes the largest score of each head. The kernels of attention do not return it, so the
# products of queries and keys are computed a second time, without gradient. The maximum over
# layers' uses, minibatches and devices is that of flax's FP8 scales: the gradient of a variable
# that each step replaces by its gradient (`manualpar.core.modes.variable_reduction`). So there is
# one maximum over the devices in each step, of `L N` numbers. Devices that have some of the heads
# first gather the numbers of all heads.
#
# The update gives the variables to the optimizer, as the argument `collections`. `qk_clip`, the
# last part of an optimizer's chain, multiplies both kernels by `sqrt(threshold / largest)` where
# the largest score of the heads that share a key is above the threshold. This is elementwise, so
# it sends nothing.


LARGEST, OVERWRITTEN = "largest_score", OVERWRITE_WITH_GRADIENT
_MOST_BLOCKS, _SMALLEST_BLOCK = 16, 256


def note_largest_scores(
    module: nn.Module,
    config: LayerConfig,
    query_BSNH: jax.Array,
    key_BSKH: jax.Array,
    document_BS: jax.Array | None,
) -> jax.Array:
    """Returns the queries; notes the largest score of each head when they are differentiated.

    Communication:
      If heads are split over a model axis, an all-gather of `float32[N]` over the axis.
    """
    if not module.is_initializing() and not module.has_variable(OVERWRITTEN, LARGEST):
        return query_BSNH  # Only a training state has the variable.
    variable: Any = module.variable(OVERWRITTEN, LARGEST, jnp.zeros, config.num_heads, jnp.float32)
    value = variable.value
    if value.dtype != fm32:  # It is not differentiated.
        return query_BSNH
    arrays = jax.lax.stop_gradient((query_BSNH, key_BSKH))
    largest_N = largest_scores(*arrays, document_BS, config.attention)
    if len(largest_N) < config.num_heads:
        axes = bound_axes("Transformer", config.split.axis)
        largest_N = gather_invariant(largest_N, 0, axes, scope=COLLECTIONS_SCOPE)
    return _noted(query_BSNH, largest_N, value)


@jax.custom_vjp
def _noted(x: jax.Array, largest: jax.Array, variable: jax.Array) -> jax.Array:
    """Returns `x`; the gradient of `variable` is `largest`."""
    del largest, variable
    return x


_noted.defvjp(
    lambda x, largest, variable: (x, largest),
    lambda largest, g: (
        g,
        jnp.zeros_like(largest),
        jax.lax.convert_element_type(largest, fm32),
    ),
)


def largest_scores(
    query_BSNH: jax.Array, key_BSKH: jax.Array, document_BS: jax.Array | None, how: Attention
) -> jax.Array:
    """Returns the largest score of each query head that attention sees, `float32[N]`."""
    (S, N, H), K = query_BSNH.shape[1:], key_BSKH.shape[2]
    size = max(_SMALLEST_BLOCK, -(-S // _MOST_BLOCKS))
    position = jnp.arange(S)
    blocks = []
    for start in range(0, S, size):
        end = min(start + size, S)
        queries = query_BSNH[:, start:end].reshape(-1, end - start, K, N // K, H)
        scores = jnp.einsum(
            "bqkgh,bskh->bkgqs",
            queries,
            key_BSKH[:, :end],
            preferred_element_type=jnp.float32,
        )
        documents: tuple[Any, Any] = None, None
        if document_BS is not None:
            documents = document_BS[:, start:end], document_BS[:, :end]
        seen = how.scoring.sees(position[start:end], position[:end], documents)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        blocks.append(scores.max((0, 3, 4)))
    return jnp.stack(blocks).max(0).reshape(N) * H**-0.5


def qk_clip(threshold: float) -> optax.GradientTransformationExtraArgs:
    """Makes the last part of an optimizer, which bounds the scores of a `Transformer`'s attention.

    After each update the kernels and biases of the queries and keys of a head are multiplied by
    `sqrt(threshold / s)` if `s`, the largest score of the head in the step, is above the threshold.
    Heads that share a key share the factor. The model needs `Attention(notes_largest=True)`.

    Args:
      threshold: The largest score that does not change a kernel, such as 100.

    Returns:
      The transformation. Its update takes `collections`, the state's collections after the step,
      which a program's update passes to its optimizer.

    Raises:
      ValueError: The update raises this error if no layer notes its largest scores.

    Communication:
      None.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, collections: Any = None, **others: Any
    ) -> tuple[Any, Any]:
        del others
        noted = flatten_dict(dict((collections or {}).get(OVERWRITTEN, {})))
        noted = {path[:-1]: x for path, x in noted.items() if path[-1] == LARGEST}
        if not noted:
            raise ValueError(
                "qk_clip: no layer notes its largest scores, expected a Transformer with "
                "attention=Attention(notes_largest=True)."
            )

        def clip(path: Any, update: jax.Array, x: jax.Array) -> jax.Array:
            keys = path_keys(path)
            if keys[:-2] not in noted or keys[-2] not in ("query", "key"):
                return update
            is_bias, largest = keys[-1] == "bias", noted[keys[:-2]]
            number = params_of(params, (*keys[:-2], "key", keys[-1])).shape[-2]
            groups = largest.reshape(*largest.shape[:-1], number, -1).max(-1)
            factor = jnp.sqrt(jnp.where(groups > threshold, threshold / groups, 1))
            factor = jnp.repeat(factor, x.shape[-2] // number, axis=-1)[..., None]
            factor = factor if is_bias else jnp.expand_dims(factor, -3)
            return ((x + update) * factor - x).astype(update.dtype)

        return jax.tree_util.tree_map_with_path(clip, updates, params), state

    def params_of(params: Any, keys: tuple[str, ...]) -> Any:
        return functools.reduce(lambda tree, key: tree[key], keys, params)

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


# -------------------------------------------------------------------------------------------------


class GatedMLP(nn.Module):
    """A gated MLP, SwiGLU or GeGLU with `gelu`, or an MLP without gates."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array | Chunks) -> jax.Array:
        """Computes the MLP from the result of `enter_normalized`; `Layer` adds the output."""
        config, hidden_size = self.config, self.config.hidden_size
        into = (hidden_size, config.mlp_size), ("embed", "mlp")
        out = (config.mlp_size, hidden_size), ("mlp", "embed")
        bias: Any = {"use_bias": config.mlp.bias}
        activate = ACTIVATIONS[config.activation]
        up_BSF = make_product(config, *into, name="mlp/up", **bias)(x_BSD)
        down = make_product(config, *out, scale=config.added_scale, name="mlp/down", **bias)
        if not config.mlp.gated:
            return down(jax.tree.map(activate, up_BSF))
        gate_BSF = make_product(config, *into, name="mlp/gate", **bias)(x_BSD)
        # With `overlap="ring"`, `gate_BSF` and `up_BSF` are `Chunks`.
        return down(jax.tree.map(lambda gate, up: activate(gate) * up, gate_BSF, up_BSF))


class OffsetNorm(nn.Module):
    """An RMSNorm that multiplies by `1 + scale`.

    Attributes:
      epsilon: The number added to the mean of squares.
      dtype: The dtype of the result; the computation is in float32.
      scale_init: The initializer of `scale`, `float32[D]`.
    """

    epsilon: float
    dtype: jnp.dtype
    scale_init: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes `[..., D]` over its last dim."""
        scale_D = self.param("scale", self.scale_init, (x.shape[-1],), jnp.float32)
        factor = 1 + scale_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale_D.shape)
        unit = nn.RMSNorm(self.epsilon, dtype=jnp.float32, use_scale=False, name="unit")(x)
        return (unit * factor).astype(self.dtype)


class WideNorm(nn.Module):
    """An RMSNorm over the features of all heads, which may be split over devices.

    Attributes:
      config: The config of the layer.
      dim_name: The name of the dim of heads.
    """

    config: LayerConfig
    dim_name: str

    @nn.compact
    def __call__(self, x_BSNH: jax.Array) -> jax.Array:
        """Normalizes `[B, S, N, H]`, this device's heads, over the last two dims of all devices.

        Communication:
          An all-reduce of the means of squares, `[B, S]`, over `config.split.axis`, and another in
          the backward pass.
        """
        config = self.config
        heads = config.num_heads if self.dim_name == "heads" else config.num_kv_heads
        dim_names = self.dim_name, None
        init = marked(nn.initializers.ones, dim_names, annotate=config.annotate)
        if config.split.axis:
            names = split_dims(dim_names, config.split.axis)
            init = split(init, names, shared=self.dim_name == "kv_heads")
        shape = heads, config.head_size
        scale_NH: jax.Array = self.param("scale", init, shape, jnp.float32)
        x = x_BSNH.astype(jnp.float32)
        mean = mean_square_of_heads(x, config.split.axis)
        unit = x * jax.lax.rsqrt(mean + config.norm.epsilon)
        return (unit * scale_NH[None, None]).astype(config.dtype)


def enter_normalized(
    x_BSD: jax.Array, name: str, config: LayerConfig, *, float8: bool = False
) -> jax.Array | Chunks:
    """Applies a norm called `name`, and then `enter`, or `enter_ring` if products overlap.

    `float8` is as in `enter`. A ring sends no codes: each chunk has a scale of its own.

    Communication:
      The communication of `normalize`, and of `enter` or `enter_ring`.
    """
    y_BSD = normalize(x_BSD, name, config) if config.norm.pre else x_BSD
    how = config.split
    if how.overlap == "ring" and how.sequence_dim is not None:
        return enter_ring(y_BSD, how.axis, how.sequence_dim)
    return enter(y_BSD, how.axis, how.sequence_dim, float8=float8)


def normalize(x_BSD: jax.Array, name: str, config: LayerConfig) -> jax.Array:
    """Applies a norm called `name` to the residual stream.

    Communication:
      If the stream is split over positions: in the backward pass, an all-reduce of the scale's
      gradient, because each device along the axis has different positions.
    """
    y_BSD: jax.Array = _norm(name, "embed", config)(x_BSD)
    return y_BSD


def _behind_barrier(x_BSD: jax.Array) -> jax.Array:
    """Keeps XLA from fusing a layer's input with what comes before, on chips where this helps.

    In mode `auto` steps would be slower, so this is for mode `manual`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kind = mesh.abstract_device.device_kind if mesh.abstract_device else ""
    return jax.lax.optimization_barrier(x_BSD) if mesh.manual_axes and kind in APART else x_BSD


def _norm(name: str, dim_name: str | None, config: LayerConfig) -> nn.Module:
    """Makes a norm called `name` over the last dim, whose logical name is `dim_name`."""
    initial = nn.initializers.zeros if config.norm.offset else nn.initializers.ones
    init = marked(initial, (dim_name,), annotate=config.annotate)
    if config.norm.kind == "layer":
        zeros = marked(nn.initializers.zeros, (dim_name,), annotate=config.annotate)
        return LayerNorm(
            config.norm.epsilon,
            dtype=config.dtype,
            use_bias=config.norm.bias,
            scale_init=init,
            bias_init=zeros,
            use_fast_variance=False,
            name=name,
        )
    kind: Any = OffsetNorm if config.norm.offset else RMSNorm
    norm: nn.Module = kind(config.norm.epsilon, dtype=config.dtype, scale_init=init, name=name)
    return norm


def _sinks(module: nn.Module, config: LayerConfig) -> jax.Array | None:
    """Makes the parameter `sinks` of this device's query heads, if heads have sinks."""
    if not config.attention.sinks:
        return None
    init = marked(nn.initializers.zeros, ("heads",), annotate=config.annotate)
    if config.split.axis:
        init = split(init, split_dims(("heads",), config.split.axis))
    sinks: jax.Array = module.param("sinks", init, (config.num_heads,), jnp.float32)
    return sinks


def _experts(config: LayerConfig) -> MoE:
    return MoE(
        **config.experts.of_layer,
        mlp_size=config.mlp_size,
        model_axis=config.split.axis,
        sequence=config.split.sequence_parallel,
        down_scale=config.added_scale,
        context_axis=config.context.axis,
        matmul=config.low_precision.of_product("experts"),
        name="experts",
    )


# -------------------------------------------------------------------------------------------------
# Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).
#
# A product compresses each position to one *latent* of `R` features, from which the keys and
# values of all heads are computed. A second part of the product, `P` features, is rotated by the
# position and is a part of every head's key. Queries may come from a latent too. In generation the
# cache has only the latent and the rotated part, `R + P` numbers for a position. A new token then
# does not compute the keys of earlier positions: it multiplies its queries with the kernel of the
# keys, and attends to the latents themselves.
#
# If a layer is split over devices, each device computes the latents in full, and then its heads.
# With sequence parallelism each device compresses its own positions, and the latents are gathered:
# `R + P` features in place of the `D` features of the residual stream.
#
# Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `H` features of a
# query and of a key, `V` features of a value, `Q` features of the latent of queries.


EPSILON = 1e-6  # The norms of latents add it in all models, whatever the other norms add.


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent of each position.

    Its parameters are `latent/kernel` `[D, R + P]`, `latent_norm/scale` `[R]`, `expand/kernel`
    `[R, N, H - P + V]`, `query/kernel` `[D, N, H]` and `out/kernel` `[N, V, D]`. With a latent of
    queries there are also `query_latent/kernel` `[D, Q]` and `query_latent_norm/scale` `[Q]`, and
    `query/kernel` is `[Q, N, H]`.
    """

    config: LayerConfig
    gathers_float8: bool = False  # As in `Layer`.

    @nn.compact
    def __call__(
        self,
        x_BSD: jax.Array,
        angles_SH: jax.Array,
        document_BS: jax.Array | None,
        rows: Prompts | Past | None = None,
    ) -> jax.Array:
        """Computes attention from the normalized residual stream; `Layer` adds the output."""
        config, how = self.config, self.config.attention
        latent, D = how.latent, config.hidden_size
        N, H, P, V, R = (
            config.num_heads,
            config.head_size,
            latent.rotary_size,
            latent.value_size,
            latent.rank,
        )
        where = config.split.axis, config.split.sequence_dim
        scoring = how.scoring
        float8 = self.gathers_float8 and reads_float8(config)[0]

        def turn(x_BSNH: jax.Array) -> jax.Array:
            """Rotates the last `P` features."""
            still, turned = jnp.split(x_BSNH, [x_BSNH.shape[-1] - P], axis=-1)
            turned = rotate(turned, angles_SH, rotary=config.rotary)
            return jnp.concatenate([still, turned], axis=-1)

        if latent.query_rank:
            compressed = Compress(config, latent.query_rank, name="query_latent")(x_BSD)
            normed = _latent_norm("query_latent_norm", config)(compressed)
            of_query, into = enter(normed, *where, float8=float8), latent.query_rank
        else:
            of_query, into = enter(x_BSD, *where, float8=float8), D
        query = make_product(config, (into, N, H), (None, "heads", None), name="attention/query")
        query_BSNH = turn(query(of_query))
        compressed = Compress(config, R + P, name="latent")(x_BSD)
        normed = _latent_norm("latent_norm", config)(compressed[..., :R])
        own_BS1L = jnp.concatenate([normed, compressed[..., R:]], axis=-1)[:, :, None]
        latent_BS1L = turn(enter(own_BS1L, *where))
        expand_RNH = Expand(config, (R, N, H - P + V), name="expand")()
        scale = how.scale or H**-0.5
        if isinstance(rows, Past):
            of_keys, of_values = jnp.split(expand_RNH, [H - P], axis=-1)
            still, turned = jnp.split(query_BSNH, [H - P], axis=-1)
            absorbed = jnp.einsum("bsnh,rnh->bsnr", still, of_keys)
            query_BSNL = scaled(jnp.concatenate([absorbed, turned], -1), scale * (R + P) ** 0.5)
            kept: Any = self.get_variable(CACHE, LATENT)
            pair, values = (kept, kept[..., :R]), latent_BS1L[..., :R]
            mixed = attend_to_kept(query_BSNL, latent_BS1L, values, pair, rows, scoring)
            mixed_BSNV = jnp.einsum("bsnr,rnv->bsnv", mixed, of_values)
        else:
            expanded = jnp.einsum("bsr,rnh->bsnh", latent_BS1L[:, :, 0, :R], expand_RNH)
            key_BSNH, value_BSNV = jnp.split(expanded, [H - P], axis=-1)
            turned = jnp.broadcast_to(latent_BS1L[..., R:], (*key_BSNH.shape[:3], P))
            key_BSNH = jnp.concatenate([key_BSNH, turned], axis=-1)
            # Attention needs keys and values of one size. Zeros change no score, and no sum.
            size = max(H, V)
            mixed_BSNV = config.context.attention(
                _padded(scaled(query_BSNH, scale * size**0.5), size),
                _padded(key_BSNH, size),
                _padded(value_BSNV, size),
                document_BS,
                kind="" if self.is_initializing() else how.kind,
                **scoring._asdict(),
            )[..., :V]
        if rows is not None:
            new = turn(own_BS1L)  # The same on all devices along the axis, as the cache is.
            if isinstance(rows, Prompts):
                new = keep_prompts(new, rows, scoring)
            self.put_variable(NEW_KEYS, LATENT, new)
        dims: tuple[int, ...] = (N, V, D)
        names: DimNames = ("heads", None, "embed")
        of_out: Any = {"contracted": 2, "scale": config.added_scale, "name": "attention/out"}
        result: jax.Array = make_product(config, dims, names, **of_out)(mixed_BSNV)
        return result


class Compress(nn.Module):
    """A product with a kernel that every device has in full, of this device's positions."""

    config: LayerConfig
    features: int

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Multiplies the normalized residual stream, `[B, S, D]`, by the kernel."""
        config = self.config
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        init = marked(init, ("embed", None), annotate=config.annotate)
        kernel = self.param("kernel", init, (config.hidden_size, self.features))
        if config.split.sequence_dim is not None:
            kernel = enter(kernel, config.split.axis)  # Devices have different positions.
        return jnp.matmul(x_BSD, kernel.astype(config.dtype))


class Expand(nn.Module):
    """The kernel that makes keys and values of this device's heads from a latent."""

    config: LayerConfig
    shape: tuple[int, int, int]
    matrix_dims: ClassVar[Mapping[str, MatrixDims]] = {"kernel": MatrixDims((0,), (1, 2))}

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns the kernel, in the dtype of the layer."""
        config, names = self.config, (None, "heads", None)
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", (0,), (1, 2))
        init = marked(init, names, annotate=config.annotate)
        if config.split.axis:
            init = split(init, split_dims(names, config.split.axis))
        kernel: jax.Array = self.param("kernel", init, self.shape)
        return kernel.astype(config.dtype)


def _latent_norm(name: str, config: LayerConfig) -> nn.Module:
    init = marked(nn.initializers.ones, (None,), annotate=config.annotate)
    norm: nn.Module = RMSNorm(EPSILON, dtype=config.dtype, scale_init=init, name=name)
    return norm


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Adds zeros at the end of the last dim, up to `size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


# -------------------------------------------------------------------------------------------------
# Two halves of the device's batch in a layer (dual-batch overlap, as in DeepSeek-V3,
# https://arxiv.org/abs/2412.19437, and Domino, https://arxiv.org/abs/2409.15241).
#
# The collectives of a split layer wait for the product before them, and the product after them
# waits for the collectives. With two halves of the batch, one half computes while the other half is
# sent. XLA's scheduler finds this order alone, if nothing joins the halves. But XLA merges products
# that read the same weight, and norms that read the same scale, and then both halves wait for each
# other. So the second half reads copies, which a barrier makes: they take no memory and no time,
# because XLA removes the barrier after it has merged what it can.
#
# The layer gathers each parameter once, before the copies, and sums the gradients of both halves
# before it scatters them. It sends as many bytes as without halves, in twice as many collectives.


def halve(stream: jax.Array) -> Halves:
    """Divides the sequences of a device's batch, dim 0, into two halves."""
    count = len(stream)
    if count % 2:
        raise ValueError(
            f"Transformer: split.overlap is 'dual_batch', and a device has {count} "
            f"sequence{'s' * (count > 1)} of a minibatch, expected an even number, because it "
            "divides them into two halves; use a larger batch or fewer minibatches, or "
            "overlap='none'."
        )
    first, second = jnp.split(stream, 2)
    return first, second


def run_halves(
    layer: Layer, halves: Halves, angles_SH: jax.Array | None, documents: Documents
) -> Halves:
    """Runs a layer on each half of the batch; returns both halves of the residual stream.

    Each half draws its own dropout masks.

    Communication:
      The parameters are gathered once. Each half has the collectives of activations of `Layer`, and
      the all-reduces of the gradients of replicated parameters, such as the scales of norms.
    """
    variables = dict(layer.variables)
    sown = [name for name in (LOSSES, COUNTS) if layer.is_mutable_collection(name)]
    read = {name: value for name, value in variables.items() if name not in sown}
    params = jax.tree_util.tree_map_with_path(_read, read.pop("params"), is_leaf=_is_boxed)
    pair = documents if isinstance(documents, tuple) else (None, None)
    outputs, values = [], []
    for number, of_half in enumerate((params, _copied(params))):
        rngs = {"dropout": layer.make_rng("dropout")} if layer.config.dropout_rate else {}
        half: Any = layer.clone(parent=None, name=HALVES[number])
        (y_BSD, _), new = half.apply(
            {**read, "params": of_half},
            halves[number],
            angles_SH,
            pair[number],
            rngs=rngs,
            mutable=sown,
        )
        outputs.append(y_BSD)
        values.append(new)
    # Sown values have an entry for each sequence.
    joined = jax.tree.map(lambda *both: jnp.concatenate(both), *values)
    for collection, modules in joined.items():
        for module, value in modules.items():
            layer.put_variable(collection, module, value)
    first, second = outputs
    return first, second


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.meta.AxisMetadata)


def _read(path: tuple[Any, ...], x: Any) -> Any:
    """Returns a parameter as its module gets it."""
    if not _is_boxed(x):
        return x
    with jax.named_scope("/".join(key.key for key in path[:-1])):
        return x.unbox()


def _copied(params: Any) -> Any:
    """Returns parameters that XLA takes for others than `params`.

    There is a barrier for each type, because its operands must vary over the same axes. Both halves
    read a parameter that is the only one of its type: XLA for GPUs, which keeps two iterations of a
    loop in memory, crashes at a barrier of one array.
    """
    leaves, structure = jax.tree.flatten(params)
    by_type: dict[frozenset[str], list[int]] = {}
    for i, x in enumerate(leaves):
        by_type.setdefault(varying_axes(x), []).append(i)
    for indices in by_type.values():
        if len(indices) == 1:
            continue
        copies = _behind([leaves[i] for i in indices])
        for i, x in zip(indices, copies, strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


@jax.custom_jvp
def _behind(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns arrays behind a barrier. Gradients pass none, so frozen parameters get none."""
    copies: list[jax.Array] = jax.lax.optimization_barrier(arrays)
    return copies


def _behind_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (arrays,), (changes,) = primals, tangents
    return _behind(arrays), changes


_behind.defjvp(_behind_jvp, symbolic_zeros=True)
