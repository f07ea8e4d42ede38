"""Attention to the keys of complete sequences in plain JAX, without an array of all scores.

Queries and keys are cut into blocks. One loop goes over the pairs of blocks in which a query sees a
key: the pairs on and below the diagonal, and inside of the window. The backward pass loops over the
same pairs and computes the scores again, see `blockwise_attention`.

Symbols: `B` examples, `S` positions of queries, `T` positions of keys, `N` query heads, `K` key and
value heads, `H` features of a head, `C` devices along an axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.layers.attention.blockwise_attention import (
    ATTENDED,
    Keys,
    Pairs,
    Queries,
    Scoring,
    attend,
    attend_backward,
    block_size,
    cut_keys,
    cut_queries,
    gradient_of_sinks,
    join_heads,
    no_sums,
    seen_of,
    seen_pairs,
    spans,
)


class _Labels(NamedTuple):
    """Positions and documents of queries and keys, and the pairs of blocks to compute."""

    query_positions: jax.Array
    key_positions: jax.Array
    query_documents: jax.Array | None
    key_documents: jax.Array | None
    pairs: Pairs


class _Cut(NamedTuple):
    """How queries are cut into blocks, and the options that change scores."""

    size: int
    parts: int  # Equal parts of the queries; each part is cut into blocks separately.
    scoring: Scoring


def attend_in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`.
      key: `[B, S, K, H]`, where `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[B, S]`, or `None` if each sequence is one document.
      scoring: Which keys a query sees, and the cap of scores.
      sinks: `float32[N]`, see `manualpar.layers.attention.attention`; `None` for none.

    Returns:
      `[B, S, N, H]`, of the dtype of `value`.

    Communication:
      None.

    Gradient:
      Written by hand: it computes the scores again, from the arguments and the result. The result
      and the logarithm of each query's sum of weights have the name `ATTENDED` in checkpoints.
    """
    length = query.shape[1]
    size, positions = block_size(length), jnp.arange(length, dtype=jnp.int32)
    blocks = spans(length, size)
    pairs = seen_pairs(blocks, blocks, scoring)
    labels = _Labels(positions, positions, documents, documents, pairs)
    return _attend_varying(query, key, value, sinks, labels, _Cut(size, 1, scoring))


def attend_from_half_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    documents: tuple[jax.Array | None, jax.Array | None],
    axis: str,
    scoring: Scoring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents, from two half-blocks to the keys of the full sequence.

    One of a device's half-blocks is early in the sequence and the other one is late, so that all
    devices have about the same number of pairs of blocks.

    Args:
      query: `[B, S, N, H]`. Device `c` of `C` has the half-blocks `c` and `2 C - 1 - c`.
      key: `[B, C S, K, H]`, where `K` divides `N`, in the order of the sequence.
      value: `[B, C S, K, H]`, of the dtype of `key`.
      positions: `int32[S]`, of the queries.
      documents: The documents of the queries, `int32[B, S]`, and of the keys, `int32[B, C S]`; or
        `(None, None)` if each sequence is one document.
      scoring: Which keys a query sees, and the cap of scores.
      sinks: `float32[N]`, see `manualpar.layers.attention.attention`; `None` for none.

    Returns:
      `[B, S, N, H]`, of the dtype of `value`.

    Communication:
      None.

    Gradient:
      Written by hand, see `attend_in_blocks`.
    """
    devices, half = jax.lax.axis_size(axis), query.shape[1] // 2
    device, size = jax.lax.axis_index(axis), block_size(half, key.shape[1])
    pairs = jnp.asarray(_pairs_of_devices(devices, half, size, scoring))[device]
    key_positions = jnp.arange(key.shape[1], dtype=jnp.int32)
    labels = _Labels(positions, key_positions, documents[0], documents[1], pairs)
    return _attend_varying(query, key, value, sinks, labels, _Cut(size, 2, scoring))


def _pairs_of_devices(devices: int, half: int, size: int, scoring: Scoring) -> np.ndarray:
    """Returns the pairs of blocks that each device computes, `[C, P, 2]`.

    A half-block has `half` positions, and a block has `size` positions.
    """
    keys, lists = spans(2 * devices * half, size), []
    for device in range(devices):
        halves = [spans(half, size, block * half) for block in (device, 2 * devices - 1 - device)]
        lists.append(seen_pairs(np.concatenate(halves), keys, scoring))
    # A device with fewer pairs gets the pair (first queries, last keys) in addition, as often as
    # needed. This pair has no effect, because none of these queries sees one of these keys.
    most, unseen = max(map(len, lists)), np.array([[0, len(keys) - 1]], np.int32)
    return np.stack([np.concatenate([x, unseen.repeat(most - len(x), 0)]) for x in lists])


def _attend_varying(
    query: Any, key: Any, value: Any, sinks: Any, labels: _Labels, cut: _Cut
) -> jax.Array:
    arrays = (query, key, value, sinks, labels)
    out: jax.Array = _attend(*cast_to_varying(arrays, varying_axes(arrays)), cut)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    labels: _Labels,
    cut: _Cut,
) -> jax.Array:
    return _forward(query, key, value, sinks, labels, cut)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    labels: _Labels,
    cut: _Cut,
) -> tuple[jax.Array, jax.Array]:
    """Returns the result, and the log of each query's sum of weights, `float32[n, B, K, G, S]`."""
    queries, keys = _blocks(query, key, value, labels, cut)
    sums = attend(no_sums(queries, sinks), queries, keys, labels.pairs, cut.scoring)
    out = join_heads(sums.values / sums.weights[..., None], query.shape[1], cut.parts)
    return out.astype(value.dtype), sums.largest + jnp.log(sums.weights)


def _blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, labels: _Labels, cut: _Cut
) -> tuple[Queries, Keys]:
    size, num_groups = cut.size, key.shape[2]
    where = (labels.query_positions, labels.query_documents)
    queries = cut_queries(query, *where, num_groups=num_groups, size=size, parts=cut.parts)
    return queries, cut_keys(key, value, labels.key_positions, labels.key_documents, size=size)


def _attend_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    labels: _Labels,
    cut: _Cut,
) -> tuple[jax.Array, Any]:
    found = _forward(query, key, value, sinks, labels, cut)
    out, log_weights = checkpoint_name(found, ATTENDED)
    return out, (query, key, value, sinks, labels, out, log_weights)


def _attend_backward(cut: _Cut, residuals: Any, g: jax.Array) -> tuple[Any, Any, Any, Any, None]:
    query, key, value, sinks, labels, out, log_weights = residuals
    queries, keys = _blocks(query, key, value, labels, cut)
    seen = seen_of(log_weights, out, g, num_groups=key.shape[2], size=cut.size, parts=cut.parts)
    grads = attend_backward(queries, seen, keys, labels.pairs, cut.scoring)
    of_query = join_heads(grads[0], query.shape[1], cut.parts).astype(query.dtype)
    of_key, of_value = (join_heads(x[:, :, :, None], key.shape[1]) for x in grads[1:])
    of_sinks = None if sinks is None else gradient_of_sinks(seen, sinks)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype), of_sinks, None


_attend.defvjp(_attend_forward, _attend_backward)
