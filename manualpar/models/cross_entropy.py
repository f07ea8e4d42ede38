"""Losses for programs: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`.

`batch` is one device's share of a minibatch. The loss is the mean over the examples or tokens of
the share. A metric is a pair (sum, count). The program uses the counts as the weights of devices
and minibatches. An example of weight 0 has no influence. If all weights of a share are 0, the loss
of the share is 0.

If the model's head is sharded, logits are sharded over devices along their last dim. Logits are
not gathered, see `manualpar.layers.vocabulary`. If the `__call__` of a language model has an
argument `labels`, as in `Transformer`, the model computes the losses itself and need not compute
all logits at once.
"""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import Batch
from manualpar.layers.moe.routing import COUNTS, LOSSES, auxiliary_loss
from manualpar.layers.vocabulary import split_argmax, split_cross_entropy, vocabulary_axes


def classification_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Computes the cross entropy of the logits and the labels.

    Args:
      params: The parameters of the model.
      apply_fn: The model's `apply`, which returns logits `[B, num_classes]`, or this device's
        columns of the logits if the head is sharded.
      batch: `inputs`, `labels` `int[B]`, and optionally `mask` `[B]`, the weight of each label (0
        for padding).
      rng: A key for dropout.

    Returns:
      The mean loss in nats, and the metrics `loss` and `accuracy`.

    Raises:
      ValueError: The labels or the mask do not have one value for each example; or the columns of
        the logits are sharded over several axes.

    Communication:
      None if the logits are not sharded; otherwise the communication of `split_cross_entropy` and
      `split_argmax`.
    """
    return _mean_cross_entropy("classification_loss", params, apply_fn, batch, rng)


def language_model_loss(
    params: Any, apply_fn: Callable[..., jax.Array], batch: Batch, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
    """Computes the cross entropy of the logits at each position and the next token.

    Arguments and results are those of `classification_loss`, but inputs, labels and mask are
    `[B, S]`, and logits are `[B, S, V]`. The label of a position is the next token.

    If `apply_fn` is the `apply` of a module whose `__call__` has an argument `labels`, the function
    passes `labels=batch.labels`. Such a module must return a pair instead of logits: the losses in
    nats, `float32[B, S]`, and whether the label has the largest logit, `bool[B, S]`. Any other
    `apply_fn` must return logits.
    """
    return _mean_cross_entropy(
        "language_model_loss", params, apply_fn, batch, rng, with_labels=takes_labels(apply_fn)
    )


def takes_labels(apply_fn: Callable[..., Any]) -> bool:
    """Returns whether `apply_fn` is the `apply` of a module that takes an argument `labels`."""
    owner = getattr(apply_fn, "__self__", apply_fn)
    # `owner` may be an object that wraps the module, such as a model interface.
    module: Any = owner if isinstance(owner, nn.Module) else getattr(owner, "module", owner)
    return "labels" in inspect.signature(module.__call__).parameters


def mixture_of_experts_loss(
    params: Any, apply_fn: Callable[..., Any], batch: Batch, rng: jax.Array
) -> tuple[Metrics, Metrics]:
    """Computes `language_model_loss` plus the losses that balance the load of experts.

    The metrics are those of `language_model_loss` and of `auxiliary_loss`. The metric `loss` does
    not contain the added losses.
    """
    sown: dict[str, Any] = {}

    def apply_and_keep(*args: Any, **kwargs: Any) -> Any:
        out, updates = apply_fn(*args, mutable=[LOSSES, COUNTS], **kwargs)
        sown.update(updates)
        return out

    name, with_labels = "mixture_of_experts_loss", takes_labels(apply_fn)
    _, metrics = _mean_cross_entropy(
        name, params, apply_and_keep, batch, rng, with_labels=with_labels
    )
    weights = jnp.ones(batch.labels.shape) if batch.mask is None else batch.mask
    auxiliary, of_experts = auxiliary_loss(sown, weights.astype(jnp.float32).sum(-1))
    total, count = metrics["loss"]
    return {"loss": (total + auxiliary * count, count)}, {**metrics, **of_experts}


def _mean_cross_entropy(
    name: str,
    params: Any,
    apply_fn: Callable[..., Any],
    batch: Batch,
    rng: jax.Array,
    *,
    with_labels: bool = False,
) -> tuple[jax.Array, Metrics]:
    losses, correct = token_losses(name, params, apply_fn, batch, rng, with_labels=with_labels)
    correct = correct.astype(losses.dtype)
    weights = jnp.ones_like(losses) if batch.mask is None else batch.mask.astype(losses.dtype)
    # Weights are summed per sequence first, because the experts' loss needs the sums per sequence.
    count = weights.sum(-1).sum()
    # A masked label may be any number, so its loss may be NaN, and NaN times 0 is NaN.
    total = jnp.where(weights == 0, 0, losses * weights).sum()
    metrics = {"loss": (total, count), "accuracy": ((correct * weights).sum(), count)}
    # If a device's share consists only of padding, the loss is 0 and not NaN.
    return total / jnp.where(count > 0, count, 1), metrics


def token_losses(
    name: str,
    params: Any,
    apply_fn: Callable[..., Any],
    batch: Batch,
    rng: jax.Array,
    *,
    with_labels: bool,
    train: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes the losses of all labels in nats, and whether each label has the largest logit.

    The losses are also those of labels that `batch.mask` leaves out, and may be NaN there. `name`
    is the caller's, for error messages. `with_labels` is the result of `takes_labels(apply_fn)`.
    `train` is whether the model drops activations.
    """
    call = {"train": train, "rngs": {"dropout": rng}}
    if with_labels:
        out = apply_fn({"params": params}, batch.inputs, labels=batch.labels, **call)
        losses, correct = _checked_pair(name, out, batch.labels)
    else:
        logits = apply_fn({"params": params}, batch.inputs, **call)
        _check_one_each(name, batch, logits.shape[:-1], f"model's logits {logits.shape}")
        axis = vocabulary_axes(logits, batch.labels)
        losses = split_cross_entropy(logits, batch.labels, axis=axis)
        correct = split_argmax(logits, axis) == batch.labels
    _check_one_each(name, batch, losses.shape, f"model's losses {losses.shape}")
    return losses, correct


def _check_one_each(name: str, batch: Batch, shape: tuple[int, ...], of: str) -> None:
    for field in ("labels", "mask"):
        value = getattr(batch, field)
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{name}: batch.{field} has the shape {value.shape}, expected {shape}: one for "
                f"each of the {of}."
            )


def _checked_pair(name: str, out: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `out` as (losses, correct); refuses other results and other shapes than `labels`."""
    shapes = [jnp.shape(x) for x in out] if isinstance(out, tuple) else [jnp.shape(out)]
    if shapes != [labels.shape] * 2:
        raise ValueError(
            f"{name}: the model, whose __call__ takes labels, returned arrays of the shapes "
            f"{shapes}, expected two of {labels.shape}: the losses in nats, and whether the "
            "largest logit is the label's. If the argument `labels` means anything else, rename it."
        )
    losses, correct = out
    return losses, correct
