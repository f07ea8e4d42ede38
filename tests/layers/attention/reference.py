"""Attention in float64, and arrays for it."""

import jax
import jax.numpy as jnp
import numpy as np


def reference(query, key, value, documents=None, g=None, *, window=None, soft_cap=None, chunk=None):
    """In float64: the result, and the gradients of query, key and value for that of the result."""
    query, key, value, g = (np.asarray(x, np.float64) for x in (query, key, value, g))
    _, S, N, H = query.shape
    group, places = N // key.shape[2], np.arange(S)
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    is_seen = places[:, None] >= places
    if window is not None:
        is_seen &= places[:, None] - places < window
    if chunk is not None:
        is_seen &= places[:, None] // chunk == places // chunk
    is_seen = is_seen[None]
    if documents is not None:
        documents = np.asarray(documents)
        is_seen = is_seen & (documents[:, :, None] == documents[:, None])
    scores = np.einsum("bsnh,btnh->bnst", query, key) * H**-0.5
    slope = 1.0
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
        slope = 1 - np.square(scores / soft_cap)
    scores = np.where(is_seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", weights, value)
    of_weights = np.einsum("bsnh,btnh->bnst", g, value)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    of_scores *= slope * H**-0.5
    of_query = np.einsum("bnst,btnh->bsnh", of_scores, key)
    of_key = np.einsum("bnst,bsnh->btnh", of_scores, query)
    of_value = np.einsum("bnst,bsnh->btnh", weights, g)
    of_key, of_value = (x.reshape(*x.shape[:2], -1, group, H).sum(3) for x in (of_key, of_value))
    return out, of_query, of_key, of_value


def arrays(S=12, N=4, K=2, H=4, B=2, *, dtype="float32", seed=0):
    """Query, key, value and the gradient of the result."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return tuple(
        jax.random.normal(k, (B, S, heads, H), dtype)
        for k, heads in zip(keys, (N, K, K, N), strict=True)
    )


def numbers(S, B=2):
    """Documents whose numbers are not sorted and come again."""
    cycle = np.repeat(np.array([5, 2, 2, 7, 5, 0, 2]), 3)
    return jnp.asarray(np.stack([np.resize(np.roll(cycle, 4 * b), S) for b in range(B)]), jnp.int32)


def zigzag(devices, length):
    """Where in the sequence the positions of all devices are, one device after the other."""
    half = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([half[[c, 2 * devices - 1 - c]].ravel() for c in range(devices)])
