"""Fully sharded data parallelism: every device holds a shard and sees a part of the batch.

ZeRO stage 3 (Rajbhandari et al., https://arxiv.org/abs/1910.02054; Zhao et al.,
https://arxiv.org/abs/2304.11277).
"""

import functools
from typing import Unpack

import optax

from manualpar.core.program import Program, build_program
from manualpar.core.strategy import (
    COMMUNICATE_EVERY,
    CommunicateEvery,
    ProgramOptions,
    Strategy,
    check_choice,
    check_min_weight_size,
    check_names,
)
from manualpar.sharding.layout import check_named, shard_largest_dim
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss import LossFn


def fsdp(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    min_weight_size: int = 2**18,
    reshard_after_forward: bool = True,
    communicate_every: CommunicateEvery = "minibatch",
    keep_gathered: tuple[str, ...] = (),
    replicate: tuple[str, ...] = (),
    pad: bool = False,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds fully sharded training: parameters gathered where used, gradients scattered back.

    Args:
      model: A Linen or NNX model, written for one device, see `manualpar.nnx.model.NNXModel.wrap`.
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
        all parameters and gradients meanwhile; `"gather-step"` gathers once and scatters in each
        minibatch, and it holds all parameters and of the gradients that are added up its shard. The
        last two keep, whatever `reshard_after_forward`.
      keep_gathered: Names of parameters, or of modules that they are in (`("head",)` for
        `head/kernel`), that are gathered once in each minibatch and kept until the backward pass,
        whatever `reshard_after_forward`. It is for the last layer, which the backward pass begins
        with, and for what is used several times.
      replicate: Names of parameters, or of modules that they are in, that every device holds whole,
        even if the model annotates them. It is for what a model reads in a way that a shard cannot
        serve, as `nn.WeightNorm` does.
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
      `communicate_every="step"`, `(m + 1) b P (N - 1) / N` with `"gather-step"`. Replicated
      parameters cost one all-reduce.
    """
    strategy = sharded_strategy(
        "fsdp",
        min_weight_size=min_weight_size,
        reshard_after_forward=reshard_after_forward,
        communicate_every=communicate_every,
        keep_gathered=keep_gathered,
        replicate=replicate,
        pad=pad,
    )
    program = build_program(strategy, model, tx, loss_fn, **options)
    check_named("fsdp", program.parameters, keep_gathered=keep_gathered, replicate=replicate)
    return program


def sharded_strategy(
    name: str,
    *,
    min_weight_size: int,
    reshard_after_forward: bool,
    communicate_every: CommunicateEvery,
    keep_gathered: tuple[str, ...],
    replicate: tuple[str, ...],
    pad: bool,
    replica_axes: tuple[str, ...] = (),
) -> Strategy:
    """The strategy of `fsdp` and, with axes to replicate over, of `hsdp`."""
    check_min_weight_size(name, min_weight_size)
    check_choice(name, "pad", pad, (True, False))
    check_choice(name, "reshard_after_forward", reshard_after_forward, (True, False))
    check_choice(name, "communicate_every", communicate_every, COMMUNICATE_EVERY)
    check_names(name, "keep_gathered", keep_gathered)
    check_names(name, "replicate", replicate)
    return Strategy(
        name,
        functools.partial(
            shard_largest_dim,
            min_weight_size=min_weight_size,
            pad=pad,
            keep_gathered=keep_gathered,
            replicated=replicate,
        ),
        replica_axes=replica_axes,
        gather_every="minibatch" if communicate_every == "minibatch" else "step",
        reduce_every="step" if communicate_every == "step" else "minibatch",
        reshard_after_forward=reshard_after_forward and communicate_every == "minibatch",
    )
