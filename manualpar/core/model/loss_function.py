"""The form of a loss function, and the checks of its results.

    loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)

`batch` is one device's share of a minibatch, and `loss` is the mean over its valid examples.
`metrics` are pairs of scalars `(sum, count)` by name, with `metrics["loss"]` among them. The loss's
count is the weight of this share in the mean over all devices and minibatches. `apply_fn` is called
like `model.apply`. `rng` is a key that differs between devices, minibatches and steps.

- A share may have no valid example. The gradient of 0 / 0 would be NaN on that device and then
  everywhere, so a masked loss divides by `jnp.maximum(count, 1)` or
  `jnp.where(count > 0, count, 1)`. `jnp.maximum` changes the loss if a share's weights add up to
  less than 1. The same rules hold over a context axis, see `context_check`.
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
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from manualpar.core.mesh.axes import naming_unbound_axes
from manualpar.core.model.loops import MISMATCH, varying_loops
from manualpar.core.state.metrics import Metrics

LossFn = Callable[[Any, Callable[..., Any], Any, jax.Array], tuple[jax.Array, Mapping[str, Any]]]


def call_loss(loss_fn: LossFn, *args: Any) -> tuple[jax.Array, Metrics]:
    """Calls a loss function while it is traced, and checks its result."""
    with tracing_loss():
        result = loss_fn(*args)
    return check_loss(result)


@contextlib.contextmanager
def tracing_loss() -> Iterator[None]:
    """Opens the context in which a loss function is called while it is traced.

    Raises:
      ValueError: A collective is over an axis that is not bound.
      TypeError: A loop in the loss or in the model starts from a constant, or a constant is a
        cotangent.
    """
    try:
        with naming_unbound_axes(), varying_loops():
            yield
    except (TypeError, ValueError) as error:
        message = _explain_constant(error)
        if message is None:
            raise
        raise TypeError(message) from error


def check_loss(result: Any) -> tuple[jax.Array, Metrics]:
    """Checks the result of a loss function, and returns the loss and the metrics.

    Raises:
      ValueError: The loss is not a scalar, or metrics are not pairs of scalars with `"loss"` among
        them.
      TypeError: The result is not a pair of a loss and a mapping.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"loss_fn returned a {type(result).__name__}, expected the pair (loss, metrics)."
        )
    loss, metrics = result
    if not _is_scalar(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"loss_fn: the loss is {_describe(loss)}, expected a floating-point scalar. Return the "
            "mean over the examples."
        )
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"loss_fn: metrics is a {type(metrics).__name__}, expected a dict such as "
            "{'loss': (sum, count)}."
        )
    if "loss" not in metrics:
        near = difflib.get_close_matches("loss", [str(name) for name in metrics], n=1)
        hint = f" Did you mean it by {near[0]!r}?" if near else ""
        raise ValueError(
            f"loss_fn: metrics has {sorted(map(str, metrics))}, expected a 'loss' among them: the "
            "pair (sum of the examples' losses, their count), whose count weights the gradient."
            f"{hint}"
        )
    return loss, {name: _check_metric(name, value) for name, value in metrics.items()}


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


def _check_metric(name: str, value: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(value, tuple) or len(value) != 2 or not all(map(_is_scalar, value)):
        parts = value if isinstance(value, tuple) else (value,)
        raise ValueError(
            f"loss_fn: metrics[{name!r}] is ({', '.join(map(_describe, parts))}), expected a pair "
            "of scalars (sum, count): return x.sum() and the number of examples, and the mean is "
            "taken over all devices and minibatches."
        )
    total, count = map(jnp.asarray, value)
    is_small_float = jnp.issubdtype(count.dtype, jnp.floating) and jnp.finfo(count.dtype).bits < 32
    if count.dtype == bool or is_small_float:
        raise ValueError(
            f"loss_fn: metrics[{name!r}] has a count of dtype {count.dtype}, which cannot hold "
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
