"""Fully sharded data parallelism: every device holds a shard and sees a part of the batch.

ZeRO stage 3 (Rajbhandari et al., https://arxiv.org/abs/1910.02054; Zhao et al.,
https://arxiv.org/abs/2304.11277).
"""

import functools
from typing import Unpack

import flax.linen as nn
import optax

from manualpar.layout import shard_largest_dim
from manualpar.loss import LossFn
from manualpar.program import Program, build_program
from manualpar.strategy import Every, ProgramOptions, Strategy, check_choice, check_min_weight_size


def fsdp(
    model: nn.Module,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    min_weight_size: int = 2**18,
    reshard_after_forward: bool = True,
    communicate_every: Every = "minibatch",
    pad: bool = False,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds fully sharded training: parameters gathered where used, gradients scattered back.

    Args:
      model: A Linen model, written for one device.
      tx: Any optax optimizer; its state is sharded like the parameters.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      min_weight_size: The fewest elements of a parameter that is sharded; smaller ones are
        replicated. A parameter is sharded along its largest divisible dimension, the first of
        equals, never along one that `nn.scan` or `nn.vmap` runs over.
      reshard_after_forward: Whether gathered parameters are dropped after the forward pass and
        gathered again for the backward one, or kept until then.
      communicate_every: `"minibatch"` gathers and scatters in each minibatch, and a device never
        holds more than the layers at work; `"step"` gathers once and scatters once, and it holds
        all parameters and gradients meanwhile. It keeps, whatever `reshard_after_forward`.
      pad: Whether a parameter no dimension of which divides is padded with zeros and sharded. The
        state then holds it padded; numbers are the same, also for the optimizer.
      **options: `mesh`, `batch` and others, see `ProgramOptions`.

    Returns:
      A `Program`. Nothing has been compiled and no device touched. `inspect.layout_table(program)`
      shows what is sharded how, and why not.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      For every use of a parameter and every minibatch one all-gather, one more for the backward
      pass unless it is kept, and one reduce-scatter of its gradient: a device sends
      `3 m b P (N - 1) / N` bytes a step for `P` parameters of `b` bytes, each used once, on `N`
      devices, in `m` minibatches; `2 m b P (N - 1) / N` if kept, `2 b P (N - 1) / N` with
      `communicate_every="step"`. Replicated parameters cost one all-reduce.
    """
    strategy = sharded_strategy(
        "fsdp",
        min_weight_size=min_weight_size,
        reshard_after_forward=reshard_after_forward,
        communicate_every=communicate_every,
        pad=pad,
    )
    return build_program(strategy, model, tx, loss_fn, **options)


def sharded_strategy(
    name: str,
    *,
    min_weight_size: int,
    reshard_after_forward: bool,
    communicate_every: Every,
    pad: bool,
    replica_axes: tuple[str, ...] = (),
) -> Strategy:
    """The strategy of `fsdp` and, with axes to replicate over, of `hsdp`."""
    check_min_weight_size(name, min_weight_size)
    check_choice(name, "pad", pad, (True, False))
    check_choice(name, "reshard_after_forward", reshard_after_forward, (True, False))
    check_choice(name, "communicate_every", communicate_every, ("minibatch", "step"))
    return Strategy(
        name,
        functools.partial(shard_largest_dim, min_weight_size=min_weight_size, pad=pad),
        replica_axes=replica_axes,
        gather_every=communicate_every,
        reduce_every=communicate_every,
        reshard_after_forward=reshard_after_forward and communicate_every == "minibatch",
    )
