"""Finds the fastest layouts of a transformer on many devices.

The search estimates in closed form every mesh that uses all devices and divides the model and the
batch. It combines each mesh with every number of minibatches and of chunks, every `communicate` and
every `keep`, and uses the least remat with which the step fits into memory. Without stages, once a
step fits without remat, larger numbers of minibatches are not tried. `manualpar.planner.sweep`
traces programs, so it tries fewer candidates.

Layers are split only over devices of a node, or of one slice. Replicas are slices, nodes, or groups
of nodes, because the network between them is slow.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from manualpar.models import Transformer
from manualpar.planner.candidate_meshes import MOST_SPLIT
from manualpar.planner.closed_form.layout import (
    AnyCode,
    Communicate,
    Layout,
    PipelineSaves,
    find_obstacle,
    sizes_on_device,
)
from manualpar.planner.closed_form.layout_estimate import LayoutEstimator
from manualpar.planner.closed_form.layout_work import step_memory_of
from manualpar.planner.sweep import Outcome
from manualpar.planner.topology import Topology, levels_of
from manualpar.strategies.shared_options import ReplicaMean

MOST_CONTEXT, MOST_STAGES, MOST_CHUNKS = 16, 32, 8
# The largest number of minibatches to try.
MOST_MINIBATCHES = 256


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
        fully_kept: set[tuple[Communicate, ReplicaMean]] = set()
        quantized = dataclasses.replace(factors, gather_code=gather_code, reduce_code=reduce_code)
        for run in _runs(model, quantized, **sizes):
            if (run.communicate, run.replica_mean) in fully_kept:
                continue
            layout = _with_remat(model, run, topology.chip.hbm_bytes, **sizes)
            if layout is None:
                continue
            if layout.stage == 1 and layout.remat == "none":
                # More minibatches only send more bytes.
                fully_kept.add((layout.communicate, layout.replica_mean))
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


def _runs(model: Transformer, layout: Layout, *, examples: int, positions: int) -> Iterator[Layout]:
    """Yields the ways to run on a mesh: minibatches, chunks, and when a step communicates."""
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
        yield run
        if run.replica > 1 and run.stage == 1 and communicate == "minibatch":
            yield dataclasses.replace(run, replica_mean="backward")


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
