"""Plans how often a run should save, and estimates the time that its failures cost.

The plan assumes that a process has all GPUs of a node, or four TPU chips.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import rich.console

from manualpar.core.program.program import Program
from manualpar.inspect import state_bytes
from manualpar.planner.goodput import (
    CheckpointCosts,
    Goodput,
    best_interval,
    daly_interval,
    goodput,
    mean_time_between_failures,
    scaled_costs,
    young_interval,
)
from manualpar.planner.topology import Topology
from manualpar.system.reports.tables import (
    Column,
    describe_share,
    print_side_by_side,
    print_wrapped,
)

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
