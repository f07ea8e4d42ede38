"""Predicts a `Transformer`'s collectives for activations in a training step by formulas."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import flax
import jax
import jax.numpy as jnp

from manualpar.core.mesh.mesh import platform_of
from manualpar.core.modes.layer_loops import CHOICES
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import CAST_SCOPE, CONTEXT_SCOPE
from manualpar.inspect.communication import Collective
from manualpar.inspect.expected_bytes import PipelineForm
from manualpar.inspect.layer_formulas import (
    LayerActivations,
    attention_collectives,
    block_collectives,
    cross_entropy_collectives,
    document_collectives,
    expert_collectives,
    head_collectives,
    lookup_collectives,
    loss_of_experts_collectives,
    router_collectives,
    routing_collectives,
)
from manualpar.layers.moe.moe import MoE, capacity_of
from manualpar.models.layer_config import reads_float8
from manualpar.models.transformer import (
    Transformer,
    context_on,
    heads_of_device,
    layers_with_experts,
    scanned_layers,
    size_of_group,
    size_of_head,
    size_of_value,
)

# How many copies of a loop's body a program contains. Before Flax 0.12.9 there is a second, unused
# copy, which `nn.scan` traces to find results that no iteration changes.
COPIES = 2 if [*map(int, re.findall(r"\d+", flax.__version__)[:3])] < [0, 12, 9] else 1


def transformer_sends(
    program: Program, model: Transformer, *, stage: int = 0
) -> tuple[Collective, ...]:
    """Predicts the collectives that a step runs for activations.

    Args:
      program: A program of `model` in mode `manual`, with the loss `language_model_loss` or
        `mixture_of_experts_loss`. `model.experts.axis` must shard the batch too.
      stage: The pipeline stage whose collectives are counted, if there is a pipeline.

    Returns:
      The collectives between stages, and the collectives over `model.split.axis`,
      `model.experts.axis` and `model.context.axis` if the mesh has these axes. Collectives for
      parameters and gradients are not included, because `step_bytes` predicts their bytes; the two
      predictions together cover all collectives over `split.axis`. With `overlap="ring"` the result
      lists the layers' all-gathers and reduce-scatters, although permutes send their bytes.
    """
    form = PipelineForm(program) if program.pipeline else None
    keeps_inputs = form is not None and form.run.keep == "inputs"
    of_minibatch = _in_minibatch(program, model, passes=2 if keeps_inputs else 1)
    before = [*of_minibatch.before, *of_minibatch.documents]
    layers, after = of_minibatch.layer, of_minibatch.after
    minibatches = program.num_minibatches
    if not form:
        has_experts = bool(model.experts.num_experts)
        num_dense = model.num_layers - layers_with_experts(model) if has_experts else 0
        dense = _times(num_dense, of_minibatch.dense_layer)
        layers = _times(model.num_layers - num_dense, layers)
        sends = _times(minibatches, [*before, *dense, *layers, *after])
        return *sends, *_arranging(program)
    if model.experts.dense_layers or model.experts.every > 1:
        raise ValueError(
            f"transformer_sends: experts.dense_layers={model.experts.dense_layers} and "
            f"experts.every={model.experts.every}, expected 0 and 1 in a pipeline: there is no "
            "formula for layers without experts there. Use trace_collectives."
        )
    run, table = form.run, form.run.table
    if of_minibatch.context and _has_documents(program, model):
        raise ValueError(
            f"transformer_sends: bos_token={model.bos_token}, expected -1 (no documents) in a "
            "pipeline with a context axis: there is no formula for documents there. Use "
            "trace_collectives."
        )
    # A layer with a permute runs on all stages whenever one stage runs it, forward and backward.
    together = form.loss.cut.layers_permute
    runs = int(table.is_run("forward_microbatch", together=together)[:, stage].sum())
    looped = len(scanned_layers(model))
    sends = _times(runs * (looped // (run.num_stages * run.chunks)), layers)
    if stage == 0:
        sends += _times(minibatches, before)
    # If the code after the scan contains a ring, all stages run this code.
    if stage == run.num_stages - 1 or form.loss.cut.suffix.permutes:
        of_rest = _in_minibatch(program, model, passes=1).layer
        sends += _times(minibatches, [*_times(model.num_layers - looped, of_rest), *after])
    return *sends, *form.sends(), *_arranging(program)


class MinibatchCollectives:
    """The collectives of a minibatch: before the layers, in one layer, and after the layers.

    These are the attributes `before`, `layer` and `after`. With `overlap="dual_batch"`, a layer has
    twice as many collectives, of half as many examples. `dense_layer` has the collectives of a
    layer without experts in a model with experts. The collectives in `documents` send the document
    numbers for all layers.

    Args:
      model: The model, with the context that `context_on` returns.
      sizes: The sizes of the mesh axes.
      tokens: `[B, S]`, the tokens of a device in a minibatch.
      parameter_dtype: The dtype in which the model gets its parameters.
      passes: How often the layers' forward pass runs, without the runs of remat.
      recomputed: Whether the backward pass runs the layers' forward pass again; by default, if the
        model's `remat` says so.
      lookups: How often the code before the layers runs.
      documents: The source of document numbers: `"given"` for the batch, `"counted"` for counting
        BOS tokens, `""` without documents.
      copies: How many copies of a loop's body a program has.
      in_ticks: The number of layers that a stage runs in a tick of the pipeline schedule; 0 without
        stages.
      gathers_float8: Whether activations that only products in float8 read are gathered as codes.
    """

    def __init__(
        self,
        model: Transformer,
        sizes: Mapping[str, int],
        tokens: tuple[int, int],
        *,
        parameter_dtype: Any,
        passes: int = 1,
        recomputed: bool | None = None,
        lookups: int = 1,
        documents: Literal["given", "counted", ""] = "",
        copies: int = COPIES,
        in_ticks: int = 0,
        gathers_float8: bool = False,
    ) -> None:
        self.before: list[Collective] = []
        self.documents: list[Collective] = []
        self.layer: list[Collective] = []
        self.dense_layer: list[Collective] = []
        self.after: list[Collective] = []
        split, experts = model.split, model.experts
        halves = 2 if split.overlap == "dual_batch" and split.axis in sizes else 1

        def activations(axis: str | None, parts: int = 1) -> LayerActivations | None:
            examples, positions = tokens
            if axis is None or axis not in sizes:
                return None
            examples //= parts
            if axis == model.context.axis:
                positions *= sizes[axis]
            return LayerActivations(
                shape=(examples, positions, model.hidden_size),
                dtype=jnp.dtype(model.dtype),
                axis=axis,
                devices=sizes[axis],
                sequence=split.sequence_parallel and axis == split.axis,
            )

        self.context = activations(model.context.axis)
        recomputed = model.remat in ("dots", "full") if recomputed is None else recomputed
        runs: Any = {"passes": passes, "recomputed": recomputed}
        if x := activations(split.axis):
            self.before += lookup_collectives(x, parameter_dtype, passes=lookups)
            if model.rotary.learned and x.sequence:
                table = model.rotary.learned, model.hidden_size
                self.before.append(x.backward(CAST_SCOPE, "all_reduce", 1, table, parameter_dtype))
            is_wide, vectors = model.attention.wide_query_key_norm, 1 + model.norm.bias
            has_own = model.attention.query_key_norm and not is_wide
            head_norms = (size_of_head(model),) * 2 * vectors * has_own
            norms: Any = {"post_norms": model.norm.post, "head_norms": head_norms}
            norms |= {"wide_norms": 2 * is_wide, "norm_vectors": vectors}
            norms |= {"shared": model.norm.shared, "parallel": model.mlp.parallel}
            norms |= {"pre_norms": (2 - model.norm.shared) * model.norm.pre}
            norms["out_biases"] = model.attention.out_bias + model.mlp.bias
            in_layer = activations(split.axis, halves)
            assert in_layer is not None
            if (latent := model.attention.latent).rank:
                of_keys, of_queries = latent.rank + latent.rotary_size, latent.query_rank
                norms["latents"] = of_queries or model.hidden_size, of_keys
                norms["latent_norms"] = latent.rank, *(of_queries,) * bool(of_queries)
                norms["latent_kernels"] = of_keys, *(of_queries,) * bool(of_queries)
                norms["dtype"] = parameter_dtype
            dense, own = (
                _float8_gathers(model, has_mlp=has_mlp) if gathers_float8 else {}
                for has_mlp in (True, not experts.num_experts)
            )
            self.dense_layer += block_collectives(in_layer, **norms, **dense, **runs)
            self.layer += block_collectives(in_layer, **norms, **own, **runs)
            if experts.num_experts:
                counts: Any = {"num_experts": experts.num_experts, "top_k": experts.top_k}
                counts |= {"has_shared_gate": experts.shared_is_gated, "dtype": parameter_dtype}
                if experts.biases:
                    counts["biased"] = experts.num_experts // sizes.get(experts.axis or "", 1)
                self.layer += router_collectives(in_layer, **counts, **runs)
            smoothed = model.label_smoothing > 0
            self.after += [
                *head_collectives(x, norm_vectors=vectors),
                *cross_entropy_collectives(x, smoothed=smoothed),
            ]
        if experts.num_experts and (x := activations(experts.axis, halves)):
            capacity = slots_of_expert(model, sizes, x.shape[1])
            self.layer += expert_collectives(
                x, num_experts=experts.num_experts, capacity=capacity, **runs
            )
        if x := self.context:
            features = max(size_of_head(model), size_of_value(model))
            heads = *heads_of_device(model, sizes), features
            how = model.context.how
            in_layer = activations(model.context.axis, halves)
            assert in_layer is not None
            of_attention = list(attention_collectives(in_layer, how, heads=heads, **runs))
            self.layer += of_attention
            self.dense_layer += of_attention
            if experts.num_experts:
                of_experts: Any = {"num_experts": experts.num_experts, "top_k": experts.top_k}
                self.layer += routing_collectives(in_layer, **of_experts, **runs)
                self.after += loss_of_experts_collectives(x, layers_with_experts(model))
            if documents:
                looped = len(scanned_layers(model))
                in_loop = size_of_group(model.attention, experts) if looped else 0
                is_looped = passes > 0 or not recomputed
                self.documents += document_collectives(
                    x,
                    in_ticks or model.num_layers,
                    in_loop=in_loop if is_looped else 0,
                    after=0 if in_ticks else model.num_layers - looped,
                    copies=1 if in_ticks else copies,
                    counted=documents == "counted",
                    recomputed=recomputed,
                    parts=halves,
                )
        self.layer, self.dense_layer = _times(halves, self.layer), _times(halves, self.dense_layer)


def _float8_gathers(model: Transformer, *, has_mlp: bool) -> dict[str, Any]:
    """Returns which gathers of a layer send float8 codes, as `block_collectives` takes them."""
    if model.split.overlap == "ring":
        return {}
    of_attention, of_mlp = reads_float8(model)
    of_outputs = [model.low_precision.is_float8(x) for x in ("attention/out", "mlp/down")]
    return {
        "float8_inputs": (of_attention, of_mlp and has_mlp),
        "float8_outputs": sum(of_outputs[: 1 + has_mlp]),
    }


def slots_of_expert(model: Transformer, sizes: Mapping[str, int], positions: int) -> int:
    """Returns the number of slots that an expert has for a device's `positions` of a sequence.

    If a context axis splits sequences, one device's positions may take all slots of a sequence.
    """
    moe = MoE(**model.experts.of_layer, mlp_size=model.mlp_size)
    return min(capacity_of(moe, positions * sizes.get(model.context.axis or "", 1)), positions)


def _in_minibatch(program: Program, model: Transformer, *, passes: int) -> MinibatchCollectives:
    """Returns the collectives of a program's minibatch.

    In a pipeline the code before the layers runs again before its backward pass.
    """
    tokens, sizes = program.abstract_batch.inputs, program.mesh.shape
    is_given = isinstance(tokens, Mapping)
    tokens = tokens["tokens"] if is_given else tokens
    examples, positions = tokens.sharding.shard_shape(tokens.shape)
    # Rows of the embedding are summed in the dtype in which parameters are used.
    [stored] = {info.dtype for info, _ in program.parameters if info.path == "embedding"}
    return MinibatchCollectives(
        model.clone(context=context_on(model, sizes, platform_of(program.mesh))),
        sizes,
        (examples // program.num_minibatches, positions),
        parameter_dtype=program.comm.gather.dtype or stored,
        passes=passes,
        recomputed=_is_recomputed(program, model),
        lookups=1 if program.pipeline is None else 2,
        documents="given" if is_given else "counted" if model.bos_token >= 0 else "",
        gathers_float8=program.model.interface.gathers_float8,
    )


def _is_recomputed(program: Program, model: Transformer) -> bool:
    remat = model.remat
    if remat == "auto":
        choice = program.layer_choice
        # In a pipeline the layers keep their mark, which is the policy `dots`.
        in_pipeline = "dots" if platform_of(program.mesh) in CHOICES else "none"
        remat = choice.remat if choice else in_pipeline
    return remat != "none"


def _has_documents(program: Program, model: Transformer) -> bool:
    return isinstance(program.abstract_batch.inputs, Mapping) or model.bos_token >= 0


def _times(number: int, sends: Iterable[Collective]) -> list[Collective]:
    return [dataclasses.replace(one, times=one.times * number) for one in sends]


def _arranging(program: Program) -> Iterator[Collective]:
    """Yields the collectives for zig-zag order: two permutes of half of each batch leaf."""
    axis = program.roles.context_axis
    size = program.mesh.shape.get(axis, 1) if axis else 1
    for leaf in jax.tree.leaves(program.abstract_batch) if size > 1 else ():
        if leaf.shape:
            examples, positions, *rest = leaf.sharding.shard_shape(leaf.shape)
            half = (examples, positions // 2, *rest)
            yield Collective("permute", (str(axis),), size, half, leaf.dtype, 2, CONTEXT_SCOPE)
