"""Where a run's time went: the intervals add up to the time since it first began."""

import json

import pytest

from manualpar.training.monitoring.run_record import (
    COMPILING,
    RESTORING,
    SAVING,
    STOPPED,
    TRAINING,
    TimeLedger,
    add_up,
    check_interval,
)


class Clock:
    """A clock that is turned by hand, for one start of a run after another."""

    def __init__(self, path):
        self.now, self.path = 1000.0, path

    def start(self, monkeypatch):
        monkeypatch.setattr("time.time", lambda: self.now)
        times = TimeLedger(get_time=lambda: self.now)
        self.now += 2
        return times

    def lines(self):
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        for line in lines:
            check_interval(line)
        return lines


def train(clock, times, steps, seconds=1.0):
    for step in steps:
        clock.now += seconds
        times.at(step)


def kill(times):
    """Ends it without its last line."""
    times._file.close()


def test_a_run_that_is_killed_stopped_and_resumed(tmp_path, monkeypatch):
    clock = Clock(tmp_path / "times.jsonl")
    times = clock.start(monkeypatch)
    times.write_to(clock.path)
    times.enter(TRAINING)
    with times.during(COMPILING):
        clock.now += 5
    train(clock, times, range(1, 11))
    with times.during(SAVING):
        clock.now += 3
    train(clock, times, range(11, 21))
    clock.now += 60
    times.stalled(60)
    times.flush()
    train(clock, times, range(21, 25))
    kill(times)
    clock.now += 100

    times = clock.start(monkeypatch)
    with times.during(RESTORING):
        clock.now += 4
        times.at(15)
    times.write_to(clock.path)
    times.enter(TRAINING)
    train(clock, times, range(16, 31))
    times.close()

    found = add_up(clock.lines())
    assert found.seconds == pytest.approx(
        {
            "starting": 4,
            "compiling": 5,
            "training": 15 + 15,
            "saving": 3,
            "training again": 5,  # The steps after the checkpoint of step 15.
            "stalled": 60,
            "standing still": 104,
            "restoring": 4,
        }
    )
    assert found.total == pytest.approx(clock.now - 1000)
    assert [(one.what, one.step, one.seconds) for one in found.losses] == [
        ("starting", 0, 2),
        ("compiling", 0, 5),
        ("saving", 10, 3),
        ("stalled", 20, 60),
        ("standing still", 20, 104),
        ("starting", 0, 2),
        ("restoring", 15, 4),
    ]


def test_a_run_that_begins_again_without_a_checkpoint_repeats_everything(tmp_path, monkeypatch):
    clock = Clock(tmp_path / "times.jsonl")
    for _ in range(2):
        times = clock.start(monkeypatch)
        times.write_to(clock.path)
        times.enter(TRAINING)
        train(clock, times, range(1, 4))
        times.close()
        clock.now += 10
    seconds = add_up(clock.lines()).seconds
    assert seconds["training"] == seconds["training again"] == 3
    assert seconds[STOPPED] == 10


def test_short_intervals_and_clocks_that_differ_lose_no_time(tmp_path, monkeypatch):
    clock = Clock(tmp_path / "times.jsonl")
    times = clock.start(monkeypatch)
    times.write_to(clock.path)
    for _ in range(1000):
        with times.during(SAVING):
            clock.now += 1e-4
        clock.now += 1e-4
    times.close()
    assert add_up(clock.lines()).total == pytest.approx(clock.now - 1000)
    clock.now -= 500
    times = clock.start(monkeypatch)
    times.write_to(clock.path)
    kill(times)
    assert STOPPED not in add_up(clock.lines()).seconds


@pytest.mark.parametrize(
    "change",
    [
        {"what": "x"},
        {"seconds": -1},
        {"seconds": True},
        {"began": None},
        {"step": 1.5},
        {"from": -1},
    ],
)
def test_a_line_that_no_run_writes_is_refused(change):
    line = {"what": TRAINING, "began": 1.0, "seconds": 2.0, "from": 0, "step": 3}
    check_interval(line)
    with pytest.raises(ValueError, match="has "):
        check_interval({**line, **change})
