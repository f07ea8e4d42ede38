"""A mixture of experts: a few of many MLPs compute each token.

On a mesh the experts are divided over an axis: each of `N` devices has `E / N` experts. There are
two ways to bring tokens and experts together. The type of the tokens decides which way is used:

- The axis is one of the axes that split the batch, so the tokens differ along it. An all-to-all
  sends the tokens to the experts, and another one sends the results back (GShard, Lepikhin et al.,
  https://arxiv.org/abs/2006.16668).
- Every device along the axis has the same tokens. Each device computes the outputs of its experts,
  and `leave` sums the outputs.

The MLPs themselves may be split over a model axis, see `boundaries`. The weighted outputs are then
summed once over that axis. This is right because weighing and sending outputs are linear.

Symbols: `B` sequences, `S` positions of a device, `D` features between layers, `F` features inside
an expert, `E` experts, `K` choices of a token, `C` the capacity, `N` devices along the expert axis.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import AxisName
from manualpar.core.parameters.annotations import split
from manualpar.core.parameters.collectives import cast_to_varying, gather_invariant, varying_axes
from manualpar.core.parameters.placement import MatrixDims
from manualpar.core.tracing.scopes import EXPERT_SCOPE, SEQUENCE_SCOPE, TENSOR_SCOPE
from manualpar.layers.attention.context import Context
from manualpar.layers.boundaries import bound_axes, enter, leave, platform_traced_for
from manualpar.layers.low_precision import Matmul, multiply_stacks, tensordot
from manualpar.layers.moe.experts import check_moe
from manualpar.layers.moe.routing import (
    BIAS,
    CHOICES,
    COUNTS,
    DROPPED,
    LOAD_BALANCE,
    LOSSES,
    ROUTER_Z,
    Gates,
    GroupScore,
    Routing,
    choices_per_expert,
    load_balance_loss,
    moved_bias,
    places,
    route,
    router_z_loss,
)

# -------------------------------------------------------------------------------------------------
# The gated MLP of an expert: SwiGLU, or gpt-oss's clamped SwiGLU, with biases or without.
#
# Symbols: `D` features between layers, `F` features inside an expert.


class Weights(NamedTuple):
    """The weights of an expert, or of several experts with a dim in front of each array.

    Attributes:
      gate: `[D, F]`.
      up: `[D, F]`.
      down: `[F, D]`.
      gate_bias: `[F]`; `None` for none.
      up_bias: `[F]`; `None` for none.
      down_bias: `[D]`; `None` for none.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class Gating(NamedTuple):
    """How the gate of an MLP multiplies its features.

    Attributes:
      limit: The bound of gates and features; 0 for none.
      alpha: The factor inside of the sigmoid, only with a limit.
    """

    limit: float = 0.0
    alpha: float = 1.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Computes `silu(gate) * up`, or the clamped SwiGLU of gpt-oss, which adds 1 to `up`."""
        if not self.limit:
            return nn.silu(gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU = Gating()


def gated_mlp(
    x: jax.Array,
    weights: Weights,
    gating: Gating = SWIGLU,
    *,
    product: Callable[..., jax.Array] = jnp.matmul,
    of_rows: Callable[[jax.Array], jax.Array] = lambda bias: bias,
) -> jax.Array:
    """Computes `down(gating(gate(x), up(x)))` in the dtype of `x`.

    Args:
      x: `[..., D]`.
      gating: How gates multiply features.
      product: `product(x, weights)` multiplies rows with the weights of their experts.
      of_rows: Returns the bias of each row from the biases of the experts.
    """

    def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = product(x, kernel.astype(x.dtype))
        return y if bias is None else y + of_rows(bias.astype(x.dtype))

    gate, up = dense(x, weights.gate, weights.gate_bias), dense(x, weights.up, weights.up_bias)
    return dense(gating(gate, up), weights.down, weights.down_bias)


# -------------------------------------------------------------------------------------------------
# Sends tokens to the devices of their experts, and sends the outputs back.
#
# With a capacity, each expert has `C` slots for the tokens of each sequence. All buffers have
# fixed sizes, so that an all-to-all can exchange them.
#
# Without a capacity, no choice is dropped. The tokens are sorted by expert, and a grouped product
# (`jax.lax.ragged_dot`; Gale et al., https://arxiv.org/abs/2211.15841) multiplies each group with
# the weights of its expert. If the backend has a ragged all-to-all, tokens are sent to the devices
# of their experts. XLA has no ragged all-to-all on CPUs. So on CPUs every device gathers all
# tokens and computes the tokens that chose its experts, and a reduce-scatter returns the results.
#
# Symbols: `B` sequences, `S` positions, `D` features, `F` features inside an expert, `E` experts,
# `K` choices of a token, `C` slots of an expert for a sequence, `N` devices along the expert axis.
# Inside `shard_map`, `B`, `S` and `F` are sizes on this device. `H` experts have slots on this
# device: all `E` experts if tokens are sent, otherwise the `E / N` experts of the device. `M = H
# C` is the number of slots of a sequence. `T = B S` is the number of tokens. `R` rows are choices
# of tokens, sorted by expert.


class LocalExperts(NamedTuple):
    """The weights of this device's experts, and how experts and tokens are sharded.

    Attributes:
      weights: `gate` and `up` `[E/N, D, F]`, and `down` `[E/N, F, D]`, and their biases, if any.
      num_experts: The number of all experts, `E`.
      axes: The bound mesh axes that the experts are divided over.
      tokens_differ: Whether tokens differ along these axes. If tokens differ, they are sent to
        their experts.
      gating: How the gates of an expert multiply its features.
      matmul: The format of products, see `MoE`.
    """

    weights: Weights
    num_experts: int
    axes: tuple[str, ...]
    tokens_differ: bool
    gating: Gating = SWIGLU
    matmul: Matmul = ""

    def on_device(self) -> tuple[jax.Array | int, int]:
        """Returns the index of this device's first expert, and the number of its experts."""
        if not self.axes:
            return 0, self.num_experts
        count = self.num_experts // jax.lax.axis_size(self.axes)
        with jax.named_scope(EXPERT_SCOPE):
            return jax.lax.axis_index(self.axes) * count, count


def compute_with_capacity(
    x_BSD: jax.Array,
    chosen_BSK: jax.Array,
    gates_BSK: jax.Array,
    experts: LocalExperts,
    capacity: int,
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """Computes the experts' outputs for all choices for which the chosen expert has a slot.

    Args:
      x_BSD: `[B/data, S, D]`, the tokens.
      chosen_BSK: `int32[B/data, S, K]`, the experts of each token; `E` for none.
      gates_BSK: `[B/data, S, K]`, the weights of these experts' outputs.
      capacity: How many tokens of a sequence an expert takes.
      context: How sequences are split over devices.

    Returns:
      `[B/data, S, D]`, the weighted sums of the outputs (of only this device's experts, if tokens
      are not sent); and `int32[B/data]`, the number of dropped choices.

    Communication:
      If tokens are sent, an all-to-all before the experts and one after them, and the same
      backward. A device sends `(N - 1) / N` of `E B/data C D` elements in each. With a context
      axis also the collectives of `places`.
    """
    B, S, D = x_BSD.shape
    K, C = chosen_BSK.shape[-1], min(capacity, S)
    first, H = (0, experts.num_experts) if experts.tokens_differ else experts.on_device()
    place_BSK = places(chosen_BSK, experts.num_experts, context)
    # If sequences are split, each device numbers the slots of an expert by its own tokens.
    device_place_BSK = places(chosen_BSK, experts.num_experts) if context.size > 1 else place_BSK
    here_BSK, has_room_BSK = chosen_BSK - first, place_BSK < capacity
    is_computed_BSK = (here_BSK >= 0) & (here_BSK < H) & has_room_BSK
    # The slot of each choice, and the position in each slot. An index out of range stands for no
    # slot and for no position.
    slot_BSK = jnp.where(is_computed_BSK, here_BSK * C + device_place_BSK, H * C)
    position_BM = jax.vmap(_positions, (0, None))(slot_BSK, H * C)
    slots_BMD = _take(x_BSD, position_BM)
    slots_HTD = slots_BMD.reshape(B, H, C, D).swapaxes(0, 1).reshape(H, B * C, D)
    slots_HTD = gated_mlp(
        _send(slots_HTD, experts, 0, 1),
        experts.weights,
        experts.gating,
        product=functools.partial(multiply_stacks, matmul=experts.matmul),
        of_rows=lambda bias_HX: bias_HX[:, None],
    )
    slots_HTD = _send(slots_HTD, experts, 1, 0)
    slots_BMD = slots_HTD.reshape(H, B, C, D).swapaxes(0, 1).reshape(B, H * C, D)
    y_BSKD = _take(slots_BMD, slot_BSK.reshape(B, S * K)).reshape(B, S, K, D)
    is_dropped_BSK = ~has_room_BSK & (chosen_BSK < experts.num_experts)
    return _weighted(y_BSKD, gates_BSK), is_dropped_BSK.sum((1, 2))


def compute_dropless(
    x_BSD: jax.Array, chosen_BSK: jax.Array, gates_BSK: jax.Array, experts: LocalExperts
) -> jax.Array:
    """Computes the experts' outputs for all choices.

    The arguments and the result are as in `compute_with_capacity`, without a capacity and without
    the number of dropped choices.

    Communication:
      If tokens are sent and the backend has a ragged all-to-all: one before the experts and one
      after them, and two more backward. With equal load, a device sends `(N - 1) / N` of `K B/data
      S D` elements in each. Each device also gathers from every device the `E` numbers of rows for
      the experts. The receive buffer has room for the worst case, in which one device gets all
      possible choices.

      If the backend has no ragged all-to-all: an all-gather of the tokens, their choices and gates,
      and a reduce-scatter of the results. Backward the all-gather becomes a reduce-scatter, and the
      reduce-scatter becomes an all-gather. In each of them a device sends `N - 1` times its
      `B/data S D` elements.
    """
    B, S, D = x_BSD.shape
    K = chosen_BSK.shape[-1]
    x_TD, chosen_TK, gates_TK = (v.reshape(B * S, -1) for v in (x_BSD, chosen_BSK, gates_BSK))
    if experts.tokens_differ and has_ragged_all_to_all():
        y_TKD = _exchange_ragged(x_TD, chosen_TK, experts)
        return _weighted(y_TKD.reshape(B, S, K, D), gates_BSK)
    if experts.tokens_differ:
        with jax.named_scope(EXPERT_SCOPE):
            x_TD, chosen_TK, gates_TK = (
                jax.lax.all_gather(v, experts.axes, axis=0, tiled=True)
                for v in (x_TD, chosen_TK, gates_TK)
            )
    first, _ = experts.on_device()
    y_TKD = _compute_groups(x_TD, chosen_TK - first, experts)
    y_TD = _weighted(y_TKD[None], gates_TK[None])[0]
    if experts.tokens_differ:
        with jax.named_scope(EXPERT_SCOPE):
            y_TD = jax.lax.psum_scatter(y_TD, experts.axes, scatter_dimension=0, tiled=True)
    return y_TD.reshape(B, S, D)


def has_ragged_all_to_all() -> bool:
    """Returns whether XLA has a ragged all-to-all for the devices of the traced program."""
    return (platform_traced_for() or jax.default_backend()) != "cpu"


def _compute_groups(x_TD: jax.Array, expert_TK: jax.Array, experts: LocalExperts) -> jax.Array:
    """Computes the outputs `[T, K, D]` of this device's experts.

    `expert_TK` numbers these experts from 0. Other numbers stand for experts of other devices, and
    give outputs of 0.
    """
    (T, D), K, (_, H) = x_TD.shape, expert_TK.shape[-1], experts.on_device()
    expert_R = jnp.where((expert_TK >= 0) & (expert_TK < H), expert_TK, H).reshape(T * K)
    # Choices of other devices' experts come last. A token chooses an expert at most once, so at
    # most `min(K, H)` of its choices come before.
    order_R = jnp.argsort(expert_R, stable=True)[: T * min(K, H)]
    group_sizes = jnp.bincount(expert_R, length=H + 1)[:H].astype(jnp.int32)
    is_here_R1 = expert_R[order_R][:, None] < H
    # For rows without a group, a grouped product's results and gradients are undefined.
    rows_RD = jnp.where(is_here_R1, x_TD[order_R // K], 0)
    nearest_R = jnp.minimum(expert_R[order_R], H - 1)
    y_RD = gated_mlp(
        rows_RD,
        experts.weights,
        experts.gating,
        product=functools.partial(jax.lax.ragged_dot, group_sizes=group_sizes),
        of_rows=lambda bias_HX: bias_HX[nearest_R],
    )
    return _put(jnp.where(is_here_R1, y_RD, 0), order_R, T * K).reshape(T, K, D)


def _exchange_ragged(x_TD: jax.Array, chosen_TK: jax.Array, experts: LocalExperts) -> jax.Array:
    """Computes the outputs `[T, K, D]` of all choices, each on the device of its expert."""
    (T, D), K, (_, H) = x_TD.shape, chosen_TK.shape[-1], experts.on_device()
    axes, N = experts.axes, jax.lax.axis_size(experts.axes)
    chosen_R = chosen_TK.reshape(T * K)
    order_R = jnp.argsort(chosen_R, stable=True)
    counts_NH = jnp.bincount(chosen_R, length=N * H + 1)[:-1].astype(jnp.int32).reshape(N, H)
    with jax.named_scope(EXPERT_SCOPE):
        counts_SNH = jax.lax.all_gather(counts_NH, axes, axis=0)  # The counts of all senders.
        sizes_SN, device = counts_SNH.sum(-1), jax.lax.axis_index(axes)
        # Rows leave in the order of their receivers, and arrive in the order of their senders.
        leave_SN, arrive_SN = _starts(sizes_SN, 1), _starts(sizes_SN, 0)
        rows_RD = jax.lax.ragged_all_to_all(
            x_TD[order_R // K],
            cast_to_varying(jnp.zeros((N * T * min(K, H), D), x_TD.dtype), varying_axes(x_TD)),
            leave_SN[device],
            sizes_SN[device],
            arrive_SN[device],
            sizes_SN[:, device],
            axis_name=axes,
        )
    # Each sender's rows arrive in the order of this device's experts.
    ends = jnp.cumsum(counts_SNH[:, device])
    run_R = jnp.cumsum(jnp.zeros(len(rows_RD), jnp.int32).at[ends].add(1, mode="drop"))
    expert_R = jnp.where(run_R < N * H, run_R % H, H)
    y_RD = _compute_groups(rows_RD, expert_R[:, None], experts)[:, 0]
    with jax.named_scope(EXPERT_SCOPE):
        y_RD = jax.lax.ragged_all_to_all(
            y_RD,
            cast_to_varying(jnp.zeros((T * K, D), y_RD.dtype), varying_axes(y_RD)),
            arrive_SN[:, device],
            sizes_SN[:, device],
            leave_SN[:, device],
            sizes_SN[device],
            axis_name=axes,
        )
    return _put(y_RD, order_R, T * K).reshape(T, K, D)


def _starts(sizes: jax.Array, dim: int) -> jax.Array:
    return jnp.cumsum(sizes, dim) - sizes


def _put(rows_RD: jax.Array, order_R: jax.Array, count: int) -> jax.Array:
    """Returns `count` rows: row `i` of `rows_RD` at `order_R[i]`, and zeros elsewhere."""
    return jnp.zeros((count, rows_RD.shape[1]), rows_RD.dtype).at[order_R].set(rows_RD)


def _weighted(y_BSKD: jax.Array, gates_BSK: jax.Array) -> jax.Array:
    return jnp.einsum("bskd,bsk->bsd", y_BSKD, gates_BSK.astype(y_BSKD.dtype))


def _positions(slot_SK: jax.Array, num_slots: int) -> jax.Array:
    """Returns, for each slot, the position that has taken the slot; `S` for an empty slot."""
    S, K = slot_SK.shape
    position_SK = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[:, None], (S, K))
    return jnp.full(num_slots, S, jnp.int32).at[slot_SK].set(position_SK, mode="drop")


def _take(x_BND: jax.Array, index_BM: jax.Array) -> jax.Array:
    """Takes rows of each sequence, `[B, M, D]`; an index that is too large gives zeros."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_BND, index_BM)


def _send(x: jax.Array, experts: LocalExperts, split_dim: int, concat_dim: int) -> jax.Array:
    if not experts.tokens_differ:
        return x
    with jax.named_scope(EXPERT_SCOPE):
        return jax.lax.all_to_all(x, experts.axes, split_dim, concat_dim, tiled=True)


# -------------------------------------------------------------------------------------------------


class MoE(nn.Module):
    """A mixture of experts, each a SwiGLU (Shazeer, https://arxiv.org/abs/2002.05202).

    Its parameters are `router` `[D, E]`, `gate` and `up` `[E, D, F]` and `down` `[E, F, D]`. With
    shared experts there are also `shared_gate` and `shared_up` `[D, F']` and `shared_down`
    `[F', D]`, where `F'` is `shared_size` or `num_shared` times `F`. With `shared_is_gated` there
    is also `shared_router` `[D, 1]`. With `biases` there are also `logit_bias` `[E]`, `gate_bias`
    and `up_bias` `[E, F]` and `down_bias` `[E, D]`. If no `shard_map` binds the axes, the layer is
    an ordinary layer of one device. The parameters and their initial values are the same on every
    mesh. Parameters and routing are float32. The experts compute in the dtype of their input.

    Capacity, order of choices and balance loss are separate for each sequence, so that the result
    does not depend on how sequences are divided among devices and minibatches.

    The layer sows into `losses`, for each sequence, `load_balance` and `router_z`, and into
    `intermediates` the counts `choices` `[B, E]` and `dropped` `[B]`. `auxiliary_loss` makes a loss
    and metrics of these values. In `nn.scan`, name both collections in `variable_axes`, because
    flax silently drops values sown into other collections.

    With `router_bias` or `bias_rate` the layer has a variable `bias` `float32[E]` in the collection
    `router`. A program carries the bias from step to step, and no optimizer sees it. With a rate
    the bias changes whenever the layer is applied with `router` mutable. A program's training does
    this once for each minibatch. (Evaluation does not change the state.) The bias follows the load
    of all devices' tokens. So the bias does not depend on the mesh, but with `num_minibatches=2` it
    changes twice in a step. `nn.scan` needs `"router": 0` in `variable_axes` too.

    Attributes:
      num_experts: The number of experts, `E`, a multiple of the number of devices along `axis`.
      mlp_size: The number of features inside an expert, `F`, a multiple of the number of devices
        along `model_axis`.
      top_k: How many experts compute a token, `K`.
      capacity_factor: The number of tokens of a sequence that an expert can take, as a multiple of
        an equal share, see `capacity_of`. A choice of a full expert adds nothing. With `None` no
        choice is dropped.
      num_shared: The number of shared experts. They compute every token, with a gate of 1
        (DeepSeekMoE, Dai et al., https://arxiv.org/abs/2401.06066), and are not divided over
        `axis`.
      shared_size: The features of all shared experts together, `F'`, in place of `num_shared`.
      shared_is_gated: Whether the shared experts' output has a gate: `sigmoid(x @ shared_router)`.
      router_bias: Whether a bias is added to the scores to choose the experts. The initial bias is
        0. Use this option for pretrained weights that include such a bias.
      bias_rate: The change of the bias in a minibatch, such as 0.001, see `routing.moved_bias`.
        With a rate above 0 the layer has a bias, even without `router_bias`. With 0 the bias does
        not change.
      gates: How the router's logits become scores; `routing.route` explains this attribute and the
        next five.
      normalize_gates: Whether the gates of a token are divided by their sum.
      gate_scale: The factor by which the gates are then multiplied.
      gates_on_inputs: Whether the gate of a token multiplies the input of its one expert, and not
        the output, as in Llama 4.
      groups: The number of groups into which neighbouring experts are divided; 1 for no groups.
      groups_per_token: The number of groups in which a token may choose experts.
      group_score: How the score of a group is computed from the scores of its experts.
      axis: The mesh axis, or tuple of axes, that the experts are divided over; `None` for none.
      model_axis: The mesh axis, or tuple of axes, that each expert is split over.
      sequence: Whether positions are split over `model_axis` between layers.
      context_axis: The mesh axis that sequences are split over, see `Context`; `None` for none. If
        sequences are split and the field is not set, capacity, order and balance refer to one
        device's part of a sequence. With a capacity, one device's positions may fill all slots of
        an expert. So each device has as many slots as its positions can fill. All devices together
        have more slots than without the axis, at most by a factor of the number of devices along
        the axis. Without a capacity, only chosen tokens are computed, on any mesh.
      biases: Whether the router and the products of the experts have biases.
      swiglu_limit: The bound `c` of gates and features in gpt-oss's experts, which compute `(up +
        1) * gate * sigmoid(alpha * gate)` of `gate` up to `c` and of `up` from `-c` to `c`; 0 for
        SwiGLU.
      swiglu_alpha: The factor `alpha` of `swiglu_limit`.
      down_scale: The standard deviation of the initial `down` in multiples of `F**-0.5`.
      matmul: The format of the experts' products: `"float8"`, in which each expert has scales of
        its own, or `"int8"`, see `manualpar.layers.float8_dot_general`; `""` for the dtype of the
        input. It needs a capacity.
    """

    num_experts: int
    mlp_size: int
    top_k: int = 2
    capacity_factor: float | None = 1.25
    num_shared: int = 0
    bias_rate: float = 0.0
    gates: Gates = "softmax"
    axis: AxisName | None = "expert"
    model_axis: AxisName | None = None
    sequence: bool = False
    down_scale: float = 1.0
    context_axis: str | None = None
    shared_size: int = 0
    shared_is_gated: bool = False
    router_bias: bool = False
    normalize_gates: bool = True
    gate_scale: float = 1.0
    gates_on_inputs: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore = "best_two"
    biases: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    matmul: Matmul = ""
    # Each expert has a matrix of its own.
    matrix_dims: ClassVar[Mapping[str, MatrixDims | None]] = {
        **dict.fromkeys(("gate", "up", "down"), MatrixDims((1,), (2,))),
        **dict.fromkeys(("router", "shared_router"), MatrixDims((0,), (1,), hidden=False)),
        **dict.fromkeys(("gate_bias", "up_bias", "down_bias", "logit_bias")),
    }

    @nn.compact
    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        """Computes the experts' outputs for the tokens of some sequences.

        Args:
          x_BSD: `[B/data, S, D]`; with `sequence` and a model axis `[B/data, S/model, D]`.
          mask_BS: `bool[B/data, S]`, which tokens are routed. Other tokens go only to the shared
            experts. They use no capacity and are not counted in a loss. `None` routes every token,
            padding too.

        Returns:
          The sums of the experts' outputs times their gates, in the shape and dtype of `x_BSD`.

        Raises:
          ValueError: A field is out of range, or does not fit the input or the mesh.

        Communication:
          If tokens are sent to experts: two all-to-alls forward and two backward. In each a device
          sends `(N - 1) / N` of `B C E D` elements in the dtype of `x`, see `all_to_all_bytes`.

          If tokens are not sent: an all-reduce of the outputs forward, and all-reduces of the
          gradients of `x` and of the gates backward. Over a model axis: the same all-reduces. With
          `sequence` the collectives of `enter` and `leave` replace the all-reduces of the outputs
          and of the gradient of `x`, and the router's logits are gathered.

          With `biases` over a model axis: an all-reduce of the gradient of `down_bias`. With
          `bias_rate`: an all-reduce of `E` counts. Over a context axis: sums for each
          sequence, see `places`, `load_balance_loss` and `router_z_loss`.
        """
        check_moe(self, x_BSD, mask_BS)
        x_BSD = jnp.asarray(x_BSD)  # A NumPy array cannot be indexed by traced indices.
        context = Context(self.context_axis)
        with context.scope():
            return self._compute(x_BSD, mask_BS, context)

    def _compute(self, x_BSD: jax.Array, mask_BS: jax.Array | None, context: Context) -> jax.Array:
        axes = bound_axes("MoE", self.axis)
        tokens_differ = _tokens_differ(x_BSD, axes)
        sum_axes = () if tokens_differ else axes
        sequence_dim = 1 if self.sequence else None

        logits_BSE = self._logits(x_BSD)
        routing, choices_BE = self._route(logits_BSE, mask_BS)
        x_BSD = enter(x_BSD, self.model_axis, sequence_dim)
        experts = self._experts(x_BSD.shape[-1], axes, tokens_differ)
        gates_BSK = enter(enter(routing.gates, self.model_axis), sum_axes, scope=EXPERT_SCOPE)
        into_BSD = enter(x_BSD, sum_axes, scope=EXPERT_SCOPE)
        if self.gates_on_inputs:  # With one choice of each token.
            into_BSD *= gates_BSK.astype(into_BSD.dtype)
            gates_BSK = cast_to_varying(jnp.ones_like(gates_BSK), varying_axes(gates_BSK))
        tokens = into_BSD, routing.chosen, gates_BSK
        if self.capacity_factor is None:
            y_BSD, dropped_B = compute_dropless(*tokens, experts), jnp.zeros(len(x_BSD))
        else:
            capacity = capacity_of(self, x_BSD.shape[1] * context.size)
            y_BSD, dropped_B = compute_with_capacity(*tokens, experts, capacity, context)
        y_BSD = leave(y_BSD, sum_axes, scope=EXPERT_SCOPE)
        if self.num_shared or self.shared_size:
            y_BSD += self._shared(x_BSD)
        self.sow(LOSSES, LOAD_BALANCE, load_balance_loss(routing, mask_BS, context))
        self.sow(LOSSES, ROUTER_Z, router_z_loss(logits_BSE, mask_BS, context))
        self.sow(COUNTS, CHOICES, choices_BE.astype(jnp.float32))
        self.sow(COUNTS, DROPPED, dropped_B.astype(jnp.float32))
        return leave(y_BSD, self.model_axis, sequence_dim)

    def _logits(self, x_BSD: jax.Array) -> jax.Array:
        D, E = x_BSD.shape[-1], self.num_experts
        router_DE = self.param("router", nn.initializers.normal(D**-0.5), (D, E))
        model_axes = bound_axes("MoE", self.model_axis)
        if self.sequence and model_axes:
            # Gather logits and not activations, because logits have fewer bytes.
            logits_BSE = jnp.matmul(x_BSD.astype(jnp.float32), enter(router_DE, model_axes))
            logits_BSE = gather_invariant(logits_BSE, 1, model_axes, scope=SEQUENCE_SCOPE)
        else:
            logits_BSE = jnp.matmul(x_BSD.astype(jnp.float32), router_DE)
        if not self.biases:
            return logits_BSE
        return logits_BSE + self.param("logit_bias", nn.initializers.zeros, (E,))[None, None]

    def _route(self, logits_BSE: jax.Array, mask_BS: jax.Array | None) -> tuple[Routing, jax.Array]:
        bias = None
        if self.router_bias or self.bias_rate:
            bias = self.variable(BIAS, "bias", jnp.zeros, self.num_experts, jnp.float32)
        routing = route(
            logits_BSE,
            top_k=self.top_k,
            gates=self.gates,
            normalize=self.normalize_gates,
            scale=self.gate_scale,
            groups=self.groups,
            groups_per_token=self.groups_per_token,
            group_score=self.group_score,
            bias_E=bias.value if bias else None,
            mask_BS=mask_BS,
        )
        choices_BE = choices_per_expert(routing.chosen, self.num_experts)
        is_trained = self.is_mutable_collection(BIAS) and not self.is_initializing()
        if bias and self.bias_rate and is_trained:
            bias.value = moved_bias(bias.value, choices_BE, self.bias_rate)
        return routing, choices_BE

    def _experts(
        self, hidden_size: int, axes: tuple[str, ...], tokens_differ: bool
    ) -> LocalExperts:
        D, E, F = hidden_size, self.num_experts, self.mlp_size
        axis, model_axis = self.axis or None, self.model_axis or None
        into, out = (axis, None, model_axis), (axis, model_axis, None)
        weights = Weights(
            self.param("gate", split(_normal(1.0), into), (E, D, F)),
            self.param("up", split(_normal(1.0), into), (E, D, F)),
            self.param("down", split(_normal(self.down_scale), out), (E, F, D)),
        )
        if self.biases:
            zeros, wide = nn.initializers.zeros, (axis, model_axis)
            down_bias = self.param("down_bias", split(zeros, (axis, None)), (E, D))
            down_bias = enter(down_bias, model_axis)
            # The outputs are summed over the model axis, so only one device may add the bias.
            if model_axes := bound_axes("MoE", model_axis):
                with jax.named_scope(TENSOR_SCOPE):
                    down_bias = jnp.where(jax.lax.axis_index(model_axes) == 0, down_bias, 0)
            weights = weights._replace(
                gate_bias=self.param("gate_bias", split(zeros, wide), (E, F)),
                up_bias=self.param("up_bias", split(zeros, wide), (E, F)),
                down_bias=down_bias,
            )
        gating = Gating(self.swiglu_limit, self.swiglu_alpha)
        return LocalExperts(weights, E, axes, tokens_differ, gating, self.matmul)

    def _shared(self, x_BSD: jax.Array) -> jax.Array:
        D, model_axis = x_BSD.shape[-1], self.model_axis or None
        F = self.shared_size or self.num_shared * self.mlp_size
        into, out = split(_normal(1.0), (None, model_axis)), (model_axis, None)
        gate, up = (self.param(f"shared_{name}", into, (D, F)) for name in ("gate", "up"))
        down = self.param("shared_down", split(_normal(self.down_scale), out), (F, D))
        product = functools.partial(tensordot, contracted=1, matmul=self.matmul)
        y_BSD = gated_mlp(x_BSD, Weights(gate, up, down), product=product)
        if not self.shared_is_gated:
            return y_BSD
        router_D1 = self.param("shared_router", nn.initializers.normal(D**-0.5), (D, 1))
        # Each device multiplies its term of the sum over the model axis by the gate. The result is
        # the same as with a gate after the sum.
        logits_BS1 = jnp.matmul(x_BSD.astype(jnp.float32), enter(router_D1, self.model_axis))
        return y_BSD * jax.nn.sigmoid(logits_BS1).astype(y_BSD.dtype)


def capacity_of(moe: MoE, sequence_length: int) -> int:
    """Computes how many tokens of a sequence an expert may take, `C`.

    `C` is `capacity_factor` times an equal share, `S K / E`, rounded up, and at most the length of
    the sequence.
    """
    if moe.capacity_factor is None:
        return sequence_length
    equal = sequence_length * moe.top_k / moe.num_experts
    return min(sequence_length, math.ceil(equal * moe.capacity_factor))


def all_to_all_bytes(
    moe: MoE, shape: tuple[int, int, int], *, devices: int, itemsize: int = 4
) -> int:
    """Computes the bytes that a device sends in one all-to-all of a layer with a capacity.

    A training step has four all-to-alls for each layer: two forward and two backward. With
    `nn.remat` there are six, because the forward pass is computed again.

    Args:
      shape: `[B/data, S, D]`, a device's tokens of one minibatch.
      devices: The number of devices along the layer's axis, `N`, that exchange the tokens.
      itemsize: The bytes of an element.
    """
    B, S, D = shape
    return B * capacity_of(moe, S) * moe.num_experts * D * itemsize * (devices - 1) // devices


def _normal(scale: float) -> Callable[..., jax.Array]:
    def init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return scale * shape[-2] ** -0.5 * jax.random.normal(key, shape)

    return init


def _tokens_differ(x: jax.Array, axes: tuple[str, ...]) -> bool:
    """Returns whether, by the type of `x`, tokens differ along `axes`."""
    differing = [axis for axis in axes if axis in varying_axes(x)]
    if differing and len(differing) < len(axes):
        raise ValueError(
            f"MoE: axis={axes}, but by its type x of shape {x.shape} varies over {differing} only, "
            "expected tokens that vary over all axes in axis, or over none of them. Build the "
            f"program with axis_name=... that names all of {axes}, or divide the experts over "
            f"{differing}."
        )
    return bool(differing)
