"""Predicts the collectives of layers that are split over a model, expert or context axis.

The table lists the collectives of one minibatch, forward and backward, over `N` devices:

    a block, attention and MLP               4 all-reduces
      with sequence parallelism              4 all-gathers and 4 reduce-scatters
      forward pass run again, in addition    1 all-reduce; or 2 all-gathers and 1 reduce-scatter
    a lookup in a split vocabulary           1 all-reduce; or 1 reduce-scatter and 1 all-gather
    a head with a split vocabulary           1 all-reduce; or 1 all-gather and 1 reduce-scatter
    experts, if tokens are sent to them      4 all-to-alls; each sends b B C E D (N - 1) / N bytes
    attention over a context, in a ring      2 (N - 1) permutes of keys and values, N of gradients
      by heads                               8 all-to-alls: of queries, keys, values and results
      with all keys                          2 all-gathers and 2 reduce-scatters

Except for experts and for attention over a context, the array that is sent is a device's
activations: `A = b B S D` bytes, with `b` bytes an element. An all-reduce sends `2 A (N - 1) / N`,
an all-gather or a reduce-scatter half of these bytes. In addition, the cross entropy sends a few
bytes for each label (Megatron-LM, https://arxiv.org/abs/1909.08053; Korthikanti et al.,
https://arxiv.org/abs/2205.05198; GShard, https://arxiv.org/abs/2006.16668).

A context of `N` devices has `S / N` positions of each sequence on a device. Keys and values are two
arrays of `[B, S / N, K, H]` in the dtype of activations, and a ring sends the gradients of both in
float32 (Liu et al., https://arxiv.org/abs/2310.01889). If remat runs a forward pass again, the
collectives of that pass run again. A ring's forward pass is not run again, because its result is
kept.

With sequence parallelism devices apply the scale of a norm to different positions, so the gradient
of the scale is summed over the devices: 1 all-reduce of `D` numbers for each norm. The gradient of
a norm of queries or keys is summed too, because devices have different heads: 1 all-reduce of `H`
numbers. The collectives of parameters are in `manualpar.inspect.expected_bytes`.

With `float8` in `enter` and `leave`, an all-gather sends a byte for each number, and the devices
reduce the largest magnitude before.

Symbols: `B` examples of a device, `S` positions, `D` features, `K` heads of keys with `H` features,
  `E` experts with a capacity of `C` tokens each.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from manualpar.core.tracing.scopes import (
    CAST_SCOPE,
    CONTEXT_SCOPE,
    CROSS_ENTROPY_SCOPE,
    EXPERT_SCOPE,
    SEQUENCE_SCOPE,
    TENSOR_SCOPE,
)
from manualpar.inspect.communication import Collective, Kind
from manualpar.layers.low_precision import GRADIENT8
from manualpar.quantization.quantized_collectives import FLOAT8

__all__ = [
    "BACKWARD",
    "FLOAT32",
    "FORWARD",
    "INT32",
    "RECOMPUTED",
    "LayerActivations",
    "attention_collectives",
    "block_collectives",
    "cross_entropy_collectives",
    "document_collectives",
    "expert_collectives",
    "head_collectives",
    "lookup_collectives",
    "loss_of_experts_collectives",
    "router_collectives",
    "routing_collectives",
]

FLOAT32 = jnp.dtype("float32")  # The dtype of norms' scales and of losses in every program.
INT32 = jnp.dtype("int32")
# The scopes that JAX writes around a model's operations in the two passes.
FORWARD, BACKWARD = "jvp(Transformer)", "transpose(jvp(Transformer))"
RECOMPUTED = f"{BACKWARD}/rematted_computation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """The activations of a device between layers, in one minibatch.

    Attributes:
      shape: `[B, S, D]`, with the positions of all devices along `axis`.
      axis: The axis that the layers are split over: a model, an expert or a context axis.
      devices: The number of devices along the axis, `N`.
      sequence: Whether the positions between layers are split over the devices.
    """

    shape: tuple[int, int, int]
    dtype: Any
    axis: str
    devices: int
    sequence: bool = False

    @property
    def part(self) -> tuple[int, int, int]:
        """The shape of a device's part of the positions: `[B, S / N, D]`."""
        examples, positions, hidden_size = self.shape
        return examples, positions // self.devices, hidden_size

    def collective(
        self, purpose: str, kind: Kind, times: int, shape: tuple[int, ...], dtype: Any
    ) -> Collective:
        """Returns `times` collectives of the forward pass over the axis, as one `Collective`."""
        scope = f"{FORWARD}/{purpose}"
        return Collective(kind, (self.axis,), self.devices, shape, dtype, times, scope)

    def backward(
        self, purpose: str, kind: Kind, times: int, shape: tuple[int, ...], dtype: Any
    ) -> Collective:
        """Returns `times` collectives of the backward pass over the axis."""
        scope = f"{BACKWARD}/{purpose}"
        return Collective(kind, (self.axis,), self.devices, shape, dtype, times, scope)


def block_collectives(
    x: LayerActivations,
    *,
    passes: int = 1,
    recomputed: bool = False,
    post_norms: bool = False,
    out_biases: int = 0,
    head_norms: tuple[int, ...] = (),
    wide_norms: int = 0,
    pre_norms: int = 2,
    norm_vectors: int = 1,
    shared: bool = False,
    parallel: bool = False,
    latents: tuple[int, ...] = (),
    latent_norms: tuple[int, ...] = (),
    latent_kernels: tuple[int, ...] = (),
    dtype: Any = FLOAT32,
    float8_inputs: tuple[bool, bool] = (False, False),
    float8_outputs: int = 0,
) -> Iterator[Collective]:
    """Yields the collectives of a block: attention and MLP, each after a norm.

    Args:
      x: The activations of the block on a device.
      passes: How often the forward pass of the block runs in a minibatch.
      recomputed: Whether remat runs the forward pass again in the backward pass. It repeats the
        last sum of the block only with `post_norms`, because only a norm after the sum needs it.
      post_norms: Whether norms also follow attention and MLP.
      out_biases: The number of biases that are added to the sum of the devices' outputs.
      head_norms: The sizes of the norms of queries and keys, whose scales all heads share.
      wide_norms: The number of norms over the features of all heads, whose mean square is summed.
      pre_norms: The number of norms before attention and MLP.
      norm_vectors: The number of vectors of a norm: its scale, and its bias if it has one.
      shared: Whether attention and MLP read the result of one norm.
      parallel: Whether the MLP reads the block's input, so that remat repeats no sum.
      latents: With latent attention, the features of each array that attention enters, in place of
        the activations.
      latent_norms: With latent attention, the features of the norms of latents.
      latent_kernels: With latent attention, the outputs of the products that make latents.
      dtype: The dtype of the gradients of `latent_kernels`.
      float8_inputs: Whether the first array that attention enters, and the array that the MLP
        enters, are gathered as float8 codes.
      float8_outputs: The number of outputs, 0 to 2, whose gradients are gathered as float8 codes.
    """
    entered = [dataclasses.replace(x, shape=(*x.shape[:2], size)) for size in latents] or [x]
    is_float8 = [float8_inputs[0], *(False for _ in entered[1:]), float8_inputs[1]]
    for array, float8 in zip([*entered, *([] if shared else [x])], is_float8, strict=False):
        yield from _enter(array, 1, forward=passes + recomputed, float8=float8)
    for size in latent_norms * x.sequence:
        yield x.backward(CAST_SCOPE, "all_reduce", 1, (1, 1, size), FLOAT32)
    for size in latent_kernels * x.sequence:
        yield x.backward(TENSOR_SCOPE, "all_reduce", 1, (x.shape[2], size), jnp.dtype(dtype))
    again = 2 * post_norms if parallel else 1 + post_norms
    forward = 2 * passes + recomputed * again
    yield from _leave(x, 2, forward=forward, float8=float8_outputs)
    yield from _norm_scales(x, (pre_norms + 2 * post_norms) * norm_vectors)
    for _ in range(out_biases * x.sequence):
        yield x.backward(TENSOR_SCOPE, "all_reduce", 1, x.shape[2:], x.dtype)
    if wide_norms:
        means, forward = (*x.shape[:2], 1, 1), passes + recomputed
        yield x.collective(TENSOR_SCOPE, "all_reduce", wide_norms * forward, means, FLOAT32)
        yield x.backward(CAST_SCOPE, "all_reduce", wide_norms, means, FLOAT32)
    for size in head_norms:
        yield x.backward(CAST_SCOPE, "all_reduce", 1, (1, 1, 1, size), FLOAT32)


def lookup_collectives(
    x: LayerActivations, dtype: Any = FLOAT32, *, passes: int = 1
) -> Iterator[Collective]:
    """Yields the collectives of a lookup in an embedding of `dtype` whose rows are split."""
    yield from _leave(dataclasses.replace(x, dtype=jnp.dtype(dtype)), 1, forward=passes)


def head_collectives(x: LayerActivations, *, norm_vectors: int = 1) -> Iterator[Collective]:
    """Yields the collectives of the model's last norm and of a head whose columns are split."""
    yield from _norm_scales(x, norm_vectors)
    yield from _enter(x, 1, forward=1)


def cross_entropy_collectives(
    x: LayerActivations, *, smoothed: bool = False
) -> Iterator[Collective]:
    """Yields the collectives of the loss and the accuracy of split logits.

    For each label the devices reduce the largest logit and two sums (four with label smoothing).
    For the accuracy they gather each device's largest logit and this logit's index.
    """
    labels, sums = x.shape[:2], 4 if smoothed else 2
    yield x.collective(CROSS_ENTROPY_SCOPE, "all_reduce", 1, labels, FLOAT32)
    yield x.collective(CROSS_ENTROPY_SCOPE, "all_reduce", 1, (sums, *labels), FLOAT32)
    yield x.collective(CROSS_ENTROPY_SCOPE, "all_gather", 1, (2, 1, *labels), FLOAT32)


def expert_collectives(
    x: LayerActivations,
    *,
    num_experts: int,
    capacity: int,
    passes: int = 1,
    recomputed: bool = False,
) -> Iterator[Collective]:
    """Yields the all-to-alls of an MoE layer whose experts are split over `x.axis`.

    The devices along `x.axis` have different examples, and send tokens to the experts.
    """
    examples, _, hidden_size = x.shape
    rows = (examples, capacity, num_experts, hidden_size)
    yield x.collective(EXPERT_SCOPE, "all_to_all", 2 * (passes + recomputed), rows, x.dtype)
    yield x.backward(EXPERT_SCOPE, "all_to_all", 2, rows, x.dtype)


def router_collectives(
    x: LayerActivations,
    *,
    num_experts: int,
    top_k: int,
    has_shared_gate: bool = False,
    biased: int = 0,
    dtype: Any = FLOAT32,
    passes: int = 1,
    recomputed: bool = False,
) -> Iterator[Collective]:
    """Yields the router's collectives, if each expert is split over a model axis like an MLP.

    They come in addition to the collectives of an MLP. The devices sum the gradients of the gates
    and of the shared experts' gate. With sequence parallelism they also gather the router's logits
    of all positions, and sum the gradient of the router's weights. `biased` is the number of a
    device's experts if experts have biases. The gradients of the biases of their outputs are
    summed. `dtype` is the dtype of the weights and of the sums of their gradients.
    """
    examples, positions, hidden_size = x.shape
    gates = (examples, positions, top_k)
    yield x.backward(TENSOR_SCOPE, "all_reduce", 1, gates, FLOAT32)
    if has_shared_gate:
        yield x.backward(TENSOR_SCOPE, "all_reduce", 1, (hidden_size, 1), jnp.dtype(dtype))
    if biased:
        yield x.backward(TENSOR_SCOPE, "all_reduce", 1, (biased, hidden_size), jnp.dtype(dtype))
    if x.sequence:
        logits = (*x.part[:2], num_experts)
        yield x.collective(SEQUENCE_SCOPE, "all_gather", passes + recomputed, logits, FLOAT32)
        router = (hidden_size, num_experts)
        yield x.backward(TENSOR_SCOPE, "all_reduce", 1, router, jnp.dtype(dtype))


def routing_collectives(
    x: LayerActivations, *, num_experts: int, top_k: int, passes: int = 1, recomputed: bool = False
) -> Iterator[Collective]:
    """Yields the collectives over a context axis, `x.axis`, that choose and balance experts.

    An expert accepts tokens in the order of a sequence's positions. So the devices tell each other
    how many of their tokens choose each expert. The forward pass also sums choices and scores for
    the balance loss. Remat computes only the sums of the choices again.
    """
    examples, forward = x.shape[0], passes + recomputed
    choices = (examples, top_k, num_experts)
    yield x.collective(CONTEXT_SCOPE, "all_reduce", forward, choices, INT32)
    yield x.collective(CONTEXT_SCOPE, "all_gather", forward, (2, *choices), INT32)
    yield x.collective(CONTEXT_SCOPE, "all_reduce", forward, (examples, num_experts), INT32)
    yield x.collective(CONTEXT_SCOPE, "all_reduce", passes, (examples, num_experts), FLOAT32)
    yield x.collective(CONTEXT_SCOPE, "all_reduce", passes, (examples, 1), FLOAT32)


def loss_of_experts_collectives(x: LayerActivations, layers: int) -> Iterator[Collective]:
    """Yields the collectives, over a context axis `x.axis`, of the losses that balance experts."""
    yield x.collective(CONTEXT_SCOPE, "all_reduce", 1, x.shape[:1], FLOAT32)
    yield x.backward(CONTEXT_SCOPE, "all_reduce", 2, (layers, x.shape[0]), FLOAT32)


def attention_collectives(
    x: LayerActivations,
    how: str,
    *,
    heads: tuple[int, int, int],
    passes: int = 1,
    recomputed: bool = False,
) -> Iterator[Collective]:
    """Yields the collectives of attention over a context axis, `x.axis`.

    `heads` is (number of query heads, `K`, `H`); `how` is as in
    `manualpar.layers.attention.context.Context`.
    """
    queries, keys, features = heads
    of_queries, of_keys = ((*x.part[:2], number, features) for number in (queries, keys))
    forward, others = passes + recomputed, x.devices - 1
    if how == "ring":
        yield x.collective(CONTEXT_SCOPE, "permute", passes * others, (2, *of_keys), x.dtype)
        yield x.backward(CONTEXT_SCOPE, "permute", others, (2, *of_keys), x.dtype)
        yield x.backward(CONTEXT_SCOPE, "permute", x.devices, (2, *of_keys), FLOAT32)
    elif how == "ulysses":
        repeated = (*of_keys[:2], max(keys, x.devices), features)
        for shape in (of_queries, repeated):
            yield x.collective(CONTEXT_SCOPE, "all_to_all", 2 * forward, shape, x.dtype)
            yield x.backward(CONTEXT_SCOPE, "all_to_all", 2, shape, x.dtype)
    else:
        yield x.collective(CONTEXT_SCOPE, "all_gather", 2 * forward, of_keys, x.dtype)
        yield x.backward(CONTEXT_SCOPE, "reduce_scatter", 2, (x.devices, *of_keys), x.dtype)


def document_collectives(
    x: LayerActivations,
    layers: int,
    *,
    in_loop: int,
    after: int,
    copies: int,
    counted: bool = True,
    recomputed: bool = False,
    parts: int = 1,
) -> Iterator[Collective]:
    """Yields the gathers of document numbers over a context axis, for packed sequences.

    Attention needs the document number of each position of the sequence. `counted` says whether the
    batch has no document numbers, so that the step counts documents; this takes one more gather.

    The body of the loop over layers has `in_loop` layers, and `after` layers are outside of the
    loop. All iterations gather the same numbers, so JAX moves these gathers out of the loop, where
    each layer of the body has `copies` gathers. With `recomputed` each layer of the body has one
    gather there, and each of all `layers` gathers once more when remat runs it again. A layer
    gathers the numbers of each of `parts` parts of the batch.
    """
    if counted:
        yield x.collective(CONTEXT_SCOPE, "all_gather", 1, (2, x.part[0]), INT32)
    times = (1 if recomputed else copies) * in_loop + after
    times += layers if recomputed else 0
    examples, positions = x.part[0] // parts, x.part[1]
    yield x.collective(CONTEXT_SCOPE, "all_gather", parts * times, (examples, positions), INT32)


def _enter(
    x: LayerActivations, times: int, *, forward: int, float8: bool = False
) -> Iterator[Collective]:
    """Yields the collectives of `times` calls of `enter`, see `manualpar.layers.boundaries`.

    `forward` is the number of these calls in all forward passes, and `float8` is as in `enter`.
    """
    if x.sequence:
        dtype = FLOAT8 if float8 else x.dtype
        yield x.collective(SEQUENCE_SCOPE, "all_gather", forward, x.part, dtype)
        if float8:
            yield x.collective(SEQUENCE_SCOPE, "all_reduce", forward, (1, 1, 1), FLOAT32)
        yield x.backward(SEQUENCE_SCOPE, "reduce_scatter", times, x.shape, x.dtype)
    else:
        yield x.backward(TENSOR_SCOPE, "all_reduce", times, x.shape, x.dtype)


def _leave(
    x: LayerActivations, times: int, *, forward: int, float8: int = 0
) -> Iterator[Collective]:
    """Yields the collectives of `times` calls of `leave`, `float8` of them with this argument.

    `forward` is as in `_enter`.
    """
    if x.sequence:
        yield x.collective(SEQUENCE_SCOPE, "reduce_scatter", forward, x.shape, x.dtype)
        if times > float8:
            yield x.backward(SEQUENCE_SCOPE, "all_gather", times - float8, x.part, x.dtype)
        if float8:
            yield x.backward(SEQUENCE_SCOPE, "all_gather", float8, x.part, GRADIENT8)
            yield x.backward(SEQUENCE_SCOPE, "all_reduce", float8, (1, 1, 1), FLOAT32)
    else:
        yield x.collective(TENSOR_SCOPE, "all_reduce", forward, x.shape, x.dtype)


def _norm_scales(x: LayerActivations, norms: int) -> Iterator[Collective]:
    if x.sequence:
        yield x.backward(CAST_SCOPE, "all_reduce", norms, (1, 1, x.shape[2]), FLOAT32)
