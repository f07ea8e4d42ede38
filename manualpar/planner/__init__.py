"""Estimates a step on devices that are not here: its collectives, its memory and its time.

In reading order: `hardware` and `topology` describe the devices, `step_work` the work of a traced
step on each device, `timed_collectives` the seconds of its collectives, and `roofline` makes a
`StepEstimate` (in `plan`) from the devices and the work. `compiled_timeline` computes when each
instruction of a compiled program runs, and `compiled_plan` makes a `StepEstimate` from this
timeline, or names the largest buffers of a program that does not fit.
"""

from manualpar.planner.compiled_plan import CompiledStep, plan_of
from manualpar.planner.gpu_targets import GPU_TARGETS, describe_target
from manualpar.planner.hardware import Chip, chip_named
from manualpar.planner.plan import PlannedCollective, StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import (
    PartWork,
    PipelineWork,
    StepWork,
    read_work,
    with_gather_dtype,
    with_minibatches,
    with_repeats,
)
from manualpar.planner.topology import (
    Topology,
    levels_of,
    parse_topology,
    place_axes,
    topology_of_size,
)

__all__ = [
    "GPU_TARGETS",
    "Chip",
    "CompiledStep",
    "PartWork",
    "PipelineWork",
    "PlannedCollective",
    "StepEstimate",
    "StepWork",
    "Topology",
    "chip_named",
    "describe_target",
    "estimate",
    "levels_of",
    "parse_topology",
    "place_axes",
    "plan_of",
    "read_work",
    "topology_of_size",
    "with_gather_dtype",
    "with_minibatches",
    "with_repeats",
]
