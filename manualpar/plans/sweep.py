"""Compares strategies, meshes, numbers of minibatches, remat and gather dtypes by step time.

For each strategy, mesh, remat and time of the mean over replicas a program is traced on an abstract
mesh, in one minibatch; the other candidates are derived by formulas
(`manualpar.planner.step_work`), which are exact in time but not in memory. Then the programs of the
candidates that rank first, and of candidates near the limit of memory, are traced too.

If the model supports it, other candidates split its layers over a model axis, or divide its experts
over an expert axis. (No candidate does both.) This axis is the last of the mesh, so its devices are
neighbours. If a size does not divide the model or the data, the builder refuses the candidate, and
the candidate's outcome contains the builder's message.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import ml_collections
import optax

from manualpar.core.mesh.mesh import platform_of
from manualpar.core.program.program import Program
from manualpar.inspect.throughput import Throughput
from manualpar.layers.attention.causal_attention import best_kind
from manualpar.models import Transformer
from manualpar.models.transformer import context_on, heads_of_device, size_of_head
from manualpar.planner.hardware import Chip
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import (
    StepWork,
    read_work,
    with_gather_dtype,
    with_minibatches,
)
from manualpar.planner.topology import Topology, levels_of, place_axes, topology_of_size
from manualpar.strategies import StrategyKind, strategy_kinds
from manualpar.training.experiment import build_experiment
from manualpar.training.task import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    SPLIT_AXIS,
    Task,
    split_of,
    splits_layers,
)

REMATS = ("none", "dots", "full")
MINIBATCHES = (1, 2, 4, 8)
GATHER_DTYPES = ("", "bfloat16")
# A plan with estimated memory is traced if it exceeds the device's memory by at most this share.
NEARLY = 0.3
CHIP_COUNTS = tuple(2**k for k in range(3, 13))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy, a mesh and options that a sweep compares.

    Attributes:
      remat: The model's `remat`; "" if the model has no such option.
      gather_dtype: The dtype in which parameters are gathered; "" for the stored dtype.
      replica_mean: When gradients are averaged over replicas, see `hsdp`; "" if the strategy has no
        such option.
    """

    strategy: str
    mesh: Mapping[str, int]
    num_minibatches: int
    remat: str
    gather_dtype: str
    replica_mean: str = ""

    @property
    def name(self) -> str:
        """The candidate's name in a table."""
        return f"{self.strategy}, {' x '.join(f'{a}={n}' for a, n in self.mesh.items())}"

    @property
    def details(self) -> str:
        """How a step runs on the mesh, for a table."""
        parts = [f"{self.num_minibatches} minibatch{'es' * (self.num_minibatches > 1)}"]
        parts += [f"remat {self.remat}"] if self.remat else []
        parts += [f"gather {self.gather_dtype}"] if self.gather_dtype else []
        parts += ["mean in the backward pass"] if self.replica_mean == "backward" else []
        return ", ".join(parts)


class Compared(Protocol):
    """A mesh and a way to run on it, which a search compares with others."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """The sizes of the mesh axes."""

    @property
    def name(self) -> str:
        """The mesh, for a table."""

    @property
    def details(self) -> str:
        """How a step runs on the mesh, for a table."""


C_co = TypeVar("C_co", bound=Compared, covariant=True)


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[C_co]):
    """The result for a candidate.

    Attributes:
      plan: The candidate's plan; `None` if no program could be built.
      reason: Why the candidate is not ranked, in words; "" if it is ranked.
      is_traced: Whether the candidate's own program was traced; otherwise its plan was derived from
        another candidate's program.
    """

    candidate: C_co
    plan: StepEstimate | None
    reason: str
    is_traced: bool

    @property
    def seconds(self) -> float:
        """The estimated step time, infinite if the candidate does not run."""
        fits = self.plan is not None and not self.reason
        return (self.plan.step_seconds or math.inf) if fits and self.plan else math.inf


class Builder(NamedTuple):
    """Builds programs for candidates from one config and one task, and reads their `StepWork`.

    The models of the programs differ only in remat and in how their layers are split.
    """

    config: ml_collections.ConfigDict
    task: Task

    @property
    def remats(self) -> tuple[str, ...]:
        """The choices of remat for the model; "" if it has none."""
        return REMATS if "remat" in self.config.model else ("",)

    @property
    def can_split(self) -> bool:
        """Whether the layers of the model can be split over a mesh axis."""
        return isinstance(self.task.model, Transformer) and not self.config.parallel.rules

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """The mesh axes that split layers or divide experts; a mesh has at most one of them."""
        has_experts = self.config.model.get("num_experts")
        return (SPLIT_AXIS,) * self.can_split + (EXPERT_AXIS,) * bool(has_experts)

    def read(self, candidate: Candidate, topology: Topology, *, batch_size: int = 0) -> StepWork:
        """Traces a candidate's program and reads its work; the builder may raise a `ValueError`."""
        config = ml_collections.ConfigDict(self.config.to_dict())
        config.parallel.strategy = candidate.strategy
        config.parallel.mesh = ml_collections.ConfigDict(dict(candidate.mesh))
        config.parallel.gather_dtype = candidate.gather_dtype
        if config.parallel.gather_code == "float8" and not candidate.gather_dtype:
            # The codes must be those of numbers in the dtype of the products.
            config.parallel.gather_dtype = config.model.get("dtype", "")
            config.parallel.reduce_dtype = config.parallel.reduce_dtype or "float32"
        config.parallel.axis_by_axis |= MINOR_AXIS in candidate.mesh
        config.optimizer.num_minibatches = candidate.num_minibatches
        config.data.batch_size = batch_size or config.data.batch_size
        if candidate.replica_mean:
            config.parallel.replica_mean = candidate.replica_mean
        fields: dict[str, Any] = {}
        if candidate.remat:
            config.model.remat = fields["remat"] = candidate.remat
        if self.can_split:
            config.parallel.sequence &= splits_layers(config)
            is_ring = config.parallel.layer_overlap == "ring"
            if not splits_layers(config) or (is_ring and not config.parallel.sequence):
                config.parallel.layer_overlap = "none"
            fields["split"] = split_of(config)
        task = dataclasses.replace(self.task, model=self.task.model.clone(**fields))
        rate = optax.constant_schedule(config.optimizer.learning_rate)
        program = build_experiment(config, task, rate, devices=topology.abstract_devices)
        throughput, overlap = throughput_of(config, task), config.parallel.overlap
        fused = has_kernel(task.model, program, topology.chip)
        return read_work(program, throughput, overlap=overlap, fused_attention=fused)

    def outcome(self, candidate: Candidate, topology: Topology) -> Outcome[Candidate]:
        """Traces a candidate's program, and returns the outcome."""
        try:
            work = self.read(candidate, topology)
        except ValueError as error:
            return Outcome(candidate, None, str(error), is_traced=True)
        return _planned(candidate, work, topology, is_traced=True)


def throughput_of(config: ml_collections.ConfigDict, task: Task) -> Throughput:
    """Returns a `Throughput` for a config's step, without the devices and their peak."""
    return Throughput(
        examples_per_step=config.data.batch_size,
        tokens_per_example=task.tokens_per_example or None,
        flops_per_example=task.flops_per_example,
    )


def sweep(
    builder: Builder,
    topology: Topology,
    *,
    traced: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> list[Outcome[Candidate]]:
    """Ranks candidates by estimated step time.

    Args:
      builder: Builder for a config in mode `manual`; fields that are not swept stay unchanged.
      traced: The number of candidates, the fastest first, whose own programs are traced.
      report: Called with a line of progress.

    Returns:
      All candidates: first the candidates that fit, the fastest first, then the others.
    """
    if order := builder.config.parallel.mesh_order:
        raise ValueError(
            f"config.parallel.mesh_order is {order}, expected () in a sweep, because its meshes "
            "have other axes than the config's mesh."
        )
    outcomes: list[Outcome[Candidate]] = []
    bases = list(_bases(topology, builder))
    for number, base in enumerate(bases, 1):
        report(f"{number}/{len(bases)} {base.name}{', remat ' * bool(base.remat)}{base.remat}")
        outcomes += _family(builder, base, topology)
    for _ in range(2 * traced):  # A traced candidate may turn out slower; then the next is traced.
        ranked = sorted(outcomes, key=lambda outcome: outcome.seconds)
        todo = [x for x in ranked[:traced] if not x.is_traced and x.plan]
        todo += [x for x in outcomes if _nearly_fits(x, fastest=ranked[0].seconds)]
        if not todo:
            break
        report(f"tracing {todo[0].candidate.name}")
        outcomes[outcomes.index(todo[0])] = builder.outcome(todo[0].candidate, topology)
    return sorted(outcomes, key=lambda outcome: outcome.seconds)


def scaling_curves(
    builder: Builder,
    topology: Topology,
    candidates: Mapping[str, Candidate],
    *,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, list[tuple[int, StepEstimate]]]:
    """Plans candidates on 8 to 4,096 devices of the topology's chip (weak scaling).

    Each device has as many examples as with the builder's config on `topology`. The mesh changes
    with the number of devices. Returns a curve for each name in `candidates`: pairs of a number of
    devices and a plan.
    """
    per_device = max(builder.config.data.batch_size // topology.num_devices, 1)
    curves: dict[str, list[tuple[int, StepEstimate]]] = {name: [] for name in candidates}
    sizes = [(count, topology_of_size(topology.chip, count)) for count in CHIP_COUNTS]
    for (name, candidate), (count, topology_of_count) in itertools.product(
        candidates.items(), sizes
    ):
        mesh = mesh_like(candidate.mesh, topology_of_count) if topology_of_count else None
        if topology_of_count is None or mesh is None:
            continue
        report(f"{name} on {topology_of_count.name}")
        resized = dataclasses.replace(candidate, mesh=mesh)
        try:
            work = builder.read(resized, topology_of_count, batch_size=per_device * count)
        except ValueError:
            continue  # A dimension or a minibatch does not divide: the curve has a gap.
        curves[name].append((count, estimate(work, topology_of_count)))
    return curves


def _bases(topology: Topology, builder: Builder) -> Iterator[Candidate]:
    """Yields the candidates that are always traced: one minibatch, gathers in the stored dtype."""
    for strategy, kind in strategy_kinds().items():
        meshes = list(data_meshes(kind, topology)) if kind.is_exact else []
        if meshes and kind.has_curve:
            for axis in builder.layer_axes:
                meshes += meshes_with(axis, kind, topology)
        means = kind.fields["replica_mean"].choices if "replica_mean" in kind.fields else ("",)
        for mesh, remat, mean in itertools.product(meshes, builder.remats, means):
            yield Candidate(strategy, mesh, 1, remat, "", mean)


def _family(builder: Builder, base: Candidate, topology: Topology) -> Iterator[Outcome[Candidate]]:
    """Yields a traced candidate and the candidates derived from it."""
    config, count = builder.config, topology.num_devices
    rows = count // base.mesh.get(SPLIT_AXIS, 1)  # Devices with different examples.
    try:
        work = builder.read(base, topology)
    except ValueError as error:
        yield Outcome(base, None, str(error), is_traced=True)
        return
    fewest = strategy_kinds()[base.strategy].fewest_minibatches
    for minibatches, dtype in itertools.product(MINIBATCHES, GATHER_DTYPES):
        if minibatches >= fewest and config.data.batch_size % (rows * minibatches) == 0:
            candidate = dataclasses.replace(base, num_minibatches=minibatches, gather_dtype=dtype)
            scaled = with_minibatches(work, minibatches)
            scaled = with_gather_dtype(scaled, dtype, reduce_dtype=config.parallel.reduce_dtype)
            yield _planned(candidate, scaled, topology, is_traced=candidate == base)


def _planned(
    candidate: Candidate, work: StepWork, topology: Topology, *, is_traced: bool
) -> Outcome[Candidate]:
    plan = estimate(work, topology)
    reason = ""
    if not plan.fits:
        largest = sorted(plan.memory, key=lambda name: -plan.memory[name])[:2]
        parts = ", ".join(f"{name} {plan.memory[name] / 2**30:.1f} GiB" for name in largest)
        reason = f"{-plan.spare_bytes / 2**30:.1f} GiB too much: {parts}"
    return Outcome(candidate, plan, reason, is_traced)


def _nearly_fits(outcome: Outcome[Candidate], *, fastest: float) -> bool:
    """Returns whether an untraced candidate would be the fastest, and may fit when traced."""
    plan = outcome.plan
    return (
        plan is not None
        and bool(outcome.reason)
        and not outcome.is_traced
        and plan.peak_bytes < (1 + NEARLY) * plan.hbm_bytes
        and (plan.step_seconds or math.inf) < fastest
    )


def has_kernel(model: Any, program: Program, chip: Chip) -> bool:
    """Returns whether a model's attention runs in a kernel on a chip.

    A plan is traced without devices that run kernels, so the trace has blockwise attention. If the
    model does not name a kind, this function asks for the kind that devices of the chip take
    (`best_kind`). A ring over split sequences has a kernel only on TPUs, and is planned without it.
    """
    if not isinstance(model, Transformer):
        return False
    sizes, platform = program.mesh.shape, platform_of(program.mesh)
    if CONTEXT_AXIS in sizes and context_on(model, sizes, platform).how != "ulysses":
        return False
    if model.attention.kind:
        return model.attention.kind in ("splash", "cudnn", "triton")
    inputs = program.abstract_batch.inputs
    tokens = jax.tree.leaves(inputs)[0]
    examples = tokens.sharding.shard_shape(tokens.shape)[0] // program.num_minibatches
    number = max(heads_of_device(model, sizes)[0] // sizes.get(CONTEXT_AXIS, 1), 1)
    shape = examples, tokens.shape[1], number, size_of_head(model)
    heads = jax.ShapeDtypeStruct(shape, model.dtype)
    has_documents = isinstance(inputs, Mapping) or model.bos_token >= 0
    kind = best_kind(
        chip.device, heads, heads, model.attention.scoring, has_documents=has_documents
    )
    return kind != "blockwise"


# -------------------------------------------------------------------------------------------------
# The meshes that a search tries on a topology, by the axes that a strategy has.
#
# An axis that splits layers, or divides experts, is the last of the mesh, so its devices are
# neighbours. A group of devices that shards a replica of the parameters is a node, or a slice, or
# a part of it.


# The name of a second axis to shard over; two axes suit a torus.
MINOR_AXIS = "data_minor"
# The largest number of devices to split layers over.
MOST_SPLIT = 16


def data_meshes(kind: StrategyKind, topology: Topology) -> Iterator[dict[str, int]]:
    """Yields the meshes that have only data axes."""
    count, groups = topology.num_devices, group_sizes(topology)
    if kind.replicates:
        yield from ({"replica": count // size, "data": size} for size in groups)
        return
    yield {"data": count}
    if kind.on_torus and topology.chip.is_tpu and groups:
        yield {"data": count // groups[0], MINOR_AXIS: groups[0]}


def meshes_with(axis: str, kind: StrategyKind, topology: Topology) -> Iterator[dict[str, int]]:
    """Yields a strategy's first mesh, with `axis` added, for each possible size of `axis`."""
    for data_mesh, size in itertools.product(
        itertools.islice(data_meshes(kind, topology), 1), split_sizes(topology)
    ):
        mesh = with_axis(data_mesh, axis, size)
        # With data=1 a strategy that replicates would be another strategy.
        if mesh and not (kind.replicates and mesh["data"] == 1) and _fits_into(topology, mesh):
            yield mesh


def mesh_like(mesh: Mapping[str, int], topology: Topology) -> dict[str, int] | None:
    """Returns a mesh with the axes of another on a topology; `None` if there is none.

    Layers are split, or experts divided, over as many devices as in the other mesh.
    """
    count, groups = topology.num_devices, group_sizes(topology)
    data_axes = [axis for axis in mesh if axis not in (SPLIT_AXIS, EXPERT_AXIS)]
    found: dict[str, int] | None = {"data": count}
    if len(data_axes) > 1:
        if not groups:
            return None
        found = dict(zip(data_axes, (count // groups[0], groups[0]), strict=True))
    for axis in (EXPERT_AXIS, SPLIT_AXIS):
        if found and axis in mesh:
            found = with_axis(found, axis, mesh[axis])
    return found if found and _fits_into(topology, found) else None


def with_axis(mesh: Mapping[str, int], axis: str, size: int) -> dict[str, int] | None:
    """Moves a factor `size` of a mesh's axis `data` to another axis; `None` if it is no factor."""
    if mesh["data"] % size:
        return None
    return {**mesh, "data": mesh["data"] // size, axis: size}


def split_sizes(topology: Topology) -> list[int]:
    """Returns the numbers of devices that layers may be split over, within a node or a slice."""
    inside = topology.num_devices // levels_of(topology)[0]
    return [size for size in range(2, min(inside, MOST_SPLIT) + 1) if inside % size == 0]


def group_sizes(topology: Topology) -> list[int]:
    """Returns the sizes of groups of devices over which to shard; each group may be a replica.

    The first size is a node or a slice. In a single slice it is the slice without one dimension of
    the torus, which is left to the replicas.
    """
    count, levels = topology.num_devices, levels_of(topology)
    products = [math.prod(levels[i:]) for i in range(1, len(levels))]
    sizes = [size for size in products if 1 < size < count]
    if topology.chip.network.kind == "nodes" and sizes:
        nodes = count // sizes[0]
        between = sizes[0] * 2 ** (nodes.bit_length() // 2)
        sizes += [between] if sizes[0] < between < count and count % between == 0 else []
    return list(dict.fromkeys(sizes))[:2]


def _fits_into(topology: Topology, mesh: Mapping[str, int]) -> bool:
    try:
        place_axes(topology, mesh)
    except ValueError:
        return False
    return True
