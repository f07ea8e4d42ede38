"""Attention from blocks of queries to blocks of keys, one pair of blocks after the other.

The softmax of a query is over all keys that the query may see. This module keeps the softmax's sums
over the keys seen so far, relative to the largest score so far (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867). So the keys may come in any order and from any device. The scores
of a pair of blocks are computed, used and dropped. The backward pass computes the scores again
(FlashAttention, Dao et al., https://arxiv.org/abs/2205.14135). So memory grows with the number of
queries, and not with the number of queries times the number of keys.

A query sees the keys of its document that are not after the query. Each block has the positions of
its queries or keys, so the order of the blocks does not matter. The caller leaves out the pairs of
blocks in which no query sees a key.

Symbols: `B` examples, `K` key and value heads, `G` query heads that share a key head, `H` features
of a head, `n` blocks of `S` queries each, `m` blocks of `T` keys each.

Invariants: scores, sums and gradients are float32. Matrix products multiply in the dtype of their
arguments.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.modes.layer_loops import ATTENDED as ATTENDED  # For all attention here.
from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import blocks_scope
from manualpar.layers.boundaries import platform_traced_for

MASKED = -1e30  # Not -inf, because a query may see no key of a block, and -inf minus -inf is NaN.
# The largest number of positions of a block. With the smaller number for CPUs, the scores of a pair
# of blocks fit into a core's cache.
CPU_BLOCK, BLOCK = 128, 512
# The largest number of blocks of a sequence. The program contains the indices of all pairs of
# blocks as a constant, and the number of pairs grows with the square of this number.
MAX_BLOCKS = 1024
# Pairs of indices (block of queries, block of keys) to compute, `int32[P, 2]`.
Pairs = jax.Array | np.ndarray


class Queries(NamedTuple):
    """Blocks of queries.

    Attributes:
      query: `[n, B, K, G, S, H]`.
      position: `int32[n, S]`.
      document: `int32[n, B, S]`; `None` if there is only one document.
    """

    query: jax.Array
    position: jax.Array
    document: jax.Array | None


class Keys(NamedTuple):
    """Blocks of keys and values.

    Attributes:
      key: `[m, B, K, T, H]`.
      value: `[m, B, K, T, H]`.
      position: `int32[m, T]`.
      document: `int32[m, B, T]`; `None` if there is only one document.
    """

    key: jax.Array
    value: jax.Array
    position: jax.Array
    document: jax.Array | None


class Sums(NamedTuple):
    """The sums over the keys seen so far.

    Attributes:
      values: `float32[n, B, K, G, S, H]`, the sum of values weighted by `exp(score - largest)`.
      weights: `float32[n, B, K, G, S]`, the sum of `exp(score - largest)`.
      largest: `float32[n, B, K, G, S]`, the largest score.
    """

    values: jax.Array
    weights: jax.Array
    largest: jax.Array


class Seen(NamedTuple):
    """The arrays that a backward pass needs, for each query over all keys that it has seen.

    Attributes:
      log_weights: `float32[n, B, K, G, S]`, `log(sum(exp(score)))`.
      gradient: `[n, B, K, G, S, H]`, the gradient of the result.
      product: `float32[n, B, K, G, S]`, the inner product of `out` and `gradient`.
      out: `[n, B, K, G, S, H]`, the result.
    """

    log_weights: jax.Array
    gradient: jax.Array
    product: jax.Array
    out: jax.Array


class Scoring(NamedTuple):
    """The options that change scores.

    Attributes:
      window: How many positions a query sees, including the query's position; `None` for all.
      soft_cap: Bounds scores: a score becomes `soft_cap * tanh(score / soft_cap)`; `None` for no
        bound.
      chunk: The length of the chunks into which sequences are divided from their beginning. A query
        sees only keys of its own chunk; `None` for no chunks.
    """

    window: int | None = None
    soft_cap: float | None = None
    chunk: int | None = None

    def sees(
        self,
        query: jax.Array,
        key: jax.Array,
        documents: tuple[jax.Array | None, jax.Array | None] = (None, None),
    ) -> jax.Array:
        """Returns which keys each query sees, `bool[B, S, T]`, or `[1, S, T]` without documents.

        Args:
          query: The positions of queries, `int32[S]`.
          key: The positions of keys, `int32[T]`.
          documents: The document numbers of queries `[B, S]` and of keys `[B, T]`.
        """
        distance = query[:, None] - key[None]
        is_seen = distance >= 0
        if self.window is not None:
            is_seen &= distance < self.window
        if self.chunk is not None:
            is_seen &= (query // self.chunk)[:, None] == (key // self.chunk)[None]
        is_seen = is_seen[None]
        of_query, of_key = documents
        if of_query is not None and of_key is not None:
            is_seen = is_seen & (of_query[:, :, None] == of_key[:, None])
        return is_seen


EVERYTHING = Scoring()


def block_size(length: int, longest: int = 0) -> int:
    """Returns the size of the blocks: as few blocks of equal size as the limits allow.

    `length` is the length of the sequence to cut. `longest` is the length of the keys' sequence if
    that is longer.
    """
    most = CPU_BLOCK if platform_traced_for() == "cpu" else BLOCK
    most = max(most, -(-max(length, longest) // MAX_BLOCKS))
    return -(-length // -(-length // most))


def cut_queries(
    query: jax.Array,
    positions: jax.Array,
    documents: jax.Array | None,
    *,
    num_groups: int,
    size: int,
    parts: int = 1,
) -> Queries:
    """Cuts queries `[B, L, N, H]` into blocks of `size` positions.

    First the `L` positions are split into `parts` equal parts, and then each part is cut into
    blocks. The last block of each part is padded. The padding has positions after all others, and
    no gradient.
    """
    return Queries(
        cut_heads(query, num_groups, size, parts), *_cut_labels(positions, documents, size, parts)
    )


def cut_keys(
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    documents: jax.Array | None,
    *,
    size: int,
    parts: int = 1,
) -> Keys:
    """Cuts keys and values `[B, L, K, H]` into blocks, see `cut_queries`."""
    key, value = (cut_heads(x, x.shape[2], size, parts)[:, :, :, 0] for x in (key, value))
    return Keys(key, value, *_cut_labels(positions, documents, size, parts))


def seen_of(
    log_weights: jax.Array,
    out: jax.Array,
    gradient: jax.Array,
    *,
    num_groups: int,
    size: int,
    parts: int = 1,
) -> Seen:
    """Prepares a backward pass from a result `[B, L, N, H]` and its gradient."""
    gradient, out = (cut_heads(x, num_groups, size, parts) for x in (gradient, out))
    product = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    return Seen(log_weights, gradient, product, out)


def cut_heads(x: jax.Array, num_groups: int, size: int, parts: int = 1) -> jax.Array:
    """Cuts `[B, L, N, H]` into blocks `[n, B, K, G, S, H]`."""
    n, B, S, N, H = (x := _cut(x, size, parts)).shape
    return x.reshape(n, B, S, num_groups, N // num_groups, H).transpose(0, 1, 3, 4, 2, 5)


def join_heads(blocks: jax.Array, length: int, parts: int = 1) -> jax.Array:
    """Joins blocks `[n, B, K, G, S, H]` to `[B, L, N, H]`, without their padding."""
    n, B, K, G, S, H = blocks.shape
    x = blocks.transpose(1, 0, 4, 2, 3, 5).reshape(B, parts, n // parts * S, K * G, H)
    return x[:, :, : length // parts].reshape(B, length, K * G, H)


def spans(length: int, size: int, start: int = 0) -> np.ndarray:
    """Returns the first and last position of each block, `[n, 2]`; block 0 begins at `start`."""
    first = np.arange(0, length, size)
    return start + np.stack([first, np.minimum(first + size, length) - 1], axis=1)


def seen_pairs(queries: np.ndarray, keys: np.ndarray, scoring: Scoring = EVERYTHING) -> np.ndarray:
    """Returns the pairs of blocks in which, by their positions, a query sees a key, `[P, 2]`."""
    (first_query, last_query), (first_key, last_key) = queries.T[..., None], keys.T[:, None]
    is_seen = last_query >= first_key
    if scoring.window is not None:
        is_seen &= first_query - last_key < scoring.window
    if scoring.chunk is not None:
        is_seen &= first_query // scoring.chunk <= last_key // scoring.chunk
    return np.argwhere(is_seen).astype(np.int32)


def no_sums(queries: Queries, sinks: jax.Array | None = None) -> Sums:
    """Returns the sums over no keys.

    `sinks` is `float32[N]`, the score of each head's sink: a key that every query sees, and whose
    value is 0.
    """
    zeros = _zeros(queries.query, queries)
    none = zeros[..., 0]
    if sinks is None:
        return Sums(zeros, none, none + MASKED)
    return Sums(zeros, none + 1, none + sinks.reshape(1, 1, *none.shape[2:4], 1))


def gradient_of_sinks(seen: Seen, sinks: jax.Array) -> jax.Array:
    """Computes this device's term of the gradient of the sinks, `float32[N]`."""
    weights = jnp.exp(sinks.reshape(1, 1, *seen.product.shape[2:4], 1) - seen.log_weights)
    return -(weights * seen.product).sum((0, 1, 4)).reshape(sinks.shape)


def attend(sums: Sums, queries: Queries, keys: Keys, pairs: Pairs, scoring: Scoring) -> Sums:
    """Adds, for each pair of blocks, the pair's keys to the sums of the pair's queries."""

    def add(all_sums: Sums, pair: jax.Array) -> tuple[Sums, None]:
        query_block, key_block = _get(queries, pair[0]), _get(keys, pair[1])
        sums = _get(all_sums, pair[0])
        scores, _ = _scores(query_block, key_block, scoring)
        largest = jnp.maximum(sums.largest, scores.max(-1))
        weights, fading = jnp.exp(scores - largest[..., None]), jnp.exp(sums.largest - largest)
        values = _product(
            "bkgst,bkth->bkgsh", weights.astype(key_block.value.dtype), key_block.value
        )
        # If the query has seen no key so far, its sums are meaningless. They are multiplied by 0
        # as soon as it sees a key.
        values += sums.values * fading[..., None]
        sums = Sums(values, sums.weights * fading + weights.sum(-1), largest)
        return _put(all_sums, sums, pair[0]), None

    with jax.named_scope(blocks_scope(len(pairs))):
        return jax.lax.scan(add, sums, jnp.asarray(pairs))[0]


def attend_backward(
    queries: Queries, seen: Seen, keys: Keys, pairs: Pairs, scoring: Scoring
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the contributions of some pairs of blocks to the gradients.

    Returns:
      The gradients of queries, keys and values, in float32.
    """
    scale = queries.query.shape[-1] ** -0.5

    def add(totals: Any, pair: jax.Array) -> tuple[Any, None]:
        query_block, key_block = _get(queries, pair[0]), _get(keys, pair[1])
        known = _get(seen, pair[0])
        scores, slope = _scores(query_block, key_block, scoring)
        weights = jnp.exp(scores - known.log_weights[..., None])
        of_weights = _product("bkgsh,bkth->bkgst", known.gradient, key_block.value)
        of_scores = weights * (of_weights - known.product[..., None]) * (slope * scale)
        of_scores = of_scores.astype(key_block.key.dtype)
        g = known.gradient
        of_query = _product("bkgst,bkth->bkgsh", of_scores, key_block.key)
        of_key = _product("bkgst,bkgsh->bkth", of_scores, query_block.query)
        of_value = _product("bkgst,bkgsh->bkth", weights.astype(g.dtype), g)
        places = (pair[0], pair[1], pair[1])
        new = (
            _put(total, _get(total, place) + part, place)
            for total, part, place in zip(totals, (of_query, of_key, of_value), places, strict=True)
        )
        return tuple(new), None

    like = (queries, keys)
    zeros = tuple(_zeros(x, like) for x in (queries.query, keys.key, keys.value))
    with jax.named_scope(blocks_scope(len(pairs))):
        (of_query, of_key, of_value), _ = jax.lax.scan(add, zeros, jnp.asarray(pairs))
    return of_query, of_key, of_value


def _zeros(x: jax.Array, like: Any) -> jax.Array:
    return cast_to_varying(jnp.zeros_like(x, jnp.float32), varying_axes(like))


def _cut(x: jax.Array, size: int, parts: int, filling: int = 0) -> jax.Array:
    """Cuts `[B, L, ...]` into blocks `[n, B, size, ...]`."""
    B, length, rest = x.shape[0], x.shape[1] // parts, x.shape[2:]
    count = -(-length // size)
    x = x.reshape(B, parts, length, *rest)
    if count * size > length:
        widths = ((0, 0), (0, 0), (0, count * size - length), *((0, 0) for _ in rest))
        x = jnp.pad(x, widths, constant_values=filling)
    return jnp.moveaxis(x.reshape(B, parts * count, size, *rest), 1, 0)


def _cut_labels(
    positions: jax.Array, documents: jax.Array | None, size: int, parts: int
) -> tuple[jax.Array, jax.Array | None]:
    position = _cut(positions[None], size, parts, filling=jnp.iinfo(jnp.int32).max)[:, 0]
    return position, None if documents is None else _cut(documents, size, parts)


def _get(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree: Any, block: Any, index: jax.Array) -> Any:
    def put(x: jax.Array, entry: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, entry, index, 0)

    return jax.tree.map(put, tree, block)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _scores(queries: Queries, keys: Keys, scoring: Scoring) -> tuple[jax.Array, jax.Array | float]:
    """Computes scores `float32[B, K, G, S, T]` and the derivative of the soft cap.

    Scores are `MASKED` where a query does not see a key.
    """
    scores = _product("bkgsh,bkth->bkgst", queries.query, keys.key) * keys.key.shape[-1] ** -0.5
    slope: jax.Array | float = 1.0
    if scoring.soft_cap is not None:
        capped = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = scoring.soft_cap * capped, 1 - jnp.square(capped)
    documents = queries.document, keys.document
    is_seen = scoring.sees(queries.position, keys.position, documents)
    return jnp.where(is_seen[:, None, None], scores, MASKED), slope
