"""Causal attention of a sequence that is split over devices: keys and values go around a ring.

Each device computes with the keys and values that it has, and hands them on at the same time (Liu
et al., https://arxiv.org/abs/2310.01889). The `2 C` half-blocks of the sequence lie in zig-zag:
device `c` has half-blocks `c` and `2 C - 1 - c`, an early and a late one. Of the keys of another
device

- the early ones are before this device's late queries,
- the early ones are before this device's early queries too if that device has a smaller number;
  otherwise the late ones are before this device's late queries.

So each step but the first is two products of half-blocks on every device, half the work of all
queries with all keys. `where` chooses which ones: devices that wait for each other in a permute may
not be in different branches of a condition.

Symbols: `C` devices along the axis, `B` examples, `S` positions of a device, `N` query heads, `K`
key and value heads, `G` query heads that share one, `H` features of a head.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from manualpar.core.collectives import cast_to_varying, varying_axes
from manualpar.layers.blockwise_attention import (
    ATTENDED,
    Keys,
    Queries,
    Seen,
    Sums,
    attend,
    attend_backward,
    no_sums,
)
from manualpar.layers.chunks import shift
from manualpar.purposes import CONTEXT_SCOPE

Tree = TypeVar("Tree")
# The dims of positions.
QUERY_DIMS = (3, 0, 1)
KEY_DIMS = (1, 1, 0, 1)
SEEN_DIMS = (3, 3, 3)


def zigzag_positions(device: jax.Array | int, length: int, devices: int) -> jax.Array:
    """`int32[S]`, the positions in the sequence that one of `devices` has, `length` of them."""
    half = jnp.arange(length // 2, dtype=jnp.int32)
    blocks = (device, 2 * devices - 1 - device)
    return jnp.concatenate([block * (length // 2) + half for block in blocks])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, axis: str
) -> jax.Array:
    return _forward(query, key, value, documents, axis)[0]


def ring_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, axis: str
) -> jax.Array:
    """Attends causally within documents.

    Args:
      query: `[B, S, N, H]`, those of this device's positions.
      key: `[B, S, K, H]`, where `K` divides `N`.
      value: `[B, S, K, H]`, of the dtype of `key`.
      documents: `int32[C, B, S]`, the documents of the positions of every device.
      axis: The mesh axis over which the sequence is split in zig-zag. `S` is even.

    Returns:
      `[B, S, N, H]`, of the dtype of `value`.

    Communication:
      Forward `C - 1` permutes of keys and values together, `2 B S K H` elements in their dtype.
      Backward the same, and `C` permutes of the gradients of both in float32.

    Gradient:
      Written by hand: it computes the scores again, from the arguments and the result. The result
      has the name `ATTENDED` in checkpoints. With a policy that saves the name, the keys do not go
      around once more.
    """
    arrays = (query, key, value, documents)
    return _ring(*cast_to_varying(arrays, varying_axes(arrays) | {axis}), axis)


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, axis: str
) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithm of each query's sum of weights, `float32[B, K, G, S]`."""
    early, late = _queries(query, key.shape[2], documents, axis)

    def step(sums: tuple[Sums, Sums], pair: jax.Array, index: Any) -> tuple[Sums, Sums]:
        of_early, of_late = sums
        keys, is_before = _keys(pair, index, documents, axis)
        of_late = attend(of_late, late, keys[0])
        some = _pick(is_before, of_early, of_late)
        some = attend(some, _pick(is_before, early, late), _pick(is_before, *keys))
        return _pick(is_before, some, of_early), _pick(is_before, of_late, some)

    pair = jnp.stack([key, value])
    own, _ = _keys(pair, 0, documents, axis)
    of_early = attend(no_sums(early), early, own[0])
    of_late = attend(attend(no_sums(late), late, own[0]), late, own[1])
    of_early, of_late = _go_around(step, (of_early, of_late), pair, axis)
    sums: Sums = jax.tree.map(lambda *x: jnp.concatenate(x, 3), of_early, of_late)
    out = _ungroup(sums.values / sums.weights[..., None]).astype(value.dtype)
    return out, sums.largest + jnp.log(sums.weights)


def _ring_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, axis: str
) -> tuple[jax.Array, Any]:
    out, log_weights = checkpoint_name(_forward(query, key, value, documents, axis), ATTENDED)
    return out, (query, key, value, documents, out, log_weights)


def _ring_backward(axis: str, kept: Any, g: jax.Array) -> tuple[Any, Any, Any, None]:
    query, key, value, documents, out, log_weights = kept
    num_groups = key.shape[2]
    early, late = _queries(query, num_groups, documents, axis)
    product = _group(g.astype(jnp.float32) * out.astype(jnp.float32), num_groups).sum(-1)
    seen = _halves(Seen(log_weights, _group(g, num_groups), product), SEEN_DIMS)

    def step(grads: Any, pair: jax.Array, index: Any) -> Any:
        of_query, of_pair = grads
        of_pair = _shift(of_pair, axis)  # Home, together with the keys that it is of.
        keys, is_before = _keys(pair, index, documents, axis)
        of_late, of_early_pair = attend_backward(late, seen[1], keys[0])
        queries, some_seen = _pick(is_before, early, late), _pick(is_before, *seen)
        of_some, of_some_pair = attend_backward(queries, some_seen, _pick(is_before, *keys))
        of_query += _join(_pick(is_before, of_some, 0), of_late + _pick(is_before, 0, of_some), 3)
        first = of_early_pair + _pick(is_before, of_some_pair, 0)
        return of_query, of_pair + _join(first, _pick(is_before, 0, of_some_pair), 2)

    pair = jnp.stack([key, value])
    own, _ = _keys(pair, 0, documents, axis)
    of_early, of_early_pair = attend_backward(early, seen[0], own[0])
    of_late, of_same_pair = attend_backward(late, seen[1], own[0])
    of_late_too, of_late_pair = attend_backward(late, seen[1], own[1])
    of_query = _join(of_early, of_late + of_late_too, 3)
    of_pair = _join(of_early_pair + of_same_pair, of_late_pair, 2)
    of_query, of_pair = _go_around(step, (of_query, of_pair), pair, axis)
    of_key, of_value = _shift(of_pair, axis)
    of_query = _ungroup(of_query).astype(query.dtype)
    return of_query, of_key.astype(key.dtype), of_value.astype(value.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)


def _go_around(
    step: Callable[[Tree, jax.Array, Any], Tree], carry: Tree, pair: jax.Array, axis: str
) -> Tree:
    """Runs `step(carry, pair, index)` on the keys and values of each other device.

    A device sends what it has before it computes with it, so that both may go on at once.
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


def _queries(
    query: jax.Array, num_groups: int, documents: jax.Array, axis: str
) -> tuple[Queries, Queries]:
    """This device's early and late queries."""
    device = jax.lax.axis_index(axis)
    positions = zigzag_positions(device, query.shape[1], jax.lax.axis_size(axis))
    of_device = jax.lax.dynamic_index_in_dim(documents, device, keepdims=False)
    return _halves(Queries(_group(query, num_groups), positions, of_device), QUERY_DIMS)


def _keys(
    pair: jax.Array, step: Any, documents: jax.Array, axis: str
) -> tuple[tuple[Keys, Keys], jax.Array]:
    """The early and late keys that are here in a step, and whether they are from a lower device."""
    here, size = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    device = (here - step) % size
    positions = zigzag_positions(device, pair.shape[2], size)
    of_device = jax.lax.dynamic_index_in_dim(documents, device, keepdims=False)
    return _halves(Keys(pair[0], pair[1], positions, of_device), KEY_DIMS), device < here


def _halves(tree: Tree, dims: tuple[int, ...]) -> tuple[Tree, Tree]:
    leaves, structure = jax.tree.flatten(tree)
    halves = [jnp.split(x, 2, dim) for x, dim in zip(leaves, dims, strict=True)]
    early, late = (jax.tree.unflatten(structure, half) for half in zip(*halves, strict=True))
    return early, late


def _join(early: jax.Array, late: jax.Array, dim: int) -> jax.Array:
    return jnp.concatenate([early, late], dim)


def _pick(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)


def _group(x: jax.Array, num_groups: int) -> jax.Array:
    """`[B, K, G, S, H]` of `[B, S, N, H]`."""
    B, S, N, H = x.shape
    return jnp.moveaxis(x.reshape(B, S, num_groups, N // num_groups, H), 1, 3)


def _ungroup(x: jax.Array) -> jax.Array:
    B, K, G, S, H = x.shape
    return jnp.moveaxis(x, 3, 1).reshape(B, S, K * G, H)
