"""Fully sharded data parallelism: every device holds a shard and sees a part of the batch.

ZeRO stage 3 (Rajbhandari et al., https://arxiv.org/abs/1910.02054; Zhao et al.,
https://arxiv.org/abs/2304.11277).
"""

import difflib
import functools
from typing import Unpack

import optax

from manualpar.layout import is_inside, shard_largest_dim
from manualpar.loss import LossFn
from manualpar.nnx_model import Model
from manualpar.program import Program, build_program
from manualpar.strategy import (
    COMMUNICATE_EVERY,
    CommunicateEvery,
    ProgramOptions,
    Strategy,
    check_choice,
    check_min_weight_size,
)


def fsdp(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    min_weight_size: int = 2**18,
    reshard_after_forward: bool = True,
    communicate_every: CommunicateEvery = "minibatch",
    keep_gathered: tuple[str, ...] = (),
    pad: bool = False,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds fully sharded training: parameters gathered where used, gradients scattered back.

    Args:
      model: A Linen or NNX model, written for one device, see `manualpar.nnx_model.as_model`.
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
        pad=pad,
    )
    program = build_program(strategy, model, tx, loss_fn, **options)
    check_kept("fsdp", keep_gathered, program)
    return program


def sharded_strategy(
    name: str,
    *,
    min_weight_size: int,
    reshard_after_forward: bool,
    communicate_every: CommunicateEvery,
    keep_gathered: tuple[str, ...],
    pad: bool,
    replica_axes: tuple[str, ...] = (),
) -> Strategy:
    """The strategy of `fsdp` and, with axes to replicate over, of `hsdp`."""
    check_min_weight_size(name, min_weight_size)
    check_choice(name, "pad", pad, (True, False))
    check_choice(name, "reshard_after_forward", reshard_after_forward, (True, False))
    check_choice(name, "communicate_every", communicate_every, COMMUNICATE_EVERY)
    if not isinstance(keep_gathered, tuple) or not all(isinstance(x, str) for x in keep_gathered):
        raise TypeError(
            f"{name}: keep_gathered={keep_gathered!r}, expected a tuple of names of parameters or "
            "modules, such as ('head',)."
        )
    return Strategy(
        name,
        functools.partial(
            shard_largest_dim,
            min_weight_size=min_weight_size,
            pad=pad,
            keep_gathered=keep_gathered,
        ),
        replica_axes=replica_axes,
        gather_every="minibatch" if communicate_every == "minibatch" else "step",
        reduce_every="step" if communicate_every == "step" else "minibatch",
        reshard_after_forward=reshard_after_forward and communicate_every == "minibatch",
    )


def check_kept(builder: str, keep_gathered: tuple[str, ...], program: Program) -> None:
    """Refuses names of which the model has no parameter."""
    paths = [info.path for info, _ in program.parameters]
    for name in keep_gathered:
        if not any(is_inside(path, name) for path in paths):
            known = [*paths, *{path.split("/")[0] for path in paths}]
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            raise ValueError(
                f"{builder}: keep_gathered names {name!r}, expected a parameter or a module with "
                f"some, such as {near[0]!r}; inspect.layout_table shows all."
            )
