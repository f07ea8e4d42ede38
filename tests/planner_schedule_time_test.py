"""How long events take, against arithmetic by hand: a cycle is a second."""

import pytest

from manualpar.planner.schedule import (
    Compute,
    Event,
    Repeat,
    Schedule,
    ScheduledCollective,
    Start,
    Wait,
)
from manualpar.planner.schedule_time import ScheduleTime, follow


def times(*events: Event, wire: list[float], runs: list[int] | None = None) -> ScheduleTime:
    """Follows events whose collectives take so long."""
    collectives = tuple(
        ScheduledCollective(
            name=str(i),
            kind="all_gather",
            axes=("data",),
            group_size=2,
            shapes=((2,),),
            dtypes=("f32",),
            times=count,
            scope="",
        )
        for i, count in enumerate(runs or [1] * len(wire))
    )
    return follow(
        Schedule(events, collectives, {}, 0),
        clock=1.0,
        wire_seconds=lambda collective: wire[int(collective.name)],
    )


def test_collective_that_is_waited_for_at_once_is_exposed() -> None:
    found = times(Compute(3, ""), Start(0), Wait(0), Compute(4, ""), wire=[5])
    assert (found.compute_seconds, found.exposed_seconds, found.step_seconds) == (7, 5, 12)
    assert found.hidden_seconds == (0,)


@pytest.mark.parametrize(("compute", "exposed"), [(0, 5), (2, 3), (5, 0), (9, 0)])
def test_compute_between_hides_as_much_as_there_is(compute: int, exposed: int) -> None:
    found = times(Start(0), Compute(compute, ""), Wait(0), wire=[5])
    assert found.exposed_seconds == exposed
    assert found.overlapped_seconds == 5 - exposed


def test_links_carry_one_collective_at_a_time() -> None:
    # The second is on the wire from 5 to 9, and two seconds of compute are over at 2.
    found = times(Start(0), Start(1), Compute(2, ""), Wait(1), Wait(0), wire=[5, 4])
    assert found.exposed_seconds == 7
    assert found.step_seconds == 9
    # One that is waited for at once waits for that before it as well.
    found = times(Start(0), Start(1), Wait(1), Compute(3, ""), Wait(0), wire=[5, 4])
    assert found.step_seconds == 12


def test_turns_of_a_loop_add_up_also_of_loops_in_loops() -> None:
    inner = Repeat(3, (Compute(2, ""), Start(0), Compute(1, ""), Wait(0)))
    found = times(Repeat(2, (inner, Compute(10, ""))), Compute(7, ""), wire=[4], runs=[6])
    assert found.compute_seconds == 2 * (3 * 3 + 10) + 7
    assert found.exposed_seconds == 6 * 3
    assert found.wire_seconds == (24,)
    assert found.hidden_seconds == (6,)


def test_loop_runs_behind_what_was_begun_before_it_and_its_collectives_delay_what_follows() -> None:
    found = times(Start(0), Repeat(4, (Compute(1, ""),)), Wait(0), wire=[5])
    assert found.exposed_seconds == 1
    sending = Repeat(2, (Start(1), Wait(1)))
    found = times(sending, Start(0), Wait(0), wire=[5, 3], runs=[1, 2])
    assert found.step_seconds == 11


def test_rounding_hides_nothing() -> None:
    found = times(Repeat(10, (Start(0), Wait(0))), wire=[0.1], runs=[10])
    assert found.overlapped_seconds == 0
