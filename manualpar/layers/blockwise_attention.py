"""Attention to keys that come in parts, one block of each part after the other.

The softmax of a query is over all keys that it may see. Its sums are kept for the keys that have
come so far, relative to the largest score so far (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867), so that the keys may come in any order and from any device. The
scores of a block are computed, used and dropped, and the backward pass computes them again
(FlashAttention, Dao et al., https://arxiv.org/abs/2205.14135). So memory grows with the number of
queries and not with its product with that of the keys.

A query sees the keys of its document that are not after it. Positions say which these are, so it
does not matter in which order they stand.

Symbols: `B` examples, `S` queries, `T` keys, `K` key and value heads, `G` query heads that share
one, `H` features of a head, `M` keys of a block.

Invariants: scores, sums and gradients are float32. Products are of the dtype of their arguments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from manualpar.core.collectives import cast_to_varying, varying_axes

# The name of what attention returns, for the policies of checkpoints.
ATTENDED = "attended"
KEY_BLOCK = 256
MASKED = -1e30  # Not -inf: a query may see no key of a block, and the difference must be a number.


class Queries(NamedTuple):
    """What looks for keys.

    Attributes:
      query: `[B, K, G, S, H]`.
      position: `int32[S]`.
      document: `int32[B, S]`.
    """

    query: jax.Array
    position: jax.Array
    document: jax.Array


class Keys(NamedTuple):
    """What is looked at.

    Attributes:
      key: `[B, T, K, H]`.
      value: `[B, T, K, H]`.
      position: `int32[T]`.
      document: `int32[B, T]`.
    """

    key: jax.Array
    value: jax.Array
    position: jax.Array
    document: jax.Array


class Sums(NamedTuple):
    """The sums over the keys that have come so far.

    Attributes:
      values: `float32[B, K, G, S, H]`, of values, each weighted by `exp(score - largest)`.
      weights: `float32[B, K, G, S]`, of these weights.
      largest: `float32[B, K, G, S]`, the largest score.
    """

    values: jax.Array
    weights: jax.Array
    largest: jax.Array


class Seen(NamedTuple):
    """What a backward pass must know of all the keys that a query has seen.

    Attributes:
      log_weights: `float32[B, K, G, S]`, `log(sum(exp(score)))`.
      gradient: `[B, K, G, S, H]`, of the result.
      product: `float32[B, K, G, S]`, the inner product of the result and its gradient.
    """

    log_weights: jax.Array
    gradient: jax.Array
    product: jax.Array


def no_sums(queries: Queries) -> Sums:
    """The sums over no keys."""
    zero = _zeros(queries)
    return Sums(zero, zero[..., 0], zero[..., 0] + MASKED)


def attend(sums: Sums, queries: Queries, keys: Keys) -> Sums:
    """Adds some keys to the sums."""

    def add(sums: Sums, block: Keys) -> tuple[Sums, None]:
        scores = _scores(queries, block)
        largest = jnp.maximum(sums.largest, scores.max(-1))
        weights, fading = jnp.exp(scores - largest[..., None]), jnp.exp(sums.largest - largest)
        values = _product("bkgst,btkh->bkgsh", weights.astype(block.value.dtype), block.value)
        # What a query that has seen no key has added up fades to exactly 0 when it sees one.
        values += sums.values * fading[..., None]
        return Sums(values, sums.weights * fading + weights.sum(-1), largest), None

    return jax.lax.scan(add, sums, _blocks(keys))[0]


def attend_backward(queries: Queries, seen: Seen, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """What queries and keys contribute to each other's gradients.

    Returns:
      `float32[B, K, G, S, H]` of the queries, and `float32[2, B, T, K, H]` of keys and values.
    """
    scale = queries.query.shape[-1] ** -0.5

    def add(total: jax.Array, block: Keys) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        weights = jnp.exp(_scores(queries, block) - seen.log_weights[..., None])
        of_weights = _product("bkgsh,btkh->bkgst", seen.gradient, block.value)
        of_scores = weights * (of_weights - seen.product[..., None]) * scale
        of_scores = of_scores.astype(block.key.dtype)
        of_values = _product(
            "bkgst,bkgsh->btkh", weights.astype(seen.gradient.dtype), seen.gradient
        )
        of_keys = _product("bkgst,bkgsh->btkh", of_scores, queries.query)
        return total + _product("bkgst,btkh->bkgsh", of_scores, block.key), (of_keys, of_values)

    total, of_blocks = jax.lax.scan(add, _zeros(queries), _blocks(keys))
    return total, jnp.stack([_join_blocks(x, keys.key.shape[1]) for x in of_blocks])


def _zeros(queries: Queries) -> jax.Array:
    zeros = jnp.zeros(queries.query.shape, jnp.float32)
    return cast_to_varying(zeros, varying_axes(queries))


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _scores(queries: Queries, keys: Keys) -> jax.Array:
    """`float32[B, K, G, S, M]`, `MASKED` where a query does not see a key."""
    scores = _product("bkgsh,btkh->bkgst", queries.query, keys.key) * keys.key.shape[-1] ** -0.5
    is_before = queries.position[:, None] >= keys.position[None]
    is_seen = is_before[None] & (queries.document[:, :, None] == keys.document[:, None])
    return jnp.where(is_seen[:, None, None], scores, MASKED)


def _blocks(keys: Keys) -> Keys:
    """Blocks of equal size, `[T / M, B, M, ...]`; what fills the last one is after every query."""
    length = keys.key.shape[1]
    count = -(-length // KEY_BLOCK)
    size = -(-length // count)

    def cut(x: jax.Array, dim: int, filling: int) -> jax.Array:
        widths = [(0, count * size - length if i == dim else 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=filling)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :]), dim, 0)

    return Keys(
        cut(keys.key, 1, 0),
        cut(keys.value, 1, 0),
        cut(keys.position, 0, jnp.iinfo(jnp.int32).max),
        cut(keys.document, 1, 0),
    )


def _join_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """`[B, T, ...]` of blocks."""
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
