"""ZeRO: every device holds all parameters, and the optimizer's state for a shard of them.

Stages 1 and 2 of Rajbhandari et al., https://arxiv.org/abs/1910.02054; stage 3 is `manualpar.fsdp`.
With AdamW in float32 the state is two thirds of what data parallelism replicates.
"""

import functools
from typing import Unpack

import optax

from manualpar.core.program import Program, build_program
from manualpar.core.strategy import (
    ProgramOptions,
    Strategy,
    check_choice,
    check_min_weight_size,
    check_names,
)
from manualpar.sharding.layout import check_named, shard_state_only
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss import LossFn


def zero(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    stage: int = 1,
    min_weight_size: int = 2**18,
    replicate: tuple[str, ...] = (),
    pad: bool = False,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds training with a sharded optimizer: gradients scattered, new parameters gathered.

    Args:
      model: A Linen or NNX model, written for one device, see `manualpar.nnx.model.NNXModel.wrap`.
      tx: Any optax optimizer; its state is sharded.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      stage: 1 scatters the gradients once a step, for which a device accumulates those of all
        parameters; 2 scatters those of each minibatch and accumulates a shard.
      min_weight_size: The fewest elements of a parameter whose state is sharded, see `fsdp`.
      replicate: Names of parameters, or of modules that they are in, whose state every device holds
        whole, and the parameters too, even if the model annotates them.
      pad: Whether to pad what does not divide, see `fsdp`.
      **options: `mesh`, `batch` and others, see `ProgramOptions`.

    Returns:
      A `Program`. Nothing has been compiled and no device touched.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      A reduce-scatter of the gradients, at stage 2 one for each of `m` minibatches, and one
      all-gather of the new parameters: a device sends `2 b P (N - 1) / N` bytes a step at stage 1,
      `(m + 1) b P (N - 1) / N` at stage 2, for `P` parameters of `b` bytes on `N` devices.
      Parameters whose state is not sharded cost one all-reduce.
    """
    check_choice("zero", "stage", stage, (1, 2))
    check_min_weight_size("zero", min_weight_size)
    check_choice("zero", "pad", pad, (True, False))
    check_names("zero", "replicate", replicate)
    strategy = Strategy(
        f"zero{stage}",
        functools.partial(
            shard_state_only, min_weight_size=min_weight_size, pad=pad, replicated=replicate
        ),
        reduce_every="step" if stage == 1 else "minibatch",
    )
    program = build_program(strategy, model, tx, loss_fn, **options)
    check_named("zero", program.parameters, replicate=replicate)
    return program
