"""Sends tokens to the devices of their experts, and sends the outputs back.

With a capacity, each expert has `C` slots for the tokens of each sequence. All buffers have fixed
sizes, so that an all-to-all can exchange them.

Without a capacity, no choice is dropped. The tokens are sorted by expert, and a grouped product
(`jax.lax.ragged_dot`; Gale et al., https://arxiv.org/abs/2211.15841) multiplies each group with the
weights of its expert. If the backend has a ragged all-to-all, tokens are sent to the devices of
their experts. XLA has no ragged all-to-all on CPUs. So on CPUs every device gathers all tokens and
computes the tokens that chose its experts, and a reduce-scatter returns the results.

Symbols: `B` sequences, `S` positions, `D` features, `F` features inside an expert, `E` experts, `K`
choices of a token, `C` slots of an expert for a sequence, `N` devices along the expert axis. Inside
`shard_map`, `B`, `S` and `F` are sizes on this device. `H` experts have slots on this device: all
`E` experts if tokens are sent, otherwise the `E / N` experts of the device. `M = H C` is the number
of slots of a sequence. `T = B S` is the number of tokens. `R` rows are choices of tokens, sorted by
expert.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import EXPERT_SCOPE
from manualpar.layers.attention.context import Context
from manualpar.layers.boundaries import platform_traced_for
from manualpar.layers.moe.gated_mlp import SWIGLU, Gating, Weights, gated_mlp
from manualpar.layers.moe.routing import places


class LocalExperts(NamedTuple):
    """The weights of this device's experts, and how experts and tokens are sharded.

    Attributes:
      weights: `gate` and `up` `[E/N, D, F]`, and `down` `[E/N, F, D]`, and their biases, if any.
      num_experts: The number of all experts, `E`.
      axes: The bound mesh axes that the experts are divided over.
      tokens_differ: Whether tokens differ along these axes. If tokens differ, they are sent to
        their experts.
      gating: How the gates of an expert multiply its features.
    """

    weights: Weights
    num_experts: int
    axes: tuple[str, ...]
    tokens_differ: bool
    gating: Gating = SWIGLU

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
      experts: The experts.
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
