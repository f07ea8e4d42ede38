"""The optimizers of `random_programs`, by name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import optax.contrib

LR = 0.02
# How far an update may be off, in parts of the largest one of its leaf, where it is more than a few
# operations on an element: norms and products of matrices are sums that devices add up otherwise.
LOOSE: Mapping[str, float] = {
    "lamb": 1e-4,
    "lars": 1e-4,
    "adafactor": 3e-4,
    "muon": 0.02,
    "clip_adaptive": 1e-4,
    "prodigy": 2e-3,
    "dowg": 1e-3,
    "schedule_free": 1e-4,
    "adam_bf16": 0.02,
    "adan": 1e-4,
    "centralize": 1e-4,
    "adamw": 1e-4,
}


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "kernel" if x.ndim > 1 else "rest", params)


_CLIP = optax.clip_by_global_norm(0.1)
_OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(1.0),
    "momentum": lambda: optax.chain(_CLIP, optax.sgd(LR, momentum=0.9, nesterov=True)),
    "adamw": lambda: optax.chain(_CLIP, optax.adamw(LR)),
    "adamw_masked": lambda: optax.adamw(LR, weight_decay=0.1, mask=_matrices),
    "adam_bf16": lambda: optax.adam(LR, mu_dtype="bfloat16"),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(LR),
    "lion": lambda: optax.lion(LR),
    "rmsprop": lambda: optax.rmsprop(LR, momentum=0.5),
    "adagrad": lambda: optax.adagrad(LR),
    "multisteps": lambda: optax.MultiSteps(optax.adam(LR), 2).gradient_transformation(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(LR),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.5, 4), momentum=0.5),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 2),
    "partition": lambda: optax.partition(
        {"kernel": optax.adamw(LR), "rest": optax.sgd(LR)}, _labels
    ),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=LR),
    "clip_adaptive": lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(LR)),
    "linear": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 3)),
    "prodigy": lambda: optax.contrib.prodigy(estim_lr0=0.01),
    "dowg": lambda: optax.contrib.dowg(),
    "nadamw": lambda: optax.nadamw(LR),
    "noise": lambda: optax.noisy_sgd(LR),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(LR)),
    "adan": lambda: optax.adan(LR),
}


def make_optimizer(name: str) -> Any:
    """Returns an optimizer by name."""
    return _OPTIMIZERS[name]()
