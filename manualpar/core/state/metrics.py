"""Metrics: pairs `(sum, count)`, which add up over devices, minibatches, batches and steps.

The mean is computed once, from the final sum and count. The mean of the minibatches' means would be
wrong if minibatches have different counts.
"""

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "AnyMetrics",
    "Metrics",
    "add_metrics",
    "fetch_metrics",
    "mean_metrics",
    "print_metrics",
]

# A metric that only the first step reads: by which part of itself the loss is off because a part of
# it has another divisor than the count of `metrics["loss"]`.
UNEVEN = "loss_uneven"
# A pair (sum, count) for each name: scalars on the device, as a step returns them.
Metrics = dict[str, tuple[jax.Array, jax.Array]]
# The same, on the device or as floats after `fetch_metrics`.
AnyMetrics = Mapping[str, tuple[Any, Any]]


class StepSums(NamedTuple):
    """The scalars of a step that add up over minibatches and over devices.

    Attributes:
      objective: The sum of each term of the differentiated loss, and its count. If there is a
        `rest`, the count is that of `metrics["loss"]`, and stands only there.
      metrics: The metrics that the loss function returns.
      rest: The sum of `loss - sum / count` over the shares of the batch, where the pair is
        `metrics["loss"]`; `None` if all shares have the same count, or if the loss has terms.
      nonfinite: The number of devices with a gradient that is not finite, and the number of all
        devices; `None` if the step does not count them.
    """

    objective: Mapping[str, tuple[jax.Array, jax.Array | None]]
    metrics: Metrics
    rest: jax.Array | None = None
    nonfinite: tuple[jax.Array, jax.Array] | None = None

    @property
    def loss(self) -> jax.Array:
        """The differentiated loss, the sum of the means of its terms, `float32[]`."""
        return sum_of_means(
            {
                name: (total, self.metrics["loss"][1] if count is None else count)
                for name, (total, count) in self.objective.items()
            }
        )


def mean(metric: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean of a metric; 0 if its count is 0."""
    total, count = metric
    return total / jnp.where(count == 0, 1, count)


def sum_of_means(terms: Metrics) -> jax.Array:
    """Returns the sum of the means of a loss's terms."""
    return jnp.stack([mean(pair) for pair in terms.values()]).sum()


def fetch_metrics(metrics: AnyMetrics) -> dict[str, tuple[float, float]]:
    """Copies metrics to the host, and waits for the computation that makes them."""
    fetched = jax.device_get(dict(metrics))
    # Restores the order of the metrics, because `device_get` sorts a dict by its keys.
    return {name: (float(fetched[name][0]), float(fetched[name][1])) for name in metrics}


def add_metrics(first: AnyMetrics | None, second: AnyMetrics) -> AnyMetrics:
    """Adds two metrics; `first` may be `None`, for no metrics yet.

    Raises:
      ValueError: `first` and `second` do not have the same names.
    """
    if first is None:
        return second
    if first.keys() != second.keys():
        raise ValueError(
            f"add_metrics: second has the metrics {sorted(second)}, expected the metrics of first, "
            f"{sorted(first)}."
        )
    is_fetched = not any(isinstance(x, jax.Array) for x in jax.tree.leaves((first, second)))
    added = (_add if is_fetched else _add_on_devices)(first, second)
    return {name: added[name] for name in first}


def _add(first: AnyMetrics, second: AnyMetrics) -> AnyMetrics:
    return jax.tree.map(operator.add, first, second)


# One jitted computation adds all metrics, because simulated devices run few computations at a time,
# see `guarded_step`.
_add_on_devices = jax.jit(_add)


def mean_metrics(metrics: AnyMetrics) -> dict[str, float]:
    """Computes the means as floats, `nan` where the count is 0. Waits for the device."""
    return {
        name: total / count if count else math.nan
        for name, (total, count) in fetch_metrics(metrics).items()
    }


def print_metrics(metrics: AnyMetrics, title: str | None = None) -> None:
    """Prints the mean of every metric on a line of its own, under `title` if there is one."""
    lines = [f"{name}: {mean:.6f}" for name, mean in mean_metrics(metrics).items()]
    if title:
        title = f" {title} "
        lines.insert(0, title.center(max(len(title), *map(len, lines)), "="))
    print("\n".join(lines))
