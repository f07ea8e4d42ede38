"""The loop keeps the device fed, reports exact means, and stops cleanly."""

import itertools
import signal

import jax
import numpy as np
import pytest

from manualpar.replicas import ReplicaError
from manualpar.training import loop
from manualpar.training.data import Dataset, Split, train_batch
from manualpar.training.loop import LAG, Recorder, postponed_interrupt, train

BATCH_SIZE = 4


class FakeMetric:
    """A number on a device: it writes down when somebody waits for it."""

    def __init__(self, value: float, *, waited_for) -> None:
        self._value = value
        self._waited_for = waited_for

    def __array__(self, dtype=None, copy=None):
        self._waited_for()
        return np.asarray(self._value, dtype)


class FakeProgram:
    """Counts examples and adds up labels; `log` tells in which order things happened."""

    def __init__(self, *, interrupt_at: int | None = None) -> None:
        self.log: list[tuple] = []
        self.labels: list[np.ndarray] = []
        self.batch_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self._interrupt_at = interrupt_at
        self.mesh, self.layout = None, self.log

    def _metrics(self, name, batch):
        count = float(batch.mask.sum())
        total = float((batch.labels * batch.mask).sum())
        fetched = lambda: self.log.append(("fetch", *name))  # noqa: E731
        return {"loss": (FakeMetric(total, waited_for=fetched), count)}

    def train_step(self, state, batch):
        state += 1
        self.log.append(("train", state))
        self.labels.append(np.asarray(batch.labels))
        if state == self._interrupt_at:
            signal.raise_signal(signal.SIGINT)
        return state, self._metrics(("train", state), batch)

    def eval_step(self, state, batch):
        self.log.append(("eval", state))
        return self._metrics(("eval", state), batch)


class Reports:
    """A writer and a progress report that remember."""

    def __init__(self) -> None:
        self.written: list[tuple] = []
        self.shown: list[tuple] = []
        self.steps: list[int] = []

    def write(self, step, split, metrics):
        assert self.shown == self.written, "shown before it was written"
        self.written.append((step, split, metrics["loss"]))
        self.metrics = metrics

    def report(self, step, split, metrics):
        self.shown.append((step, split, metrics["loss"]))

    def advance(self, step):
        self.steps.append(step)


def _split(num_examples: int, first_label: int) -> Split:
    labels = np.arange(first_label, first_label + num_examples, dtype=np.int32)
    return Split(labels[:, None].astype(np.float32), labels)


DATASET = Dataset(_split(10, 0), _split(6, 100), _split(7, 200), num_classes=300)


def _train(
    program: FakeProgram,
    *,
    num_steps=7,
    eval_every_steps=3,
    log_every_steps=2,
    check_replicas_every=0,
):
    reports = Reports()
    recorder = Recorder(reports, reports, batch_size=BATCH_SIZE, learning_rate=lambda s: s / 10)
    try:
        train(
            program,
            0,
            DATASET,
            recorder=recorder,
            seed=5,
            batch_size=BATCH_SIZE,
            num_steps=num_steps,
            eval_every_steps=eval_every_steps,
            log_every_steps=log_every_steps,
            check_replicas_every=check_replicas_every,
        )
    except (KeyboardInterrupt, ReplicaError) as error:
        return reports, recorder, error
    return reports, recorder, None


def test_reports_are_means_over_their_interval_and_evaluation_counts_each_example_once():
    program = FakeProgram()
    reports, recorder, _ = _train(program)
    expected = [train_batch(DATASET.train, s, batch_size=4, seed=5).labels for s in range(7)]
    np.testing.assert_array_equal(program.labels, expected)

    def mean(first: int, last: int) -> float:
        return pytest.approx(np.mean(expected[first - 1 : last]))

    evaluated = np.mean(DATASET.eval.labels)
    assert reports.written == [
        (0, "eval", evaluated),
        (2, "train", mean(1, 2)),
        (3, "eval", evaluated),
        (4, "train", mean(3, 4)),
        (6, "train", mean(5, 6)),
        (6, "eval", evaluated),
        (7, "train", mean(7, 7)),
        (7, "eval", evaluated),
        (7, "test", np.mean(DATASET.test.labels)),
    ]
    assert reports.steps == [1, 2, 3, 4, 5, 6, 7]
    assert recorder.latest("test") == {"loss": np.mean(DATASET.test.labels)}


def test_metrics_are_fetched_behind_the_device_in_the_order_of_dispatch():
    program = FakeProgram()
    _train(program, num_steps=6, eval_every_steps=0, log_every_steps=1)
    in_flight, most = 0, 0
    for event in program.log:
        in_flight += -1 if event[0] == "fetch" else 1
        most = max(most, in_flight)
        if event[:2] == ("fetch", "train") and event[2] < 5:
            assert in_flight >= LAG, f"{event} left the device with nothing to do"
    assert most == LAG + 1
    fetched = [event[1:] for event in program.log if event[0] == "fetch"]
    assert fetched == [event for event in program.log if event[0] != "fetch"]


def test_without_periodic_evaluation_there_is_only_the_test():
    reports, _, _ = _train(FakeProgram(), eval_every_steps=0)
    assert [split for _, split, _ in reports.written] == ["train"] * 4 + ["test"]


def test_examples_per_second_leave_out_compilation_and_evaluation(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    reports = Reports()
    recorder = Recorder(reports, reports, batch_size=32, learning_rate=lambda step: step / 10)

    def put(split: str, step: int, *, report: bool = False) -> dict:
        recorder.put(split, step, {"loss": (1.0, 1.0)}, report=report)
        recorder.drain()  # takes one second
        return reports.metrics if report else {}

    assert put("train", 1, report=True) == {"loss": 1, "learning_rate": 0}
    put("train", 2)
    for _ in range(5):
        put("eval", 2)
    assert put("train", 3, report=True)["examples_per_second"] == 32
    assert reports.metrics["learning_rate"] == 0.2


def test_ctrl_c_ends_after_the_step_with_everything_reported():
    program = FakeProgram(interrupt_at=4)
    before = signal.getsignal(signal.SIGINT)
    reports, _, interrupted = _train(program)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert program.log[-1] == ("fetch", "train", 4)
    assert reports.written[-1][:2] == (4, "train")


@pytest.fixture
def fail_at(monkeypatch) -> dict[str, int | None]:
    """Has a sentinel that writes its checks into the program's log and fails at `["step"]`."""
    failing: dict[str, int | None] = {"step": None}

    class Sentinel:
        def __init__(self, mesh, layout):
            self._log = layout

        def check(self, state):
            self._log.append(("check", state))
            if state == failing["step"]:
                raise ReplicaError("'params/x' is not the same, ...")

    monkeypatch.setattr(loop, "ReplicaSentinel", Sentinel)
    return failing


def test_replicas_are_checked_after_every_so_many_steps(fail_at):
    program = FakeProgram()
    reports, _, error = _train(program, check_replicas_every=3)
    assert error is None
    before = [event for event, after in itertools.pairwise(program.log) if after[0] == "check"]
    checks = [event for event in program.log if event[0] == "check"]
    assert checks == [("check", 3), ("check", 6)]
    assert all(event[0] in ("train", "fetch") for event in before)
    assert reports.written == _train(FakeProgram())[0].written
    assert not any(event[0] == "check" for event in FakeProgram().log)


def test_replicas_that_differ_end_a_training_with_everything_reported(fail_at):
    fail_at["step"] = 4
    program = FakeProgram()
    reports, _, error = _train(program, check_replicas_every=2)
    assert isinstance(error, ReplicaError)
    assert str(error) == "after step 4 'params/x' is not the same, ..."
    assert program.log[-1] == ("fetch", "train", 4)
    assert reports.written[-1][:2] == (4, "train")
    assert ("train", 5) not in program.log


def test_examples_per_second_leave_out_checks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    reports = Reports()
    recorder = Recorder(reports, reports, batch_size=32, learning_rate=lambda step: step / 10)
    recorder.leave_out(7.0)  # Nothing to leave it out of.
    for step in range(1, 4):
        recorder.put("train", step, {"loss": (1.0, 1.0)}, report=step == 3)
        now[0] += 1.0
        recorder.drain()
        now[0] += 100.0
        recorder.leave_out(100.0)
    assert reports.metrics["examples_per_second"] == 32


def test_a_second_ctrl_c_does_not_wait():
    with postponed_interrupt() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_told_to_ignore_ctrl_c_keeps_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with postponed_interrupt() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
