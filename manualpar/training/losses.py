"""Losses as programs take them: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`.

A loss is the mean over the examples, or the tokens, it is given: one device's share of a minibatch.
Its metrics say how many those were, and by these counts the program weighs devices and minibatches
into the mean over all of the batch. What has no weight leaves no trace, and a share in which
nothing has any is 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manualpar.metrics import Metrics
from manualpar.train_state import Batch


def classification_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
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

    Raises:
      ValueError: The labels or the mask do not have a value for each example.
    """
    return _mean_cross_entropy("classification_loss", params, apply_fn, batch, rng)


def language_model_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Cross entropy of the logits at each position and the token that comes next.

    Args:
      params: The parameters of the model.
      apply_fn: The model's `apply`, giving logits `[B, S, V]` of tokens `[B, S]`.
      batch: Inputs `int[B, S]`; labels `int[B, S]`, the token after each position; optionally a
        mask `[B, S]` with each label's weight, 0 for padding and for what comes after the end.
      rng: Key for dropout.

    Returns:
      The mean loss over the tokens in nats, 0 if every token is masked out, and the metrics `loss`,
      nats and tokens, and `accuracy`, how many tokens are the likeliest ones.

    Raises:
      ValueError: The labels or the mask do not have a value for each token.
    """
    return _mean_cross_entropy("language_model_loss", params, apply_fn, batch, rng)


def _mean_cross_entropy(
    name: str, params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """The cross entropy of logits `[..., V]` and labels `[...]` with weights `[...]`."""
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    for field in ("labels", "mask"):
        value = getattr(batch, field)
        if value is not None and value.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name}: batch.{field} has the shape {value.shape}, expected "
                f"{logits.shape[:-1]}: one for each of the model's logits {logits.shape}."
            )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    correct = (logits.argmax(axis=-1) == batch.labels).astype(losses.dtype)
    weights = jnp.ones_like(losses) if batch.mask is None else batch.mask.astype(losses.dtype)
    count = weights.sum()
    total = (losses * weights).sum()
    metrics = {"loss": (total, count), "accuracy": ((correct * weights).sum(), count)}
    # A device's share may be all padding.
    return total / jnp.where(count > 0, count, 1), metrics
