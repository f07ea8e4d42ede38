"""How long a scheduled program takes, given how long compute and the wire take.

A chip computes one thing at a time, and its links carry one collective at a time, in the order in
which they start; the two run at once. Compute takes the compiler's cycles by the chip's clock. A
collective is on the wire as soon as it has started and the links are free. Whoever waits for one
stands still until it has ended: that part of it is *exposed*, and the rest is *overlapped*.

A turn of a loop begins with free links, because it has waited for everything that it sends; so one
turn is followed and counts as often as the loop turns.
"""

import dataclasses
from collections.abc import Callable, Sequence

from manualpar.planner.schedule import (
    Compute,
    Event,
    Repeat,
    Schedule,
    ScheduledCollective,
    Start,
    Wait,
)


@dataclasses.dataclass(frozen=True)
class ScheduleTime:
    """The time of a step.

    Attributes:
      compute_seconds: The time of all compute.
      exposed_seconds: The time that the step waits for collectives.
      wire_seconds: The time that each collective of `Schedule.collectives` is on the wire in a
        step, all its runs together.
      hidden_seconds: The part of that for which nobody waits, likewise.
    """

    compute_seconds: float
    exposed_seconds: float
    wire_seconds: tuple[float, ...]
    hidden_seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """The time of a step."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def overlapped_seconds(self) -> float:
        """The time of collectives while something computes."""
        return sum(self.hidden_seconds)


def follow(
    schedule: Schedule, *, clock: float, wire_seconds: Callable[[ScheduledCollective], float]
) -> ScheduleTime:
    """Follows a step.

    Args:
      schedule: What the step does.
      clock: Cycles a second.
      wire_seconds: How long one run of a collective is on the wire, by itself.

    Returns:
      Its times.
    """
    alone = [wire_seconds(collective) for collective in schedule.collectives]
    waited = [0.0] * len(alone)

    def run(events: Sequence[Event], times: int) -> float:
        """The seconds that events take; adds to `waited` the waits of all `times` runs."""
        now, links_free, ends = 0.0, 0.0, dict[int, float]()
        for event in events:
            match event:
                case Compute(cycles):
                    now += cycles / clock
                case Start(index):
                    links_free = max(now, links_free) + alone[index]
                    ends[index] = links_free
                case Wait(index):
                    late = max(0.0, ends[index] - now)
                    waited[index] += times * late
                    now += late
                case Repeat(turns, inner):
                    now += turns * run(inner, times * turns)
                    links_free = max(links_free, now if _sends(event) else 0.0)
        return now

    run(schedule.events, 1)
    whole = [
        seconds * collective.times
        for seconds, collective in zip(alone, schedule.collectives, strict=True)
    ]
    return ScheduleTime(
        compute_seconds=schedule.compute_cycles / clock,
        exposed_seconds=sum(waited),
        wire_seconds=tuple(whole),
        # The sum of all waits may differ from the whole by a rounding error.
        hidden_seconds=tuple(
            0.0 if late > all_runs * (1 - 1e-9) else all_runs - late
            for late, all_runs in zip(waited, whole, strict=True)
        ),
    )


def _sends(event: Event) -> bool:
    return isinstance(event, Start) or (
        isinstance(event, Repeat) and any(map(_sends, event.events))
    )
