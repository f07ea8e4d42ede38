"""Draws the dropout masks of `random_programs` again on one device.

A step splits the state's key into the next state's key and the step's key. In mode `manual` each
device folds its number into the step's key. In all modes every minibatch has a different key. So
one device can draw the same masks: it calls the model once for each minibatch of each device, with
the key of this minibatch.

Two kinds of programs in mode `manual` draw masks that one device cannot draw: if activations are
split (over a model axis, a context axis, or stages), or if a layer mixes the examples of several
devices. Then the program's loss and the terms of it are compared with those under other masks: the
distance from their mean must be plausible by chance.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.random_reference import Answer

DRAWS = 16
# The largest allowed distance of a metric from the mean, in standard deviations estimated from
# `DRAWS` draws. By chance 3 in 100,000 metrics are farther away.
DEVIATIONS = 6


def has_masks_of_one_device(program: Any, *, is_manual: bool, meets_others: bool) -> bool:
    """Returns whether one device can draw the masks of a program.

    Args:
      program: The program.
      is_manual: Whether a device's code sees only its examples. In other modes the code sees all
        examples, with one mask.
      meets_others: Whether a layer or the loss mixes examples of several devices.
    """
    if not is_manual:
        return True
    shape, own = program.mesh.shape, set(program.data_axes) - {"context"}
    is_whole = all(size == 1 for axis, size in shape.items() if axis not in own)
    return is_whole and "stage" not in shape and not meets_others


def keys_of_step(program: Any, rng: jax.Array, *, is_manual: bool) -> jax.Array:
    """Returns the dropout keys of all minibatches, by device; `rng` is the state's key."""
    _, key = jax.random.split(rng)
    if not is_manual:
        return jax.random.split(key, program.num_minibatches)
    devices = np.arange(math.prod(program.mesh.shape[axis] for axis in program.data_axes))
    keys = jax.vmap(lambda device: jax.random.fold_in(key, device))(devices)
    return jax.vmap(lambda key: jax.random.split(key, program.num_minibatches))(keys).reshape(-1)


def spread_of_metrics(
    answer: Callable[[jax.Array], Answer], units: int
) -> dict[str, tuple[float, float]]:
    """Returns the mean of each metric over random masks, and the allowed distance from this mean.

    Args:
      answer: Computes one device's results from a dropout key for each unit of examples.
      units: The number of units.
    """
    keys = jax.random.split(jax.random.key(1), (DRAWS, units))
    drawn = [answer(each).metrics for each in keys]
    spread = {}
    for name in drawn[0]:
        sums = [metrics[name][0] for metrics in drawn]
        spread[name] = float(np.mean(sums)), DEVIATIONS * float(np.std(sums, ddof=1))
    return spread
