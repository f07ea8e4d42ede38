"""Causal attention over a sequence that is split over devices: keys and values go around a ring.

Each device computes with the keys and values that it has while it sends them to the next device
(Liu et al., https://arxiv.org/abs/2310.01889). The `2 C` half-blocks of the sequence are in
zig-zag: device `c` has half-blocks `c` and `2 C - 1 - c`, an early and a late one. This device's
queries see these keys of another device:

- the late queries see the early keys;
- if the other device has a smaller number, the early queries see the early keys too; otherwise
  the late queries see the late keys.

So in each step after the first, every device computes attention for two pairs of half-blocks. That
is half the work of all queries with all keys. `jnp.where` chooses the half-blocks, because devices
that wait for each other in a permute may not be in different branches of a `cond`.

Symbols: `C` devices along the axis, `B` examples, `S` positions of a device, `N` query heads, `K`
key and value heads, `G` query heads that share a key head, `H` features of a head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from manualpar.core.parameters.collectives import cast_to_varying, varying_axes
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.layers.attention.blockwise_attention import (
    ATTENDED,
    Keys,
    Pairs,
    Queries,
    Scoring,
    Seen,
    Sums,
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
from manualpar.layers.attention.splash_ring import attend_part, attend_part_backward
from manualpar.layers.ring_chunks import shift

Tree = TypeVar("Tree")


def zigzag_positions(device: jax.Array | int, length: int, devices: int) -> jax.Array:
    """Returns the positions that `device` has in the sequence, `int32[length]`."""
    half = jnp.arange(length // 2, dtype=jnp.int32)
    blocks = (device, 2 * devices - 1 - device)
    return jnp.concatenate([block * (length // 2) + half for block in blocks])


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array | None,
    axis: str,
    scoring: Scoring,
    *,
    by_kernel: bool = False,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, at this device's positions.
      key: `[B, S, K, H]`, where `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[C, B, S]`, the documents of the positions of every device; `None` if each
        sequence is one document.
      axis: The mesh axis over which the sequence is split in zig-zag. `S` is even.
      scoring: Which keys a query sees, and the cap of scores. Keys that no query sees are sent too.
      by_kernel: Whether JAX's kernel for TPUs computes the half-blocks, see `splash_ring`.
      sinks: `float32[N]`, see `manualpar.layers.attention.kinds.attention`; `None` for none.

    Returns:
      `[B, S, N, H]`, of the dtype of `value`.

    Communication:
      Forward `C - 1` permutes of keys and values together, `2 B S K H` elements in their dtype.
      Backward the same permutes, and `C` permutes of the gradients of keys and values in float32.

    Gradient:
      Written by hand: it computes the scores again, from the arguments and the result. The result
      has the checkpoint name `ATTENDED`. With a policy that saves the name, the forward pass is not
      run again in the backward pass.
    """
    arrays = (query, key, value, sinks, documents)
    return _ring(
        *cast_to_varying(arrays, varying_axes(arrays) | {axis}), _Rule(axis, scoring, by_kernel)
    )


class _Rule(NamedTuple):
    """The static arguments of the ring; `ring_attention` describes them."""

    axis: str
    scoring: Scoring
    by_kernel: bool


class _Here:
    """This device's blocks of queries, and the computations with the keys of any device."""

    def __init__(
        self,
        query: jax.Array,
        key: jax.Array,
        documents: jax.Array | None,
        rule: _Rule,
    ) -> None:
        axis, self.scoring, self.by_kernel = rule
        self.axis, self.documents = axis, documents
        self.length, self.num_groups = query.shape[1], key.shape[2]
        half = self.length // 2
        self.size = half if self.by_kernel else block_size(half)
        blocks = spans(half, self.size)
        self.pairs = seen_pairs(blocks + half, blocks)  # All pairs of blocks of two half-blocks.
        self.causal_pairs = seen_pairs(blocks, blocks)
        self.device = jax.lax.axis_index(axis)
        self.queries = _halves(
            cut_queries(
                query,
                *self._labels(self.device),
                num_groups=self.num_groups,
                size=self.size,
                parts=2,
            )
        )

    def keys(self, pair: jax.Array, step: Any) -> tuple[tuple[Keys, Keys], jax.Array]:
        """Returns a step's early and late keys, and whether the keys' device has a lower number."""
        device = (self.device - step) % jax.lax.axis_size(self.axis)
        keys = cut_keys(pair[0], pair[1], *self._labels(device), size=self.size, parts=2)
        return _halves(keys), device < self.device

    def add(self, sums: Sums, queries: Queries, keys: Keys, pairs: Pairs) -> Sums:
        """Adds, for each pair of blocks, the pair's keys to the sums of the pair's queries."""
        if self.by_kernel:
            is_causal = pairs is self.causal_pairs
            return attend_part(sums, queries, keys, self.scoring, is_causal=is_causal)
        return attend(sums, queries, keys, pairs, self.scoring)

    def differentiate(self, queries: Queries, seen: Seen, keys: Keys, pairs: Pairs) -> Any:
        """Computes the terms of `pairs` in the gradients of queries, and of keys and values."""
        if self.by_kernel:
            is_causal = pairs is self.causal_pairs
            of_query, *of_pair = attend_part_backward(
                queries, seen, keys, self.scoring, is_causal=is_causal
            )
        else:
            of_query, *of_pair = attend_backward(queries, seen, keys, pairs, self.scoring)
        return of_query, jnp.stack(of_pair, 1)

    def _labels(self, device: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        positions = zigzag_positions(device, self.length, jax.lax.axis_size(self.axis))
        if self.documents is None:
            return positions, None
        return positions, jax.lax.dynamic_index_in_dim(self.documents, device, keepdims=False)

    def join(self, blocks: jax.Array) -> jax.Array:
        """Joins this device's blocks `[n, B, K, G, S, H]` to `[B, S, N, H]`."""
        return join_heads(blocks, self.length, parts=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> jax.Array:
    return _forward(query, key, value, sinks, documents, rule)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> tuple[jax.Array, jax.Array]:
    """Returns the result, and the log of each query's sum of weights, `float32[n, B, K, G, S]`."""
    axis, here = rule.axis, _Here(query, key, documents, rule)
    early, late = here.queries

    def step(sums: tuple[Sums, Sums], pair: jax.Array, index: Any) -> tuple[Sums, Sums]:
        of_early, of_late = sums
        keys, is_before = here.keys(pair, index)
        of_late = here.add(of_late, late, keys[0], here.pairs)
        chosen = _pick(is_before, of_early, of_late)
        queries, chosen_keys = _pick(is_before, early, late), _pick(is_before, *keys)
        chosen = here.add(chosen, queries, chosen_keys, here.pairs)
        return _pick(is_before, chosen, of_early), _pick(is_before, of_late, chosen)

    pair = jnp.stack([key, value])
    first_keys, _ = here.keys(pair, 0)
    of_early = here.add(no_sums(early, sinks), early, first_keys[0], here.causal_pairs)
    of_late = here.add(no_sums(late, sinks), late, first_keys[0], here.pairs)
    of_late = here.add(of_late, late, first_keys[1], here.causal_pairs)
    of_early, of_late = _go_around(step, (of_early, of_late), pair, axis)
    sums: Sums = jax.tree.map(_join, of_early, of_late)
    out = here.join(sums.values / sums.weights[..., None]).astype(value.dtype)
    return out, sums.largest + jnp.log(sums.weights)


def _ring_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    documents: jax.Array | None,
    rule: _Rule,
) -> tuple[jax.Array, Any]:
    found = _forward(query, key, value, sinks, documents, rule)
    out, log_weights = checkpoint_name(found, ATTENDED)
    return out, (query, key, value, sinks, documents, out, log_weights)


def _ring_backward(rule: _Rule, residuals: Any, g: jax.Array) -> tuple[Any, Any, Any, Any, None]:
    query, key, value, sinks, documents, out, log_weights = residuals
    axis, here = rule.axis, _Here(query, key, documents, rule)
    early, late = here.queries
    of_out = {"num_groups": here.num_groups, "size": here.size, "parts": 2}
    of_all = seen_of(log_weights, out, g, **of_out)
    seen = _halves(of_all)

    def join_pair(early: jax.Array, late: jax.Array) -> jax.Array:
        """Joins two half-blocks' gradients `[n, 2, B, K, S, H]` to the shape that is sent."""
        blocks = _join(early, late)[:, :, :, :, None]
        return jnp.stack([here.join(blocks[:, 0]), here.join(blocks[:, 1])])

    def step(grads: Any, pair: jax.Array, index: Any) -> Any:
        of_query, of_pair = grads
        of_pair = _shift(of_pair, axis)  # Each gradient ends on the keys' device.
        keys, is_before = here.keys(pair, index)
        of_late, of_early_pair = here.differentiate(late, seen[1], keys[0], here.pairs)
        queries, chosen_seen = _pick(is_before, early, late), _pick(is_before, *seen)
        chosen_keys = _pick(is_before, *keys)
        of_chosen, of_chosen_pair = here.differentiate(
            queries, chosen_seen, chosen_keys, here.pairs
        )
        of_query += _join(_pick(is_before, of_chosen, 0), of_late + _pick(is_before, 0, of_chosen))
        first = of_early_pair + _pick(is_before, of_chosen_pair, 0)
        return of_query, of_pair + join_pair(first, _pick(is_before, 0, of_chosen_pair))

    pair = jnp.stack([key, value])
    first_keys, _ = here.keys(pair, 0)
    of_early, of_early_pair = here.differentiate(early, seen[0], first_keys[0], here.causal_pairs)
    of_late, of_same_pair = here.differentiate(late, seen[1], first_keys[0], here.pairs)
    of_late_too, of_late_pair = here.differentiate(late, seen[1], first_keys[1], here.causal_pairs)
    of_query = _join(of_early, of_late + of_late_too)
    of_pair = join_pair(of_early_pair + of_same_pair, of_late_pair)
    of_query, of_pair = _go_around(step, (of_query, of_pair), pair, axis)
    of_key, of_value = _shift(of_pair, axis)
    of_query = here.join(of_query).astype(query.dtype)
    of_sinks = None if sinks is None else gradient_of_sinks(of_all, sinks)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype), of_sinks, None


_ring.defvjp(_ring_forward, _ring_backward)


def _go_around(
    step: Callable[[Tree, jax.Array, Any], Tree], carry: Tree, pair: jax.Array, axis: str
) -> Tree:
    """Runs `step(carry, pair, index)` on the keys and values of each other device.

    A device sends the pair before it computes with it, so that sending and computing overlap.
    """
    size = jax.lax.axis_size(axis)
    pair = _shift(pair, axis)

    def hand_on(state: tuple[Tree, jax.Array], index: jax.Array) -> Any:
        carry, pair = state
        following = _shift(pair, axis)
        return (step(carry, pair, index), following), None

    if size > 2:
        (carry, pair), _ = jax.lax.scan(hand_on, (carry, pair), jnp.arange(1, size - 1))
    return step(carry, pair, size - 1)


def _shift(x: jax.Array, axis: str) -> jax.Array:
    return shift(x, (axis,), 1, scope=CONTEXT_SCOPE)


def _halves(tree: Tree) -> tuple[Tree, Tree]:
    """Splits this device's blocks into its early and its late half-block."""

    def half(which: int) -> Tree:
        return jax.tree.map(lambda x: jnp.split(x, 2)[which], tree)

    return half(0), half(1)


def _join(early: jax.Array, late: jax.Array) -> jax.Array:
    return jnp.concatenate([early, late])


def _pick(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)
