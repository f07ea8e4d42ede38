"""Hybrid sharded data parallelism: sharded within a group of devices, replicated across groups.

Gathers use only the fast links within a group. The slow links between groups carry only a shard of
each gradient, once a step (Zhao et al., https://arxiv.org/abs/2304.11277, section 3.2.2), or once a
minibatch, behind the backward pass of the layers that follow.
"""

import functools
from typing import Unpack

from manualpar.core.mesh.axes import AxisName, axis_tuple
from manualpar.core.model.interface import Model
from manualpar.core.model.loss_function import LossFn
from manualpar.core.model.options import lists_options
from manualpar.core.program.optimizer_update import Optimizer
from manualpar.core.program.program import Program
from manualpar.strategies.fsdp import fully_sharded
from manualpar.strategies.shared_options import (
    REPLICATED_SHARDING,
    ReplicatedShardingOptions,
    build_sharded,
)


@lists_options(REPLICATED_SHARDING)
def hsdp(
    model: Model,
    tx: Optimizer,
    loss_fn: LossFn,
    *,
    replica_axis: AxisName = "replica",
    **options: Unpack[ReplicatedShardingOptions],
) -> Program:
    """Builds training that is fully sharded over `axis_name` and replicated over `replica_axis`.

    See `manualpar.strategies.build.build_program` for the other arguments, result and errors.
    `replica_axis` is the mesh axis, or tuple of axes, over which the state is replicated. The batch
    is split over `replica_axis` and `axis_name`.

    Communication:
      Within a group of `S` devices, the communication of `fsdp`: `3 m b P (S - 1) / S` bytes a
      step. Across `R` groups, one all-reduce of each gradient's shard: `2 b (P / S) (R - 1) / R`
      bytes per device; with `replica_mean="backward"` as many in each minibatch.
    """
    strategy = functools.partial(fully_sharded, "hsdp", axis_tuple(replica_axis))
    return build_sharded("hsdp", strategy, model, tx, loss_fn, options, REPLICATED_SHARDING)
