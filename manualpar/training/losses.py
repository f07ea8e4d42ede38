"""Losses as programs take them: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`.

A loss is the mean over the examples it is given, one device's share of a minibatch. Its metrics say
how many those were, and by these counts the program weighs devices and minibatches into the mean
over all of the batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manualpar.train_state import Batch


def classification_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Cross entropy of the logits and the labels.

    Args:
      params: The parameters of the model.
      apply_fn: The model's `apply`, giving logits `[B, num_classes]`.
      batch: Inputs; labels `int[B]`; optionally a mask `[B]` with each example's weight, 0 for
        padding.
      rng: Key for dropout.

    Returns:
      The mean loss in nats, 0 if every example is masked out, and the metrics `loss` and
      `accuracy`.
    """
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    correct_B = (logits.argmax(axis=-1) == batch.labels).astype(losses_B.dtype)
    weights_B = jnp.ones_like(losses_B) if batch.mask is None else batch.mask
    weights_B = weights_B.astype(losses_B.dtype)
    count = weights_B.sum()
    total = (losses_B * weights_B).sum()
    metrics = {"loss": (total, count), "accuracy": ((correct_B * weights_B).sum(), count)}
    # A device's share may be all padding.
    return total / jnp.where(count > 0, count, 1), metrics
