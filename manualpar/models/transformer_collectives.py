"""Predicts the collectives of a `Transformer`'s layers in a training step by closed formulas."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax
import jax
import jax.numpy as jnp

from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import CONTEXT_SCOPE
from manualpar.inspect.communication import Collective
from manualpar.inspect.layer_formulas import (
    LayerActivations,
    attention_collectives,
    block_collectives,
    cross_entropy_collectives,
    document_collectives,
    expert_collectives,
    head_collectives,
    lookup_collectives,
    router_collectives,
)
from manualpar.inspect.pipeline_formulas import PipelineForm
from manualpar.layers.moe.moe import MoE, capacity_of
from manualpar.models.layer_stack import scanned_layers
from manualpar.models.transformer import Transformer
from manualpar.models.transformer_fields import size_of_head

# The number of copies of a loop's body in a program. Before Flax 0.12.9 `nn.scan` makes an unused
# second copy, to find results that no iteration changes.
_COPIES = 2 if [*map(int, re.findall(r"\d+", flax.__version__)[:3])] < [0, 12, 9] else 1


def transformer_sends(
    program: Program, model: Transformer, *, stage: int = 0
) -> tuple[Collective, ...]:
    """Predicts the collectives of a step for activations.

    Args:
      program: A program of `model` in mode `manual`, with the loss `language_model_loss` or
        `mixture_of_experts_loss`. The axis of experts must split the batch too.
      model: The model.
      stage: The pipeline stage whose collectives are counted, if there is a pipeline.

    Returns:
      The collectives between stages, and the collectives over `model.split_axis`,
      `model.expert_axis` and `model.context_axis` if the mesh has these axes. Collectives for
      parameters and gradients are not included, because `step_bytes` returns them; both results
      together are all collectives over `split_axis`. With `overlap="ring"` the result lists the
      layers' all-gathers and reduce-scatters, although permutes send their bytes.

    Raises:
      ValueError: There is no closed form for documents in a pipeline with a context axis, and none
        for dense layers before a pipeline's experts.
    """
    form = PipelineForm(program) if program.pipeline else None
    keeps_inputs = form is not None and form.run.keep == "inputs"
    of_minibatch = _OfMinibatch(program, model, passes=2 if keeps_inputs else 1)
    before, layers, after = of_minibatch.before, of_minibatch.layer, of_minibatch.after
    minibatches = program.num_minibatches
    if not form:
        dense = _times(model.dense_layers, of_minibatch.dense_layer)
        layers = _times(model.num_layers - model.dense_layers, layers)
        sends = _times(minibatches, [*before, *dense, *layers, *after])
        return *sends, *_arranging(program)
    if model.dense_layers:
        raise ValueError(
            f"transformer_sends: dense_layers={model.dense_layers}, expected 0 in a pipeline: "
            "there is no closed form for layers before the stages. Use trace_collectives."
        )
    run, table = form.run, form.run.table
    if of_minibatch.context and _has_documents(program, model):
        raise ValueError(
            f"transformer_sends: bos_token={model.bos_token}, expected -1 (no documents) in a "
            "pipeline with a context axis: there is no closed form for documents there. Use "
            "trace_collectives."
        )
    # A layer with a permute runs on all stages whenever one stage runs it, forward and backward.
    together = form.loss.cut.layers_permute
    runs = int(table.is_run("forward_microbatch", together=together)[:, stage].sum())
    looped = len(scanned_layers(model))
    sends = _times(runs * (looped // (run.num_stages * run.chunks)), layers)
    if stage == 0:
        sends += _times(minibatches, before)
    # If the code after the scan has a ring, it runs on all stages.
    if stage == run.num_stages - 1 or form.loss.cut.suffix.permutes:
        of_rest = _OfMinibatch(program, model, passes=1).layer
        sends += _times(minibatches, [*_times(model.num_layers - looped, of_rest), *after])
    return *sends, *form.sends(), *_arranging(program)


class _OfMinibatch:
    """The collectives of a minibatch: before the layers, in one layer, and after the layers.

    A dense layer is a layer without experts in a model with experts.

    In a pipeline the code before the layers runs again before its backward pass. `passes` counts
    the runs of the layers' forward pass, without the runs of remat.
    """

    def __init__(self, program: Program, model: Transformer, *, passes: int) -> None:
        self.before: list[Collective] = []
        self.layer: list[Collective] = []
        self.dense_layer: list[Collective] = []
        self.after: list[Collective] = []
        self.context = _activations(program, model, model.context_axis)
        recomputed = model.remat != "none"
        runs: Any = {"passes": passes, "recomputed": recomputed}
        if x := _activations(program, model, model.split_axis):
            # Rows are summed in the dtype in which parameters are used.
            [stored] = {info.dtype for info, _ in program.parameters if info.path == "embedding"}
            dtype = program.comm.gather.dtype or stored
            self.before += lookup_collectives(x, dtype, recomputed=program.pipeline is not None)
            head_norms = (size_of_head(model),) * 2 * model.query_key_norm
            norms: Any = {"post_norms": model.post_norms, "head_norms": head_norms}
            self.layer += block_collectives(x, **norms, **runs)
            self.dense_layer += self.layer
            if model.num_experts:
                counts: Any = {"num_experts": model.num_experts, "top_k": model.experts_per_token}
                counts["has_shared_gate"] = model.shared_gate
                self.layer += router_collectives(x, **counts, **runs)
            smoothed = model.label_smoothing > 0
            self.after += [*head_collectives(x), *cross_entropy_collectives(x, smoothed=smoothed)]
        if model.num_experts and (x := _activations(program, model, model.expert_axis)):
            moe = MoE(
                model.num_experts, model.mlp_size, model.experts_per_token, model.capacity_factor
            )
            capacity = capacity_of(moe, x.shape[1])
            self.layer += expert_collectives(
                x, num_experts=model.num_experts, capacity=capacity, **runs
            )
        if x := self.context:
            split = program.mesh.shape.get(model.split_axis, 1)
            # If there are fewer heads than devices, devices share heads.
            numbers = model.num_heads, model.num_kv_heads or model.num_heads
            queries, keys = (max(number // split, 1) for number in numbers)
            heads = queries, keys, size_of_head(model)
            how = model.context_attention
            of_attention = list(attention_collectives(x, how, heads=heads, **runs))
            self.layer += of_attention
            self.dense_layer += of_attention
            if _has_documents(program, model):
                counted = not isinstance(program.abstract_batch.inputs, Mapping)
                looped = len(scanned_layers(model))
                in_loop = max(model.global_every, 1) if looped else 0
                outside = model.num_layers - looped
                self.before += document_collectives(
                    x,
                    model.num_layers,
                    in_loop=in_loop,
                    after=outside,
                    copies=_COPIES,
                    counted=counted,
                    recomputed=recomputed,
                )


def _has_documents(program: Program, model: Transformer) -> bool:
    return isinstance(program.abstract_batch.inputs, Mapping) or model.bos_token >= 0


def _times(number: int, sends: Iterable[Collective]) -> list[Collective]:
    return [dataclasses.replace(one, times=one.times * number) for one in sends]


def _arranging(program: Program) -> Iterator[Collective]:
    """Yields the collectives of zig-zag order: two permutes of half of each leaf of the batch."""
    axis = program.roles.context_axis
    size = program.mesh.shape.get(axis, 1) if axis else 1
    for leaf in jax.tree.leaves(program.abstract_batch) if size > 1 else ():
        if leaf.shape:
            examples, positions, *rest = leaf.sharding.shard_shape(leaf.shape)
            half = (examples, positions // 2, *rest)
            yield Collective("permute", (str(axis),), size, half, leaf.dtype, 2, CONTEXT_SCOPE)


def _activations(program: Program, model: Transformer, axis: str) -> LayerActivations | None:
    """Describes a layer's activations on a device; `None` if the mesh lacks the axis."""
    mesh = program.mesh
    if axis not in mesh.shape:
        return None
    tokens = program.abstract_batch.inputs
    tokens = tokens["tokens"] if isinstance(tokens, Mapping) else tokens
    examples, positions = tokens.sharding.shard_shape(tokens.shape)
    if axis == model.context_axis:
        positions *= mesh.shape[axis]
    return LayerActivations(
        shape=(examples // program.num_minibatches, positions, model.hidden_size),
        dtype=jnp.dtype(model.dtype),
        axis=axis,
        devices=mesh.shape[axis],
        sequence=model.sequence_parallel and axis == model.split_axis,
    )
