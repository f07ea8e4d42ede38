"""How tokens come to their experts, and the experts' outputs back to the tokens.

With a capacity, each expert has `C` slots for the tokens of each sequence. All buffers have fixed
sizes, so that an all-to-all can exchange them.

Symbols: `B` sequences, `S` positions, `D` features, `F` features inside an expert, `E` experts, `K`
choices of a token, `C` the capacity, `N` devices along the expert axis. Inside `shard_map`, `B` and
`F` are this device's. `H` experts are *here*: those that this device sends tokens to, all `E` of
them if tokens travel, else its own `E / N`. `M` are the slots of a sequence, `H C`.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.layers.routing import places
from manualpar.purposes import EXPERT_SCOPE


class Experts(NamedTuple):
    """The weights of this device's experts, and where experts and tokens are.

    Attributes:
      gate: `[E/N, D, F]`.
      up: `[E/N, D, F]`.
      down: `[E/N, F, D]`.
      num_experts: All experts, `E`.
      axes: The bound mesh axes that they are divided over.
      travel: Whether tokens differ along these axes, so that they travel to their experts.
    """

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    num_experts: int
    axes: tuple[str, ...]
    travel: bool

    def __call__(self, x: jax.Array, product: Callable[..., jax.Array] = jnp.matmul) -> jax.Array:
        """What the experts make of `x`, whose products with weights are `product(x, weights)`."""
        gate, up, down = (weights.astype(x.dtype) for weights in (self.gate, self.up, self.down))
        return product(nn.silu(product(x, gate)) * product(x, up), down)

    def own(self) -> tuple[jax.Array | int, int]:
        """The first of this device's experts, and how many it has."""
        if not self.axes:
            return 0, self.num_experts
        count = self.num_experts // jax.lax.axis_size(self.axes)
        return jax.lax.axis_index(self.axes) * count, count


def compute_with_capacity(
    x_BSD: jax.Array, chosen_BSK: jax.Array, experts: Experts, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the choices that find room at their experts.

    Args:
      x_BSD: `[B/data, S, D]`, the tokens.
      chosen_BSK: `int32[B/data, S, K]`, their experts; `E` for none.
      experts: The experts.
      capacity: How many tokens of a sequence an expert takes, `C`.

    Returns:
      `[B/data, S, K, D]`, the output of each choice, 0 for those dropped and, if tokens do not
      travel, for those of experts elsewhere; and `int32[B/data]`, how many choices were dropped.

    Communication:
      If tokens travel, an all-to-all before the experts and one after them, and the same backward.
      A device sends `(N - 1) / N` of `E B/data C D` elements in each.
    """
    B, S, D = x_BSD.shape
    K, C = chosen_BSK.shape[-1], capacity
    first, H = (0, experts.num_experts) if experts.travel else experts.own()
    place_BSK, here_BSK = places(chosen_BSK, experts.num_experts), chosen_BSK - first
    is_computed_BSK = (here_BSK >= 0) & (here_BSK < H) & (place_BSK < C)
    # The slot of each choice, and the position in each slot. A number that is too large is none.
    slot_BSK = jnp.where(is_computed_BSK, here_BSK * C + place_BSK, H * C)
    position_BM = jax.vmap(_positions, (0, None))(slot_BSK, H * C)
    slots_BMD = _take(x_BSD, position_BM)
    slots_HTD = slots_BMD.reshape(B, H, C, D).swapaxes(0, 1).reshape(H, B * C, D)
    slots_HTD = _send(experts(_send(slots_HTD, experts, 0, 1)), experts, 1, 0)
    slots_BMD = slots_HTD.reshape(H, B, C, D).swapaxes(0, 1).reshape(B, H * C, D)
    y_BSKD = _take(slots_BMD, slot_BSK.reshape(B, S * K)).reshape(B, S, K, D)
    is_dropped_BSK = (place_BSK >= C) & (chosen_BSK < experts.num_experts)
    return y_BSKD, is_dropped_BSK.sum((1, 2))


def _positions(slot_SK: jax.Array, num_slots: int) -> jax.Array:
    """The position whose choice is in each slot; `S` for an empty slot."""
    S, K = slot_SK.shape
    position_SK = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[:, None], (S, K))
    return jnp.full(num_slots, S, jnp.int32).at[slot_SK].set(position_SK, mode="drop")


def _take(x_BND: jax.Array, index_BM: jax.Array) -> jax.Array:
    """Rows of each sequence, `[B, M, D]`; zeros for an index that is too large."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_BND, index_BM)


def _send(x: jax.Array, experts: Experts, split_dim: int, concat_dim: int) -> jax.Array:
    if not experts.travel:
        return x
    with jax.named_scope(EXPERT_SCOPE):
        return jax.lax.all_to_all(x, experts.axes, split_dim, concat_dim, tiled=True)
