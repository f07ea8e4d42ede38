"""AdamW with a warm-up, a cosine decay, and weight decay for matrices only.

A run has T steps, of which the first w are the warm-up, and p is the peak of the learning rate. In
the warm-up, update s (counted from 0) has the learning rate p (s + 1) / (w + 1). After the warm-up
the learning rate follows half a cosine, from p to 0 at step T.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
"""

from typing import Any

import jax
import optax


def warmup_cosine_schedule(
    learning_rate: float, *, warmup_steps: int, num_steps: int
) -> optax.Schedule:
    """Returns the learning rate as a function of the number of earlier updates.

    `learning_rate` is the peak. The first update has a positive rate, so that no batch is wasted. A
    run may end within its warm-up.
    """
    cosine = optax.cosine_decay_schedule(learning_rate, max(num_steps - warmup_steps, 1))
    if not warmup_steps:
        return cosine
    first = learning_rate / (warmup_steps + 1)
    warmup = optax.linear_schedule(first, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, cosine], [warmup_steps])


def weight_decay_mask(params: Any) -> Any:
    """Marks the parameters to decay: all but biases, scales and arrays of fewer than two dims.

    Biases and scales are found by name, because in scanned layers they have two dims.
    """

    def decays(path: jax.tree_util.KeyPath, value: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return value.ndim > 1 and name not in ("bias", "scale")

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float,
    b1: float = 0.9,
    b2: float = 0.999,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Makes an AdamW optimizer that decays only the parameters marked by `weight_decay_mask`.

    Args:
      schedule: The learning rate of each update.
      weight_decay: The weight decay. An update subtracts `learning rate * weight_decay * weight`.
      b1: The decay rate of the running mean of gradients.
      b2: The decay rate of the running mean of squared gradients.
      clip_norm: The largest global norm of the gradients; larger gradients are scaled down to it. 0
        for no limit.
    """
    update = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=weight_decay_mask)
    return optax.chain(optax.clip_by_global_norm(clip_norm), update) if clip_norm else update
