"""What the layers of a `Transformer` send in a training step, in closed form."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from manualpar.core.program import Program
from manualpar.inspect.communication import Collective
from manualpar.inspect.layer_formulas import (
    Activations,
    attention_sends,
    block_sends,
    cross_entropy_sends,
    document_sends,
    expert_sends,
    head_sends,
    lookup_sends,
    router_sends,
)
from manualpar.layers.experts import MoE, capacity_of
from manualpar.models.transformer import Transformer, size_of_head
from manualpar.purposes import CONTEXT_SCOPE


def transformer_sends(program: Program, model: Transformer) -> tuple[Collective, ...]:
    """Predicts what a step sends for activations.

    Args:
      program: A program of `model` in mode `manual`, with the loss `language_model_loss`, or
        `mixture_of_experts_loss`. The axis of experts splits the batch too.
      model: The model.

    Returns:
      The collectives over `model.split_axis`, `model.expert_axis` and `model.context_axis`, as far
      as the mesh has these, that are not for parameters and gradients. Together with `step_bytes`
      they are all over the first one. With `overlap="ring"` permutations carry the same bytes in
      place of all-gathers and reduce-scatters of layers, which stand here all the same.
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
    if x := _activations(program, model, model.context_axis):
        sends += _context_sends(x, program, model)
    minibatches = program.num_minibatches
    in_minibatches = [dataclasses.replace(one, times=one.times * minibatches) for one in sends]
    return *in_minibatches, *_arranging(program)


def _context_sends(x: Activations, program: Program, model: Transformer) -> Iterator[Collective]:
    recomputed, layers = model.remat != "none", model.num_layers
    split = program.mesh.shape.get(model.split_axis, 1)
    # Heads that are fewer than devices are shared.
    numbers = model.num_heads, model.num_kv_heads or model.num_heads
    queries, keys = (max(number // split, 1) for number in numbers)
    heads = queries, keys, size_of_head(model)
    layer = attention_sends(x, model.context_attention, heads=heads, recomputed=recomputed)
    yield from list(layer) * layers
    if model.bos_token >= 0:
        in_loop = model.scan_layers
        yield from document_sends(x, layers, in_loop=in_loop, recomputed=recomputed)


def _arranging(program: Program) -> Iterator[Collective]:
    """What a step sends to put sequences into zig-zag order: two permutes of half of each leaf."""
    axis = program.step.roles.context_axis
    size = program.mesh.shape.get(axis, 1) if axis else 1
    for leaf in jax.tree.leaves(program.abstract_batch) if size > 1 else ():
        if leaf.shape:
            examples, positions, *rest = leaf.sharding.shard_shape(leaf.shape)
            half = (examples, positions // 2, *rest)
            yield Collective("permute", (str(axis),), size, half, leaf.dtype, 2, CONTEXT_SCOPE)


def _activations(program: Program, model: Transformer, axis: str) -> Activations | None:
    """A device's tokens in a minibatch, and how many devices there are along an axis, if any."""
    mesh = program.mesh
    if axis not in mesh.shape:
        return None
    tokens = program.abstract_batch.inputs
    examples, positions = tokens.sharding.shard_shape(tokens.shape)
    if axis == model.context_axis:
        positions *= mesh.shape[axis]
    return Activations(
        shape=(examples // program.num_minibatches, positions, model.hidden_size),
        dtype=jnp.dtype(model.dtype),
        axis=axis,
        devices=mesh.shape[axis],
        sequence=model.sequence_parallel and axis == model.split_axis,
    )
