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

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from manualpar.layers import enter, split, split_lookup
from manualpar.layers.attention.context import Context
from manualpar.layers.attention.key_value_cache import Past, Prompts
from manualpar.layers.boundaries import bound_axes
from manualpar.layers.field_groups import config_field
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.moe.experts import Experts
from manualpar.models.flat_fields import understand_flat_names
from manualpar.models.layer_config import (
    ACTIVATIONS,
    Activation,
    Attention,
    LayerConfig,
    Mlp,
    Norm,
    Scales,
    Split,
)
from manualpar.models.layer_parts import marked, split_dims
from manualpar.models.layer_stack import REMAT_POLICIES, Angles, run_layers
from manualpar.models.rotary import Rotary, rotary_angles
from manualpar.models.transformer_fields import (
    check_transformer,
    size_of_head,
    size_of_rotation,
    size_of_vocabulary,
    tokens_and_documents,
)
from manualpar.models.transformer_layer import normalize

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
    Scanned layers of two kinds form groups, see `manualpar.models.layer_stack`.

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
        the whole layer, `"dots"` for everything except its products with weights.
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
    tied_head: bool = config_field(False, required=True)
    scale_embedding: bool = config_field(False)
    vocab_multiple: int = config_field(1, "", 1, required=True)
    logit_soft_cap: float = config_field(0.0, "", 0, required=True)
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dropout_rate: float = config_field(0.0, "", 0, below=1, required=True)
    dtype: DTypeLike = config_field("float32", choices=DTYPES, required=True)
    remat: str = config_field("none", choices=tuple(REMAT_POLICIES), required=True)
    scan_layers: bool = config_field(True, required=True)
    bos_token: int = -1
    annotate: bool = False

    # Evaluation uses these values, because both fields apply only to training, see
    # `manualpar.core.model.evaluation`.
    evaluation_fields: ClassVar[Mapping[str, Any]] = {"label_smoothing": 0.0, "z_loss": 0.0}

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
            tokens are complete prompts, or `Past` if `tokens` are new tokens of each row. With
            `Past` the call reads the keys and values of earlier tokens from the collection `cache`.
            New keys and values go to the collection `new_keys`.

        Returns:
          Without labels `float32[B, S, V]`: at position `s` the unnormalised log-probabilities of
          token `s + 1`. A `shard_map` that binds `split.axis` and `context.axis` gets this device's
          part, `[B/data, S/context, V/split]`, see `split_cross_entropy`. With labels the pair that
          `head_cross_entropy` returns, `float32` and `bool[B/data, S/context]`: the losses in nats,
          and whether the largest logit is the label's. So a large vocabulary needs no array of all
          logits. With `Prompts` the logits at the last token of each row, `float32[B, 1, V]`; with
          `Past` at all new tokens, `float32[B, S, V]`.

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
            positions = rows.position
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
            return head_logits(x_BSD, head_DV, **of_head)
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
        """Returns the positions of a sequence, or up to each row's end or each new token."""
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
        )

    def _table(self, name: str, dim_names: tuple[str, ...], rows: int, std: float) -> jax.Array:
        """Makes the parameter `name`; each device along `split.axis` has some of the vocabulary."""
        init = marked(nn.initializers.normal(std), dim_names, annotate=self.annotate)
        if self.split.axis:
            init = split(init, split_dims(dim_names, self.split.axis))
        sizes = {"vocab": rows, "embed": self.hidden_size}
        table: jax.Array = self.param(name, init, tuple(sizes[dim] for dim in dim_names))
        return table
