"""Losses as programs take them: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`.

A loss is the mean over the examples or tokens of its batch, which is one device's share of a
minibatch. Its metrics are sums and counts, and the program weighs devices and minibatches by the
counts. An example without weight has no influence, and the loss of a share without any weight is 0.

Logits may be split over devices along their last dim, as those of a model with a split head are.
They are not gathered, see `manualpar.layers.vocabulary`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.layers.routing import COUNTS, LOSSES, auxiliary_loss
from manualpar.layers.vocabulary import split_argmax, split_cross_entropy, vocabulary_axes
from manualpar.metrics import Metrics
from manualpar.train_state import Batch


def classification_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """The cross entropy of the logits and the labels.

    Args:
      params: The parameters of the model.
      apply_fn: The model's `apply`, which returns logits `[B, num_classes]`, or this device's
        columns of them.
      batch: Inputs; labels `int[B]`; optionally a mask `[B]` with the weight of each label, 0 for
        padding.
      rng: A key for dropout.

    Returns:
      The mean loss in nats, and the metrics `loss` and `accuracy`.

    Raises:
      ValueError: The labels or the mask do not have a value for each example, or several axes split
        the columns.

    Communication:
      None if the logits are whole; otherwise that of `split_cross_entropy` and `split_argmax`.
    """
    return _mean_cross_entropy("classification_loss", params, apply_fn, batch, rng)


def language_model_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """The cross entropy of the logits at each position and the next token.

    As `classification_loss`, but inputs, labels and mask are `[B, S]`, and logits `[B, S, V]`. A
    label is the token after its position.
    """
    return _mean_cross_entropy("language_model_loss", params, apply_fn, batch, rng)


def mixture_of_experts_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """`language_model_loss` and the losses that keep the load of a model's experts balanced.

    The metrics are those of `language_model_loss`, whose `loss` is without what is added, and those
    of `auxiliary_loss`.
    """
    sown: dict[str, Any] = {}

    def apply_and_keep(*args: Any, **kwargs: Any) -> jax.Array:
        logits, updates = apply_fn(*args, mutable=[LOSSES, COUNTS], **kwargs)
        sown.update(updates)
        return logits

    loss, metrics = language_model_loss(params, apply_and_keep, batch, rng)
    weights = jnp.ones(batch.labels.shape) if batch.mask is None else batch.mask
    auxiliary, of_experts = auxiliary_loss(sown, weights.astype(jnp.float32).sum(-1))
    return loss + auxiliary, {**metrics, **of_experts}


def _mean_cross_entropy(
    name: str, params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    logits = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
    for field in ("labels", "mask"):
        value = getattr(batch, field)
        if value is not None and value.shape != logits.shape[:-1]:
            raise ValueError(
                f"{name}: batch.{field} has the shape {value.shape}, expected "
                f"{logits.shape[:-1]}: one for each of the model's logits {logits.shape}."
            )
    axis = vocabulary_axes(logits, batch.labels)
    losses = split_cross_entropy(logits, batch.labels, axis=axis)
    correct = (split_argmax(logits, axis) == batch.labels).astype(losses.dtype)
    weights = jnp.ones_like(losses) if batch.mask is None else batch.mask.astype(losses.dtype)
    # The sum of those of all sequences, by which a loss of experts weighs each.
    count = weights.sum(-1).sum()
    total = (losses * weights).sum()
    metrics = {"loss": (total, count), "accuracy": ((correct * weights).sum(), count)}
    # The share of a device may consist of padding alone.
    return total / jnp.where(count > 0, count, 1), metrics
