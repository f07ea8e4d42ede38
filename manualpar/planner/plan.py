"""What a planner says of a step on devices that nobody here has: one form for both planners.

The compiler's plan (`manualpar.planner.tpu_compiler`) is read off a program that XLA compiled for
the topology; the roofline's (`manualpar.planner.roofline`) is arithmetic on a traced program. Both
estimate time, and say on what assumptions. Seconds are those of a step, bytes those of a device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """Collectives of a step that are alike.

    Attributes:
      kind: Which: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `permute`.
      axes: The mesh axes; empty where a compiled program does not say.
      purpose: What for, such as `gather_params`.
      phase: `forward`, `backward`, `recomputed`, `update`; "" where it is not known.
      times: How many a step runs.
      bytes_sent: Bytes that a device sends for all of them.
      seconds: How long all of them take by themselves; `None` if not estimated.
      hidden_seconds: How much of that lies behind compute; `None` if not estimated.
      is_async: Whether compute can run meanwhile; `None` where a model assumes it.
      network: What carries it, such as `ICI`.
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step on a topology.

    Attributes:
      name: What was planned, such as `fsdp manual`.
      topology: The topology's name.
      num_devices: Its devices.
      mesh: The sizes of the mesh axes.
      is_model: Whether it is a model's, and not read off a program compiled for the topology.
      source: Who says so, such as `roofline` or `XLA's TPU compiler, libtpu 0.0.42`.
      hbm_bytes: What a program can have on a device.
      memory: Bytes at the peak by class: parameters, gradients, optimizer, gathered, activations,
        batch, other; a compiler that knows no classes gives arguments, temporaries, outputs.
      peak_bytes: All of them together; of a program that does not fit what it needs, as far as it
        is known.
      fits: Whether that is no more than `hbm_bytes`.
      collectives: What a step sends.
      compute_seconds: What products and memory take, with nothing sent.
      hbm_seconds: What of that waits for memory and not for products; `None` if not known.
      exposed_seconds: What collectives take with nothing computed meanwhile.
      overlapped_seconds: What they take behind compute.
      step_seconds: The estimated step time; `None` if there is none.
      tokens_per_second: Of all devices; `None` for what has no tokens.
      examples_per_second: Of all devices.
      mfu: Model FLOPs of a step by what the devices could do in it; `None` if not known.
      assumptions: What the estimate rests on, in sentences.
      notes: What is to be noticed, in sentences.
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
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    mfu: float | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spare_bytes(self) -> int:
        """What is left of a device's memory; below 0 what is missing."""
        return self.hbm_bytes - self.peak_bytes

    @property
    def bytes_sent(self) -> float:
        """The bytes that a device sends in a step."""
        return sum(collective.bytes_sent for collective in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        plain = dataclasses.asdict(self)
        plain["mesh"], plain["memory"] = dict(self.mesh), dict(self.memory)
        for collective in plain["collectives"]:
            collective["axes"] = list(collective["axes"])
        for field in ("assumptions", "notes"):
            plain[field] = list(plain[field])
        plain["collectives"] = list(plain["collectives"])
        return plain | {"spare_bytes": self.spare_bytes, "bytes_sent": self.bytes_sent}


class Rates(TypedDict):
    """What follows from a step time: fields of `Plan`."""

    examples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None


def rates(
    step_seconds: float | None,
    *,
    examples_per_step: int,
    tokens_per_example: int,
    flops_per_example: float,
    num_devices: int,
    peak: float | None,
) -> Rates:
    """The rates of a step time, as keyword arguments of `Plan`.

    Args:
      step_seconds: The step time; `None` gives no rates.
      examples_per_step: Examples of a step, on all devices.
      tokens_per_example: Tokens of an example, 0 if it has none.
      flops_per_example: FLOPs that the model asks for, forward and backward, nothing recomputed.
      num_devices: How many devices.
      peak: FLOP/s of one of them.

    Returns:
      `examples_per_second`, `tokens_per_second` and `mfu`.
    """
    if not step_seconds:
        return {"examples_per_second": None, "tokens_per_second": None, "mfu": None}
    examples = examples_per_step / step_seconds
    return {
        "examples_per_second": examples,
        "tokens_per_second": examples * tokens_per_example if tokens_per_example else None,
        "mfu": examples * flops_per_example / (num_devices * peak) if peak else None,
    }
