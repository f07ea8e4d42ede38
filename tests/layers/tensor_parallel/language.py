"""A loss and a batch of models that are split by a plan."""

from typing import Any

import jax

from manualpar import Batch
from manualpar.layers import split_cross_entropy

VOCAB = 16


def make_batch() -> Batch:
    keys = jax.random.split(jax.random.key(1))
    return Batch(*(jax.random.randint(key, (8, 8), 0, VOCAB) for key in keys))


def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    del rng
    losses = split_cross_entropy(apply_fn({"params": params}, batch.inputs), batch.labels)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}
