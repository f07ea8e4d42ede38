"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

A product compresses each position to one *latent* of `R` features, from which the keys and values
of all heads are computed. A second part of the product, `P` features, is rotated by the position
and is a part of every head's key. Queries may come from a latent too. In generation the cache has
only the latent and the rotated part, `R + P` numbers for a position. A new token then does not
compute the keys of earlier positions: it multiplies its queries with the kernel of the keys, and
attends to the latents themselves.

If a layer is split over devices, each device computes the latents in full, and then its heads.
With sequence parallelism each device compresses its own positions, and the latents are gathered:
`R + P` features in place of the `D` features of the residual stream.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `H` features of a query
and of a key, `V` features of a value, `Q` features of the latent of queries.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.layers import enter, split
from manualpar.layers.attention.key_value_cache import (
    CACHE,
    LATENT,
    NEW_KEYS,
    Past,
    Prompts,
    attend_to_kept,
    keep_prompts,
)
from manualpar.models.layer_config import LayerConfig
from manualpar.models.layer_parts import DimNames, make_product, marked, split_dims
from manualpar.models.rotary import rotate, scaled

EPSILON = 1e-6  # The norms of latents add it in all models, whatever the other norms add.


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent of each position.

    Its parameters are `latent/kernel` `[D, R + P]`, `latent_norm/scale` `[R]`, `expand/kernel`
    `[R, N, H - P + V]`, `query/kernel` `[D, N, H]` and `out/kernel` `[N, V, D]`. With a latent of
    queries there are also `query_latent/kernel` `[D, Q]` and `query_latent_norm/scale` `[Q]`, and
    `query/kernel` is `[Q, N, H]`.
    """

    config: LayerConfig

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

        def turn(x_BSNH: jax.Array) -> jax.Array:
            """Rotates the last `P` features."""
            still, turned = jnp.split(x_BSNH, [x_BSNH.shape[-1] - P], axis=-1)
            turned = rotate(turned, angles_SH, rotary=config.rotary)
            return jnp.concatenate([still, turned], axis=-1)

        if latent.query_rank:
            compressed = Compress(config, latent.query_rank, name="query_latent")(x_BSD)
            normed = _latent_norm("query_latent_norm", config)(compressed)
            of_query, into = enter(normed, *where), latent.query_rank
        else:
            of_query, into = enter(x_BSD, *where), D
        query = make_product(config, (into, N, H), (None, "heads", None), name="query")
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
        of_out: Any = {"contracted": 2, "scale": config.added_scale, "name": "out"}
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
    norm: nn.Module = nn.RMSNorm(EPSILON, dtype=config.dtype, scale_init=init, name=name)
    return norm


def _padded(x: jax.Array, size: int) -> jax.Array:
    """Adds zeros at the end of the last dim, up to `size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
