"""Metrics are added up exactly, reported once, and can be put down and taken up again."""

import itertools
import json
import math

import pytest

from manualpar.training.recorder import LAG, NonFiniteError, Recorder


class Reports:
    """A writer and a screen that remember."""

    def __init__(self) -> None:
        self.written: list[tuple] = []
        self.shown: list[tuple] = []
        self.steps: list[int] = []

    def write(self, step, split, metrics, *, throughput):
        self.written.append((step, split, dict(metrics), dict(throughput)))

    def report(self, step, split, metrics):
        assert len(self.shown) < len(self.written), "shown before it was written"
        self.shown.append((step, split, dict(metrics)))

    def advance(self, step):
        self.steps.append(step)


def _recorder(reports, **options) -> Recorder:
    return Recorder(
        reports,
        reports,
        learning_rate=lambda step: step / 10,
        rates=lambda steps, seconds: {"steps_per_second": steps / seconds},
        **options,
    )


def _loss(total: float, count: float = 1.0, *, nonfinite: float | None = None) -> dict:
    more = {} if nonfinite is None else {"nonfinite": (nonfinite, 1.0)}
    return {"loss": (total, count), **more}


def test_a_report_is_the_mean_over_what_was_counted():
    reports = Reports()
    recorder = _recorder(reports)
    for step, (total, count) in enumerate([(1, 1), (6, 2), (0, 1)], 1):
        recorder.put("train", step, _loss(total, count), report=step == 3)
    recorder.drain()
    (step, split, metrics, _), *more = reports.written
    assert not more
    assert (step, split) == (3, "train")
    assert metrics == {"loss": 7 / 4, "learning_rate": 0.2}
    assert reports.steps == [1, 2, 3]
    assert recorder.latest("train") == metrics
    assert recorder.latest("eval") == {}


def test_metrics_wait_until_some_later_steps_have_been_put():
    reports = Reports()
    recorder = _recorder(reports)
    for step in range(1, LAG + 3):
        recorder.put("train", step, _loss(1), report=True)
        assert reports.steps == list(range(1, step - LAG + 1))


def test_the_learning_rate_is_asked_for_before_more_steps_are_queued():
    # A schedule's result is a device's: it is there when the step is, unless it is queued later.
    asked, reports = [], Reports()
    schedule = lambda step: asked.append(step) or step / 10  # noqa: E731
    recorder = Recorder(reports, reports, learning_rate=schedule, rates=lambda *_: {})
    for step in range(1, 5):
        recorder.put("train", step, _loss(1), report=step % 2 == 0)
        recorder.put("eval", step, _loss(1), report=True)
        assert asked == [1, 3][: step // 2]
    recorder.drain()
    assert asked == [1, 3]
    rates = [m["learning_rate"] for _, split, m, _ in reports.written if split == "train"]
    assert rates == [0.1, 0.3]


def test_what_a_task_derives_is_reported_too():
    reports = Reports()
    recorder = _recorder(reports, derive=lambda split, means: {**means, split: means["loss"] * 2})
    recorder.put("eval", 4, _loss(3), report=True)
    recorder.drain()
    assert reports.written == [(4, "eval", {"loss": 3, "eval": 6}, {})]


def test_rates_leave_out_compilation_and_evaluation(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    reports = Reports()
    recorder = _recorder(reports)

    def put(split: str, step: int, *, report: bool = False) -> None:
        recorder.put(split, step, _loss(1), report=report)
        recorder.drain()  # takes one second

    put("eval", 0)
    put("train", 1, report=True)
    put("train", 2)
    for _ in range(5):
        put("eval", 2)
    put("train", 3, report=True)
    assert [rates for *_, rates in reports.written] == [{}, {"steps_per_second": 1.0}]
    assert reports.shown[1][2] == {"loss": 1, "learning_rate": 0.2, "steps_per_second": 1.0}


def test_rates_leave_out_what_is_said_to_be_idle(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    reports = Reports()
    recorder = _recorder(reports)
    with recorder.leave_out():
        now[0] += 7.0  # Nothing to leave it out of.
    for step in range(1, 4):
        recorder.put("train", step, _loss(1), report=step == 3)
        now[0] += 1.0
        recorder.drain()
        with recorder.leave_out():
            now[0] += 100.0
    assert reports.written[0][3] == {"steps_per_second": 1.0}


@pytest.mark.parametrize("put_down_at", range(1, 9))
def test_a_recorder_that_goes_on_reports_what_one_would_have(put_down_at):
    """Sums that are not representable come out the same, bit for bit, through JSON."""

    def run(recorder, steps):
        for step in steps:
            recorder.put("train", step, _loss(step / 3, 1 / 7), report=step % 4 == 0)
            recorder.put("eval", step, _loss(step / 11), report=step % 3 == 0)
        recorder.drain()

    whole, first, second = Reports(), Reports(), Reports()
    run(_recorder(whole), range(1, 9))
    recorder = _recorder(first)
    run(recorder, range(1, put_down_at + 1))
    state, latest = json.loads(json.dumps(recorder.state())), recorder.latest("train")
    recorder = _recorder(second)
    recorder.put("train", 99, _loss(1e9), report=True)  # Forgotten: it was not saved.
    recorder.resume(state)
    assert recorder.latest("train") == latest
    run(recorder, range(put_down_at + 1, 9))
    expected = [entry[:3] for entry in whole.written]
    assert [entry[:3] for entry in first.written + second.written] == expected


def test_a_step_that_is_not_finite_is_reported_and_raised():
    reports = Reports()
    recorder = _recorder(reports)
    recorder.put("train", 1, _loss(1, nonfinite=0), report=False)
    recorder.put("train", 2, _loss(math.nan, nonfinite=1), report=False)
    with pytest.raises(NonFiniteError, match="the loss or a gradient of step 2 is not finite"):
        recorder.drain()
    (step, _, metrics, _), *more = reports.written
    assert (step, more) == (2, [])
    assert math.isnan(metrics["loss"])


def test_a_step_whose_weights_are_all_zero_has_nothing_to_learn():
    recorder = _recorder(Reports())
    recorder.put("eval", 0, {"loss": (0, 0)}, report=True)
    recorder.put("train", 1, {"loss": (0, 0), "nonfinite": (0, 8)}, report=False)
    with pytest.raises(NonFiniteError, match="step 1 had nothing to learn, because the count of"):
        recorder.drain()
    for options, metrics in (({"skips_nonfinite": True}, {"nonfinite": (0, 8)}), ({}, {})):
        recorder = _recorder(Reports(), **options)
        recorder.put("train", 1, {"loss": (0, 0), **metrics}, report=False)
        recorder.drain()


def test_a_skipped_step_is_counted_and_leaves_the_mean_alone():
    reports = Reports()
    recorder = _recorder(reports, skips_nonfinite=True)
    losses = [(2, 0), (math.nan, 1), (4, 0), (math.inf, 1)]
    for step, (loss, nonfinite) in enumerate(losses, 1):
        recorder.put("train", step, _loss(loss, nonfinite=nonfinite), report=step in (3, 4))
    recorder.drain()
    first, second = (metrics for _, _, metrics, _ in reports.written)
    assert first == {"loss": 3, "learning_rate": 0.2, "skipped_steps": 1}
    assert math.isnan(second["loss"])  # There was no other step.
    assert second["skipped_steps"] == 2
    state = recorder.state()
    recorder.resume(json.loads(json.dumps(state)))
    assert recorder.state() == state or math.isnan(state["latest"]["train"]["loss"])


def test_an_evaluation_may_be_infinite():
    reports = Reports()
    recorder = _recorder(reports)
    recorder.put("eval", 3, _loss(math.inf), report=True)
    recorder.drain()
    assert reports.written[0][2]["loss"] == math.inf
