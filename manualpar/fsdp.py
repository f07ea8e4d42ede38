"""Fully sharded data parallelism: every device holds a shard and sees a part of the batch.

ZeRO stage 3 (Rajbhandari et al., https://arxiv.org/abs/1910.02054; Zhao et al.,
https://arxiv.org/abs/2304.11277).
"""

import functools
from typing import Any

import flax.linen as nn
import optax
from jax.sharding import Mesh

from manualpar.layout import shard_largest_dim
from manualpar.loss import LossFn
from manualpar.mesh import AxisName
from manualpar.program import Program, build_program


def fsdp(
    model: nn.Module,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    batch: Any,
    axis_name: AxisName = "data",
    num_minibatches: int = 1,
    min_weight_size: int = 2**18,
    use_scan: bool = False,
) -> Program:
    """Builds fully sharded training: parameters gathered where used, gradients scattered back.

    Args:
      model: A Linen model, written for one device.
      tx: Any optax optimizer; its state is sharded like the parameters.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      mesh: The devices, see `make_mesh`.
      batch: An example batch, or a tree of `jax.ShapeDtypeStruct`, with `.inputs` and global shapes
        `[B, ...]`; only shapes and dtypes are read.
      axis_name: The mesh axis, or tuple of axes, that the batch is split and the parameters are
        sharded over.
      num_minibatches: How many parts a device takes its share of the batch in, to hold the
        activations of one.
      min_weight_size: The fewest elements of a parameter that is sharded; smaller ones are
        replicated. A parameter is sharded along its largest divisible dimension, the first of
        equals, never along one that `nn.scan` or `nn.vmap` runs over.
      use_scan: Whether the parts run in a `jax.lax.scan` and not unrolled.

    Returns:
      A `Program`. Nothing has been compiled and no device touched. `inspect.layout_table(program)`
      shows what is sharded how, and why not.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      For every use of a parameter and every minibatch one all-gather, and one reduce-scatter of its
      gradient: a device sends `2 m b P (N - 1) / N` bytes a step for `P` parameters of `b` bytes,
      each used once, on `N` devices, in `m` minibatches. Replicated parameters cost one all-reduce.
    """
    if (
        isinstance(min_weight_size, bool)
        or not isinstance(min_weight_size, int)
        or min_weight_size < 0
    ):
        raise ValueError(
            f"fsdp: min_weight_size={min_weight_size!r}, expected a number of elements, 0 or more."
        )
    return build_program(
        "fsdp",
        functools.partial(shard_largest_dim, min_weight_size=min_weight_size),
        model=model,
        tx=tx,
        loss_fn=loss_fn,
        mesh=mesh,
        batch=batch,
        axis_name=axis_name,
        num_minibatches=num_minibatches,
        use_scan=use_scan,
    )
