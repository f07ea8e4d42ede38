"""How long a step would take, by arithmetic: a model, which says what it assumes.

A step is what its devices compute, `C`, and what collectives take, `S`. Each product takes the
longer of its operations at the peak and of its bytes at the memory's bandwidth, both times the
share that is reached (`manualpar.planner.hardware`); and what is elementwise between products, one
more pass over the bytes that they read and write. Each collective takes its bytes on a ring over
its mesh axes, laid onto the topology (`manualpar.planner.topology`), and waits for each hop.

What stands inside the differentiated model, the gathers of parameters and the scattering of their
gradients, runs while a neighbouring layer computes: in the forward pass and in the backward pass
each, `max(S - C, S of one layer)` is exposed, for the first layer's has nothing to hide behind.
What stands outside, the reduction of whole gradients, ZeRO's new parameters, metrics, is exposed.

(Williams et al., "Roofline", https://doi.org/10.1145/1498765.1498785; Austin et al., "How to scale
your model", https://jax-ml.github.io/scaling-book.)
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable

from manualpar.inspect.communication import Collective
from manualpar.planner.hardware import Chip
from manualpar.planner.plan import Plan, PlannedCollective, rates
from manualpar.planner.topology import Path, Topology, path_over
from manualpar.planner.work import Work

# The passes within which collectives hide behind compute.
PASSES = {"forward": ("forward",), "backward": ("backward", "recomputed")}
_MINIBATCH = re.compile(r"minibatch(_\d+)?")


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A collective and how long all its runs take."""

    collective: Collective
    path: Path
    seconds: float
    is_doubled: bool

    @property
    def is_inside(self) -> bool:
        """Whether it stands inside the differentiated model, next to what a layer computes."""
        return "jvp(" in self.collective.scope

    @property
    def unit(self) -> tuple[str, ...]:
        """The layer it belongs to: the first name of its module's path, in its minibatch."""
        found = _MINIBATCH.search(self.collective.scope)
        names = [name for name in self.collective.module.split("/") if name][:2]
        return (found.group() if found else "", *names)


def estimate(work: Work, topology: Topology) -> Plan:
    """Estimates a step.

    Args:
      work: What it does, see `read_work`.
      topology: On what; as many devices as the work's mesh has.

    Returns:
      The plan, a model's.

    Raises:
      ValueError: The mesh does not lie in the topology, or no peak is known for the dtype.
    """
    chip = topology.chip
    timed = _time_collectives(work, topology)
    compute = {phase: compute_seconds(work, chip, phases) for phase, phases in PASSES.items()}
    flops_alone = sum(load.flops / _flops_rate(chip, load.dtype) for load in work.loads)
    update = work.update_traffic / (chip.hbm_bandwidth * chip.hbm_efficiency)
    update += compute_seconds(work, chip, ("update",))
    hidden = _hide(timed, compute)
    sent = sum(each.seconds for each in timed)
    overlapped = sum(hidden.values())
    computing = sum(compute.values()) + update
    step = computing + sent - overlapped
    memory = work.memory.to_json()
    peak_bytes = memory.pop("peak")
    plan = Plan(
        name=work.name,
        topology=topology.name,
        num_devices=topology.num_devices,
        mesh=work.mesh,
        is_model=True,
        source="roofline",
        hbm_bytes=chip.hbm_bytes,
        memory=memory,
        peak_bytes=peak_bytes,
        fits=peak_bytes <= chip.hbm_bytes,
        collectives=_planned(timed, hidden, chip),
        compute_seconds=computing,
        hbm_seconds=computing - flops_alone,
        exposed_seconds=sent - overlapped,
        overlapped_seconds=overlapped,
        step_seconds=step,
        assumptions=_assumptions(work, chip, computing + sent),
        **rates(
            step,
            **work.task._asdict(),
            num_devices=topology.num_devices,
            peak=chip.peak(work.dtype),
        ),
    )
    return dataclasses.replace(plan, notes=(*work.notes, *_notes(work, plan, timed, topology)))


def compute_seconds(work: Work, chip: Chip, phases: Iterable[str]) -> float:
    """How long what is computed in some phases takes, each operation by what bounds it."""
    phases, hbm = set(phases), chip.hbm_bandwidth * chip.hbm_efficiency
    total = 0.0
    for load in work.loads:
        if load.phase in phases:
            passing = load.traffic / hbm
            total += max(load.flops / _flops_rate(chip, load.dtype), passing)
            total += passing if load.flops else 0.0  # What is elementwise around a product.
    return total


def _flops_rate(chip: Chip, dtype: str) -> float:
    """FLOP/s that products reach; what is no floating point number computes next to nothing."""
    known = dtype if dtype in chip.flops or "float" in dtype else "float32"
    return chip.peak(known) * chip.flops_efficiency


def _time_collectives(work: Work, topology: Topology) -> list[_Timed]:
    """How long each collective takes by itself."""
    paths: dict[tuple[str, ...], Path] = {}
    timed = []
    for collective in work.collectives:
        axes = collective.axes
        if axes not in paths:
            paths[axes] = path_over(topology, work.mesh, axes)
        path = paths[axes]
        doubled = collective.kind == "reduce_scatter" and is_made_an_all_reduce(topology, path)
        sent = float(collective.bytes_sent) * (2 if doubled else 1)
        seconds = path.seconds(topology.chip.network, sent, collective.times)
        timed.append(_Timed(collective, path, seconds, doubled))
    return timed


def is_made_an_all_reduce(topology: Topology, path: Path) -> bool:
    """Whether XLA for TPU makes an all-reduce of a reduce-scatter over these axes.

    It does (libtpu 0.0.42) for one flat axis that fills a torus: seen on 4x4, 8x8 and 16x16 chips,
    not on 8, 4x8 or 8x16, and on 4x4x8; of other shapes in three dimensions it is assumed.
    """
    if not topology.chip.is_tpu or path.outside > 1:
        return False
    shape = tuple(size for size in topology.shape if size > 1)
    fills = sorted(path.torus_dims) == sorted(shape) and len(shape) > 1
    return fills and (len(shape) > 2 or len(set(shape)) == 1) and min(shape) > 2


def _hide(timed: list[_Timed], compute: dict[str, float]) -> dict[int, float]:
    """Seconds of each collective, by its place in the list, that lie behind compute."""
    hidden: dict[int, float] = {}
    for phase, phases in PASSES.items():
        inside = [
            index
            for index, each in enumerate(timed)
            if each.is_inside and each.collective.phase in phases
        ]
        total = sum(timed[index].seconds for index in inside)
        layers: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for index in inside:
            each = timed[index]
            layers[each.unit] += each.seconds / each.collective.times
        exposed = max(total - compute[phase], max(layers.values(), default=0.0))
        share = max(total - exposed, 0.0) / total if total else 0.0
        hidden |= {index: share * timed[index].seconds for index in inside}
    return hidden


def _planned(
    timed: list[_Timed], hidden: dict[int, float], chip: Chip
) -> tuple[PlannedCollective, ...]:
    """Collectives that are alike in one, the longest first."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, each in enumerate(timed):
        found = each.collective
        groups[found.kind, found.purpose, found.phase, *found.axes].append(index)
    planned = []
    for (kind, purpose, phase, *axes), members in groups.items():
        path = timed[members[0]].path
        fast, slow = chip.network.names
        network = slow if path.inside == 1 else f"{fast}+{slow}" if path.is_slow else fast
        planned.append(
            PlannedCollective(
                kind=kind,
                axes=tuple(axes),
                purpose=purpose,
                phase=phase,
                times=sum(timed[index].collective.times for index in members),
                bytes_sent=float(sum(timed[index].collective.bytes_sent for index in members)),
                seconds=sum(timed[index].seconds for index in members),
                hidden_seconds=sum(hidden.get(index, 0.0) for index in members),
                network=network,
            )
        )
    return tuple(sorted(planned, key=lambda each: -(each.seconds or 0)))


def _assumptions(work: Work, chip: Chip, unhidden: float) -> tuple[str, ...]:
    """What the estimate rests on."""
    network = chip.network
    fast, slow = network.names
    return (
        f"Products reach {chip.flops_efficiency:.0%} of {chip.peak(work.dtype) / 1e12:,.1f} "
        f"TFLOP/s in {work.dtype}, memory {chip.hbm_efficiency:.0%} of "
        f"{chip.hbm_bandwidth / 1e9:,.0f} GB/s; elementwise operations pass once over what "
        "products read and write.",
        f"Collectives run on rings at {network.efficiency:.0%} of {fast} "
        f"{network.bandwidth / 1e9:,.4g} GB/s "
        f"{'a link' if network.kind == 'torus' else 'a device'} and {slow} "
        f"{network.slow_bandwidth / 1e9:,.4g} GB/s a device, one direction, one after another; "
        f"each starts in {network.launch * 1e6:.0f} µs and waits {network.latency * 1e6:.0f} µs a "
        f"hop, {network.slow_latency * 1e6:.0f} µs between hosts.",
        "Gathers of parameters and scattering of their gradients run behind a neighbouring layer, "
        f"everything else is exposed; if nothing overlapped a step would take {unhidden:.4g} s.",
        f"{chip.hbm_bytes / 2**30:.2f} GiB of a device's memory can be used.",
    )


def _notes(work: Work, plan: Plan, timed: list[_Timed], topology: Topology) -> list[str]:
    """What is to be noticed."""
    notes = []
    if not plan.fits:
        largest = max(plan.memory, key=lambda name: plan.memory[name])
        notes.append(
            f"Does not fit: {-plan.spare_bytes / 2**30:.2f} GiB a device too much; most of it is "
            f"{largest}, {plan.memory[largest] / 2**30:.2f} GiB. {_mend(largest)}"
        )
    inside = sum(each.seconds for each in timed if each.is_inside)
    passes = sum(compute_seconds(work, topology.chip, phases) for phases in PASSES.values())
    per_device = work.task.examples_per_step * max(work.task.tokens_per_example, 1)
    per_device //= plan.num_devices
    unit = "tokens" if work.task.tokens_per_example else "examples"
    if passes and inside > passes:
        needed = per_device * inside / passes
        notes.append(
            f"Communication-bound: gathering and scattering take {_ms(inside)}, computing "
            f"{_ms(passes)}, with {per_device:,} {unit} a device and step; about {needed:,.0f} "
            "would make them even. A larger batch, fewer minibatches, a narrower gather_dtype, "
            "hsdp, or fewer devices would help."
        )
    outside = plan.exposed_seconds or 0.0
    rest = sum(each.seconds for each in timed if not each.is_inside)
    if rest > 0.2 * (plan.step_seconds or 1) and rest > 0.5 * outside:
        notes.append(
            f"Reductions after the backward pass, which nothing hides, take {_ms(rest)} of a step."
        )
    if any(each.is_doubled for each in timed):
        notes.append(
            "Reduce-scatters over an axis that fills a torus count twice: XLA for TPU makes "
            "all-reduces of them. A mesh of two axes, data and data_minor, avoids it with "
            "config.parallel.axis_by_axis, and so does hsdp."
        )
    return notes


def _mend(largest: str) -> str:
    """What to do about a class of memory."""
    return {
        "parameters": "Shard them (fsdp), store them in bfloat16, or use more devices.",
        "optimizer": "Shard it (zero1, fsdp) or use more devices.",
        "gradients": "Shard them (fsdp), or use communicate_every='minibatch'.",
        "gathered": "Use reshard_after_forward and scan_layers, or gather_dtype='bfloat16'.",
        "activations": "Use model.remat, more minibatches, or a smaller batch.",
    }.get(largest, "Use more devices or a smaller batch.")


def _ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
