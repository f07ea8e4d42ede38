"""Data parallelism: every device holds everything and sees a part of the batch."""

from typing import Unpack

import optax

from manualpar.core.program import Program, build_program
from manualpar.core.strategy import ProgramOptions, Strategy
from manualpar.sharding.layout import replicate
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss import LossFn


def data_parallel(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds data-parallel training: the state is replicated, gradients are averaged.

    Args:
      model: A Linen or NNX model, written for one device, see `manualpar.nnx.model.NNXModel.wrap`.
      tx: Any optax optimizer.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      **options: `mesh`, `batch` and others, see `ProgramOptions`.

    Returns:
      A `Program`. Nothing has been compiled and no device touched.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      One all-reduce of the gradients a step, however many minibatches: a device sends
      `2 b P (N - 1) / N` bytes for `P` parameters of `b` bytes on `N` devices.
    """
    return build_program(Strategy("data_parallel", replicate), model, tx, loss_fn, **options)
