"""Fully sharded data parallelism, also called ZeRO-3; `sharded_parameter` cites the papers."""

import functools
from typing import Any, Unpack

from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import lists_options
from manualpar.core.modes.strategy import CommCounts, Every, Strategy
from manualpar.core.parameters.placement import shard_one_dim
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.strategies.shared_options import (
    PARAMETER_SHARDING,
    ParameterShardingOptions,
    build_sharded,
)


@lists_options(PARAMETER_SHARDING)
def fsdp(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    **options: Unpack[ParameterShardingOptions],
) -> Program:
    """Builds fully sharded training: gathers parameters where they are used, scatters gradients.

    See `manualpar.strategies.build.build_program` for arguments, result and errors.

    Communication:
      For each of `m` minibatches: an all-gather in the forward pass, an all-gather in the backward
      pass (only over `regather_axes`, if given), and a reduce-scatter of the gradient. For `P`
      parameters of `b` bytes, each used once, a device of `N` sends `3 m b P (N - 1) / N` bytes a
      step; `2 m b P (N - 1) / N` if gathered parameters are kept; `2 b P (N - 1) / N` with
      `communicate_every="step"`; and `(m + 1) b P (N - 1) / N` with `"gather-step"`.
    """
    strategy = functools.partial(fully_sharded, "fsdp", ())
    return build_sharded("fsdp", strategy, model, tx, loss_fn, options, PARAMETER_SHARDING)


def fully_sharded(
    name: str, replicas: tuple[str, ...], *, communicate_every: str, **placing: Any
) -> Strategy:
    """Makes the strategy of `fsdp` and, with `replicas`, of `hsdp`."""
    gather_every: Every = "minibatch" if communicate_every == "minibatch" else "step"
    reduce_every: Every = "step" if communicate_every == "step" else "minibatch"
    reshard = placing.pop("reshard_after_forward") and gather_every == "minibatch"
    rest = placing.pop("regather_axes") or None, placing.pop("replica_mean", "") == "backward"

    def sends(m: int, keep: bool) -> CommCounts:
        uses = 2 * m if reshard and not keep else m
        gathers = uses if gather_every == "minibatch" else 1
        return CommCounts(uses, gathers, scatters=m if reduce_every == "minibatch" else 1)

    place = functools.partial(shard_one_dim, **placing)
    every = gather_every, reduce_every
    return Strategy(name, place, sends, replicas, *every, reshard, *rest)
