"""Data parallelism: the state is replicated, and each device trains on a part of the batch."""

import functools
from typing import Unpack

from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import ProgramOptions, lists_options
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import replicate
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.strategies.build import build_program
from manualpar.strategies.shared_options import has_one_pass


@lists_options({})
def data_parallel(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds data-parallel training: the state is replicated, and gradients are averaged.

    See `manualpar.strategies.build.build_program` for arguments, result and errors.

    Communication:
      One all-reduce of the gradients in each step, for any number of minibatches: a device sends
      `2 b P (N - 1) / N` bytes for `P` parameters of `b` bytes on `N` devices. On GPUs, if there is
      one minibatch, the backward pass of an `nn.scan` averages the gradients of each large layer
      while it computes other layers. A pipeline or error feedback averages after the loop.
    """
    place = functools.partial(replicate, mean_in_loop=has_one_pass(options))
    strategy = Strategy("data_parallel", place, lambda minibatches, keep: CommCounts(minibatches))
    return build_program(strategy, model, tx, loss_fn, **options)
