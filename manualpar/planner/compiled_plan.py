"""Estimates a step that XLA has compiled for TPUs or GPUs.

The schedule, its collectives and the memory on a chip are read from the compiled program. The time
is an estimate: the compiler estimates the cycles of compute (for GPUs, see
`manualpar.planner.gpu_costs`), and the time of a collective follows from the bandwidth of the
links.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from manualpar.core.mesh.mesh_order import in_order
from manualpar.core.summary import Summarized
from manualpar.inspect.communication import Collective, summed
from manualpar.inspect.compiled import CompiledCollective
from manualpar.planner.compiled_timeline import (
    SLICES,
    Timeline,
    on_all_links,
    read_timeline,
)
from manualpar.planner.gpu_costs import CLOCK, cudnn_seconds, gpu_cycles, of_gpus
from manualpar.planner.hardware import Chip
from manualpar.planner.kernels import Kernel, kernel_clock, kernel_efficiency
from manualpar.planner.link_timeline import wire_by_links
from manualpar.planner.out_of_memory import read_out_of_memory
from manualpar.planner.plan import StepEstimate
from manualpar.planner.timed_collectives import (
    TimedCollective,
    network_of,
    planned_collectives,
)
from manualpar.planner.topology import Ring, Topology, ring_over
from manualpar.training.monitoring.throughput import Throughput

NUM_NOTED, NUM_NOTED_HIDDEN = 5, 3
Key = TypeVar("Key")
MODEL = "Transformer"  # Flax begins every scope with the model's name.


@dataclasses.dataclass(frozen=True, repr=False)
class CompiledStep(Summarized):
    """A training step as XLA has compiled it for a topology.

    `facts` is the result of `manualpar.planner.compiler_worker`: name, mesh, sizes, and versions.
    If the step fits, `facts["memory"]` has the bytes on a chip by `arguments`, `outputs`, `aliased`
    (outputs in the place of arguments), `temporaries`, `code` and `peak`, and `text` is the
    program. Otherwise `facts["out_of_memory"]` is the compiler's message, and `text` is "".
    """

    topology: Topology
    options: Mapping[str, str | bool]
    facts: Mapping[str, Any]
    text: str


def plan_of(step: CompiledStep) -> StepEstimate:
    """Makes the `StepEstimate` of a compiled step: its memory and its time.

    Raises:
      ValueError: The program has no known timeline, see `read_timeline`.
    """
    facts, topology, chip = step.facts, step.topology, step.topology.chip
    common: dict[str, Any] = {
        "name": facts["name"],
        "topology": topology.name,
        "num_devices": topology.num_devices,
        "mesh": in_order(facts["mesh"], facts["order"]),
        "is_model": False,
        "source": f"XLA's {'TPU' if chip.is_tpu else 'GPU'} compiler, {facts['compiler']}",
    }
    if "out_of_memory" in facts:
        message = read_out_of_memory(facts["out_of_memory"])
        hbm = message.available or chip.hbm_bytes
        needed = message.needed or hbm
        temporaries = max(0, needed - sum(facts["state"].values()))
        return StepEstimate(
            **common,
            hbm_bytes=hbm,
            memory={**facts["state"], "temporaries": temporaries},
            peak_bytes=needed,
            fits=False,
            notes=message.sentences,
        )
    timeline = schedule_of(step)
    memory = _memory(facts["memory"], facts["state"], holds_all_temporaries=not chip.is_tpu)
    peak_bytes = sum(memory.values())
    plan = StepEstimate(
        **common,
        hbm_bytes=chip.hbm_bytes,
        memory=memory,
        peak_bytes=peak_bytes,
        fits=chip.is_tpu or peak_bytes <= chip.hbm_bytes,
        collectives=planned_collectives(_on_networks(step, x) for x in timeline.collectives),
        compute_seconds=timeline.compute_seconds,
        exposed_seconds=timeline.exposed_seconds,
        overlapped_seconds=timeline.hidden_seconds,
        step_seconds=timeline.step_seconds,
        step_seconds_by_links=schedule_of(step, by_links=True).step_seconds
        if chip.is_tpu
        else None,
        assumptions=(*_assumptions(step), *_of_kernels(timeline, chip)),
        notes=tuple(_notes(timeline)),
    )
    return plan.with_rates(
        Throughput(
            examples_per_step=facts["examples_per_step"],
            tokens_per_example=facts["tokens_per_example"] or None,
            flops_per_example=facts["flops_per_example"],
            num_devices=topology.num_devices,
            peak=chip.flops.get(facts["dtype"]),
        )
    )


def schedule_of(step: CompiledStep, *, by_links: bool = False) -> Timeline:
    """Computes the timeline of a compiled step on the clock and the links of its topology.

    Args:
      step: The step; it must fit into the memory.
      by_links: Whether every link of a torus is a separate resource, see
        `manualpar.planner.link_timeline`. If not, each collective uses all links.
    """
    topology, chip, facts = step.topology, step.topology.chip, step.facts

    def wire_seconds(collective: CompiledCollective) -> float:
        if collective.group_size < 2:
            return 0.0
        sent = float(collective.bytes_sent) / collective.times
        return _ring_of(step, collective).seconds(sent)

    def between_slices(transfer: CompiledCollective) -> float:
        network = topology.chip.network
        ring = Ring(network, network.bandwidth, inside=1, outside=transfer.group_size, steps=0)
        return ring.seconds(float(transfer.bytes_sent) / transfer.times)

    if not chip.is_tpu:
        return read_timeline(
            step.text,
            facts["mesh"],
            clock=CLOCK,
            wire=on_all_links(wire_seconds),
            kernel_seconds=cudnn_seconds(chip),
            cycles=gpu_cycles(chip),
        )
    return read_timeline(
        step.text,
        facts["mesh"],
        clock=chip.clock,
        wire=wire_by_links(topology, facts["places"], wire_seconds, apart=by_links),
        kernel_seconds=kernel_clock((Kernel(*x) for x in facts["kernels"]), chip),
        between_slices=between_slices,
    )


def _ring_of(step: CompiledStep, collective: Collective | CompiledCollective) -> Ring:
    mesh = step.facts["mesh"]
    axes = collective.axes or tuple(axis for axis, size in mesh.items() if size > 1)
    return ring_over(step.topology, in_order(mesh, step.facts["order"]), axes)


def _on_networks(step: CompiledStep, timed: TimedCollective) -> TimedCollective:
    """Adds the networks that a collective uses, and its bytes on the slow one."""
    sent = float(timed.collective.bytes_sent)
    if timed.network == SLICES:
        _, slow = step.topology.chip.network.names
        return dataclasses.replace(timed, network=slow, slow_bytes=sent)
    ring = _ring_of(step, timed.collective)
    return dataclasses.replace(
        timed, network=network_of(step.topology, ring), slow_bytes=ring.crossing_bytes(sent)
    )


def _memory(
    memory: Mapping[str, int], state: Mapping[str, int], *, holds_all_temporaries: bool
) -> dict[str, int]:
    """Returns the bytes on a chip at the peak, by class.

    The bytes of the state follow from the layout. The other classes come from the compiler, which
    pads arguments to complete tiles on TPUs. A program for GPUs holds the memory of its temporaries
    during the complete step.
    """
    outputs = memory["outputs"] - memory["aliased"]
    temporaries = max(0, memory["peak"] - memory["arguments"] - outputs)
    return {
        **state,
        "other arguments": memory["arguments"] - sum(state.values()),
        "outputs": outputs,
        "temporaries": memory["temporaries"] if holds_all_temporaries else temporaries,
    }


def purpose_and_module(timed: TimedCollective) -> tuple[str, str]:
    """Returns the purpose and the module of a collective, as far as its scope names them."""
    return timed.collective.purpose, _module(timed.collective.module)


def _module(path: str) -> str:
    return path.removeprefix(f"{MODEL}/")


def _assumptions(step: CompiledStep) -> tuple[str, ...]:
    chip, network = step.topology.chip, step.topology.chip.network
    options = ", ".join(f"{name}={value}" for name, value in step.options.items())
    why = step.facts["why_options"]
    slices = (
        f"Transfers between slices run over {network.names[1]}, also while collectives run within "
        f"a slice, at {network.efficiency:.0%} of {network.slow_bandwidth / 1e9:,.4g} GB/s a chip "
        f"and direction. A transfer takes {network.slow_latency * 1e6:.0f} µs more for each slice "
        "that it crosses.",
    )
    return (
        *(_of_tpus(chip) if chip.is_tpu else of_gpus(chip)),
        f"A collective sends its ring's bytes at {network.efficiency:.0%} of "
        f"{network.bandwidth / 1e9:,.4g} GB/s a {'link' if chip.is_tpu else 'device'} and "
        f"direction. It also takes {network.launch * 1e6:.0f} µs to start and "
        f"{network.latency * 1e6:.0f} µs a hop. Only one collective is sent at a time.",
        "An asynchronous collective runs at the same time as all compute between its start and the "
        "wait for its end, and neither slows the other down.",
        *(slices if step.topology.num_slices > 1 else ()),
        f"Compiled with {options or 'no options but the defaults'}{why and f' ({why})'}; the links "
        f"of the mesh axes: {step.facts['links'] or 'one node or one device'}.",
    )


def _of_tpus(chip: Chip) -> Iterator[str]:
    yield (
        f"Compute takes the cycles that the compiler estimates, at {chip.clock / 1e9:g} GHz "
        f"({chip.source}). The compiler estimates no cycles for collectives, nor for copies "
        "between HBM and the chip's own memory. These copies count as 0 seconds."
    )
    yield (
        "With each link by itself, a permutation occupies only the links on its way, first along "
        "x, then y, then z. Permutations on different links run at the same time. Any other "
        "collective takes as long as on all links, and occupies the links of the dimensions that "
        "its devices span."
    )


def _of_kernels(schedule: Timeline, chip: Chip) -> Iterator[str]:
    if schedule.kernels:
        listed = ", ".join(
            f"{kernel.times} x {kernel.name} {kernel.seconds / kernel.times * 1e3:.3g} ms"
            for kernel in schedule.kernels
        )
        yield (
            f"Kernels are assumed to reach {kernel_efficiency(chip):.1%} of the peak in all their "
            "operations, because the compiler estimates no cycles for them. This share is fitted "
            "to published speeds (manualpar.planner.hardware). A kernel takes at least the time to "
            f"read and write its bytes. The kernels: {listed}."
        )


def _longest(seconds: Mapping[Key, float], most: int) -> list[tuple[Key, float]]:
    """Returns the entries with the most seconds, without those with none."""
    some = [(key, value) for key, value in seconds.items() if value > 0]
    return sorted(some, key=lambda item: -item[1])[:most]


def _notes(schedule: Timeline) -> Iterator[str]:
    """Yields sentences about waits, hidden collectives, and missing estimates."""
    exposed = summed(
        ((x.collective.kind, *purpose_and_module(x)), x.seconds - x.hidden_seconds)
        for x in schedule.collectives
    )
    hidden = summed(
        ((x.collective.kind, *purpose_and_module(x), x.behind), x.hidden_seconds)
        for x in schedule.collectives
    )
    for (kind, purpose, module), seconds in _longest(exposed, NUM_NOTED):
        where = module or "no module"
        yield f"{seconds * 1e3:,.3g} ms of {kind} ({purpose}) of {where} are exposed."
    for (kind, purpose, module, behind), seconds in _longest(hidden, NUM_NOTED_HIDDEN):
        where, computing = module or "no module", _module(behind) or "no module"
        yield (
            f"{seconds * 1e3:,.3g} ms of {kind} ({purpose}) of {where} are hidden, mostly behind "
            f"{computing}."
        )
    if schedule.unestimated:
        listed = ", ".join(f"{runs} x {name}" for name, runs in schedule.unestimated.items())
        yield f"The compiler has no estimate for these instructions; they count as 0: {listed}."
    if schedule.num_carried:
        yield (
            f"{schedule.num_carried} collectives start in one iteration of a loop and are waited "
            "for in the next. The estimate waits for them in the iteration in which they start."
        )
