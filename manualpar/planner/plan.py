"""The estimate of a step on devices that are not here: its collectives, memory and time.

Two planners make estimates of the same form. In the first, XLA compiles the step for the topology,
and `manualpar.planner.compiled_plan` reads the compiled program. In the second,
`manualpar.planner.roofline` calculates the estimate from a traced program or from formulas.
Both estimate time, and state their assumptions. Seconds are per step, bytes per device.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from manualpar.core.summary import Summarized
from manualpar.inspect.tables import (
    TableColumn,
    describe_bytes,
    describe_count,
    describe_seconds,
    describe_share,
)
from manualpar.inspect.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """A line of a plan: collectives of a step with equal kind, axes, purpose, phase and network.

    `manualpar.planner.timed_collectives.planned_collectives` makes these sums.

    Attributes:
      axes: The mesh axes; empty if a compiled program does not name them.
      times: The number of these collectives that a step runs.
      bytes_sent: Bytes that a device sends for all of these.
      slow_bytes: The part of `bytes_sent` that crosses the network between slices or nodes, as a
        mean over devices; 0 if no model of the network was used.
      seconds: The time to send all of these, without overlap; `None` if not estimated.
      hidden_seconds: The part of `seconds` hidden behind compute; `None` if not estimated.
      is_async: Whether compute runs between the start of a collective and the wait for its end;
        `None` if the collectives are not compiled.
    """

    kind: str
    axes: tuple[str, ...]
    purpose: str
    phase: str
    times: int
    bytes_sent: float
    seconds: float | None = None
    hidden_seconds: float | None = None
    is_async: bool | None = None
    network: str = ""
    slow_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class StepEstimate(Summarized):
    """The estimate of a step on a topology.

    Attributes:
      name: The strategy and the mode, such as `fsdp manual`.
      is_model: Whether the estimate is calculated, and not read off a compiled program.
      source: The source of the estimate: `roofline`, or `XLA's TPU compiler, libtpu 0.0.42`.
      hbm_bytes: The bytes of a device's memory that a program can use.
      memory: Bytes at the peak by class: parameters, gradients, optimizer, gathered, activations,
        batch, other. For a compiled program the classes are parameters, optimizer, batch, other
        arguments, outputs, temporaries.
      peak_bytes: The bytes of all classes. If the program does not fit: the needed bytes, as far as
        they are known.
      fits: Whether `peak_bytes` are at most `hbm_bytes`.
      compute_seconds: The time of products and of memory traffic, without collectives.
      hbm_seconds: The part of `compute_seconds` that waits for memory and not for products; `None`
        if not known.
      exposed_seconds: The time in which the step waits for collectives and computes nothing.
      overlapped_seconds: The time of collectives that is hidden behind compute.
      bubble_seconds: The time in which a stage of a pipeline waits for other stages, on average;
        `None` if there are no stages, or if the time is not known.
      step_seconds: The estimated step time; `None` if the program does not fit and has no schedule.
      step_seconds_by_links: The step time if every link of a torus is a separate resource; `None`
        without a compiled program.
      tokens_per_second: Tokens per second of all devices; `None` if examples have no tokens.
      examples_per_second: Examples per second of all devices.
      mfu: Model FLOPs of a step divided by the peak FLOPs of the devices; `None` if not known.
      assumptions: The assumptions behind the estimate, in sentences.
      notes: Warnings and hints, in sentences.
    """

    name: str
    topology: str
    num_devices: int
    mesh: Mapping[str, int]
    is_model: bool
    source: str
    hbm_bytes: int
    memory: Mapping[str, int]
    peak_bytes: int
    fits: bool
    collectives: tuple[PlannedCollective, ...] = ()
    compute_seconds: float | None = None
    hbm_seconds: float | None = None
    exposed_seconds: float | None = None
    overlapped_seconds: float | None = None
    bubble_seconds: float | None = None
    step_seconds: float | None = None
    step_seconds_by_links: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    mfu: float | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def _summary(self) -> tuple[str, dict[str, str]]:
        mesh = "".join(f", {axis}={size}" for axis, size in self.mesh.items())
        title = f"StepEstimate({self.name} on {self.topology}{mesh}), by {self.source}"
        peak, all_bytes, *times = (x for x in LINES if x.value != "hbm_seconds")
        memory = f"{peak.cell(self)} of {all_bytes.cell(self)} at the peak"
        lines = {FITS.name: FITS.cell(self), "memory": memory}
        return title, lines | {x.name: x.cell(self) for x in times if x.is_shown([self])}

    @property
    def spare_bytes(self) -> int:
        """The bytes left of a device's memory; negative if bytes are missing."""
        return self.hbm_bytes - self.peak_bytes

    @property
    def bytes_sent(self) -> float:
        """The bytes that a device sends in a step."""
        return sum(collective.bytes_sent for collective in self.collectives)

    @property
    def slow_bytes(self) -> float:
        """The bytes sent that cross the network between slices or nodes, as a mean over devices."""
        return sum(collective.slow_bytes for collective in self.collectives)

    @property
    def slow_seconds(self) -> float:
        """The seconds of collectives between slices or nodes, the hidden part included."""
        return sum(each.seconds or 0.0 for each in self.collectives if each.slow_bytes)

    def with_rates(self, throughput: Throughput) -> "StepEstimate":
        """Adds the tokens and examples per second and the MFU, if there is a step time."""
        rates = throughput.rates(1, self.step_seconds or 0.0)
        return dataclasses.replace(
            self,
            tokens_per_second=rates.get("tokens_per_second"),
            examples_per_second=rates.get("examples_per_second"),
            mfu=rates.get("mfu"),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the estimate as plain values: lists in place of tuples."""
        names = ("spare_bytes", "bytes_sent", "slow_bytes", "slow_seconds")
        derived = {name: getattr(self, name) for name in names}
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self) | derived))
        return plain


def _describe_fit(plan: StepEstimate) -> str:
    spare = describe_bytes(abs(plan.spare_bytes))
    return f"yes, {spare} spare" if plan.fits else f"NO, {spare} too much"


def _tokens_of_a_device(plan: StepEstimate) -> float | None:
    return plan.tokens_per_second and plan.tokens_per_second / plan.num_devices


_optional = functools.partial(TableColumn, is_optional=True)
FITS: TableColumn[StepEstimate] = TableColumn("fits", _describe_fit, str)
# The lines that follow the classes of memory in the table of plans.
LINES: Sequence[TableColumn[StepEstimate]] = (
    TableColumn("  all, at the peak", "peak_bytes", describe_bytes),
    TableColumn("  of", "hbm_bytes", describe_bytes),
    TableColumn("step, estimated", "step_seconds", describe_seconds),
    _optional("  with each link by itself", "step_seconds_by_links", describe_seconds),
    TableColumn("  computing", "compute_seconds", describe_seconds),
    TableColumn("    of it waiting for memory", "hbm_seconds", describe_seconds),
    TableColumn("  sending, exposed", "exposed_seconds", describe_seconds),
    TableColumn("  sending, overlapped", "overlapped_seconds", describe_seconds),
    _optional("  waiting for other stages", "bubble_seconds", describe_seconds),
    _optional("  sending over slow links", "slow_seconds", describe_seconds),
    TableColumn("bytes sent a device", "bytes_sent", describe_bytes),
    _optional("  over slow links", "slow_bytes", describe_bytes),
    _optional("tokens/s", "tokens_per_second", describe_count),
    _optional("  a device", _tokens_of_a_device, describe_count),
    _optional(
        "examples/s",
        lambda x: None if x.tokens_per_second else x.examples_per_second,
        describe_count,
    ),
    TableColumn("MFU", "mfu", describe_share),
)
