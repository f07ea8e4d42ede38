"""How long a scheduled program takes, if compute and the wire take as long as is said.

A chip computes one thing at a time, and its links carry one collective at a time, in the order in
which they begin; the two run at once. Compute takes the compiler's cycles by the chip's clock. A
collective is on the wire as soon as it has begun and the links are free. Who waits for one stands
still until it has ended: that is the *exposed* part of it, and the rest is *overlapped*.

A turn of a loop begins with free links, for whatever it sends it waits for; so one turn is followed
and counts as often as the loop turns.
"""

import dataclasses
from collections.abc import Callable

from manualpar.planner.schedule import (
    Compute,
    Event,
    Loop,
    Schedule,
    ScheduledCollective,
    Start,
    Wait,
)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The time of a step.

    Attributes:
      compute_seconds: What is computed.
      exposed_seconds: What is waited for collectives.
      wire_seconds: What each collective takes on the wire in a step, all its runs together, in the
        order of `Schedule.collectives`.
      hidden_seconds: How much of that nobody waits for, likewise.
    """

    compute_seconds: float
    exposed_seconds: float
    wire_seconds: tuple[float, ...]
    hidden_seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """A step."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def overlapped_seconds(self) -> float:
        """What collectives take while something is computed."""
        return sum(self.hidden_seconds)


def follow(
    schedule: Schedule, *, clock: float, wire_seconds: Callable[[ScheduledCollective], float]
) -> Timeline:
    """Follows a step.

    Args:
      schedule: What it does.
      clock: Cycles a second.
      wire_seconds: How long a collective takes on the wire, each time, by itself.

    Returns:
      Its times.
    """
    alone = [wire_seconds(collective) for collective in schedule.collectives]
    waited = dict.fromkeys(range(len(alone)), 0.0)
    _follow(schedule.events, _Chip(clock, alone), waited, times=1)
    total = tuple(
        seconds * collective.times
        for seconds, collective in zip(alone, schedule.collectives, strict=True)
    )
    return Timeline(
        compute_seconds=schedule.compute_cycles / clock,
        exposed_seconds=sum(waited.values()),
        wire_seconds=total,
        # What is waited for altogether may miss the whole by a rounding.
        hidden_seconds=tuple(
            0.0 if waited[i] > whole * (1 - 1e-9) else whole - waited[i]
            for i, whole in enumerate(total)
        ),
    )


@dataclasses.dataclass
class _Chip:
    """A chip: its clock, how long collectives take, and until when its links are taken."""

    clock: float
    alone: list[float]
    links_free: float = 0.0


def _follow(
    events: tuple[Event, ...], chip: _Chip, waited: dict[int, float], *, times: int
) -> float:
    """The seconds that events take; adds to `waited` those that were waited for each collective."""
    now, ends = 0.0, dict[int, float]()
    chip.links_free = 0.0
    for event in events:
        if isinstance(event, Compute):
            now += event.cycles / chip.clock
        elif isinstance(event, Start):
            chip.links_free = max(now, chip.links_free) + chip.alone[event.collective]
            ends[event.collective] = chip.links_free
        elif isinstance(event, Wait):
            late = max(0.0, ends[event.collective] - now)
            waited[event.collective] += times * late
            now += late
        else:
            links_free = chip.links_free
            now += event.times * _follow(event.events, chip, waited, times=times * event.times)
            chip.links_free = max(links_free, now if _sends(event) else 0.0)
    return now


def _sends(event: Event) -> bool:
    """Whether an event is, or holds, a collective."""
    return isinstance(event, Start) or (isinstance(event, Loop) and any(map(_sends, event.events)))
