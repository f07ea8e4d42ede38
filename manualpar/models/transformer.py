"""A decoder-only transformer: a language model over packed documents.

It is written for one device, and strategies over data axes shard it from outside. If the mesh has
the axis `split_axis`, each device computes a part of every layer, see `transformer_layer`, and of
the vocabulary, see `manualpar.layers.vocabulary`. If the mesh has the axis `context_axis`, each
device has a part of every sequence, see `manualpar.layers.attention.context`.

A layer is `x += attention(norm(x)); x += mlp(norm(x))`, pre-norm as in LLaMA (Touvron et al.,
https://arxiv.org/abs/2302.13971): RMSNorm (https://arxiv.org/abs/1910.07467), rotary positions (Su
et al., https://arxiv.org/abs/2104.09864), attention whose query heads share key and value heads in
groups (https://arxiv.org/abs/2305.13245) and a gated MLP, SwiGLU
(https://arxiv.org/abs/2002.05202). Fields turn it into the layers of other families, such as Qwen's
and Gemma's, see `docs/families.md`.

Symbols: `B` examples, `S` positions, `D` hidden features, `N` query heads, `K` key and value heads,
`H` features of a head, `F` features inside the MLP, `V` tokens of the vocabulary, `L` layers.

Invariants: the logits at a position depend on no later token, and on no token of another document.
Parameters, norms, rotations, the softmax of attention and the logits are float32 for every `dtype`.
Positions count from the beginning of the sequence, not of a document, because attention depends
only on their differences.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from manualpar.layers import enter, split, split_lookup
from manualpar.layers.attention.context import Context, ContextAttention
from manualpar.layers.attention.key_value_cache import Past, Prompts
from manualpar.layers.attention.kinds import AttentionKind
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.moe.routing import Gates, GroupScore
from manualpar.layers.ring_chunks import LayerOverlap
from manualpar.models.layer_stack import Angles, run_layers
from manualpar.models.rotary import RotaryKind, RotaryScaling, rotary_angles
from manualpar.models.transformer_fields import (
    check_transformer,
    expert_options,
    size_of_head,
    size_of_vocabulary,
    tokens_and_documents,
)
from manualpar.models.transformer_layer import (
    Activation,
    LayerConfig,
    marked,
    normalize,
    split_dims,
)


class Transformer(nn.Module):
    """A causal language model.

    Its parameters are `embedding` `[V, D]`, `final_norm/scale` `[D]`, `head` `[D, V]` unless it is
    tied, and for every layer `attention_norm/scale` `[D]`, `attention/query/kernel` `[D, N, H]`,
    `attention/key/kernel` and `attention/value/kernel` `[D, K, H]`, `attention/out/kernel`
    `[N, H, D]`, `mlp_norm/scale` `[D]`, `mlp/gate/kernel` and `mlp/up/kernel` `[D, F]`,
    `mlp/down/kernel` `[F, D]`. A layer with experts has the parameters of a `MoE`, `experts`, in
    place of `mlp`. The layers are `layer_0`, `layer_1`, .... If they are scanned they are `layers`,
    each leaf has a leading dimension `L`, and the first `dense_layers` layers are separate. Some
    fields of the model add
    `attention/query/bias` `[N, H]`, `attention/key/bias` and `attention/value/bias` `[K, H]`;
    `attention/query_norm/scale` and `attention/key_norm/scale` `[H]`; `attention_post_norm/scale`
    and `mlp_post_norm/scale` `[D]`. Scanned layers of two kinds form groups, see
    `manualpar.models.layer_stack`.

    Initial weights are normally distributed with variance 1 / inputs. For weights whose product is
    added to the residual stream, the variance is divided by 2 L, so that the stream does not grow
    with depth (Radford et al., "Language models are unsupervised multitask learners", 2.3).

    Attributes:
      vocab_size: Tokens of the vocabulary.
      vocab_multiple: The vocabulary is padded to `V`, the next multiple of this number, so that the
        devices along `split_axis` divide it. The logits of the padding are -inf.
      num_layers: Layers, `L`.
      hidden_size: Features between layers, `D`.
      num_heads: Query heads, `N`.
      num_kv_heads: Key and value heads, `K`, a divisor of `num_heads`; 0 for `num_heads`.
      mlp_size: Features inside the MLP, `F`.
      head_size: Features of a head, `H`, an even number; 0 for `hidden_size // num_heads`.
      activation: The activation of the MLP's gates: `"silu"`, or `"gelu"`, GELU approximated by
        tanh.
      norm_epsilon: The number that every norm adds to the mean of squares.
      norm_offset: Whether norms multiply by `1 + scale`, where `scale` begins with 0.
      post_norms: Whether the outputs of attention and MLP are normalized before they are added.
      query_key_norm: Whether the features of each query and of each key are normalized before they
        are rotated.
      qkv_bias: Whether queries, keys and values have biases.
      scale_embedding: Whether the rows of the embedding are multiplied with `sqrt(D)`.
      rope_base: The base of the rotary frequencies, see `rotary_angles`.
      rope_scaling: The kind of `RotaryScaling`, `"linear"` or `"llama3"`; `""` for none. With
        layers of two kinds it applies only to the layers that see all positions.
      rope_factor: `RotaryScaling.factor`.
      rope_low_factor: `RotaryScaling.low_factor`.
      rope_high_factor: `RotaryScaling.high_factor`.
      rope_original_length: `RotaryScaling.original_length`.
      tied_head: Whether the transposed embedding is also the head.
      logit_soft_cap: The bound of the logits, see `head_logits`; 0 for none.
      label_smoothing: The share of each label that is spread over all tokens in training, see
        `split_cross_entropy`. It has an effect only in a call with `labels`.
      z_loss: The factor of the squared logarithm of the softmax's denominator in training, in a
        call with `labels`.
      dropout_rate: Share of the outputs of attention and MLP that is dropped in training.
      dtype: The dtype of the computation, floating, or its name.
      remat: The part of a layer that is computed again in the backward pass: `"none"`, `"full"` for
        the whole layer, `"dots"` for everything except its products with weights.
      scan_layers: Whether one layer is compiled and run in a loop, or each layer is compiled.
      attention: The implementation of attention, see `manualpar.layers.attention.kinds`:
        `"splash"`, `"cudnn"`, `"blockwise"`, `"xla"`, or `""` for the best on the devices of the
        mesh.
      attention_window: How many positions a query sees, up to and including its own; 0 for all.
      global_every: The length of a group of layers; 0 if all layers are alike. The last layer of a
        group sees all positions, and the other layers see the window.
      local_rope_base: The base of the rotary frequencies of the layers with a window; 0 for
        `rope_base`.
      attention_soft_cap: The bound `c` of scores: `c * tanh(score / c)`; 0 for none.
      attention_scale: The factor of the products of queries and keys; 0 for `H ** -0.5`.
      bos_token: The token that begins a document; -1 if each sequence is one document. Attention
        does not cross document borders. The tokens before the first such token are a document too.
      annotate: Whether the dims of parameters have names, for logical axis rules: `vocab`, `embed`,
        `heads`, `kv_heads`, `mlp`, and `layers` for the dim of scanned layers.
      split_axis: The mesh axis over which each layer is split; `""` for none. The mesh may lack it.
      sequence_parallel: Whether the residual stream is split over `split_axis` too, along its
        positions. The number of devices must divide the number of positions.
      overlap: `"ring"`: attention and MLP send in a ring while they compute; it needs
        `sequence_parallel`. `"none"`: one collective before or after each product. Experts and head
        always use one collective.
      num_experts: The number of experts in each layer; 0 for an MLP. Each expert has `mlp_size`
        features. Train experts with `mixture_of_experts_loss`.
      experts_per_token: How many experts compute a token.
      capacity_factor: How many tokens of a sequence an expert takes, in multiples of an equal
        share, see `MoE`; 0 for all tokens.
      expert_axis: The mesh axis over which the experts are divided; `""` for none.
      expert_gates: How the router's logits become scores; see `MoE` for this and the next six.
      normalize_gates: Whether the gates of a token are divided by their sum.
      gate_scale: The factor that multiplies the gates after their normalization.
      router_bias: Whether each router has a bias for the choice of experts, in the collection
        `router`. Training does not change it.
      expert_groups: The number of groups of experts; 1 for no groups. A token chooses groups first,
        and then experts in these groups.
      expert_groups_per_token: The number of groups that a token chooses.
      expert_group_score: The score by which a token chooses groups, `"best_two"` or `"best"`.
      shared_experts_size: The total features of the shared experts, which compute every token; 0
        for none.
      shared_gate: Whether the output of the shared experts is multiplied by a gate.
      dense_layers: How many layers at the beginning have an MLP in place of experts.
      dense_mlp_size: The features inside the MLPs of dense layers; 0 for `mlp_size`.
      context_axis: The mesh axis over which sequences are split; `""` for none. The builder's
        `context_axis` must be the same. The mesh may lack the axis.
      context_attention: The communication of attention over `context_axis`, see `Context`:
        `"ring"`, `"ulysses"` (divides the heads over the axis), or `"gather"`.
    """

    vocab_size: int = 260
    num_layers: int = 4
    hidden_size: int = 192
    num_heads: int = 6
    num_kv_heads: int = 0
    mlp_size: int = 512
    head_size: int = 0
    activation: Activation = "silu"
    norm_epsilon: float = 1e-6
    norm_offset: bool = False
    post_norms: bool = False
    query_key_norm: bool = False
    qkv_bias: bool = False
    scale_embedding: bool = False
    rope_base: float = 10_000.0
    rope_scaling: RotaryKind | Literal[""] = ""
    rope_factor: float = 1.0
    rope_low_factor: float = 1.0
    rope_high_factor: float = 4.0
    rope_original_length: int = 8192
    tied_head: bool = False
    logit_soft_cap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dropout_rate: float = 0.0
    dtype: DTypeLike = "float32"
    remat: str = "none"
    scan_layers: bool = True
    attention: AttentionKind = ""
    attention_window: int = 0
    global_every: int = 0
    local_rope_base: float = 0.0
    attention_soft_cap: float = 0.0
    attention_scale: float = 0.0
    bos_token: int = -1
    annotate: bool = False
    vocab_multiple: int = 1
    split_axis: str = ""
    sequence_parallel: bool = False
    overlap: LayerOverlap = "none"
    num_experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    expert_axis: str = ""
    expert_gates: Gates = "softmax"
    normalize_gates: bool = True
    gate_scale: float = 1.0
    router_bias: bool = False
    expert_groups: int = 1
    expert_groups_per_token: int = 1
    expert_group_score: GroupScore = "best_two"
    shared_experts_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_mlp_size: int = 0
    context_axis: str = ""
    context_attention: ContextAttention = "ring"

    # Both fields apply only to training, see `manualpar.core.model.evaluation`.
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
            tokens are complete prompts, or `Past` if they are one new token for each row,
            `int32[B, 1]`. With `Past` the call reads the keys and values of earlier tokens from the
            collection `cache`. New keys and values go to the collection `new_keys`.

        Returns:
          Without labels `float32[B, S, V]`: at position `s` the unnormalised log-probabilities of
          token `s + 1`. A `shard_map` that binds `split_axis` and `context_axis` gets this device's
          part, `[B/data, S/context, V/split]`, see `split_cross_entropy`. With labels the pair that
          `head_cross_entropy` returns, `float32` and `bool[B/data, S/context]`: the losses in nats,
          and whether the largest logit is the label's. So a large vocabulary needs no array of all
          logits. With `rows` the logits at the last token of each row, `float32[B, V]`.

        Raises:
          ValueError: `tokens` or a field of the model is out of range; the message names it.

        Communication:
          Over `split_axis`, if it is bound: `split_lookup` once, `enter` twice for each layer and
          once for the head, and `leave` twice for each layer. Over `context_axis`:
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
        vocabulary, std = size_of_vocabulary(self), self.hidden_size**-0.5
        # If the embedding is not the head, its variance is 1, as for the sum that layers add to it.
        embedding_VD = self._table(
            "embedding", ("vocab", "embed"), vocabulary, std if self.tied_head else 1.0
        )
        known = tokens
        if vocabulary > self.vocab_size:
            known = jnp.where(tokens < self.vocab_size, tokens, -1)
        x_BSD = split_lookup(embedding_VD, known, config.axis, config.sequence_dim)
        # The cast comes after the lookup, so that gradients of equal tokens are summed in float32.
        x_BSD = x_BSD.astype(config.dtype)
        if self.scale_embedding:
            x_BSD = x_BSD * jnp.asarray(self.hidden_size**0.5, config.dtype)
        document_BS = None
        if isinstance(rows, Past):
            positions = rows.position[:, None]
        else:
            positions = config.context.positions(tokens.shape[1])
            document_BS = documents
            if documents is None and self.bos_token >= 0:
                document_BS = config.context.cumsum(tokens == self.bos_token)
        angles = self._angles(config, positions)
        x_BSD = run_layers(self, config, x_BSD, angles, document_BS, rows)
        if isinstance(rows, Prompts):
            x_BSD = jnp.take_along_axis(x_BSD, rows.length[:, None, None] - 1, axis=1)
        x_BSD = normalize(x_BSD, "final_norm", config)
        x_BSD = enter(x_BSD, config.axis, config.sequence_dim)
        head_DV = embedding_VD.T
        if not self.tied_head:
            head_DV = self._table("head", ("embed", "vocab"), vocabulary, std)
        of_head: Any = {"axis": config.axis, "vocab_size": self.vocab_size}
        of_head["soft_cap"] = self.logit_soft_cap or None
        if labels is None:
            logits = head_logits(x_BSD, head_DV, **of_head)
            return logits if rows is None else logits[:, 0]
        if train:
            of_head |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return head_cross_entropy(x_BSD, head_DV, labels, **of_head)

    def _angles(self, config: LayerConfig, positions: jax.Array) -> Angles:
        scaling = None
        if self.rope_scaling:
            scaling = RotaryScaling(
                self.rope_scaling,
                self.rope_factor,
                self.rope_low_factor,
                self.rope_high_factor,
                self.rope_original_length,
            )
        of_all: Any = {"base": self.rope_base, "scaling": scaling}
        angles_SH = rotary_angles(positions, config.head_size, **of_all)
        if not self.global_every:
            return Angles(angles_SH, angles_SH)
        local_base = self.local_rope_base or self.rope_base
        return Angles(angles_SH, rotary_angles(positions, config.head_size, base=local_base))

    def _layer_config(self, *, train: bool) -> LayerConfig:
        return LayerConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_size=size_of_head(self),
            mlp_size=self.mlp_size,
            dropout_rate=self.dropout_rate if train else 0.0,
            added_scale=(2 * self.num_layers) ** -0.5,
            dtype=jnp.dtype(self.dtype),
            attention=self.attention,
            window=self.attention_window or None,
            soft_cap=self.attention_soft_cap or None,
            query_scale=self.attention_scale * size_of_head(self) ** 0.5 or 1.0,
            norm_epsilon=self.norm_epsilon,
            norm_offset=self.norm_offset,
            post_norms=self.post_norms,
            query_key_norm=self.query_key_norm,
            qkv_bias=self.qkv_bias,
            activation=self.activation,
            annotate=self.annotate,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor or None,
            expert_options=expert_options(self),
            expert_axis=self.expert_axis or None,
            axis=self.split_axis or None,
            sequence_dim=1 if self.sequence_parallel else None,
            overlap=self.overlap,
            context=Context(self.context_axis or None, self.context_attention),
        )

    def _table(self, name: str, dim_names: tuple[str, ...], rows: int, std: float) -> jax.Array:
        """Makes the embedding or the head; each device along `split_axis` stores some tokens."""
        init = marked(nn.initializers.normal(std), dim_names, annotate=self.annotate)
        if self.split_axis:
            init = split(init, split_dims(dim_names, self.split_axis))
        sizes = {"vocab": rows, "embed": self.hidden_size}
        table: jax.Array = self.param(name, init, tuple(sizes[dim] for dim in dim_names))
        return table
