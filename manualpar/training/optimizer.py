"""AdamW, with a warm-up, a cosine decay, and no weight decay where it has no business.

With peak p, w warm-up steps and T steps in all, update s (counted from 0) has the learning rate p
(s + 1) / (w + 1) in the warm-up and then falls along half a cosine from p to 0 at step T.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
"""

from typing import Any

import jax
import optax


def warmup_cosine_schedule(
    learning_rate: float, *, warmup_steps: int, num_steps: int
) -> optax.Schedule:
    """The learning rate of each update.

    Args:
      learning_rate: The peak.
      warmup_steps: Updates before the peak; 0 for none. A run shorter than its warm-up ends within
        it.
      num_steps: Updates in all.

    Returns:
      A function of the number of updates already made. It is positive at the first: that batch is
      not wasted.
    """
    cosine = optax.cosine_decay_schedule(learning_rate, max(num_steps - warmup_steps, 1))
    if not warmup_steps:
        return cosine
    first = learning_rate / (warmup_steps + 1)
    warmup = optax.linear_schedule(first, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, cosine], [warmup_steps])


def weight_decay_mask(params: Any) -> Any:
    """Says of each parameter whether to decay it.

    Spared are biases and scales by their name, since a scanned layer's have two dimensions, and
    whatever else has fewer than two.
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
    """AdamW that spares what `weight_decay_mask` spares.

    Args:
      schedule: The learning rate of each update.
      weight_decay: The share of a weight that goes in an update, in parts of the learning rate.
      b1: How much of the mean of gradients stays in an update.
      b2: How much of the mean of their squares does.
      clip_norm: The largest global norm of a gradient, which a larger one is scaled down to; 0 for
        any.

    Returns:
      The optimizer.
    """
    update = optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay, mask=weight_decay_mask)
    return optax.chain(optax.clip_by_global_norm(clip_norm), update) if clip_norm else update
