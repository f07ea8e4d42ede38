"""What the layers of a `Transformer` send in a training step, in closed form."""

import dataclasses

import jax.numpy as jnp

from manualpar.core.program import Program
from manualpar.inspect.communication import Collective
from manualpar.inspect.layer_formulas import (
    Activations,
    block_sends,
    cross_entropy_sends,
    expert_sends,
    head_sends,
    lookup_sends,
    router_sends,
)
from manualpar.layers.experts import MoE, capacity_of
from manualpar.models.transformer import Transformer
from manualpar.sharding.axes import axes_size


def transformer_sends(program: Program, model: Transformer) -> tuple[Collective, ...]:
    """Predicts what a step sends for activations.

    Args:
      program: A program of `model` in mode `manual`, with the loss `language_model_loss`, or
        `mixture_of_experts_loss`. The axis of experts splits the batch too.
      model: The model.

    Returns:
      The collectives over `model.split_axis` and `model.expert_axis`, as far as the mesh has these,
      that are not for parameters and gradients. Together with `step_bytes` they are all over the
      first one. With `overlap="ring"` permutations carry the same bytes in place of all-gathers and
      reduce-scatters of layers, which stand here all the same.
    """
    sends: list[Collective] = []
    recomputed = model.remat != "none"
    if x := _activations(program, model, model.split_axis):
        # Rows are summed in the dtype in which parameters are used.
        [stored] = {info.dtype for info, _ in program.parameters if info.path == "embedding"}
        layer = list(block_sends(x, recomputed=recomputed))
        if model.num_experts:
            counts = {"num_experts": model.num_experts, "top_k": model.experts_per_token}
            layer += router_sends(x, **counts, recomputed=recomputed)
        sends += [
            *lookup_sends(x, program.wire.gather_dtype or stored),
            *(layer * model.num_layers),
            *head_sends(x),
            *cross_entropy_sends(x),
        ]
    if model.num_experts and (x := _activations(program, model, model.expert_axis)):
        moe = MoE(model.num_experts, model.mlp_size, model.experts_per_token, model.capacity_factor)
        layer = list(
            expert_sends(
                x,
                num_experts=model.num_experts,
                capacity=capacity_of(moe, x.shape[1]),
                recomputed=recomputed,
            )
        )
        sends += layer * model.num_layers
    minibatches = program.num_minibatches
    return tuple(dataclasses.replace(one, times=one.times * minibatches) for one in sends)


def _activations(program: Program, model: Transformer, axis: str) -> Activations | None:
    """A device's tokens in a minibatch, and how many devices there are along an axis, if any."""
    mesh = program.mesh
    if axis not in mesh.shape:
        return None
    examples, positions = program.abstract_batch.inputs.shape
    parts = axes_size(mesh, program.data_axes) * program.num_minibatches
    return Activations(
        shape=(examples // parts, positions, model.hidden_size),
        dtype=jnp.dtype(model.dtype),
        axis=axis,
        devices=mesh.shape[axis],
        sequence=model.sequence_parallel and axis == model.split_axis,
    )
