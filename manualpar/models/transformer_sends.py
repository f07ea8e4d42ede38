"""What the layers of a `Transformer` send in a training step, in closed form."""

import dataclasses

import jax.numpy as jnp

from manualpar.core.program import Program
from manualpar.inspect.communication import Collective
from manualpar.inspect.layer_formulas import (
    Activations,
    block_sends,
    cross_entropy_sends,
    head_sends,
    lookup_sends,
)
from manualpar.models.transformer import Transformer
from manualpar.sharding.axes import axes_size


def transformer_sends(program: Program, model: Transformer) -> tuple[Collective, ...]:
    """Predicts the collectives of a step over the axis that the model's layers are split over.

    Args:
      program: A program of `model` in mode `manual`, with the loss `language_model_loss`.
      model: The model.

    Returns:
      The collectives that are not for parameters and gradients; none if the mesh does not have
      `model.split_axis`. Together with `step_bytes` they are all over this axis.
    """
    axis, mesh = model.split_axis, program.mesh
    if axis not in mesh.shape:
        return ()
    examples, positions = program.abstract_batch.inputs.shape
    minibatches = program.num_minibatches
    x = Activations(
        shape=(
            examples // (axes_size(mesh, program.data_axes) * minibatches),
            positions,
            model.hidden_size,
        ),
        dtype=jnp.dtype(model.dtype),
        axis=axis,
        devices=mesh.shape[axis],
        sequence=model.sequence_parallel,
    )
    block = tuple(block_sends(x, recomputed=model.remat != "none"))
    # Rows are summed in the dtype in which parameters are used.
    [stored] = {info.dtype for info, _ in program.parameters if info.path == "embedding"}
    of_minibatch = (
        *lookup_sends(x, program.wire.gather_dtype or stored),
        *(block * model.num_layers),
        *head_sends(x),
        *cross_entropy_sends(x),
    )
    return tuple(dataclasses.replace(one, times=one.times * minibatches) for one in of_minibatch)
