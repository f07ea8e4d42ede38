"""Computes one device's results for `random_programs`, in plain flax, jax and optax.

A batch is divided into *units*. A unit is a group of examples that the model mixes (as in a batch
norm), or a single example. The reference computes each unit separately, and adds the results in
float64. So the reference has smaller rounding errors than a program, and the contribution of each
device is known.

A second call, with parameters that are changed by a few rounding errors, shows how large the
differences are that rounding can cause. `random_comparison` calls them `noise`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_tasks import LEARNED, TERMS, Plain, make_parts

Tree = Any


@dataclasses.dataclass
class Answer:
    """One device's results for a batch.

    Attributes:
      grads: The gradient of each trained parameter by path, in float64.
      contributions: The sum over devices of each device's largest gradient element, by path.
      spread: The sum over devices of the norms of their gradients, by path.
      metrics: The sum and the count of each metric.
      variables: The other variables of each unit, by path, with the units in dim 0.
    """

    grads: dict[str, np.ndarray]
    contributions: dict[str, float]
    spread: dict[str, float]
    metrics: dict[str, tuple[float, float]]
    variables: dict[str, np.ndarray]


class Reference:
    """Computes results on one device for a model and a loss, with jitted functions."""

    def __init__(self, row: Mapping[str, Any], plain: Plain, gather_dtype: str | None) -> None:
        self._plain, self._parts = plain, make_parts(row, is_plain=True)
        self._form = row.get("form", "pair")
        self._has_metrics = row.get("has_metrics", True)
        self._has_terms = self._form in ("terms", *LEARNED)
        self._gather_dtype = gather_dtype
        self._run = {
            train: jax.jit(functools.partial(self._units, train=train)) for train in (True, False)
        }

    def __call__(
        self,
        params: Tree,
        trained: set[str],
        collections: Tree,
        batch: Any,
        units: np.ndarray,
        devices: int,
        *,
        train: bool = True,
        keys: jax.Array | None = None,
    ) -> Answer:
        """Computes the results for a batch.

        `units` has a row of example numbers for each unit, sorted by device. `keys` are the dropout
        keys of the units.
        """
        keys = jax.random.split(jax.random.key(0), len(units)) if keys is None else keys
        own = {p: x for p, x in params.items() if p in trained}
        frozen = {p: x for p, x in params.items() if p not in trained}
        parts = jax.tree.map(lambda x: x[units], batch)

        def compute(weights: Any) -> Any:
            results = self._run[train](own, frozen, collections, (parts, keys), weights)
            return jax.device_get(results)

        # The same structure in both calls, so that one function is compiled.
        weights = dict.fromkeys(TERMS, (0.0, 0.0))
        grads, (terms, metrics), variables = compute(weights)
        if self._has_terms:
            grads, _, _ = compute(weights | _weights_of_terms(terms))
        metrics = {**terms, **metrics}
        total = 1.0 if self._has_terms else _sum(metrics["loss"][1]) or 1.0
        answer = Answer({}, {}, {}, {}, {})
        for path, g in grads.items():
            g = np.asarray(g, np.float64) / total
            each = g.reshape(devices, -1, *g.shape[1:]).sum(1)
            answer.grads[path] = g.sum(0)
            flat = each.reshape(devices, -1)
            answer.contributions[path] = float(np.abs(flat).max(1, initial=0).sum())
            answer.spread[path] = float(np.linalg.norm(flat, axis=1).sum())
        for name, (value, count) in metrics.items():
            answer.metrics[name] = _sum(value), _sum(count)
        answer.variables = variables
        return answer

    def _units(
        self, own: Tree, frozen: Tree, collections: Tree, parts: Any, weights: Any, *, train: bool
    ) -> tuple[Any, Any, Any]:
        def one(part: Any) -> Any:
            batch, key = part

            def loss(own: Tree) -> Any:
                cast = {path: self._cast(x, is_frozen=False) for path, x in own.items()}
                cast |= {path: self._cast(x, is_frozen=True) for path, x in frozen.items()}
                updates: dict[str, Any] = {}

                def apply(variables: Any, *args: Any, mutable: Any = (), **call: Any) -> Any:
                    call["train"] = train
                    call.pop("rngs") if not train else None
                    given = {**collections, **variables}
                    names = [*collections, *mutable]
                    out, new = self._plain.apply(given, *args, mutable=names, **call)
                    updates.update(_like(collections, new))
                    return (out, new) if mutable else out

                tree = self._plain.to_plain(unflatten(cast))
                of = self._parts(tree, apply, batch, key)
                terms, metrics = of.terms, of.metrics
                if self._form == "scalar":
                    count = len(batch.labels)
                    terms, metrics = {"loss": (of.mean * count, count)}, {}
                if self._form == "learned pair":  # The mean has more parts than the metric.
                    count = terms["loss"][1]
                    metrics = {"loss": terms["loss"], **metrics}
                    terms = {"loss": (of.mean * count, count)}
                if self._form in ("terms", "learned") and not self._has_metrics:
                    metrics = {}
                if not self._has_terms:
                    return of.mean * terms["loss"][1], (terms, metrics, flatten(updates))
                value = jnp.zeros(())
                for name, (total, count) in terms.items():
                    value += weights[name][0] * total + weights[name][1] * count
                return value, (terms, metrics, flatten(updates))

            grads, (terms, metrics, updates) = jax.grad(loss, has_aux=True)(own)
            return grads, jax.tree.map(jnp.asarray, (terms, metrics)), updates

        return jax.lax.map(one, parts)

    def _cast(self, x: Any, *, is_frozen: bool) -> Any:
        dtype = self._gather_dtype
        if not dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if is_frozen and jnp.dtype(x.dtype).itemsize <= jnp.dtype(dtype).itemsize:
            return x
        return x.astype(dtype)


def _sum(x: Any) -> float:
    return float(np.asarray(x, np.float64).sum())


def _weights_of_terms(terms: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the derivatives of the sum of terms by each term's sum and by its count."""
    weights = {}
    for name, pair in terms.items():
        total, count = map(_sum, pair)
        weights[name] = (1 / count, -total / count**2) if count else (0.0, 0.0)
    return weights


def _like(wanted: Any, given: Any) -> Any:
    """Returns the values of `given` whose paths are in `wanted`."""
    if not isinstance(wanted, Mapping):
        return given
    return {name: _like(tree, given[name]) for name, tree in wanted.items() if name in given}


def flatten(tree: Tree) -> dict[str, Any]:
    """Returns the leaves of nested dicts by path (`"a/b"`), without masked leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(k, "key", k)) for k in path): x for path, x in leaves}


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """Returns nested dicts from leaves by path, the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        *above, last = path.split("/")
        inner = tree
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = x
    return tree


def perturb(params: Mapping[str, Any], size: float, seed: int) -> dict[str, Any]:
    """Returns parameters that are randomly increased or decreased by `size` of their value."""
    random = np.random.default_rng(seed)

    def off(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        signs = random.integers(0, 2, x.shape) * 2 - 1
        return (x.astype(np.float64) * (1 + size * signs)).astype(x.dtype)

    return {path: off(np.asarray(x)) for path, x in params.items()}
