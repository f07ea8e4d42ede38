"""Data parallelism: every device holds everything and sees a part of the batch."""

from typing import Any

import flax.linen as nn
import optax
from jax.sharding import Mesh

from manualpar.layout import replicate
from manualpar.loss import LossFn
from manualpar.mesh import AxisName
from manualpar.program import Program, build_program


def data_parallel(
    model: nn.Module,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    batch: Any,
    axis_name: AxisName = "data",
    num_minibatches: int = 1,
    use_scan: bool = False,
) -> Program:
    """Builds data-parallel training: the state is replicated, gradients are averaged.

    Args:
      model: A Linen model, written for one device.
      tx: Any optax optimizer.
      loss_fn: `loss_fn(params, apply_fn, batch, rng) -> (loss, metrics)`: the mean over the
        examples it is given, and pairs `{"loss": (sum, count), ...}`, see `accumulate_gradients`.
        `rng` is another key for every device, minibatch and step.
      mesh: The devices, see `make_mesh`.
      batch: An example batch, or a tree of `jax.ShapeDtypeStruct`, with `.inputs` and global shapes
        `[B, ...]`; only shapes and dtypes are read.
      axis_name: The mesh axis, or tuple of axes, that the batch is split over.
      num_minibatches: How many parts a device takes its share of the batch in, to hold the
        activations of one.
      use_scan: Whether the parts run in a `jax.lax.scan` and not unrolled.

    Returns:
      A `Program`. Nothing has been compiled and no device touched.

    Raises:
      ValueError: A field does not fit: a mesh without the axis, a batch that does not divide, a
        loss that is not a scalar...
      TypeError: A field is of the wrong kind.

    Communication:
      One all-reduce of the gradients a step: a device sends `2 b P (N - 1) / N` bytes for `P`
      parameters of `b` bytes on `N` devices.
    """
    return build_program(
        "data_parallel",
        replicate,
        model=model,
        tx=tx,
        loss_fn=loss_fn,
        mesh=mesh,
        batch=batch,
        axis_name=axis_name,
        num_minibatches=num_minibatches,
        use_scan=use_scan,
    )
