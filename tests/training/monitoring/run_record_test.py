"""What a run wrote is read back, torn lines and gaps included."""

import json
import math
import os
import re

import pytest

from manualpar.training.monitoring.report import decimate
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.run_record import (
    COMPILING,
    RESTORING,
    SAVING,
    STOPPED,
    TRAINING,
    TimeLedger,
    add_up,
    check_interval,
    final_numbers,
    make_charts,
    read_run,
)


def test_a_run_is_read_as_it_was_written(tmp_path):
    with RunWriter(tmp_path, config={"seed": 1}) as writer:
        writer.write(0, "eval", {"loss": 2.0})
        writer.write(1, "train", {"loss": math.nan}, throughput={"examples_per_second": 5.0})
        place = writer.place()
        writer.write(2, "train", {"loss": 1.0})
    with RunWriter(tmp_path, config={"seed": 1}, place=place, step=1) as writer:
        writer.write(2, "train", {"loss": 1.0}, throughput={"examples_per_second": 6.0, "mfu": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "spl')
    run = read_run(tmp_path)
    assert run.config == {"seed": 1}
    assert [record["step"] for record in run.metrics] == [0, 1, 2]
    loss, examples, mfu = make_charts(run)
    assert loss.lines == {"train": [(1, None), (2, 1.0)], "eval": [(0, 2.0)]}
    assert list(loss.lines) == ["train", "eval"]
    assert loss.resumes == [1]
    assert (loss.unit, loss.from_zero) == ("nats", False)
    assert (examples.lines, examples.unit) == ({"train": [(1, 5.0), (2, 6.0)]}, "examples/s")
    assert (mfu.title, mfu.from_zero) == ("Model FLOPs utilization", True)
    assert final_numbers(run) == {
        "loss": {"eval": 2.0, "train": 1.0},
        "examples_per_second": {"train": 6.0},
        "mfu": {"train": 0.5},
    }


def test_tokens_make_a_chart_of_examples_needless(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        rates = {"examples_per_second": 5.0, "tokens_per_second": 50.0}
        writer.write(1, "train", {"loss": 1.0, "bits_per_byte": 1.4}, throughput=rates)
    assert [chart.unit for chart in make_charts(read_run(tmp_path))] == ["nats", "bits", "tokens/s"]


def test_the_learning_rate_and_the_norm_of_gradients_have_charts(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"gradient_norm": 2.0, "learning_rate": 0.1, "loss": 1.0})
        writer.write(1, "eval", {"loss": 1.0})
    _, rate, norm = make_charts(read_run(tmp_path))
    assert (rate.title, rate.lines) == ("Learning rate", {"train": [(1, 0.1)]})
    assert rate.from_zero
    assert (norm.title, norm.lines) == ("Gradient norm", {"train": [(1, 2.0)]})


def test_a_folder_without_a_run_holds_nothing(tmp_path):
    run = read_run(tmp_path)
    assert run == ({}, [], [], [], [], [])
    assert make_charts(run) == []
    assert final_numbers(run) == {}


GOOD = b'{"step": 1, "split": "train", "loss": 0.5}'
RESUME = b'{"resumed_after_step": 1, "reason": "resumed", "time": "now", "metrics.jsonl": []}'
DAMAGED_LINES = {
    "empty": (b"", "is not JSON"),
    "cut": (GOOD[:20], "is not JSON"),
    "overwritten": (b"x" * 9 + GOOD[9:], "is not JSON"),
    "binary": (bytes(range(128, 256)), "is not UTF-8"),
    "not UTF-8": (GOOD.replace(b"train", b"tr\xffin"), "is not UTF-8"),
    "deep": (b"[" * 100_000, "is nested deeper than 64 levels"),
    "huge": (b"x" * 10_000_000, "is not JSON"),
    "a list": (b"[1]", "is not a JSON object"),
    "without keys": (b"{}", "has the step None"),
    "a step that is text": (b'{"step": "1", "split": "train"}', "has the step"),
    "a step that is huge": (b'{"step": 1' + b"0" * 400 + b', "split": "train"}', "has the step"),
    "a resume that is no step": (b'{"resumed_after_step": -1}', "has the step"),
}
DAMAGED_NUMBERS = {
    "a split that is a number": (b'{"step": 1, "split": 1}', "has the split 1"),
    "a split that is a formula": (b'{"step": 1, "split": "$x^$"}', "has the split"),
    "NaN": (GOOD.replace(b"0.5", b"NaN"), r"is not JSON \(NaN is no number"),
    "infinite": (GOOD.replace(b"0.5", b"1e999"), "has inf for 'loss'"),
    "too large": (GOOD.replace(b"0.5", b"9" * 400), "has 9999"),
    "a string": (GOOD.replace(b"0.5", b'"0.5"'), "has '0.5' for 'loss'"),
    "a list of numbers": (GOOD.replace(b"0.5", b"[0.5]"), r"has \[0.5\] for 'loss'"),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "throughput.jsonl", "discarded.jsonl"])
def test_what_no_run_writes_is_left_out_and_said(tmp_path, name):
    good = RESUME if name == "discarded.jsonl" else GOOD
    cases = DAMAGED_LINES | (DAMAGED_NUMBERS if good is GOOD else {})
    for damaged, reason in cases.values():
        (tmp_path / name).write_bytes(b"\n".join([good, damaged, good, damaged, good, b""]))
        run = read_run(tmp_path)
        records = [*run.metrics, *run.throughput, *run.resumes]
        assert records == [json.loads(good)] * 3
        (sentence,) = run.left_out
        expected = rf"left out 2 of the 5 lines of .*{name}, which no run writes: 2, 4 \(line 2 "
        assert re.match(expected + reason, sentence), sentence
        make_charts(run)
    (tmp_path / name).write_bytes(b"x\n" * 30)
    assert "2, 3, 4, 5, 6, 7, 8, 9, 10 and 20 more (line 1 is" in read_run(tmp_path).left_out[0]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "discarded.jsonl"])
def test_what_is_no_file_is_left_out_and_said(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert read_run(tmp_path).left_out == [
        f"left out {tmp_path / name}, which is a FIFO, expected a file"
    ]
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert "which is a folder, expected a file" in read_run(tmp_path).left_out[0]


def test_a_config_that_is_none_is_left_out_and_said(tmp_path):
    for text, reason in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested deeper"),
        ("3", "is not"),
    ):
        (tmp_path / "config.json").write_text(text)
        run = read_run(tmp_path)
        assert run.config == {}
        assert f"config.json, which {reason}" in run.left_out[0]


def test_a_long_line_keeps_its_ends_its_extremes_and_its_gaps():
    points = [(step, math.sin(step / 300)) for step in range(10_000)]
    points[4321] = (4321, 7.0)
    points[5678] = (5678, -7.0)
    points[6789] = (6789, None)
    kept = decimate(points, 1000)
    assert len(kept) <= 1000
    assert set(kept) <= set(points)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert {points[0], points[-1], points[4321], points[5678], points[6789]} <= set(kept)
    assert decimate(points[:1000], 1000) == points[:1000]
    nothing = [(step, None) for step in range(5000)]
    assert 0 < len(decimate(nothing, 100)) <= 100
    assert json.dumps(decimate(nothing, 100)[0]) == "[0, null]"


# -------------------------------------------------------------------------------------------------
# Where a run's time went: the intervals add up to the time since it first began.


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
        times.set_step(step)


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
        times.set_step(15)
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
