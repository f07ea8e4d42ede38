"""Tunes a language model to prefer one answer to another (DPO).

Direct preference optimization (Rafailov et al., https://arxiv.org/abs/2305.18290) needs no reward
model and generates nothing. For a prompt with a chosen and a rejected answer, let `m` be the sum of
`log p(answer)` under the trained model minus the sum under a frozen *reference*. The loss is
`-log sigmoid(beta (m_chosen - m_rejected))`.

The reference is a part of the parameters, so it is sharded and gathered as they are. For a model
with adapters it is the same parameters without the adapters, and costs no memory. For a model that
is trained as a whole it is the frozen copy in `WithReference`.

```python
model = manualpar.lora(model, {"*/attention/*": 8}, alpha=16)
data = preference_examples(pairs, tokenizer, sequence_length=512)
fit(model, preference_loss(beta=0.1), data, options={"init_args": first_call}, init_from=params)
```

Symbols: `B` pairs, `S` positions.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from manualpar.core.model.loss_function import LossFn
from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import Batch
from manualpar.models.cross_entropy import takes_labels, token_losses
from manualpar.models.finetuning.lora import is_adapter

POLICY, REFERENCE = "policy", "reference"


class WithReference(nn.Module):
    """A language model and a frozen copy of it, for `preference_loss` without adapters.

    The parameters are `policy` and `reference`, both with the parameters of `module`. Build the
    program with `trainable=("policy/*",)`, and begin with
    `init_from({"policy": params, "reference": params})`. A call runs the policy.

    Attributes:
      module: The language model.
    """

    module: nn.Module

    @nn.compact
    def __call__(self, tokens: Any, train: bool = False, labels: Any = None) -> Any:
        """Calls the policy; the arguments and the result are those of `Transformer`."""
        if self.is_initializing():
            self.module.clone(parent=self, name=REFERENCE)(tokens)
        return self.module.clone(parent=self, name=POLICY)(tokens, train=train, labels=labels)


def first_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a model's first call, for `init_args` of a program's builder."""
    return (batch.inputs[:, 0],), {}


def preference_loss(beta: float = 0.1) -> LossFn:
    """Makes the loss of direct preference optimization for a program.

    A batch has `inputs` and `labels`, `int[B, 2, S]`, and `mask`, `[B, 2, S]`: 1 at the labels of
    the answer. Along dim 1 the chosen answer comes first. `preference_examples` makes such pairs.
    The metrics are `loss`, `accuracy` (the share of pairs whose margin is positive), and `margin`,
    `beta (m_chosen - m_rejected)`.

    Args:
      beta: How strongly the model is bound to the reference; a number above 0.

    Raises:
      ValueError: `beta` is not above 0. When a program is built: the batch has another form; the
        model has neither adapters nor a reference, or smooths labels.

    Communication:
      That of two calls of the model; only the first has a backward pass, and drops activations if
      the model does.
    """
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < float("inf"):
        raise ValueError(f"preference_loss: beta is {beta!r}, expected a number above 0.")

    def loss_fn(
        params: Any, apply_fn: Callable[..., Any], batch: Batch, rng: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        flat = _flat(apply_fn, batch)
        trained = _log_probabilities(params, apply_fn, flat, rng, train=True)
        reference = _log_probabilities(_reference(params), apply_fn, flat, rng, train=False)
        chosen, rejected = (trained - jax.lax.stop_gradient(reference)).reshape(-1, 2).T
        margins = beta * (chosen - rejected)
        # A pair without an answer is padding.
        assert flat.mask is not None
        weights = (flat.mask != 0).any(-1).reshape(-1, 2).all(-1).astype(margins.dtype)
        count = weights.sum()

        def total(x: jax.Array) -> jax.Array:
            return jnp.where(weights == 0, 0, x).sum()

        loss = total(-jax.nn.log_sigmoid(margins))
        metrics = {
            "loss": (loss, count),
            "accuracy": (total((margins > 0).astype(margins.dtype)), count),
            "margin": (total(margins), count),
        }
        return loss / jnp.where(count > 0, count, 1), metrics

    return loss_fn


def _log_probabilities(
    params: Any, apply_fn: Callable[..., Any], batch: Batch, rng: jax.Array, *, train: bool
) -> jax.Array:
    """Returns the log-probability of each sequence's answer, `[2 B]`."""
    given = {"with_labels": takes_labels(apply_fn), "train": train}
    losses, _ = token_losses("preference_loss", params, apply_fn, batch, rng, **given)
    weights = jnp.asarray(batch.mask, losses.dtype)
    return -jnp.where(weights == 0, 0, losses * weights).sum(-1)


def _reference(params: Any) -> Any:
    """Returns the parameters of the reference model, in the form of `params`."""
    if params.keys() == {POLICY, REFERENCE}:
        return {POLICY: params[REFERENCE]}
    flat = flatten_dict(params, sep="/")
    kept = {path: x for path, x in flat.items() if not is_adapter(path)}
    if len(kept) == len(flat):
        raise ValueError(
            "preference_loss: the model has no adapters and no reference, expected the result of "
            "lora, or WithReference(model), because the loss compares it with a frozen model."
        )
    return unflatten_dict(kept, sep="/")


def _flat(apply_fn: Callable[..., Any], batch: Batch) -> Batch:
    """Checks the batch and the model; returns the batch's pairs one after the other, `[2 B, S]`."""
    parts = batch.inputs, batch.labels, batch.mask
    shapes = [() if x is None else jnp.shape(x) for x in parts]
    if len({*shapes}) > 1 or len(shapes[0]) != 3 or shapes[0][1] != 2:
        raise ValueError(
            f"preference_loss: batch has inputs, labels and mask of the shapes {shapes}, expected "
            "[B, 2, S] each: the chosen and the rejected sequence of each pair."
        )
    module: Any = getattr(apply_fn, "__self__", apply_fn)
    interface: Any = getattr(module, "interface", module)
    if saved := getattr(getattr(interface, "low_rank", None), "save", ()):
        raise ValueError(
            f"preference_loss: the model is lora(..., save={saved!r}), expected no such "
            "parameters, because the reference is the model without adapters, and they are "
            "trained in it. Leave save out (config.model.lora_save), or see WithReference."
        )
    while module is not None:
        for field in ("label_smoothing", "z_loss"):
            if value := getattr(module, field, 0):
                raise ValueError(
                    f"preference_loss: the model has {field}={value}, expected 0, because the "
                    "loss needs the probabilities of answers."
                )
        if getattr(module, "bos_token", -1) >= 0:
            raise ValueError(
                f"preference_loss: the model has bos_token={module.bos_token}, expected -1: "
                "a sequence is one document, although a template of chats may write BOS in it."
            )
        module = getattr(module, "module", None)
    return Batch(*(x.reshape(-1, shapes[0][2]) for x in parts))
