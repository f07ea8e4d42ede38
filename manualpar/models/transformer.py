"""A decoder-only transformer: a language model over packed documents, free of any parallelism.

A layer is `x += attention(norm(x)); x += mlp(norm(x))`, pre-norm as in LLaMA (Touvron et al.,
https://arxiv.org/abs/2302.13971): RMSNorm (https://arxiv.org/abs/1910.07467), rotary positions (Su
et al., https://arxiv.org/abs/2104.09864), attention whose query heads share key and value heads in
groups (https://arxiv.org/abs/2305.13245) and a gated MLP, SwiGLU
(https://arxiv.org/abs/2002.05202). There are no biases.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `K` key and value heads,
`H` features of a head, `F` features inside the MLP, `V` tokens of the vocabulary, `L` layers.

Invariants: the logits at a position depend on no later token, and on no token of another document.
Parameters, norms, rotations, the softmax of attention and the logits are float32 whatever the
dtype. Positions count from the beginning of the sequence, not of a document: attention sees
only their differences.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

# The parts of a layer that are kept for its backward pass. `dots` are the products with weights.
# Attention's own products, whose scores are larger than anything else, have a batch dimension and
# are not among them.
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
ATTENTIONS: dict[str, Literal["xla", "cudnn"] | None] = {"": None, "xla": "xla", "cudnn": "cudnn"}


class Transformer(nn.Module):
    """A causal language model.

    Its parameters are `embedding` `[V, D]`, `final_norm/scale` `[D]`, `head` `[D, V]` unless it is
    tied, and for every layer `attention_norm/scale` `[D]`, `attention/query/kernel` `[D, N, H]`,
    `attention/key/kernel` and `attention/value/kernel` `[D, K, H]`, `attention/out/kernel`
    `[N, H, D]`, `mlp_norm/scale` `[D]`, `mlp/gate/kernel` and `mlp/up/kernel` `[D, F]`,
    `mlp/down/kernel` `[F, D]`. The layers are `layer_0`, `layer_1`, ...; if they are scanned they
    are `layers`, each leaf with a leading dimension `L`.

    Weights begin normally distributed with variance 1 / inputs. Weights whose product is added to
    the residual stream begin with 1 / (2 L) of that, so that the stream does not grow with depth
    (Radford et al., "Language models are unsupervised multitask learners", 2.3).

    Attributes:
      vocab_size: Tokens of the vocabulary, `V`.
      num_layers: Layers, `L`.
      hidden_size: Features between layers, `D`.
      num_heads: Query heads, `N`.
      num_kv_heads: Key and value heads, `K`, a divisor of `num_heads`; 0 for `num_heads`.
      mlp_size: Features inside the MLP, `F`.
      head_size: Features of a head, `H`, an even number; 0 for `hidden_size // num_heads`.
      rope_base: The base of the rotary frequencies, see `rotary_angles`.
      tied_head: Whether the transposed embedding is also the head.
      dropout_rate: Share of the outputs of attention and MLP that is dropped in training.
      dtype: The dtype of the computation, floating, or its name.
      remat: The part of a layer that is computed again in the backward pass: `"none"`, `"full"`
        for all of it, `"dots"` for all but its products with weights.
      scan_layers: Whether one layer is compiled and run in a loop, or each layer by itself.
      attention: The implementation of `jax.nn.dot_product_attention`: `"xla"`,
        `"cudnn"` (on an NVIDIA GPU, in 16 bits), or `""` for the one that jax chooses.
      bos_token: The token that begins a document; attention does not look across it. The tokens
        before the first one are a document too. -1 if each sequence is one document.
      annotate: Whether the dims of parameters have names, for logical axis rules: `vocab`, `embed`,
        `heads`, `kv_heads`, `mlp`, and `layers` for the scanned one.
    """

    vocab_size: int = 260
    num_layers: int = 4
    hidden_size: int = 192
    num_heads: int = 6
    num_kv_heads: int = 0
    mlp_size: int = 512
    head_size: int = 0
    rope_base: float = 10_000.0
    tied_head: bool = False
    dropout_rate: float = 0.0
    dtype: DTypeLike = "float32"
    remat: str = "none"
    scan_layers: bool = True
    attention: str = ""
    bos_token: int = -1
    annotate: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Computes the logits of each next token.

        Args:
          tokens: `int32[B, S]`, from 0 to `vocab_size - 1`; any other makes its sequence NaN.
          train: Whether to drop activations, which needs a `dropout` key.

        Returns:
          `float32[B, S, V]`: at position `s` the unnormalised log-probabilities of token `s + 1`.

        Raises:
          ValueError: `tokens` or a field of the model is out of range; the message names it.
        """
        check_transformer(self)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"Transformer: tokens are {tokens.dtype}{list(tokens.shape)}, expected integers "
                "[batch, sequence]; give one sequence a leading dimension of 1."
            )
        dtype = jnp.dtype(self.dtype)
        normal, std = nn.initializers.normal, self.hidden_size**-0.5
        # An embedding that is not the head has variance 1, about what all layers add to it.
        init = normal(std if self.tied_head else 1.0)
        init = _annotate(init, ("vocab", "embed"), self.annotate)
        embedding_VD = self.param("embedding", init, (self.vocab_size, self.hidden_size))
        # Cast only now, so that the gradients of a frequent token are summed in float32.
        x_BSD = _look_up(embedding_VD, tokens).astype(dtype)
        angles_SH = rotary_angles(tokens.shape[1], size_of_head(self), base=self.rope_base)
        mask = _same_document(tokens == self.bos_token) if self.bos_token >= 0 else None
        x_BSD = self._run_layers(x_BSD, angles_SH, mask, train=train)
        x_BSD = _norm("final_norm", dtype, self.annotate)(x_BSD)
        head_DV = embedding_VD.T
        if not self.tied_head:
            init = _annotate(normal(std), ("embed", "vocab"), self.annotate)
            head_DV = self.param("head", init, head_DV.shape)
        # Logits are not rounded to the dtype on their way to float32.
        return jnp.matmul(x_BSD, head_DV.astype(dtype), preferred_element_type=jnp.float32)

    def _run_layers(
        self, x_BSD: jax.Array, angles_SH: jax.Array, mask: jax.Array | None, *, train: bool
    ) -> jax.Array:
        config = LayerConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_size=size_of_head(self),
            mlp_size=self.mlp_size,
            dropout_rate=self.dropout_rate if train else 0.0,
            added_scale=(2 * self.num_layers) ** -0.5,
            dtype=jnp.dtype(self.dtype),
            attention=self.attention,
            annotate=self.annotate,
        )
        layer: Any = Layer
        if self.remat != "none":
            # In a loop XLA cannot merge the two computations.
            policy = REMAT_POLICIES[self.remat]
            layer = nn.remat(Layer, policy=policy, prevent_cse=not self.scan_layers)
        if self.scan_layers:
            layers = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers(config, name="layers")(x_BSD, angles_SH, mask)[0]
        for index in range(self.num_layers):
            x_BSD, _ = layer(config, name=f"layer_{index}")(x_BSD, angles_SH, mask)
        return x_BSD


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The fields of `Transformer` that a layer needs, with 0 replaced by the default it means."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    dropout_rate: float  # 0 outside of training.
    added_scale: float  # For initial weights whose products are added to the residual stream.
    dtype: jnp.dtype
    attention: str
    annotate: bool


class Layer(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    config: LayerConfig

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, angles_SH: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, None]:
        """Takes and returns the residual stream; the `None` is for `nn.scan`.

        The mask `bool[B, 1, S, S]` says which of the keys (last) before it a query may see; `None`
        stands for all.
        """
        config = self.config
        drop = nn.Dropout(config.dropout_rate, deterministic=not config.dropout_rate)
        y_BSD = _norm("attention_norm", config.dtype, config.annotate)(x_BSD)
        x_BSD = x_BSD + drop(Attention(config, name="attention")(y_BSD, angles_SH, mask))
        y_BSD = _norm("mlp_norm", config.dtype, config.annotate)(x_BSD)
        return x_BSD + drop(SwiGLU(config, name="mlp")(y_BSD)), None


class Attention(nn.Module):
    """Causal attention with rotary positions; groups of query heads share a key and value head."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array, angles_SH: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Mixes positions; the arguments are those of `Layer`."""
        config, hidden_size = self.config, x_BSD.shape[-1]
        query = (hidden_size, config.num_heads, config.head_size), ("embed", "heads", None)
        key = (hidden_size, config.num_kv_heads, config.head_size), ("embed", "kv_heads", None)
        out = (config.num_heads, config.head_size, hidden_size), ("heads", None, "embed")
        query_BSNH = rotate(Product(config, *query, name="query")(x_BSD), angles_SH)
        key_BSKH = rotate(Product(config, *key, name="key")(x_BSD), angles_SH)
        value_BSKH = Product(config, *key, name="value")(x_BSD)
        how = ATTENTIONS[config.attention]
        mixed_BSNH = jax.nn.dot_product_attention(
            query_BSNH, key_BSKH, value_BSKH, mask=mask, is_causal=True, implementation=how
        )
        return Product(config, *out, contracted=2, scale=config.added_scale, name="out")(mixed_BSNH)


class SwiGLU(nn.Module):
    """An MLP whose hidden features are gated by others."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Maps `[B, S, D]` to `[B, S, D]`."""
        config, hidden_size = self.config, x_BSD.shape[-1]
        into = (hidden_size, config.mlp_size), ("embed", "mlp")
        out = (config.mlp_size, hidden_size), ("mlp", "embed")
        gate_BSF = Product(config, *into, name="gate")(x_BSD)
        up_BSF = Product(config, *into, name="up")(x_BSD)
        down = Product(config, *out, scale=config.added_scale, name="down")
        return down(nn.silu(gate_BSF) * up_BSF)


class Product(nn.Module):
    """A product with weights, whose dims may have names.

    `nn.DenseGeneral` of flax 0.12.8 constrains weights while they are still two-dimensional.
    """

    config: LayerConfig
    shape: tuple[int, ...]
    dim_names: tuple[str | None, ...]
    contracted: int = 1
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Sums over the last dims of `x` and the first of the weights, `contracted` of them."""
        dims = range(len(self.shape))
        init = nn.initializers.variance_scaling(
            self.scale**2, "fan_in", "normal", dims[: self.contracted], dims[self.contracted :]
        )
        init = _annotate(init, self.dim_names, self.config.annotate)
        kernel = self.param("kernel", init, self.shape)
        return jnp.tensordot(x, kernel.astype(self.config.dtype), axes=self.contracted)


def rotary_angles(length: int, head_size: int, *, base: float) -> jax.Array:
    """The angles in radians by which rotary positions turn the pairs of a head's features.

    They are `float32[S, H/2]`: `s * base ** (-2 i / H)` at position `s` for pair `i`.
    """
    frequencies = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    return jnp.outer(jnp.arange(length, dtype=jnp.float32), frequencies)


def rotate(x: jax.Array, angles_SH: jax.Array) -> jax.Array:
    """Turns pairs of the features of `[B, S, N, H]`, queries or keys, by angles.

    So the product of a query and a key depends only on the difference of their positions. Feature
    `i` is paired with `i + H/2`, as in GPT-NeoX and LLaMA's public checkpoints. It is computed in
    float32, and the result has the dtype of `x`.
    """
    sin, cos = jnp.sin(angles_SH)[None, :, None], jnp.cos(angles_SH)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def size_of_head(model: Transformer) -> int:
    """The features of a head, `H`."""
    return model.head_size or model.hidden_size // model.num_heads


def flops_per_token(model: Transformer, sequence_length: int) -> int:
    """The floating point operations of training on a token, for model FLOPs utilization.

    As in appendix B of PaLM (Chowdhery et al., https://arxiv.org/abs/2204.02311): `6 P` for the `P`
    weights that a token is multiplied with, and `12 L N H S` for attention's two products of every
    query with every key. So recomputation does not count, and what a causal mask or the borders of
    documents save counts as if it were computed. Norms, softmax and the lookup of embeddings are
    left out.

    Args:
      model: The model.
      sequence_length: Positions that attention sees, `S`.

    Returns:
      Multiplications and additions of one token's forward and backward pass.

    Raises:
      ValueError: A field of the model is not as it must be.
    """
    check_transformer(model)
    size = size_of_head(model)
    heads = 2 * model.num_heads + 2 * (model.num_kv_heads or model.num_heads)  # q, out; k, v.
    layer = model.hidden_size * (heads * size + 3 * model.mlp_size)
    weights = model.num_layers * layer + model.hidden_size * model.vocab_size
    return 6 * weights + 12 * model.num_layers * model.num_heads * size * sequence_length


def check_transformer(model: Transformer) -> None:
    """Refuses, with a ValueError, fields that are out of range or do not fit each other."""

    def refuse(field: str, expected: str) -> None:
        value = getattr(model, field)
        raise ValueError(f"Transformer: {field} is {value!r}, expected {expected}.")

    for field in ("vocab_size", "num_layers", "hidden_size", "num_heads", "mlp_size"):
        if getattr(model, field) < 1:
            refuse(field, "at least 1")
    if not model.head_size and model.hidden_size % model.num_heads:
        refuse("hidden_size", f"a multiple of num_heads={model.num_heads}, or set head_size")
    if model.head_size < 0 or size_of_head(model) % 2:
        given = "" if model.head_size else f" (hidden_size // num_heads is {size_of_head(model)})"
        refuse("head_size", f"an even number, because rotations turn pairs{given}")
    if model.num_kv_heads < 0 or model.num_heads % (model.num_kv_heads or 1):
        refuse("num_kv_heads", f"a divisor of num_heads={model.num_heads}, or 0 for as many")
    if not model.rope_base > 1:
        refuse("rope_base", "more than 1, such as 10000")
    if not 0 <= model.dropout_rate < 1:
        refuse("dropout_rate", "from 0 to less than 1")
    if not -1 <= model.bos_token < model.vocab_size:
        refuse("bos_token", f"less than vocab_size={model.vocab_size}, or -1 for none")
    for field, known in (("remat", REMAT_POLICIES), ("attention", ATTENTIONS)):
        if getattr(model, field) not in known:
            refuse(field, f"one of {', '.join(map(repr, known))}")
    if not jnp.issubdtype(jnp.dtype(model.dtype), jnp.floating):
        refuse("dtype", "a floating dtype such as 'bfloat16'")


def _look_up(table: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows of a table; NaN for an index that it does not have."""
    # In explicit mode a gather needs the sharding of its result: that of the indices.
    names = jax.typeof(indices).sharding.spec
    spec = PartitionSpec(*names, None) if any(names) else None
    rows = table.at[indices]
    return rows.get(mode="fill", wrap_negative_indices=False, out_sharding=spec)


def _same_document(begins_BS: jax.Array) -> jax.Array:
    """`bool[B, 1, S, S]`: whether two positions are in one document."""
    document_BS = jnp.cumsum(begins_BS, axis=1)
    return document_BS[:, None, :, None] == document_BS[:, None, None, :]


def _norm(name: str, dtype: jnp.dtype, annotate: bool) -> nn.RMSNorm:
    init = _annotate(nn.initializers.ones, ("embed",), annotate)
    return nn.RMSNorm(dtype=dtype, scale_init=init, name=name)


def _annotate(init: Any, dim_names: tuple[str | None, ...], annotate: bool) -> Any:
    return nn.with_logical_partitioning(init, dim_names) if annotate else init
