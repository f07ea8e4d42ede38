"""Finds the fastest layouts of a transformer on many devices.

The search estimates by formula every mesh that uses all devices and divides the model and the
batch. It combines each mesh with every number of minibatches and of chunks, every `communicate` and
every `keep`, and uses the least remat with which the step fits into memory. Without stages, once a
step fits without remat, larger numbers of minibatches are not tried. `manualpar.plans.sweep`
traces programs, so it tries fewer candidates.

On GPUs split layers also run two halves of a device's batch side by side, where these are large.
Layers are split only over devices of a node, or of one slice. Replicas are slices, nodes, or groups
of nodes, because the network between them is slow.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import ml_collections

from manualpar.models import Transformer
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work, with_repeats
from manualpar.planner.topology import Topology, levels_of
from manualpar.plans.layouts.layout import (
    STRATEGIES,
    AnyCode,
    Communicate,
    HalvesOrNone,
    Layout,
    PipelineSaves,
    find_obstacle,
    sizes_on_device,
)
from manualpar.plans.layouts.layout_estimate import LayoutEstimator
from manualpar.plans.layouts.layout_work import HALF, step_memory_of
from manualpar.plans.planned_experiment import prepare_planned
from manualpar.plans.sweep import MOST_SPLIT, Outcome, throughput_of
from manualpar.strategies.shared_options import ReplicaMean
from manualpar.training.config import flatten_config

MOST_CONTEXT, MOST_STAGES, MOST_CHUNKS = 16, 32, 8
# The largest number of minibatches to try.
MOST_MINIBATCHES = 256
# The fewest tokens of a half of a device's batch, and the fewest bytes of its residual stream.
FEWEST_TOKENS, FEWEST_BYTES = 4096, 2**23


def rank_layouts(
    estimator: LayoutEstimator,
    *,
    axes: Iterable[str] = ("replica", "stage", "context", "expert", "model"),
    gather_code: AnyCode = "",
    reduce_code: AnyCode = "",
) -> list[Outcome[Layout]]:
    """Estimates all layouts that divide model and batch and fit into memory, the fastest first.

    Each layout has the least remat with which it fits. The estimates have no collectives,
    assumptions or notes.

    Args:
      estimator: The model, the devices and the batch.
      axes: The axes that may have several devices, in addition to `data`.
      gather_code: The `gather_code` of every layout.
      reduce_code: The `reduce_code` of every layout.
    """
    model, topology = estimator.model, estimator.topology
    outcomes = []
    sizes: dict[str, Any] = {"examples": estimator.examples, "positions": estimator.positions}
    for factors in factorisations(model, topology, axes=axes, **sizes):
        fully_kept: set[tuple[Communicate, ReplicaMean, HalvesOrNone]] = set()
        quantized = dataclasses.replace(factors, gather_code=gather_code, reduce_code=reduce_code)
        for run in _runs(model, quantized, topology, **sizes):
            kind = run.communicate, run.replica_mean, run.layer_overlap
            if kind in fully_kept:
                continue
            layout = _with_remat(model, run, topology.chip.hbm_bytes, **sizes)
            if layout is None:
                continue
            if layout.stage == 1 and layout.remat == "none":
                # More minibatches only send more bytes.
                fully_kept.add(kind)
            try:
                plan = estimator.estimate(layout, brief=True)
            except ValueError:
                break  # The mesh does not fit into the topology.
            outcomes.append(Outcome(layout, plan, "", is_traced=False))
    return sorted(outcomes, key=lambda outcome: outcome.seconds)


def fastest_of_each_mesh(outcomes: Iterable[Outcome[Layout]]) -> list[Outcome[Layout]]:
    """Returns the first outcome of each mesh; the fastest of `outcomes` must come first."""
    fastest: dict[str, Outcome[Layout]] = {}
    for outcome in outcomes:
        fastest.setdefault(outcome.candidate.name, outcome)
    return list(fastest.values())


def factorisations(
    model: Transformer,
    topology: Topology,
    *,
    examples: int,
    positions: int,
    axes: Iterable[str],
) -> Iterator[Layout]:
    """Yields the layouts of one minibatch that use all devices and divide model and batch."""
    count, inside = topology.num_devices, topology.num_devices // levels_of(topology)[0]
    axes = tuple(axes)
    choices = {
        "replica": _divisors(topology.num_devices // inside),
        "stage": [n for n in _divisors(model.num_layers) if n <= MOST_STAGES],
        "context": _divisors(MOST_CONTEXT),
        "expert": _divisors(model.experts.num_experts or 1),
        "model": [n for n in _divisors(inside) if n <= MOST_SPLIT],
    }
    axis_sizes = [choices[axis] if axis in axes else [1] for axis in choices]
    for sizes in itertools.product(*axis_sizes):
        rest, remainder = divmod(count, math.prod(sizes))
        if remainder or not rest:
            continue
        named_sizes: dict[str, Any] = dict(zip(choices, sizes, strict=True))
        layout = Layout(data=rest, **named_sizes)
        if not find_obstacle(model, layout, examples=examples, positions=positions):
            yield layout


def _runs(
    model: Transformer, layout: Layout, topology: Topology, *, examples: int, positions: int
) -> Iterator[Layout]:
    """Yields the ways to run on a mesh: minibatches, chunks, and when a step communicates."""
    sizes: Any = {"examples": examples, "positions": positions}
    most = examples // (layout.replica * layout.data * layout.expert)
    minibatches = [n for n in _divisors(most) if n <= MOST_MINIBATCHES]
    groups = model.num_layers // layout.stage // max(model.attention.global_every, 1)
    chunks = [n for n in _divisors(groups) if n <= MOST_CHUNKS]
    for m, v, communicate, keep in itertools.product(
        minibatches,
        chunks if layout.stage > 1 else [1],
        get_args(Communicate),
        get_args(PipelineSaves) if layout.stage > 1 else ["residuals"],
    ):
        if layout.stage > 1 and m < layout.stage:
            continue  # Stages would idle most of the time.
        if communicate == "gather-step" and m == 1:
            continue  # The same as "step".
        run = dataclasses.replace(
            layout, num_minibatches=m, chunks=v, communicate=communicate, keep=keep
        )
        runs = [run]
        if run.replica > 1 and run.stage == 1 and communicate == "minibatch":
            runs.append(dataclasses.replace(run, replica_mean="backward"))
        yield from runs
        if not topology.chip.is_tpu and _are_halves_worth_it(model, run, **sizes):
            yield from (dataclasses.replace(run, layer_overlap="dual_batch") for run in runs)


def _are_halves_worth_it(
    model: Transformer, layout: Layout, *, examples: int, positions: int
) -> bool:
    """Returns whether two halves of a device's batch are worth a try.

    The halves must be large enough: small products do not fill a GPU, and a collective of half the
    bytes does not take half the time. A context axis and experts are left out: compiled for eight
    H100s, halves make a step with Ulysses 2% slower, and one with experts no faster.
    """
    alone = layout.context == layout.expert == layout.stage == 1
    half = dataclasses.replace(layout, layer_overlap="dual_batch")
    if not alone or find_obstacle(model, half, examples=examples, positions=positions):
        return False
    tokens = sizes_on_device(model, half, examples=examples, positions=positions).tokens // 2
    return tokens >= FEWEST_TOKENS and HALF * tokens * model.hidden_size >= FEWEST_BYTES


def _with_remat(
    model: Transformer, layout: Layout, hbm_bytes: int, *, examples: int, positions: int
) -> Layout | None:
    """Returns the layout with the least remat that fits into memory; `None` if none fits."""
    # The sizes are the same for every remat. The last remat keeps the least.
    x = sizes_on_device(model, layout, examples=examples, positions=positions)
    *others, last = Layout.remats

    def fits(remat: str) -> bool:
        return step_memory_of(x, dataclasses.replace(layout, remat=remat)).peak <= hbm_bytes

    if not fits(last):
        return None
    return dataclasses.replace(layout, remat=next(filter(fits, others), last))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# -------------------------------------------------------------------------------------------------
# Turns a layout into a config, and estimates the program of that config.


def layout_fields(layout: Layout) -> Mapping[str, Any]:
    """Returns the config fields that make a transformer run on a layout, with their values."""
    return {
        "parallel.mesh": layout.mesh,
        "parallel.strategy": STRATEGIES[layout.replica > 1],
        "parallel.sequence": layout.model > 1,
        "parallel.layer_overlap": layout.layer_overlap,
        "parallel.communicate_every": layout.communicate,
        "parallel.replica_mean": layout.replica_mean,
        "parallel.pipeline_chunks": layout.chunks,
        "parallel.pipeline_keep": layout.keep,
        "optimizer.num_minibatches": layout.num_minibatches,
        "model.remat": layout.remat,
        "model.scan_layers": True,
        "parallel.gather_dtype": "bfloat16",
        "parallel.reduce_dtype": "float32",
        "parallel.gather_code": layout.gather_code,
        "parallel.reduce_code": layout.reduce_code,
    }


def config_of_layout(
    config: ml_collections.ConfigDict, layout: Layout
) -> ml_collections.ConfigDict:
    """Copies a transformer's config and sets the fields of a layout."""
    copy = ml_collections.ConfigDict(config.to_dict())
    for name, value in layout_fields(layout).items():
        group, field = name.split(".")
        is_mesh = isinstance(value, Mapping)
        copy[group][field] = ml_collections.ConfigDict(value) if is_mesh else value
    return copy


def layout_flags(config: ml_collections.ConfigDict, layout: Layout) -> list[str]:
    """Returns the command-line flags that make a config run on a layout."""
    values = flatten_config(config)
    flags = []
    for name, value in layout_fields(layout).items():
        if values[name] != value:
            flags.append(f"--config.{name}={value}")
    return flags


def trace_layout(
    config: ml_collections.ConfigDict, layout: Layout, topology: Topology, *, vocab_size: int = 0
) -> StepEstimate:
    """Traces the program of a layout, and estimates it by the roofline.

    Attention is timed as one fused kernel. Without stages only one minibatch is traced, because the
    minibatches of a step are alike; the estimated memory is then for a step of one minibatch.
    """
    config, repeats = config_of_layout(config, layout), 1
    if layout.stage == 1:
        repeats, config.optimizer.num_minibatches = layout.num_minibatches, 1
        config.data.batch_size //= repeats
    experiment = prepare_planned(config, devices=topology.abstract_devices, vocab_size=vocab_size)
    throughput = throughput_of(config, experiment.task)
    work = read_work(
        experiment.program,
        throughput,
        fused_attention=True,
        overlap=config.parallel.overlap,
    )
    if repeats > 1:
        examples = repeats * throughput.examples_per_step
        throughput = dataclasses.replace(throughput, examples_per_step=examples)
        work = dataclasses.replace(with_repeats(work, repeats), throughput=throughput)
    return estimate(work, topology)
