"""The forms of a loss function, and the checks of its results.

    loss_fn(params, apply_fn, batch, rng) -> {"loss": (sum, count)}, metrics

`batch` is one device's share of a minibatch. A loss is a mean over all examples, whoever holds
them, or a sum of such means. So it returns sums over the share's examples, and a step divides by
the count of all devices and minibatches. `metrics` are pairs of scalars `(sum, count)` by name.
`apply_fn` is called like `model.apply`. `rng` is a key that differs between devices, minibatches
and steps. The function may return:

- `terms` or `terms, metrics`: a dict of pairs `(sum, count)`. The objective is the sum of terms,
  `sum_t S_t / C_t`, with each sum and each count taken over all examples. A weight belongs into the
  term's sum. A term without a valid example is 0, and nothing has to be divided. Each term is
  reported as a metric, unless `metrics` has another one of its name.
- `loss, metrics`: the mean over the share's valid examples, and metrics with `"loss"` among them.
  The count of `metrics["loss"]` is the weight of this share. If the loss has a part with another
  divisor, this weight is wrong for it, and the first step refuses the loss (`UNEVEN`).
- `loss`: the mean over the share's examples, all of which count the same. The reported count has an
  example once for each device of a context axis.

For NNX models also `loss_fn(model, batch)`, see `for_nnx`.

- A share may have no valid example. A loss that divides by its count itself must avoid 0 / 0, which
  would make the gradient NaN everywhere: by `jnp.maximum(count, 1)` or `jnp.where(count > 0, count,
  1)`. `jnp.maximum` changes the loss if a share's weights add up to less than 1. The same rules
  hold over a context axis, see `context_check`.
- A count may depend on parameters, as in `sum(w l) / sum(w)` with weights that the model computes.
  Then a step first sums both over all examples, see `accumulate`.
- A loss that uses collectives may be the same on all devices (`jax.lax.pmean(loss, axes)`, a ratio
  of `psum`s). Then the gradient is the gradient of one device's loss. The program sums metrics over
  the devices. If a loss has already summed metrics, their means are right, but their counts are
  wrong.
- Sharded `params` are boxes, which `apply_fn` accepts. A penalty on parameters reads
  `flax.linen.unbox(params)`, which gathers all parameters, including experts and split layers.
- A loop or a conditional may combine constants with data, see `varying_loops`.
"""

import contextlib
import difflib
import functools
import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from manualpar.core.mesh.axes import naming_unbound_axes
from manualpar.core.model.loops import MISMATCH, varying_loops
from manualpar.core.state.metrics import Metrics
from manualpar.core.tracing.jaxprs import CALLS, inner_jaxprs
from manualpar.core.trees import Batch

# A function of one of the forms above.
LossFn = Callable[..., Any]


class Mean(NamedTuple):
    """A loss as a share's mean.

    Attributes:
      mean: The mean over the share's valid examples.
      weight: The number of these examples, or the sum of their weights.
    """

    mean: jax.Array
    weight: jax.Array


# A share's mean, or the pair (sum, count) of each term.
LossValue = Mean | Metrics


class LearnedCountError(ValueError):
    """A count that is differentiated: it depends on parameters, so sums have to be known first."""


def call_loss(loss_fn: LossFn, params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
    """Calls a loss function while it is traced, and checks its result, see `check_loss`."""
    with tracing_loss():
        result = loss_fn(params, apply_fn, batch, rng)
    return check_loss(result, batch)


@contextlib.contextmanager
def tracing_loss() -> Iterator[None]:
    """Opens the context in which a loss function is called while it is traced."""
    try:
        with naming_unbound_axes(), varying_loops():
            yield
    except (TypeError, ValueError) as error:
        message = _explain_constant(error)
        if message is None:
            raise
        raise TypeError(message) from error


def check_loss(result: Any, batch: Batch) -> tuple[LossValue, Metrics]:
    """Checks the result of a loss function for a share `batch`; returns the loss and the metrics.

    The metrics always have `"loss"`, and with it all terms.
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(loss, Mapping):
        return _check_terms(loss, {} if metrics is None else metrics)
    if isinstance(loss, tuple | list) or not _is_scalar(loss):
        _refuse_form(result, loss)
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        _refuse_form(result, loss)
    if metrics is None:
        count = jnp.asarray(num_examples(batch))
        loss = jnp.asarray(loss)
        return Mean(loss, count), {"loss": (loss * count, count)}
    checked = _check_metrics(metrics)
    if "loss" not in checked:
        near = difflib.get_close_matches("loss", list(checked), n=1)
        hint = f" Did you mean it by {near[0]!r}?" if near else ""
        raise ValueError(
            f"loss_fn: metrics has {sorted(checked)}, expected a 'loss' among them: the "
            "pair (sum of the examples' losses, their count), whose count weights the gradient."
            f"{hint}"
        )
    return Mean(jnp.asarray(loss), checked["loss"][1]), checked


def num_examples(batch: Batch) -> int:
    """Returns the number of examples of a share: the length of its longest array."""
    return max((len(x) for x in jax.tree.leaves(batch) if jnp.ndim(x)), default=1)


def _check_terms(terms: Mapping[str, Any], metrics: Any) -> tuple[Metrics, Metrics]:
    if not terms:
        raise ValueError(
            "loss_fn returned no terms, expected a dict of pairs such as {'loss': (sum, count)}."
        )
    checked = {str(name): _check_pair(f"term {name!r}", pair) for name, pair in terms.items()}
    for name, (total, _) in checked.items():
        if not jnp.issubdtype(total.dtype, jnp.floating):
            raise ValueError(
                f"loss_fn: term {name!r} has a sum of dtype {total.dtype}, expected a "
                "floating-point number. Return the sum of the examples' losses."
            )
    reported = {**checked, **_check_metrics(metrics)}
    if "loss" not in reported:
        raise ValueError(
            f"loss_fn: the terms are {sorted(checked)}, expected a 'loss' among them, or among the "
            "metrics: the pair that is reported as the loss."
        )
    return checked, reported


def _check_metrics(metrics: Any) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"loss_fn: metrics is a {type(metrics).__name__}, expected a dict such as "
            "{'accuracy': (sum, count)}."
        )
    return {str(k): _check_pair(f"metrics[{str(k)!r}]", value) for k, value in metrics.items()}


def _refuse_form(result: Any, loss: Any) -> None:
    forms = (
        "expected {'loss': (sum, count)}, such a dict and metrics, the pair (loss, metrics), or a "
        "scalar"
    )
    if isinstance(result, tuple) and len(result) != 2:
        raise TypeError(f"loss_fn returned a tuple of {len(result)} values, {forms}.")
    if hasattr(loss, "dtype") or isinstance(loss, int | float | complex):
        raise ValueError(
            f"loss_fn: the loss is {_describe(loss)}, expected a floating-point scalar. Return the "
            "mean over the examples."
        )
    raise TypeError(f"loss_fn returned a {type(loss).__name__}, {forms}.")


def for_nnx(loss_fn: LossFn) -> LossFn:
    """Understands `loss_fn(model, batch)`, as flax's guides of NNX write a loss.

    `model` is the module with the parameters of the step. The loss may call any of its methods.
    The second value of a pair `(loss, aux)` is metrics if it is a dict, and is ignored otherwise:
    flax's examples return logits there.

    Returns:
      A loss of four arguments; a function that takes four already is returned unchanged.
    """
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):  # A callable without a signature.
        return loss_fn
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(required) != 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return loss_fn

    @functools.wraps(loss_fn)
    def with_model(params: Any, apply_fn: Any, batch: Any, rng: jax.Array) -> Any:
        result = apply_fn({"params": params}, batch, method=loss_fn, rngs={"dropout": rng})
        if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[1], Mapping):
            return result[0]
        return result

    return with_model


def check_scalar_loss(jaxpr: Jaxpr) -> None:
    """Refuses a loss that is returned as a scalar, and is divided by a number of the batch.

    Such a loss is a mean over the valid examples of a share. The shares may have different counts,
    so the mean of their means would be another loss. `jaxpr` computes the loss from the batch.
    """
    if _is_divided(jaxpr, [True] * len(jaxpr.outvars), frozenset(jaxpr.invars)):
        raise ValueError(
            "loss_fn returned a scalar that is divided by a number which it computes from the "
            "batch, expected the mean over all examples, which count the same. Return the sum and "
            "the number: {'loss': (sum, count)}. Then the mean is taken over all devices."
        )


def _is_divided(jaxpr: Jaxpr, wanted: list[bool], batch: frozenset[Var]) -> bool:
    """Returns whether the way from scalars to a result divides by a value of the batch."""
    depends = set(batch)
    for eqn in jaxpr.eqns:
        if any(isinstance(v, Var) and v in depends for v in eqn.invars):
            depends.update(eqn.outvars)
    results = zip(jaxpr.outvars, wanted, strict=True)
    scalars = {v for v, use in results if use and isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if scalars.isdisjoint(eqn.outvars):
            continue
        divisors = eqn.invars[1:] if eqn.primitive.name == "div" else []
        if any(isinstance(v, Var) and v in depends for v in divisors):
            return True
        if eqn.primitive.name in CALLS or "custom" in eqn.primitive.name:
            inner_wanted = [v in scalars for v in eqn.outvars]
            for _, inner in inner_jaxprs(eqn):
                if len(inner.outvars) != len(inner_wanted):
                    continue
                offset = len(eqn.invars) - len(inner.invars)
                pairs = zip(eqn.invars[offset:], inner.invars, strict=True)
                given = frozenset(v for x, v in pairs if isinstance(x, Var) and x in depends)
                if _is_divided(inner, inner_wanted, given):
                    return True
        scalars.update(v for v in eqn.invars if isinstance(v, Var) and _is_scalar(v.aval))
    return False


def _explain_constant(error: Exception) -> str | None:
    """Explains JAX's error about a constant among varying arrays; `None` for other errors."""
    said = str(error)
    if "argument to VJP function" in said and "{V:" in said:
        return (
            "loss_fn: in the model or the loss function a cotangent that is given to jax.vjp or "
            "nn.vjp is a constant, expected one that varies over the devices as the output does. "
            "Make it from the output, jnp.ones_like(y) instead of jnp.ones(()): the numbers are "
            "the same, on one device too."
        )
    lines = (line.strip() for line in said.splitlines() if MISMATCH in line)
    mismatch = next(lines, None)
    return mismatch and (
        f"loss_fn: in the model or the loss function{_place(error)} a loop or a conditional has a "
        "constant where it expected an array that varies over the devices as the batch does: "
        f"{mismatch} Constants are cast in calls by the names jax.lax.scan, jax.lax.while_loop, "
        "jax.lax.fori_loop, jax.lax.cond and jax.lax.switch. Call the loop or the conditional by "
        "such a name, or make the constant from data, jnp.zeros_like(x, shape=(...)) instead of "
        "jnp.zeros((...)): the numbers are the same, on one device too. If a library calls it, "
        "build the program with mode='auto'."
    )


def _place(error: Exception) -> str:
    """Names the line of the user's code at which JAX raised an error, for a message."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (
            "jax",
            "jaxlib",
            "manualpar",
        ):
            text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
            place = f", at {Path(frame.f_code.co_filename).name}:{line} ({text}),"
    return place


def _check_pair(name: str, value: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(value, tuple) or len(value) != 2 or not all(map(_is_scalar, value)):
        parts = value if isinstance(value, tuple) else (value,)
        raise ValueError(
            f"loss_fn: {name} is ({', '.join(map(_describe, parts))}), expected a pair "
            "of scalars (sum, count): return x.sum() and the number of examples, and the mean is "
            "taken over all devices and minibatches."
        )
    total, count = map(jnp.asarray, value)
    is_small_float = jnp.issubdtype(count.dtype, jnp.floating) and jnp.finfo(count.dtype).bits < 32
    if count.dtype == bool or is_small_float:
        raise ValueError(
            f"loss_fn: {name} has a count of dtype {count.dtype}, which cannot hold "
            "large counts, expected an integer or float32. Cast the mask before you sum it."
        )
    return total, count


def _is_scalar(x: Any) -> bool:
    """Returns whether `x` is a real number or a real array without dimensions."""
    return isinstance(x, int | float | bool) or (
        hasattr(x, "dtype") and jnp.ndim(x) == 0 and not jnp.iscomplexobj(x)
    )


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
