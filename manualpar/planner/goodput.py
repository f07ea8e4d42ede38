"""Computes how often a run should save if devices fail, and the share of its time that trains.

Devices fail independently and at random: one of `n` devices fails every `M = device_mtbf / n`
seconds on average. After a failure the run starts again, restores the newest checkpoint and repeats
the steps after it. A save of `d` seconds follows every `t` seconds of training. A failure costs `R`
seconds, in addition to the repeated steps. Then the expected time for `t` seconds of training is

    T(t) = M exp(R / M) (exp((t + d) / M) - 1)

This assumes that saves, restarts and repeated steps can fail too (Daly, "A higher order estimate
of the optimum checkpoint interval for restart dumps", 2006,
https://doi.org/10.1016/j.future.2004.11.016). For any `R`, `T(t) / t` is smallest for the `t` with

    (1 - t / M) exp((t + d) / M) = 1

Young's and Daly's estimates of this interval are closed forms.

In this package a save blocks the loop only while the state is copied, for `blocked` seconds, and is
complete `background` seconds later. A failure loses the steps since the start of the last complete
save. These are `background` seconds more than in Daly's model. So `R` is the sum of the seconds
until training continues and of `background`.

The model leaves out simultaneous failures, devices that are only slow, and the time until a person
reacts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console

from manualpar.core.program.program import Program
from manualpar.inspect import state_bytes
from manualpar.planner.topology import Topology
from manualpar.system.reports.tables import (
    Column,
    describe_share,
    print_side_by_side,
    print_wrapped,
)

# Measured by `benchmarks/checkpoint_rates.py` of commit 14127f0, with one process on two cores on
# 2026-11-22: seconds that do not depend on the bytes, and bytes per second.
BLOCKED = (0.02, 7.9e9)
BACKGROUND = (0.02, 0.51e9)
RESTORE = (0.0, 0.41e9)


@dataclasses.dataclass(frozen=True)
class CheckpointCosts:
    """The costs of a checkpoint and of a failure, in seconds.

    Attributes:
      blocked: The time that the training loop waits for a save.
      background: The time from the end of the wait until the checkpoint is complete.
      restore: The time from the start of restoring to a state on the devices.
      restart: The time from a failure until restoring begins: the failure is noticed, the devices
        are replaced, and all processes run again and have compiled.
    """

    blocked: float
    background: float
    restore: float
    restart: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value!r}, expected seconds, at least 0.")

    @property
    def recovery(self) -> float:
        """The seconds that a failure costs: `R`.

        These are the seconds until training continues, and the seconds of training that are lost
        because a save in the background had not ended.
        """
        return self.restart + self.restore + self.background


@dataclasses.dataclass(frozen=True)
class Goodput:
    """How a run spends its time, as shares of the time.

    Attributes:
      interval: Seconds of training between two saves.
      training: The share in which the run trains, without the training that failures lose.
      saving: The share in which the loop waits for saves.
      repeating: The share in which the run repeats steps that a failure lost.
      recovering: The share in which the run restarts and restores.
    """

    interval: float
    training: float
    saving: float
    repeating: float
    recovering: float


def mean_time_between_failures(device_mtbf: float, num_devices: int) -> float:
    """Returns the mean time between two failures of a run on `num_devices`, in the same unit."""
    if not device_mtbf > 0 or num_devices < 1:
        raise ValueError(
            f"device_mtbf is {device_mtbf!r} and num_devices {num_devices!r}, expected a positive "
            "time and a positive number."
        )
    return device_mtbf / num_devices


def young_interval(blocked: float, mtbf: float) -> float:
    """Returns Young's first-order estimate of the best interval.

    See https://doi.org/10.1145/361147.361115.
    """
    return math.sqrt(2 * blocked * mtbf)


def daly_interval(blocked: float, mtbf: float) -> float:
    """Returns Daly's higher-order estimate of the best interval, see the module."""
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return young_interval(blocked, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def best_interval(blocked: float, mtbf: float) -> float:
    """Finds the interval that loses the least time, to float precision; 0 if saves cost nothing."""
    low, high = 0.0, 1.0  # As shares of the time between failures.
    for _ in range(100):
        middle = (low + high) / 2
        if math.log1p(-middle) + middle + blocked / mtbf > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


def expected_seconds(interval: float, costs: CheckpointCosts, mtbf: float) -> float:
    """Returns the expected time for `interval` seconds of training, `T(t)`; may be infinite."""
    try:
        tries = math.expm1((interval + costs.blocked) / mtbf)
        return mtbf * math.exp(costs.recovery / mtbf) * tries
    except OverflowError:
        return math.inf


def goodput(interval: float, costs: CheckpointCosts, mtbf: float) -> Goodput:
    """Returns the shares of a run's time with a save after every `interval` seconds of training.

    Raises:
      ValueError: The interval is not positive, or is shorter than `costs.background`, so that each
        save would wait for the previous save.
    """
    if not interval > 0 or interval < costs.background:
        raise ValueError(
            f"interval is {interval!r} s, expected more than 0, and at least the "
            f"{costs.background:.3g} s that a save takes in the background."
        )
    expected = expected_seconds(interval, costs, mtbf)
    failures = math.expm1((interval + costs.blocked) / mtbf)
    recovering = failures * mtbf * math.expm1(costs.recovery / mtbf)
    unfinished = recovering * costs.background / costs.recovery if costs.recovery else 0.0
    repeating = mtbf * failures - interval - costs.blocked + unfinished
    shares = (interval, costs.blocked, repeating, recovering - unfinished)
    return Goodput(interval, *(part / expected for part in shares))


def scaled_costs(
    *,
    state_bytes: float,
    held_bytes: float,
    num_processes: int,
    restart_seconds: float,
    storage_bandwidth: float = math.inf,
) -> CheckpointCosts:
    """Estimates the costs of a large run from the rates of one measured process.

    Every process writes an equal part of the state, and reads the part of its devices. All
    processes do this at the same time and at the measured rates, unless the file system is slower
    than their total rate.

    Args:
      state_bytes: Bytes of the complete state.
      held_bytes: Bytes of the state on the devices of one process.
      num_processes: The number of processes that write.
      restart_seconds: Seconds from a failure until restoring begins.
      storage_bandwidth: Bytes per second of the file system, for all processes together.
    """
    part = state_bytes / num_processes
    share = storage_bandwidth / num_processes

    def seconds(measured: tuple[float, float], size: float, *, limit: float = math.inf) -> float:
        start, rate = measured
        return start + size / min(rate, limit)

    return CheckpointCosts(
        blocked=seconds(BLOCKED, part),
        background=seconds(BACKGROUND, part, limit=share),
        restore=seconds(RESTORE, held_bytes, limit=share),
        restart=restart_seconds,
    )


def longest_recovery(training: float, *, blocked: float, mtbf: float) -> float:
    """Returns the seconds that a recovery may take if a run is to train for a share of its time.

    `training` is this share. The run saves at the best interval.

    Raises:
      ValueError: No recovery is short enough, or the share is not between 0 and 1.
    """
    if not 0 < training < 1:
        raise ValueError(f"training is {training!r}, expected a share between 0 and 1.")
    interval = best_interval(blocked, mtbf)
    at_once = CheckpointCosts(blocked, 0.0, 0.0, 0.0)
    recovery = mtbf * math.log(interval / training / expected_seconds(interval, at_once, mtbf))
    if recovery < 0:
        raise ValueError(
            f"training is {training!r}, expected at most "
            f"{interval / expected_seconds(interval, at_once, mtbf):.4f}: saves take the rest."
        )
    return recovery


# -------------------------------------------------------------------------------------------------
# Plans how often a run should save, and estimates the time that its failures cost.
#
# The plan assumes that a process has all GPUs of a node, or four TPU chips.


HOUR = 3600.0
CHIPS_OF_A_HOST = 4
INTERVALS = {"Young": young_interval, "Daly": daly_interval, "exact": best_interval}


def describe_time(seconds: float) -> str:
    """Formats a time in the unit that suits it, such as `3.09 h`."""
    for unit, size in (("d", 24 * HOUR), ("h", HOUR), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


SHARES: Sequence[Column[Goodput]] = (
    Column("a save every", "interval", describe_time),
    Column("trains", "training", describe_share),
    Column("waits for saves", "saving", describe_share),
    Column("computes again", "repeating", describe_share),
    Column("restarts and restores", "recovering", describe_share),
)


class PlannedGoodput(NamedTuple):
    """The time between failures of a run, the costs of saving, and the goodput by interval.

    `intervals` has Young's, Daly's and the exact interval.
    """

    device_mtbf: float
    mtbf: float
    costs: CheckpointCosts
    intervals: dict[str, Goodput]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; times are seconds."""
        return {
            "device_mtbf": self.device_mtbf,
            "mtbf": self.mtbf,
            "costs": dataclasses.asdict(self.costs),
            "intervals": {name: dataclasses.asdict(x) for name, x in self.intervals.items()},
        }


def plan_goodput(
    program: Program,
    topology: Topology,
    *,
    device_mtbf: float,
    restart_seconds: float,
    storage_bandwidth: float = math.inf,
) -> PlannedGoodput:
    """Plans how often a program on a topology should save.

    Args:
      program: The program, on a mesh of the topology's size.
      topology: The devices.
      device_mtbf: Seconds between two failures of a device.
      restart_seconds: Seconds from a failure until restoring begins.
      storage_bandwidth: Bytes per second of the file system, for all processes together.
    """
    chip, devices = topology.chip, topology.num_devices
    host = chip.network.node_size or CHIPS_OF_A_HOST * chip.devices_per_chip
    state = program.abstract_state
    device_bytes, total_bytes = state_bytes((state.params, state.opt_state))
    costs = scaled_costs(
        state_bytes=total_bytes,
        held_bytes=device_bytes * min(host, devices),
        num_processes=max(devices // host, 1),
        restart_seconds=restart_seconds,
        storage_bandwidth=storage_bandwidth,
    )
    mtbf = mean_time_between_failures(device_mtbf, devices)
    intervals = {}
    for name, find in INTERVALS.items():
        # A save waits for the previous save.
        interval = max(find(costs.blocked, mtbf), costs.background)
        intervals[name] = goodput(interval, costs, mtbf)
    return PlannedGoodput(device_mtbf, mtbf, costs, intervals)


def print_goodput(console: rich.console.Console, planned: PlannedGoodput) -> None:
    """Prints how a run spends its time with each of the intervals."""
    costs = planned.costs
    title = (
        f"goodput: a device fails every {planned.device_mtbf / HOUR:,.0f} h, the run every "
        f"{describe_time(planned.mtbf)}"
    )
    goodputs, names = list(planned.intervals.values()), list(planned.intervals)
    print_side_by_side(console, SHARES, goodputs, names=names, title=title)
    print_wrapped(
        console,
        f"The loop waits {describe_time(costs.blocked)} for a save, which is complete "
        f"{describe_time(costs.background)} later; restoring takes {describe_time(costs.restore)}: "
        "rates that one process reached, or the file system's. "
        f"From a failure until then {describe_time(costs.restart)} are assumed. See "
        "manualpar.planner.goodput.",
    )
