"""Hybrid sharded data parallelism: sharded within a group of devices, replicated across groups.

The gathers stay within a group, whose links are fast, and what crosses the slow links between
groups is a shard of each gradient, once a step (Zhao et al., https://arxiv.org/abs/2304.11277,
section 3.2.2).
"""

from typing import Unpack

import optax

from manualpar.core.program import Program, build_program
from manualpar.core.strategy import CommunicateEvery, ProgramOptions
from manualpar.sharding.layout import check_named
from manualpar.sharding.mesh import AxisName, axis_tuple
from manualpar.strategies.fsdp import sharded_strategy
from manualpar.user_model.adapter import Model
from manualpar.user_model.loss import LossFn


def hsdp(
    model: Model,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    replica_axis: AxisName = "replica",
    min_weight_size: int = 2**18,
    reshard_after_forward: bool = True,
    communicate_every: CommunicateEvery = "minibatch",
    keep_gathered: tuple[str, ...] = (),
    replicate: tuple[str, ...] = (),
    pad: bool = False,
    **options: Unpack[ProgramOptions],
) -> Program:
    """Builds training that is fully sharded over `axis_name` and replicated over `replica_axis`.

    Args:
      model: A Linen or NNX model, written for one device, see `manualpar.nnx.model.NNXModel.wrap`.
      tx: Any optax optimizer; its state is sharded like the parameters.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      replica_axis: The mesh axis, or tuple of axes, over which the state is replicated. The batch
        is split over it and over `axis_name`.
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
      A `Program`. Nothing has been compiled and no device touched.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      Within a group of `S` devices as `fsdp`: `3 m b P (S - 1) / S` bytes a step. Across `R` groups
      one all-reduce of each gradient's shard: `2 b (P / S) (R - 1) / R` bytes a device.
    """
    strategy = sharded_strategy(
        "hsdp",
        min_weight_size=min_weight_size,
        reshard_after_forward=reshard_after_forward,
        communicate_every=communicate_every,
        keep_gathered=keep_gathered,
        replicate=replicate,
        pad=pad,
        replica_axes=axis_tuple(replica_axis),
    )
    program = build_program(strategy, model, tx, loss_fn, **options)
    check_named("hsdp", program.parameters, keep_gathered=keep_gathered, replicate=replicate)
    return program
