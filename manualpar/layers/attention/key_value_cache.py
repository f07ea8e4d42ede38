"""The cache of keys and values in generation, and attention from one new token to the cache.

The first call (`Prompts`) runs a forward pass like in training on the prompts, and the layers keep
the keys and values. Each later call (`Past`) adds one token to each row of the batch. The new token
attends to the cache and to itself. `attend_to_kept` does not write the token's keys and values into
the cache, so that a loop over layers only reads the cache and does not copy it.

A layer keeps the latest `C` positions of each row in a ring: position `p` is in slot `p % C`. A
layer with a window, or with chunks, keeps only as many positions. Prompts are padded on the right.
No query sees the padding, because the length of each row decides which slots hold positions.

Symbols: `B` rows, `S` positions of a prompt, `C` slots, `N` query heads, `K` key and value heads,
`G` query heads that share a key head, `H` features of a head.

Invariants: keys are rotated before they are kept. Scores and their softmax are float32.
"""

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from manualpar.layers.attention.blockwise_attention import MASKED, Scoring

__all__ = [
    "CACHE",
    "LATENT",
    "NEW_KEYS",
    "Past",
    "Prompts",
    "append",
    "attend_to_kept",
    "keep_prompts",
]

# The collection of the cached keys and values, and the collection of the keys and values that a
# call adds.
CACHE, NEW_KEYS = "cache", "new_keys"
# The name of the cached latents of multi-head latent attention, which all heads share.
LATENT = "latent"


@flax.struct.dataclass
class Prompts:
    """The arguments of a call with complete prompts, whose keys and values the cache keeps.

    Attributes:
      length: `int32[B]`, the number of tokens of each prompt; padding follows the tokens.
      size: The largest number of positions of a row, for prompt and answer together.
    """

    length: jax.Array
    size: int = flax.struct.field(pytree_node=False)


class Past(NamedTuple):
    """The arguments of a call with one new token for each row.

    Attributes:
      position: `int32[B]`, the position of the new token, which is the number of tokens before it.
    """

    position: jax.Array


def kept_positions(position_B: jax.Array, slots: int) -> jax.Array:
    """Returns the position that each slot holds before `position_B` is written, `int32[B, C]`.

    An empty slot has a negative position.
    """
    last_B1 = position_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(slots)[None]) % slots


def keep_prompts(x_BSKH: jax.Array, prompts: Prompts, scoring: Scoring) -> jax.Array:
    """Returns the keys, or the values, that a layer has in its slots after the prompts.

    Args:
      x_BSKH: `[B, S, K, H]`, keys or values at all positions of the padded prompts.
      prompts: The lengths of the prompts, and the number of slots.
      scoring: Which positions the layer sees.

    Returns:
      `[B, C, K, H]`, where `C` is `prompts.size`, or the window or the chunk if that is less.

    Communication:
      None.
    """
    seen = [limit for limit in (scoring.window, scoring.chunk) if limit is not None]
    slots = min([prompts.size, *seen])
    index_BC = jnp.clip(kept_positions(prompts.length, slots), 0, x_BSKH.shape[1] - 1)
    return jnp.take_along_axis(x_BSKH, index_BC[:, :, None, None], axis=1)


def append(cache: Any, new: Any, position_B: jax.Array) -> Any:
    """Writes the keys and values of a new token of each row into the slots.

    Args:
      cache: A tree of `[..., B, C, K, H]`.
      new: A tree of `[..., B, 1, K, H]`.
      position_B: `int32[B]`, the position of the token.

    Returns:
      The tree of `cache`, with the new tokens; if all slots are used, a new token replaces the
      oldest position.

    Communication:
      None.
    """
    rows = jnp.arange(position_B.shape[0])

    def write(x: jax.Array, token: jax.Array) -> jax.Array:
        return x.at[..., rows, position_B % x.shape[-3], :, :].set(token[..., 0, :, :])

    return jax.tree.map(write, cache, new)


def attend_to_kept(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    kept: tuple[jax.Array, jax.Array],
    past: Past,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends from one new token of each row to the cache and to the token itself.

    Args:
      query: `[B, 1, N, H]`, rotated.
      key: `[B, 1, K, H]`, rotated.
      value: `[B, 1, K, H]`.
      kept: The keys and the values in the slots, `[B, C, K, H]` each.
      past: The positions of the new tokens.
      scoring: Which positions the layer sees, and the bound of scores.
      sinks: `float32[N]`, see `manualpar.layers.attention.attention`; `None` for none.

    Returns:
      `[B, 1, N, H]`.

    Communication:
      None.
    """
    B, _, N, H = query.shape
    C, K = kept[0].shape[1:3]
    query_BKGH = query.reshape(B, K, -1, H)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def score(keys_BXKH: jax.Array) -> jax.Array:
        scores = einsum("bkgh,bxkh->bkgx", query_BKGH, keys_BXKH) * H**-0.5
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * jnp.tanh(scores / scoring.soft_cap)
        return scores

    def mix(weights_BKGX: jax.Array, values_BXKH: jax.Array) -> jax.Array:
        return einsum("bkgx,bxkh->bkgh", weights_BKGX, values_BXKH)

    first_B = jnp.zeros_like(past.position)
    if scoring.window is not None:
        first_B = jnp.maximum(first_B, past.position - scoring.window + 1)
    if scoring.chunk is not None:
        first_B = jnp.maximum(first_B, past.position // scoring.chunk * scoring.chunk)
    is_seen_BC = kept_positions(past.position, C) >= first_B[:, None]
    of_kept = jnp.where(is_seen_BC[:, None, None], score(kept[0]), MASKED)
    scores = jnp.concatenate([of_kept, score(key)], axis=-1)
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks.reshape(1, K, -1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([of_sinks, scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights if sinks is None else weights[..., 1:]
    out = mix(weights[..., :C], kept[1]) + mix(weights[..., C:], value)
    return out.reshape(B, 1, N, -1).astype(query.dtype)
