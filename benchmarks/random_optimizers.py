"""The optimizers of `random_programs`, and their updates on one device.

`recording` wraps a program's optimizer, and keeps the gradients that it gets. These gradients are
compared with the gradients of one device. Then the program's update is compared with an update of
optax on one device, which gets the program's gradients. So differences between the gradients do not
affect the comparison of updates.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from benchmarks.random_comparison import Arrays, WrongError
from benchmarks.random_reference import flatten, unflatten
from manualpar import params_ema

LR = 0.02
# The allowed difference of an update, relative to the largest update in its array. It is larger for
# these optimizers, because devices sum their norms and matrix products in another order.
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
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
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
    """Makes an optimizer by name."""
    return OPTIMIZERS[name]()


EMA = 0.9


class Recorded(NamedTuple):
    """The state of an optimizer that keeps the last gradient."""

    gradient: Any
    inner: Any


def recording(tx: Any) -> Any:
    """Wraps an optimizer so that its state also keeps the last gradients."""

    def init(params: Any) -> Recorded:
        return Recorded(jax.tree.map(jnp.zeros_like, params), tx.init(params))

    def update(grads: Any, state: Recorded, params: Any = None) -> Any:
        updates, inner = tx.update(grads, state.inner, params)
        return updates, Recorded(grads, inner)

    return optax.GradientTransformation(init, update)


class OneDevice:
    """An optimizer on one device that repeats a program's updates with the program's gradients.

    Attributes:
      average: The average of parameters, in float64; `None` before the first update.
    """

    def __init__(self, name: str, share: Callable[..., Any], *, has_average: bool) -> None:
        self._name, self._share, self._has_average = name, share, has_average
        self._tx = share("tx", (), lambda: make_optimizer(name))
        self.restart()

    @property
    def tx(self) -> Any:
        """The optimizer for the program; it also averages parameters if the description says so."""
        return optax.chain(self._tx, params_ema(EMA)) if self._has_average else self._tx

    def restart(self) -> None:
        """Forgets the optimizer's state and the average."""
        self._state: Any = None
        self._farthest: dict[str, np.ndarray] = {}
        self.average: dict[str, np.ndarray] | None = None

    def updated(self, params: Arrays, grads: Arrays) -> dict[str, np.ndarray]:
        """Returns the trained parameters after an update."""
        tree = unflatten({path: np.asarray(params[path]) for path in grads})
        gradient = unflatten({path: np.asarray(g) for path, g in grads.items()})
        if self._state is None:
            init = self._share("tx init", sorted(grads), lambda: jax.jit(self._tx.init))
            self._state = init(tree)
        tx = self._tx

        def run(grads: Any, state: Any, params: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        update = self._share("update", sorted(grads), lambda: jax.jit(run))
        new, self._state = update(gradient, self._state, tree)
        expected = flatten(jax.device_get(new))
        for path, x in expected.items():
            moved = np.abs(np.asarray(x, np.float64) - np.asarray(params[path], np.float64))
            self._farthest[path] = np.fmax(self._farthest.get(path, 0), moved)
        return expected

    def check(self, what: str, params: Arrays, grads: Arrays, after: Arrays) -> None:
        """Updates `params` on one device, and compares the result with the program's `after`."""
        self.compare(what, params, after, self.updated(params, grads))
        before = self.average or {p: np.asarray(params[p], np.float64) for p in grads}
        self.average = {
            path: EMA * x + (1 - EMA) * np.float64(after[path]) for path, x in before.items()
        }

    def compare(self, what: str, params: Arrays, after: Arrays, expected: Arrays) -> None:
        """Raises WrongError if the program's trained parameters are not the expected ones."""
        loose = LOOSE.get(self._name, 1e-5)
        for path, new in expected.items():
            ulp = float(jnp.finfo(after[path].dtype).eps)
            if ulp > 1e-3:  # Moments and other factors are in bfloat16 too.
                loose = 0.3 if self._name == "muon" else max(loose, 0.03)
            got, old, e = (np.asarray(x, np.float64) for x in (after[path], params[path], new))
            if np.isnan(e).all() and np.isnan(got).all():
                continue  # DoWG gives NaN for zero gradients, on one device too.
            moved = np.abs(e - old)
            scale = moved.max(initial=0) if loose > 1e-5 else moved
            # Momentum and gradient may cancel, so that only their rounding errors remain. The
            # farthest earlier move of an element bounds these errors.
            roundings = 2 * ulp * np.abs(e) + 4 * ulp * self._farthest[path]
            if not (np.abs(got - e) <= roundings + loose * scale + 1e-12).all():
                off, far = np.abs(got - e).max(), moved.max()
                raise WrongError(
                    f"{what} update: {path} is off {off:.3g}, optax moves it {far:.3g}"
                )
