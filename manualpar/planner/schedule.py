"""What a program that XLA has compiled for a TPU does, in its order: computing, sending, waiting.

It is a list of events. An instruction computes for as many cycles as the compiler estimates. A
collective begins; of an *asynchronous* one other instructions run before it is waited for. A loop
repeats events. What lies between a start and its wait is what can hide a collective.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from manualpar.inspect.communication import Kind, ring_bytes


@dataclasses.dataclass(frozen=True)
class Compute:
    """An instruction computes.

    Attributes:
      cycles: How many cycles the compiler expects it to take.
      scope: Where it comes from.
    """

    cycles: int
    scope: str


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective begins: the position of its entry in `Schedule.collectives`."""

    collective: int


@dataclasses.dataclass(frozen=True)
class Wait:
    """Nothing goes on until a collective has ended, as `Start`."""

    collective: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """Events that run again and again."""

    times: int
    events: tuple["Event", ...]


Event = Compute | Start | Wait | Loop


@dataclasses.dataclass(frozen=True)
class ScheduledCollective:
    """A collective of a scheduled program.

    Attributes:
      name: The name of its instruction, or of that which starts it.
      kind: Which one.
      axes: The mesh axes it goes over; none where the devices it joins do not lie along any.
      group_size: How many devices each of its groups has.
      operand_bytes: The bytes of its operands on one device, with what the compiler pads them by.
      dtypes: The dtypes of its operands as HLO writes them.
      times: How often a step runs it.
      scope: Where it comes from, see `manualpar.inspect.scopes`.
      is_async: Whether other instructions can run between its start and the wait for it.
      cycles_between: The cycles of those instructions, each time.
      between: Their scopes, without repetitions.
    """

    name: str
    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    operand_bytes: int
    dtypes: tuple[str, ...]
    times: int
    scope: str
    is_async: bool = False
    cycles_between: int = 0
    between: tuple[str, ...] = ()

    @property
    def bytes_sent(self) -> Fraction:
        """The bytes that a device sends for it in a step, by `ring_bytes`."""
        return self.times * ring_bytes(self.kind, self.operand_bytes, self.group_size)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A scheduled program.

    Attributes:
      events: What it does, in its order.
      collectives: What it sends, in the order of the program.
      unestimated: Instructions that work on a MiB or more without an estimate of their cycles, how
        often a step runs them, by their opcodes: they count as nothing.
      num_carried: Collectives that are begun and waited for in different turns of a loop; they
        are taken to end with the turn in which they begin.
    """

    events: tuple[Event, ...]
    collectives: tuple[ScheduledCollective, ...]
    unestimated: Mapping[str, int]
    num_carried: int

    @property
    def compute_cycles(self) -> int:
        """The cycles of all compute in a step."""
        return sum(map(total_cycles, self.events))


def total_cycles(event: Event) -> int:
    """The cycles of compute in an event."""
    if isinstance(event, Loop):
        return event.times * sum(map(total_cycles, event.events))
    return event.cycles if isinstance(event, Compute) else 0
