"""The masks of dropout in `random_programs`, drawn once more on one device.

A step splits the state's key: one half is the next state's, the other is the step's. In mode manual
each device folds its number into it, and in each mode every minibatch has a key of its own. So one
device draws the same masks if it takes the examples that met in a call together, with their key.

Where mode manual splits activations (over a model axis, a context, or stages), or the examples of
several devices meet in a layer, the masks are not those of one call. There the loss is compared
with the ones that other masks give: it may be as far from their mean as chance would bring it.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.random_reference import Answer

DRAWS = 16
# How many standard deviations a loss may be off, of which `DRAWS` draws are an estimate: 3 in
# 100,000 are farther from the mean.
DEVIATIONS = 6


def has_masks_of_one_device(program: Any, *, is_manual: bool, meets_others: bool) -> bool:
    """Returns whether one device can draw the masks of a program.

    Args:
      program: The program.
      is_manual: Whether a device's code sees its own examples. In other modes it sees all, with one
        mask.
      meets_others: Whether examples of several devices meet in a layer or the loss.
    """
    if not is_manual:
        return True
    shape, own = program.mesh.shape, set(program.data_axes) - {"context"}
    is_whole = all(size == 1 for axis, size in shape.items() if axis not in own)
    return is_whole and "stage" not in shape and not meets_others


def keys_of_step(program: Any, rng: jax.Array, *, is_manual: bool) -> jax.Array:
    """Returns the key of each minibatch of each device in a step from a state with a key."""
    _, key = jax.random.split(rng)
    if not is_manual:
        return jax.random.split(key, program.num_minibatches)
    devices = np.arange(math.prod(program.mesh.shape[axis] for axis in program.data_axes))
    keys = jax.vmap(lambda device: jax.random.fold_in(key, device))(devices)
    return jax.vmap(lambda key: jax.random.split(key, program.num_minibatches))(keys).reshape(-1)


def spread_of_losses(answer: Callable[[jax.Array], Answer], units: int) -> tuple[float, float]:
    """Returns the mean of the loss over masks, and how far from it a program's may be.

    Args:
      answer: One device's answer, with a key for each unit.
      units: How many units there are.
    """
    keys = jax.random.split(jax.random.key(1), (DRAWS, units))
    losses = [answer(each).metrics["loss"][0] for each in keys]
    return float(np.mean(losses)), DEVIATIONS * float(np.std(losses, ddof=1))
