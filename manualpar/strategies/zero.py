"""ZeRO: parameters are replicated, and the optimizer's state is sharded.

Stages 1 and 2 of Rajbhandari et al., https://arxiv.org/abs/1910.02054; stage 3 is `manualpar.fsdp`.
With AdamW in float32 the optimizer's state is two thirds of the bytes that DP replicates.
"""

import functools
from typing import Any, Unpack

from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import lists_options
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.placement import shard_state_only
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.errors import check_choice
from manualpar.strategies.shared_options import (
    STATE_SHARDING,
    StateShardingOptions,
    build_sharded,
    has_one_pass,
)


@lists_options(STATE_SHARDING)
def zero(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    *,
    stage: int = 1,
    **options: Unpack[StateShardingOptions],
) -> Program:
    """Builds training with a sharded optimizer: scatters gradients, gathers new parameters.

    See `manualpar.strategies.build.build_program` for the other arguments, result and errors.
    With `stage=1` gradients are scattered once a step, with `stage=2` in each minibatch: a device
    accumulates only its shard. The gradients of layers in an `nn.scan` are then scattered in the
    loop, and with one minibatch also those of `stage=1`, without pipeline and error feedback.

    Communication:
      A reduce-scatter of the gradients (at stage 2 in each of `m` minibatches), and one all-gather
      of the new parameters. A device sends `2 b P (N - 1) / N` bytes a step at stage 1, and
      `(m + 1) b P (N - 1) / N` at stage 2, for `P` parameters of `b` bytes on `N` devices. If the
      state of a parameter is not sharded, its gradient costs one all-reduce.
    """
    check_choice("zero", "stage", stage, (1, 2))

    def strategy(**placing: Any) -> Strategy:
        return Strategy(
            f"zero{stage}",
            functools.partial(shard_state_only, **placing),
            lambda m, keep: CommCounts(uses=m, scatters=m if stage == 2 else 1, new_gathers=1),
            reduce_every="minibatch" if stage == 2 or has_one_pass(options) else "step",
        )

    return build_sharded("zero", strategy, model, tx, loss_fn, options, STATE_SHARDING)
