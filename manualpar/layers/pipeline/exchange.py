"""Exchanges layers between stages, so that chunks interleave.

Each stage stores a contiguous run of layers, because a `PartitionSpec` cannot express interleaving.
With `v` chunks on each of `S` stages, chunk `k` of `v S` runs on stage `k % S`, as chunk `k // S`
of that stage. So once a step each chunk is sent to the stage that runs it, and the gradient of the
chunk is sent back.

In each of `v` rounds every stage sends one chunk and receives one chunk. Stage `a` stores the
chunks `a v, ..., a v + v - 1`. Let `g` be the greatest common divisor of `S` and `v`. In round `i`
stage `a` sends the chunk that it stores at index `(i // g) g + (i + a g // S) % g`. With this order
no stage receives two chunks in a round.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.tracing.scopes import PIPELINE_SCOPE


def sent_in_round(num_stages: int, chunks: int, index: int) -> list[int]:
    """Returns for each stage the number of the chunk that it sends in round `index`.

    Stage `s` stores the chunks from `s * chunks` to `(s + 1) * chunks - 1`.
    """
    shared = math.gcd(num_stages, chunks)
    places = [
        index // shared * shared + (index + stage * shared // num_stages) % shared
        for stage in range(num_stages)
    ]
    return [stage * chunks + place for stage, place in enumerate(places)]


def exchange(x: Any, axis: str, chunks: int, *, back: bool = False) -> Any:
    """Sends stored layers to the stages that run them, or sends gradients back.

    Args:
      x: `[L/S, ...]`, the contiguous layers that this stage stores; with `back` the layers that
        this stage runs, chunk after chunk.
      axis: The mesh axis of stages.
      chunks: The number of chunks on a stage, a divisor of `L/S`.
      back: Whether to undo the exchange.

    Returns:
      `[L/S, ...]`, the layers that this stage runs; with `back` the layers that it stores.

    Communication:
      One permute for each chunk over `axis`; a device sends at most the bytes of `x`.
    """
    num_stages, stage = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    stored = x.reshape(chunks, -1, *x.shape[1:])
    result = jnp.zeros_like(stored)
    for index in range(chunks):
        sent = sent_in_round(num_stages, chunks, index)
        there = [chunk % num_stages for chunk in sent]
        # For each stage: where it stores the chunk that it sends, and where it puts the chunk that
        # it receives.
        home = [chunk % chunks for chunk in sent]
        away = [sent[there.index(stage)] // num_stages for stage in range(num_stages)]
        pairs = list(enumerate(there))
        if back:
            home, away, pairs = away, home, [(b, a) for a, b in pairs]
        piece = jax.lax.dynamic_index_in_dim(stored, jnp.asarray(home)[stage], keepdims=False)
        with jax.named_scope(PIPELINE_SCOPE):
            piece = jax.lax.ppermute(piece, axis, pairs)
        result = jax.lax.dynamic_update_index_in_dim(result, piece, jnp.asarray(away)[stage], 0)
    return result.reshape(x.shape)
