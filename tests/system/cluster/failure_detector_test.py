"""Who is hung, on clocks that are turned by hand."""

import dataclasses
import json

import pytest

from manualpar.system.cluster.failure_detector import (
    FIRST_SECONDS,
    KNOWN_AFTER,
    MOST_TOLD,
    UNWATCHED,
    Pace,
    ProcessProgress,
    find_hung,
    parse_progress,
    slowest,
)

TIMEOUT = 10.0


class Watched:
    """A process whose main thread enters phases, with the clock of all."""

    def __init__(self, clock):
        self.clock = clock
        self.pace = Pace(get_time=lambda: clock[0])
        self.since = clock[0]

    def enter(self, phase, **limits):
        self.pace.enter(phase, **limits)
        self.since = self.clock[0]

    def progress(self):
        stuck = self.clock[0] - self.since
        return ProcessProgress(**{**vars(self.pace.progress()), "stuck": stuck})


class Run:
    """Some processes."""

    def __init__(self, count=3):
        self.clock = [100.0]
        self.processes = [Watched(self.clock) for _ in range(count)]

    def go_on(self, phase, seconds=0.0, *, but=(), **limits):
        """All but some enter a phase, and time passes."""
        for number, process in enumerate(self.processes):
            if number not in but:
                process.enter(phase, **limits)
        self.clock[0] += seconds

    def train(self, steps, seconds=1.0):
        for _ in range(steps):
            self.go_on("in a step", seconds)
            assert self.hung() is None
            self.go_on("between two steps")

    def hung(self):
        progress = {number: process.progress() for number, process in enumerate(self.processes)}
        return find_hung(progress, timeout_seconds=TIMEOUT)


def test_who_is_behind_is_hung_after_the_timeout_beyond_the_longest_phase():
    run = Run()
    run.train(10, seconds=3.0)
    run.go_on("in a step", 13.0, but=[1])
    assert run.hung() is None
    run.clock[0] += 0.1
    process, reason = run.hung()
    assert process == 1
    assert reason == (
        "it has made no progress for 13 s (between two steps), but other processes are ahead"
    )


def test_who_goes_on_in_time_is_not_hung():
    run = Run()
    run.train(10, seconds=3.0)
    run.go_on("in a step", 12.0, but=[1])
    run.processes[1].enter("in a step")
    run.clock[0] += 0.9
    assert run.hung() is None
    # And from now on it is known that it may take so long.
    run.go_on("between two steps")
    run.go_on("in a step", 22.0, but=[2])
    assert run.hung() is None
    run.clock[0] += 1.0
    assert run.hung()[0] == 2


def test_a_long_compilation_or_evaluation_that_was_seen_is_no_hang():
    run = Run()
    run.go_on("in a step", 200.0)
    assert run.hung() is None
    run.train(10)
    run.go_on("evaluating", 205.0, but=[0])
    assert run.hung() is None
    run.clock[0] += 5.1
    assert run.hung()[0] == 0


@pytest.mark.parametrize("times", range(KNOWN_AFTER))
def test_what_has_hardly_been_done_may_take_much_longer(times):
    run = Run()
    run.train(10)
    for _ in range(times):
        run.go_on("saving", 1.0)
        run.train(2)
    run.go_on("saving", 0.0)
    # One of them saves, and the others are in a step.
    run.go_on("in a step", FIRST_SECONDS, but=[2])
    assert run.hung() is None
    run.clock[0] += 1.1
    process, reason = run.hung()
    assert process == 2
    assert "(saving)" in reason


def test_a_first_save_that_nobody_comes_out_of_has_a_limit():
    run = Run()
    run.train(10)
    run.go_on("saving in /runs/1", 2000.0, limit=2000.0)
    assert run.hung() is None
    run.clock[0] += 1.1
    assert run.hung() == (
        None,
        "no process has made progress for 2001 s, all are saving in /runs/1",
    )


def test_what_a_process_says_of_itself_is_understood():
    pace = Pace()
    pace.enter("saving", limit=600)  # Whole numbers too.
    pace.at_step(3)
    assert parse_progress(json.loads(json.dumps(dataclasses.asdict(pace.progress())))).limit == 600


def test_a_disk_may_become_slower_than_it_was_up_to_the_limit():
    run, waiting = Run(), {"limit": 2000.0, "varies": True}
    for _ in range(2 * KNOWN_AFTER):
        run.train(2)
        run.go_on("waiting for the disk", 1.0, **waiting)
    run.train(2)
    run.go_on("waiting for the disk", 2000.0, **waiting)
    assert run.hung() is None, "a slow disk was taken for a process that hangs"
    run.clock[0] += 1.1
    assert run.hung() is not None


def test_all_that_compile_for_hours_are_not_hung():
    run = Run()
    run.go_on("in a step", 1e5)
    assert run.hung() is None


def test_all_that_stand_in_the_same_known_place_are_hung_and_nobody_is_named():
    run = Run()
    run.train(10)
    run.go_on("in a step", 11.0)
    assert run.hung() is None
    run.clock[0] += 0.1
    assert run.hung() == (None, "no process has made progress for 11 s, all are in a step")


def test_one_that_has_just_come_to_where_the_others_stand_is_given_time():
    run = Run()
    run.train(10)
    run.go_on("in a step", 10.5, but=[1])
    run.processes[1].enter("in a step")
    run.clock[0] += 10.2  # By now the others are here for more than 20.5 s.
    assert run.hung() is None
    run.clock[0] += 10.5
    assert run.hung() == (None, "no process has made progress for 21 s, all are in a step")


def test_of_several_that_are_behind_all_are_named():
    run = Run(4)
    run.train(10)
    run.go_on("in a step", 12.0, but=[1, 3])
    assert run.hung() == (
        1,
        "it has made no progress, like process 3, for 12 s (between two steps), but other "
        "processes are ahead",
    )


def test_nobody_is_hung_before_the_first_phase_and_after_the_last():
    run = Run()
    run.clock[0] += 1e6
    assert run.hung() is None
    run.train(10)
    run.go_on(UNWATCHED, 1e6)
    assert run.hung() is None
    run.processes[1].enter("elsewhere")
    assert run.hung() is None


def test_of_many_processes_the_slowest_are_told():
    few = [(process, process, 1.0) for process in range(MOST_TOLD)]
    assert slowest(reversed(few)) == few
    equal = [(process, 7, 1.0) for process in range(1000)]
    assert len(slowest(equal)) == MOST_TOLD
    assert {step for _, step, _ in slowest([*equal, (1000, 9, 0.0)])} == {7, 9}
    late = [(3000, None, 0.0), (4000, 6, 5.0), (5000, 6, 9.0)]
    assert slowest([*equal, *late])[:3] == [late[0], late[2], late[1]]
