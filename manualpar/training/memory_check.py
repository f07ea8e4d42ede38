"""Refuses a run that cannot fit into memory, before anything is allocated or compiled.

The peak memory of a device is read from the traced step, see `manualpar.inspect.memory`. The state
and the batch are exact. The rest is an estimate, and XLA may need less. So a run is refused only if
its state and batch do not fit, or its peak is more than `SLACK` times the memory.
"""

import contextlib
import os
from pathlib import Path

import jax

from manualpar.core.program.program import Program
from manualpar.inspect import state_bytes, step_memory
from manualpar.inspect.tables import describe_bytes
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment

SLACK = 2
# Linux's files with the memory limit of a container.
CONTROL_GROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# The config fields that determine the memory of a step.
SIZES = (
    "data.batch_size",
    "data.sequence_length",
    "model.hidden_size",
    "model.mlp_size",
    "model.num_layers",
    "model.num_classes",
)


def check_fits(experiment: Experiment) -> None:
    """Raises a `ValueError` if an experiment certainly does not fit into its devices' memory."""
    config, program = experiment.config, experiment.program
    devices = [d for d in program.mesh.devices.flat if d.process_index == jax.process_index()]
    host, smaller = host_memory(), "make some of these sizes smaller, or start with --force"
    waiting = (config.data.prefetch + 1) * state_bytes(program.abstract_batch)[0] * len(devices)
    if waiting > host:
        raise ValueError(
            f"config.data.prefetch is {config.data.prefetch}, {_sizes(experiment)}: the batches "
            f"that are read ahead take {describe_bytes(waiting)}, and this machine has "
            f"{describe_bytes(host)}; {smaller}."
        )
    available, owner = host // len(devices), "its part of this machine's memory"
    stats = [device.memory_stats() or {} for device in devices]
    if limits := [entry["bytes_limit"] for entry in stats if "bytes_limit" in entry]:
        available, owner = min(limits), "its memory"
    parts = least_bytes(program)
    if sum(parts.values()) > available:
        shown = ", ".join(f"{name} {describe_bytes(size)}" for name, size in parts.items())
        raise ValueError(
            f"{_sizes(experiment)}: a step takes at least {describe_bytes(sum(parts.values()))} on "
            f"a device ({shown}), and {owner} is {describe_bytes(available)}; {smaller}."
        )


def least_bytes(program: Program) -> dict[str, int]:
    """Estimates a lower bound of a step's bytes on a device; compiles nothing.

    Returns the bytes of `state`, `batch` and `activations`. The bytes of `activations` are the peak
    of `step_memory` divided by `SLACK`, minus the state and the batch.
    """
    state = state_bytes(program.abstract_state)[0]
    batch = state_bytes(program.abstract_batch)[0]
    try:
        peak = step_memory(program, platform="cpu").peak
    except ValueError:  # In these modes the compiler chooses the layouts.
        peak = 0
    activations = max(0, peak // SLACK - state - batch)
    return {"state": state, "batch": batch, "activations": activations}


def host_memory() -> int:
    """Returns this machine's memory in bytes, or its container's memory limit if that is lower."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTROL_GROUPS:
        # The file may be missing, or contain `max` if there is no limit.
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def _sizes(experiment: Experiment) -> str:
    """Describes the config fields that determine a step's memory, and the vocabulary's size."""
    values = flatten_config(experiment.config)
    found = [f"config.{name} is {values[name]}" for name in SIZES if name in values]
    if tokens := getattr(experiment.task.model, "vocab_size", None):
        found.append(f"its data has a vocabulary of {tokens} tokens")
    return ", ".join(found)
