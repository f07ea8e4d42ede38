"""A decoder-only transformer: a language model over packed documents.

It is written for one device, and strategies over data axes shard it from outside. On a mesh with
the axis that `split_axis` names, each device computes a part of every layer, see
`transformer_layer`, and of the vocabulary, see `manualpar.layers.vocabulary`. On one with the axis
that `context_axis` names, each device has a part of every sequence, see `manualpar.layers.context`.

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

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from manualpar.layers import enter, split, split_lookup
from manualpar.layers.attention import ATTENTION_KINDS, AttentionKind
from manualpar.layers.blockwise_attention import ATTENDED
from manualpar.layers.chunks import LAYER_OVERLAPS, LayerOverlap
from manualpar.layers.context import CONTEXT_ATTENTIONS, Context, ContextAttention
from manualpar.layers.head_loss import head_cross_entropy, head_logits
from manualpar.layers.routing import COUNTS, LOSSES
from manualpar.models.rotary import rotary_angles
from manualpar.models.transformer_layer import (
    Layer,
    LayerConfig,
    marked,
    normalize,
    split_dims,
)

# The parts of a layer that are kept for its backward pass. `dots` are the products with weights.
# Attention's own products, whose scores are larger than anything else, have a batch dimension and
# are not among them. What attention returns is kept, so that none is computed twice.
_KEPT = jax.checkpoint_policies.save_only_these_names(ATTENDED)
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KEPT
    ),
    "full": _KEPT,
}


class Transformer(nn.Module):
    """A causal language model.

    Its parameters are `embedding` `[V, D]`, `final_norm/scale` `[D]`, `head` `[D, V]` unless it is
    tied, and for every layer `attention_norm/scale` `[D]`, `attention/query/kernel` `[D, N, H]`,
    `attention/key/kernel` and `attention/value/kernel` `[D, K, H]`, `attention/out/kernel`
    `[N, H, D]`, `mlp_norm/scale` `[D]`, `mlp/gate/kernel` and `mlp/up/kernel` `[D, F]`,
    `mlp/down/kernel` `[F, D]`; or in place of `mlp` the parameters of a `MoE`, `experts`. The
    layers are `layer_0`, `layer_1`, ...; if they are scanned they are `layers`, each leaf with a
    leading dimension `L`.

    Weights begin normally distributed with variance 1 / inputs. Weights whose product is added to
    the residual stream begin with 1 / (2 L) of that, so that the stream does not grow with depth
    (Radford et al., "Language models are unsupervised multitask learners", 2.3).

    Attributes:
      vocab_size: Tokens of the vocabulary.
      vocab_multiple: The vocabulary is padded to the next multiple of it, `V`, so that it divides
        over the devices along `split_axis`. The logits of what is no token are -inf.
      num_layers: Layers, `L`.
      hidden_size: Features between layers, `D`.
      num_heads: Query heads, `N`.
      num_kv_heads: Key and value heads, `K`, a divisor of `num_heads`; 0 for `num_heads`.
      mlp_size: Features inside the MLP, `F`.
      head_size: Features of a head, `H`, an even number; 0 for `hidden_size // num_heads`.
      rope_base: The base of the rotary frequencies, see `rotary_angles`.
      tied_head: Whether the transposed embedding is also the head.
      logit_soft_cap: The bound of the logits, see `head_logits`; 0 for none.
      label_smoothing: The share of each label that is spread over all tokens in training, see
        `split_cross_entropy`. Only what is computed with `labels` knows it and `z_loss`.
      z_loss: The factor of the squared logarithm of the softmax's denominator in training,
        likewise.
      dropout_rate: Share of the outputs of attention and MLP that is dropped in training.
      dtype: The dtype of the computation, floating, or its name.
      remat: The part of a layer that is computed again in the backward pass: `"none"`, `"full"`
        for all of it, `"dots"` for all but its products with weights.
      scan_layers: Whether one layer is compiled and run in a loop, or each layer by itself.
      attention: What computes attention, see `manualpar.layers.attention`: `"splash"`, `"cudnn"`,
        `"blockwise"`, `"xla"`, or `""` for the best one that runs on the devices of the mesh.
      attention_window: How many positions a query sees, its own and those right before it; 0 for
        all.
      attention_soft_cap: `c`, which bounds scores by `c * tanh(score / c)`; 0 for none.
      bos_token: The token that begins a document; attention does not look across it. The tokens
        before the first one are a document too. -1 if each sequence is one document.
      annotate: Whether the dims of parameters have names, for logical axis rules: `vocab`, `embed`,
        `heads`, `kv_heads`, `mlp`, and `layers` for the scanned one.
      split_axis: The mesh axis over which each layer is split. A mesh need not have it. `""` for
        none.
      sequence_parallel: Whether the residual stream between the split parts is split over that axis
        too, along its positions, which must divide.
      overlap: `"ring"`: attention and MLP compute while they send what sequence parallelism sends;
        `"none"` for collectives of all at once. Experts and head know only these.
      num_experts: Experts that each layer has in place of its MLP, each an MLP of that size; 0 for
        none. A loss of them is that of `mixture_of_experts_loss`.
      experts_per_token: How many experts compute a token.
      capacity_factor: The room of an expert in multiples of an equal share of a sequence's tokens,
        see `MoE`; 0 for room for all tokens.
      expert_axis: The mesh axis over which the experts are divided; `""` for none.
      context_axis: The mesh axis over which sequences are split, that of the builder's
        `context_axis`. A mesh need not have it. `""` for none.
      context_attention: What attention sends over it, see `Context`: `"ring"`, `"ulysses"`,
        which divides the heads over the axis, or `"gather"`.
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
    logit_soft_cap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dropout_rate: float = 0.0
    dtype: DTypeLike = "float32"
    remat: str = "none"
    scan_layers: bool = True
    attention: AttentionKind = ""
    attention_window: int = 0
    attention_soft_cap: float = 0.0
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
    context_axis: str = ""
    context_attention: ContextAttention = "ring"

    @nn.compact
    def __call__(
        self, tokens: jax.Array, train: bool = False, labels: jax.Array | None = None
    ) -> Any:
        """Computes the logits of each next token, or their cross entropy.

        Args:
          tokens: `int32[B, S]`, from 0 to `vocab_size - 1`; any other makes its sequence NaN.
          train: Whether to drop activations, which needs a `dropout` key, and to smooth labels and
            add the z-loss.
          labels: `int[B, S]`, the token after each position; `None` for logits.

        Returns:
          Without labels `float32[B, S, V]`: at position `s` the unnormalised log-probabilities of
          token `s + 1`. Inside a `shard_map` that binds `split_axis` and `context_axis` this
          device's part of them, `[B/data, S/context, V/split]`, see `split_cross_entropy`. With
          labels the pair of `head_cross_entropy`, `float32` and `bool[B/data, S/context]`: the
          losses in nats, and whether the largest logit is the label's. No array of all logits
          exists then if they are many.

        Raises:
          ValueError: `tokens` or a field of the model is out of range; the message names it.

        Communication:
          Over `split_axis`, where it is bound, that of `split_lookup`, and for each layer and the
          head that of `enter`, for each layer also two times that of `leave`. Over `context_axis`
          for each layer that of `Context.attention`. With labels that of `head_cross_entropy`.
        """
        check_transformer(self)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"Transformer: tokens are {tokens.dtype}{list(tokens.shape)}, expected integers "
                "[batch, sequence]; give one sequence a leading dimension of 1."
            )
        config = self._layer_config(train=train)
        config.context.check_split(tokens)
        rows, std = size_of_vocabulary(self), self.hidden_size**-0.5
        # An embedding that is not the head has variance 1, about what all layers add to it.
        embedding_VD = self._table(
            "embedding", ("vocab", "embed"), rows, std if self.tied_head else 1.0
        )
        known = tokens
        if rows > self.vocab_size:
            known = jnp.where(tokens < self.vocab_size, tokens, -1)
        x_BSD = split_lookup(embedding_VD, known, config.axis, config.sequence_dim)
        # Cast only now, so that the gradients of a frequent token are summed in float32.
        x_BSD = x_BSD.astype(config.dtype)
        positions_S = config.context.positions(tokens.shape[1])
        angles_SH = rotary_angles(positions_S, config.head_size, base=self.rope_base)
        document_BS = None
        if self.bos_token >= 0:
            document_BS = config.context.cumsum(tokens == self.bos_token)
        x_BSD = self._run_layers(config, x_BSD, angles_SH, document_BS)
        x_BSD = normalize(x_BSD, "final_norm", config)
        x_BSD = enter(x_BSD, config.axis, config.sequence_dim)
        head_DV = embedding_VD.T
        if not self.tied_head:
            head_DV = self._table("head", ("embed", "vocab"), rows, std)
        of_head: Any = {"axis": config.axis, "vocab_size": self.vocab_size}
        of_head["soft_cap"] = self.logit_soft_cap or None
        if labels is None:
            return head_logits(x_BSD, head_DV, **of_head)
        if train:
            of_head |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return head_cross_entropy(x_BSD, head_DV, labels, **of_head)

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
            annotate=self.annotate,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            capacity_factor=self.capacity_factor or None,
            expert_axis=self.expert_axis or None,
            axis=self.split_axis or None,
            sequence_dim=1 if self.sequence_parallel else None,
            overlap=self.overlap,
            context=Context(self.context_axis or None, self.context_attention),
        )

    def _table(self, name: str, dim_names: tuple[str, ...], rows: int, std: float) -> jax.Array:
        """The embedding or the head; each device along the axis has some of the tokens."""
        init = marked(nn.initializers.normal(std), dim_names, annotate=self.annotate)
        if self.split_axis:
            init = split(init, split_dims(dim_names, self.split_axis))
        sizes = {"vocab": rows, "embed": self.hidden_size}
        table: jax.Array = self.param(name, init, tuple(sizes[dim] for dim in dim_names))
        return table

    def _run_layers(
        self,
        config: LayerConfig,
        x_BSD: jax.Array,
        angles_SH: jax.Array,
        document_BS: jax.Array | None,
    ) -> jax.Array:
        layer: Any = Layer
        if self.remat != "none":
            # In a loop XLA cannot merge the two computations.
            policy = REMAT_POLICIES[self.remat]
            layer = nn.remat(Layer, policy=policy, prevent_cse=not self.scan_layers)
        if self.scan_layers:
            collections = (LOSSES, COUNTS) if self.num_experts else ()
            layers = nn.scan(
                layer,
                variable_axes=dict.fromkeys(("params", *collections), 0),
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=self.num_layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers(config, name="layers")(x_BSD, angles_SH, document_BS)[0]
        for index in range(self.num_layers):
            x_BSD, _ = layer(config, name=f"layer_{index}")(x_BSD, angles_SH, document_BS)
        return x_BSD


def size_of_head(model: Transformer) -> int:
    """The features of a head, `H`."""
    return model.head_size or model.hidden_size // model.num_heads


def size_of_vocabulary(model: Transformer) -> int:
    """The rows of the embedding, `V`: a multiple of `vocab_multiple`."""
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def flops_per_token(model: Transformer, sequence_length: int) -> int:
    """The floating point operations of training on a token, for model FLOPs utilization.

    As in appendix B of PaLM (Chowdhery et al., https://arxiv.org/abs/2204.02311): `6 P` for the `P`
    weights that a token is multiplied with, and `12 L N H S` for attention's two products of every
    query with every key. So recomputation does not count, and what a causal mask or the borders of
    documents save counts as if it were computed. Of experts those of a token count, whether or not
    they have room for it. Norms, softmax and the lookup of embeddings are left out.

    Args:
      model: The model.
      sequence_length: Positions of a sequence; `S` is as many, or those of the model's window.

    Returns:
      Multiplications and additions of one token's forward and backward pass.

    Raises:
      ValueError: A field of the model is not as it must be.
    """
    check_transformer(model)
    size = size_of_head(model)
    heads = 2 * model.num_heads + 2 * (model.num_kv_heads or model.num_heads)  # q, out; k, v.
    mlp = 3 * model.mlp_size
    if model.num_experts:
        mlp = model.experts_per_token * mlp + model.num_experts
    layer = model.hidden_size * (heads * size + mlp)
    weights = model.num_layers * layer + model.hidden_size * size_of_vocabulary(model)
    seen = min(sequence_length, model.attention_window or sequence_length)
    return 6 * weights + 12 * model.num_layers * model.num_heads * size * seen


def check_transformer(model: Transformer) -> None:
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
        refuse("num_kv_heads", f"a divisor of num_heads={model.num_heads}, or 0 for as many")
    if not model.rope_base > 1:
        refuse("rope_base", "more than 1, such as 10000")
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
    if model.expert_axis and not model.num_experts:
        refuse("expert_axis", "'' without num_experts")
    if model.sequence_parallel and not model.split_axis:
        refuse("sequence_parallel", "False, or a split_axis such as 'model' that splits positions")
    if model.split_axis and model.annotate:
        refuse(
            "annotate",
            f"False with split_axis={model.split_axis!r}: rules say how parameters are stored, and "
            "a split parameter is stored as it is computed with",
        )
    if model.overlap != "none" and not model.sequence_parallel:
        refuse("overlap", "'none' without sequence_parallel, whose collectives it takes apart")
    if model.context_axis and model.context_axis == model.split_axis:
        refuse("context_axis", f"another axis than split_axis={model.split_axis!r}")
    if model.attention_window < 0:
        refuse("attention_window", "at least 1, such as 4096, or 0 for all positions")
    if not model.attention_soft_cap >= 0:
        refuse("attention_soft_cap", "more than 0, such as 50, or 0 for none")
    has_own = model.context_axis and model.context_attention != "ulysses"
    if has_own and model.attention not in ("", "blockwise"):
        refuse("attention", f"'' or 'blockwise' with context_attention={model.context_attention!r}")
    choices = (
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
