"""What a step that XLA has compiled for TPUs needs and takes, as a plan."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from manualpar.inspect.scopes import compiled_scopes, module_of, phase_of, purpose_in
from manualpar.planner.hardware import Chip
from manualpar.planner.out_of_memory import OutOfMemory
from manualpar.planner.plan import Plan, PlannedCollective, rates
from manualpar.planner.schedule import Schedule, ScheduledCollective
from manualpar.planner.schedule_time import ScheduleTime
from manualpar.planner.topology import Topology

NUM_NOTED = 5


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A training step as XLA has compiled it for a topology.

    Attributes:
      topology: The topology.
      facts: What the worker says of the program: its name, mesh, sizes, and versions.
      memory: Bytes on a chip: `arguments`, `outputs`, `aliased` (outputs in the place of
        arguments), `temporaries`, `code`, `peak`; empty for what does not fit.
      schedule: What it does, `None` for what does not fit.
      timeline: How long that takes, likewise.
      out_of_memory: What is too much; `None` for what fits.
      options: The compiler options.
    """

    topology: Topology
    facts: Mapping[str, Any]
    memory: Mapping[str, int]
    schedule: Schedule | None
    timeline: ScheduleTime | None
    out_of_memory: OutOfMemory | None
    options: Mapping[str, str]


def plan_of(step: CompiledStep) -> Plan:
    """What a compiled step needs and takes, in the form that all plans have."""
    facts, topology, chip = step.facts, step.topology, step.topology.chip
    common: dict[str, Any] = {
        "name": facts["name"],
        "topology": topology.name,
        "num_devices": topology.num_devices,
        "mesh": facts["mesh"],
        "is_model": False,
        "source": f"XLA's TPU compiler, libtpu {facts['libtpu']}",
    }
    if step.schedule is None or step.timeline is None:
        assert step.out_of_memory is not None
        too_much = step.out_of_memory
        hbm = too_much.available or chip.hbm_bytes
        needed = too_much.needed or hbm
        held = dict(facts["state"])
        held["temporaries"] = max(0, needed - sum(held.values()))
        return Plan(
            **common,
            hbm_bytes=hbm,
            memory=held,
            peak_bytes=needed,
            fits=False,
            notes=too_much.sentences(),
        )
    timeline = step.timeline
    return Plan(
        **common,
        hbm_bytes=chip.hbm_bytes,
        memory=_memory(step),
        peak_bytes=step.memory["peak"],
        fits=True,
        collectives=_planned(step.schedule, timeline, chip),
        compute_seconds=timeline.compute_seconds,
        exposed_seconds=timeline.exposed_seconds,
        overlapped_seconds=timeline.overlapped_seconds,
        step_seconds=timeline.step_seconds,
        assumptions=_assumptions(step),
        notes=_notes(step.schedule, timeline),
        **rates(
            timeline.step_seconds,
            examples_per_step=facts["examples_per_step"],
            tokens_per_example=facts["tokens_per_example"],
            flops_per_example=facts["flops_per_example"],
            num_devices=topology.num_devices,
            peak=chip.flops.get(facts["dtype"]),
        ),
    )


def _memory(step: CompiledStep) -> dict[str, int]:
    """The bytes on a chip at the peak by class: the state by the layout, else the compiler's.

    The compiler pads arguments to whole tiles.
    """
    memory, state = step.memory, step.facts["state"]
    outputs = memory["outputs"] - memory["aliased"]
    return {
        **state,
        "other arguments": memory["arguments"] - sum(state.values()),
        "outputs": outputs,
        "temporaries": max(0, memory["peak"] - memory["arguments"] - outputs),
    }


def module_and_purpose(collective: ScheduledCollective) -> tuple[str, str]:
    """The module that a collective comes from and what it is for, as far as its scope says."""
    scope = compiled_scopes(collective.scope)[0] if collective.scope else ""
    return module_of(scope, root="Transformer"), purpose_in(scope, collective.axes)


def _planned(
    schedule: Schedule, timeline: ScheduleTime, chip: Chip
) -> tuple[PlannedCollective, ...]:
    """The collectives, those that are alike in one, the longest first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, each in enumerate(schedule.collectives):
        purpose = module_and_purpose(each)[1]
        key = (each.kind, each.axes, purpose, phase_of(each.scope), each.is_async)
        groups.setdefault(key, []).append(index)
    planned = []
    for (kind, axes, purpose, phase, is_async), members in groups.items():
        alike = [schedule.collectives[index] for index in members]
        planned.append(
            PlannedCollective(
                kind=kind,
                axes=axes,
                purpose=purpose,
                phase=phase,
                times=sum(each.times for each in alike),
                bytes_sent=float(sum(each.bytes_sent for each in alike)),
                seconds=sum(timeline.wire_seconds[index] for index in members),
                hidden_seconds=sum(timeline.hidden_seconds[index] for index in members),
                is_async=is_async,
                network=chip.network.names[0],
            )
        )
    return tuple(sorted(planned, key=lambda each: -(each.seconds or 0.0)))


def _assumptions(step: CompiledStep) -> tuple[str, ...]:
    """What the estimate rests on."""
    chip, network = step.topology.chip, step.topology.chip.network
    options = ", ".join(f"{name}={value}" for name, value in step.options.items())
    return (
        f"Computing takes the cycles that the compiler estimates, at {chip.clock / 1e9:g} GHz "
        f"({chip.source}); it estimates none for collectives, and none for what it copies ahead "
        "between HBM and the chip's own memory, which counts as nothing.",
        f"On the wire a collective takes its ring's bytes at {network.efficiency:.0%} of "
        f"{network.bandwidth / 1e9:,.4g} GB/s a link and direction, and {network.launch * 1e6:.0f} "
        f"µs to start and {network.latency * 1e6:.0f} µs a hop; one is on the wire at a time.",
        "An asynchronous collective runs behind everything that is computed before it is waited "
        "for, at no cost to either.",
        f"Compiled with {options or 'no options but the defaults'}.",
    )


def _notes(schedule: Schedule, timeline: ScheduleTime) -> tuple[str, ...]:
    """What is to be noticed: what is waited for most, and what has no estimate."""
    exposed: Counter[tuple[str, str, str]] = Counter()
    for index, each in enumerate(schedule.collectives):
        module, purpose = module_and_purpose(each)
        waited = timeline.wire_seconds[index] - timeline.hidden_seconds[index]
        exposed[each.kind, module or "no module", purpose] += waited  # type: ignore[assignment]
    notes = [
        f"{seconds * 1e3:,.3g} ms of {kind} ({purpose}) of {module} are exposed."
        for (kind, module, purpose), seconds in exposed.most_common(NUM_NOTED)
        if seconds > 0
    ]
    if schedule.unestimated:
        listed = ", ".join(f"{times} x {name}" for name, times in schedule.unestimated.items())
        notes.append(f"Without an estimate, and counted as nothing, in a step: {listed}.")
    if schedule.num_carried:
        notes.append(
            f"{schedule.num_carried} collectives are begun in one turn of a loop and waited for in "
            "the next; they are counted as waited for in the turn that begins them."
        )
    return tuple(notes)
