"""The loop keeps the device fed, saves what can be gone on from, and stops cleanly."""

import itertools
import signal
import types
from pathlib import Path

import jax
import ml_collections
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from manualpar.data import ArraySplit, Dataset, train_batch
from manualpar.system.cluster import Cluster
from manualpar.training import trainer
from manualpar.training.checkpoints import Restored
from manualpar.training.division import Division
from manualpar.training.monitoring.profiling import StepProfiler
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.recorder import LAG, NonFiniteError, Recorder
from manualpar.training.replicas import ReplicaError
from manualpar.training.trainer import MAX_ROLLBACKS, StoppedError, Trainer, postponed_interrupt
from manualpar.training.workdir import START, Position

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
    """Counts steps and adds up labels; `log` tells in which order things happened.

    Its state is the number of updates. The batches that hold a poisonous label make their step not
    finite, and `at` calls functions in a step.
    """

    def __init__(self, *, at=None, poison=()) -> None:
        self.log: list[tuple] = []
        self.labels: list[list[int]] = []
        self.batch_sharding = SingleDeviceSharding(jax.devices()[0])
        self.mesh, self.layout = None, self.log
        self._at = at or {}
        self._poison = set(poison)

    def _metrics(self, name, batch, nonfinite=None):
        count = float(batch.mask.sum())
        total = float((batch.labels * batch.mask).sum())
        fetched = lambda: self.log.append(("fetch", *name))  # noqa: E731
        more = {} if nonfinite is None else {"nonfinite": (float(nonfinite), 1.0)}
        return {"loss": (FakeMetric(total, waited_for=fetched), count), **more}

    def step_at(self, number):
        return self.train_step

    def train_step(self, state, batch):
        state += 1
        self.log.append(("train", state))
        self.labels.append(np.asarray(batch.labels).tolist())
        self._at.pop(state, lambda: None)()
        nonfinite = bool(self._poison & set(self.labels[-1]))
        return state, self._metrics(("train", state), batch, nonfinite)

    def eval_step(self, state, batch):
        self.log.append(("eval", state))
        return self._metrics(("eval", state), batch)


class Reports:
    """A writer and a screen that remember."""

    def __init__(self) -> None:
        self.written: list[tuple] = []
        self.steps: list[int] = []

    def write(self, step, split, metrics, *, throughput):
        self.written.append((step, split, metrics["loss"]))

    def report(self, step, split, metrics):
        pass

    def call(self, name, step, *args):
        return step(*args)

    def advance(self, step):
        self.steps.append(step)

    workdir = Path("unused")

    def place(self):
        return {"metrics.jsonl": len(self.written), "throughput.jsonl": 0}

    def go_back(self, place, *, step, report):
        del self.written[place["metrics.jsonl"] :]


class FakeCheckpoints:
    """Keeps states in memory."""

    def __init__(self, log) -> None:
        self.saved: list[tuple[int, dict]] = []
        self.folder = Path("run") / "checkpoints"
        self.longest_save = 600.0
        self._log = log

    def save(self, program, state, *, step, extra, metrics):
        self._log.append(("save", state))
        self.saved.append((state, extra))

    def wait(self):
        if self.saved:
            self._log.append(("saved", self.saved[-1][0]))

    def latest_step(self):
        return self.saved[-1][0] if self.saved else None

    def restore(self, program, *, on_corruption, report):
        state, extra = self.saved[-1]
        return Restored(state, state, extra)


def _split(num_examples: int, first_label: int) -> ArraySplit:
    labels = np.arange(first_label, first_label + num_examples, dtype=np.int32)
    return ArraySplit(labels[:, None].astype(np.float32), labels)


DATASET = Dataset(train=_split(30, 0), eval=_split(6, 100), test=_split(7, 200), fingerprint="")


class Run:
    """The training of a fake program, and all that came of it."""

    def __init__(self, program=None, *, save_every=0, position=START, profile=range(0), **options):
        self.program = program or FakeProgram()
        self.reports, self.cluster, self.lines = Reports(), Cluster(), []
        self.checkpoints = FakeCheckpoints(self.program.log)
        self.config = ml_collections.ConfigDict(
            {
                "seed": 5,
                "data": {"batch_size": BATCH_SIZE, "prefetch": 2},
                "optimizer": {"ema_decay": 0.0},
                "training": {"num_steps": 7, "eval_every_steps": 3, "log_every_steps": 2}
                | {"eval_batches": 0, "on_nonfinite": "stop"},
                "checkpoint": {"every_steps": save_every, "on_corruption": "stop"},
                "debug": {"check_replicas_every": options.pop("check_replicas_every", 0)},
            }
        )
        self.config.training.update(options)
        self.error: BaseException | None = None
        self.position = position
        self.profiler = StepProfiler(profile, Path("unused"), print)

    @property
    def saved(self) -> list[Position]:
        """The position of every checkpoint."""
        return [Position(state, extra["position"]) for state, extra in self.checkpoints.saved]

    @property
    def reported(self) -> list[int]:
        """How many reports were written before every checkpoint."""
        return [extra["files"]["metrics.jsonl"] for _, extra in self.checkpoints.saved]

    def _train(self):
        recorder = Recorder(
            self.reports,
            self.reports,
            learning_rate=lambda step: step / 10,
            rates=lambda steps, seconds: {},
        )
        task = types.SimpleNamespace(dataset=DATASET)
        experiment = types.SimpleNamespace(
            config=self.config, program=self.program, task=task, division=Division(1, 1, BATCH_SIZE)
        )
        trainer = Trainer(
            experiment,
            self.checkpoints,
            recorder,
            self.reports,
            self.cluster,
            StallDetector(0),
            self.profiler,
            self.lines.append,
        )
        return trainer.train(self.position.step, self.position)

    def __call__(self) -> "Run":
        try:
            self.state = self._train()
        except (KeyboardInterrupt, ReplicaError, StoppedError, NonFiniteError) as error:
            self.error = error
        return self


def _batch_labels(position: int) -> list[int]:
    batch = train_batch(DATASET.train, position, batch_size=BATCH_SIZE, seed=5)
    return batch.labels.tolist()


def test_reports_are_means_over_their_interval_and_evaluation_counts_each_example_once():
    run = Run()()
    expected = [_batch_labels(4 * s) for s in range(7)]
    assert run.program.labels == expected
    assert run.state == 7

    def mean(first: int, last: int) -> float:
        return pytest.approx(np.mean(expected[first - 1 : last]))

    evaluated = np.mean(DATASET.eval.labels)
    assert run.reports.written == [
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
    assert run.reports.steps == [1, 2, 3, 4, 5, 6, 7]


def test_metrics_are_fetched_behind_the_device_in_the_order_of_dispatch():
    run = Run(num_steps=6, eval_every_steps=0, log_every_steps=1)()
    in_flight, most = 0, 0
    for event in run.program.log:
        in_flight += -1 if event[0] == "fetch" else 1
        most = max(most, in_flight)
        if event[:2] == ("fetch", "train") and event[2] < 5:
            assert in_flight >= LAG, f"{event} left the device with nothing to do"
    assert most == LAG + 1
    fetched = [event[1:] for event in run.program.log if event[0] == "fetch"]
    assert fetched == [event for event in run.program.log if event[0] != "fetch"]


def test_without_periodic_evaluation_there_is_only_the_test():
    run = Run(eval_every_steps=0)()
    assert [split for _, split, _ in run.reports.written] == ["train"] * 4 + ["test"]


def test_an_evaluation_may_be_cut_short_and_the_test_is_not():
    run = Run(eval_batches=1)()
    assert run.reports.written[0] == (0, "eval", np.mean(DATASET.eval.labels[:4]))
    assert run.reports.written[-1] == (7, "test", np.mean(DATASET.test.labels))


@pytest.mark.parametrize("step", range(1, 7))
def test_a_run_that_goes_on_sees_the_batches_that_are_left(step):
    whole = Run()()
    run = Run(position=Position(step, 4 * step))()
    assert run.program.labels == whole.program.labels[step:]
    assert (0, "eval") not in [entry[:2] for entry in run.reports.written]


def test_a_run_that_was_at_its_end_is_tested_again():
    run = Run(position=Position(7, 28))()
    assert run.program.labels == []
    assert [entry[:2] for entry in run.reports.written] == [(7, "test")]


def test_a_checkpoint_comes_after_all_that_is_reported_of_its_step():
    run = Run(save_every=3)()
    assert run.saved == [Position(3, 12), Position(6, 24), Position(7, 28)]
    last = [run.reports.written[number - 1][:2] for number in run.reported]
    assert last == [(3, "eval"), (6, "eval"), (7, "eval")]


@pytest.mark.parametrize("save_every", [0, 5])
def test_a_request_to_stop_is_followed_after_the_step_and_saved(save_every):
    run = Run(save_every=save_every)
    run.program._at = {4: run.cluster.request_stop}
    run()
    assert isinstance(run.error, StoppedError)
    assert (("saved", 4) in run.program.log) == bool(save_every)
    assert (run.error.step, run.error.is_saved) == (4, bool(save_every))
    assert str(run.error) == "stopped after step 4"
    assert run.reports.written[-1][:2] == (4, "train")
    assert ("train", 5) not in run.program.log
    if save_every:
        assert run.saved == [Position(4, 16)]


@pytest.mark.parametrize("save_every", [0, 5])
def test_ctrl_c_ends_after_the_step_with_everything_reported_and_saved(save_every):
    program = FakeProgram(at={4: lambda: signal.raise_signal(signal.SIGINT)})
    before = signal.getsignal(signal.SIGINT)
    run = Run(program, save_every=save_every)()
    assert isinstance(run.error, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert run.reports.written[-1][:2] == (4, "train")
    assert ("train", 5) not in program.log
    if save_every:
        assert run.saved == [Position(4, 16)]


def test_a_step_that_is_not_finite_ends_a_run_before_it_is_saved():
    poison = _batch_labels(4 * 3)[0]  # Step 4 has it first, step 3 ends at a checkpoint.
    first = next(s for s in range(7) if poison in _batch_labels(4 * s)) + 1
    run = Run(FakeProgram(poison=[poison]), save_every=1)()
    assert isinstance(run.error, NonFiniteError)
    assert run.error.step == first
    assert [position.step for position in run.saved] == list(range(1, first))


def _poisoned_run(*, steps, **options) -> Run:
    """A run in which the batches of some steps, counted from 1 along the data, are not finite."""
    run = Run(**options)
    train_step = run.program.train_step
    poisoned = [_batch_labels(4 * (step - 1)) for step in steps]

    def step(state, batch):
        run.program._poison = set()
        if np.asarray(batch.labels).tolist() in poisoned:
            run.program._poison = set(np.asarray(batch.labels).tolist())
        return train_step(state, batch)

    run.program.train_step = step
    return run


@pytest.mark.parametrize("bad_step", range(3, 8))
def test_a_rollback_goes_to_the_checkpoint_and_past_the_bad_batch(bad_step):
    run = _poisoned_run(steps=[bad_step], save_every=2, on_nonfinite="rollback", num_steps=8)()
    assert run.error is None
    back = (bad_step - 1) // 2 * 2
    # What led to the final state, by position in the data.
    trained = [_batch_labels(4 * s) for s in (*range(back), *range(bad_step, 8 + bad_step - back))]
    kept = run.program.labels[:back] + run.program.labels[-(8 - back) :]
    assert kept == trained
    assert run.lines == [
        f"the loss or a gradient of step {bad_step} is not finite: back to the checkpoint of step "
        f"{back}, past the {bad_step - back} batches since then"
    ]
    steps = [step for step, split, _ in run.reports.written if split == "train"]
    assert steps == [2, 4, 6, 8]


def test_bad_batches_one_after_the_other_are_all_passed():
    run = _poisoned_run(steps=[3, 4], save_every=2, on_nonfinite="rollback")()
    assert run.error is None
    kept = run.program.labels[:2] + run.program.labels[-5:]
    assert kept == [_batch_labels(4 * (step - 1)) for step in (1, 2, 5, 6, 7, 8, 9)]


def test_rollbacks_with_checkpoints_between_them_are_not_counted_together():
    bad = range(3, 3 + 3 * (MAX_ROLLBACKS + 2), 3)
    run = _poisoned_run(steps=bad, save_every=1, on_nonfinite="rollback", num_steps=12)()
    assert run.error is None
    assert len(run.lines) == MAX_ROLLBACKS + 2


def test_a_rollback_without_a_checkpoint_is_not_possible():
    run = _poisoned_run(steps=[1], save_every=2, on_nonfinite="rollback")()
    assert isinstance(run.error, NonFiniteError)
    assert run.lines == []


def test_a_run_that_does_not_get_better_is_not_rolled_back_for_ever():
    run = _poisoned_run(steps=range(3, 100), save_every=2, on_nonfinite="rollback")()
    assert isinstance(run.error, NonFiniteError)
    assert len(run.lines) == MAX_ROLLBACKS


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

    monkeypatch.setattr(trainer, "ReplicaSentinel", Sentinel)
    return failing


def test_replicas_are_checked_after_every_so_many_steps(fail_at):
    run = Run(check_replicas_every=3)()
    assert run.error is None
    log = run.program.log
    before = [event for event, after in itertools.pairwise(log) if after[0] == "check"]
    assert [event for event in log if event[0] == "check"] == [("check", 3), ("check", 6)]
    assert all(event[0] in ("train", "fetch") for event in before)
    assert run.reports.written == Run()().reports.written
    assert not any(event[0] == "check" for event in Run()().program.log)


def test_replicas_that_differ_end_a_training_with_everything_reported(fail_at):
    fail_at["step"] = 4
    run = Run(check_replicas_every=2)()
    assert isinstance(run.error, ReplicaError)
    assert str(run.error) == "after step 4 'params/x' is not the same, ..."
    assert run.program.log[-1] == ("fetch", "train", 4)
    assert run.reports.written[-1][:2] == (4, "train")
    assert ("train", 5) not in run.program.log


def test_a_second_ctrl_c_does_not_wait():
    with postponed_interrupt(Cluster()) as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_told_to_ignore_ctrl_c_keeps_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with postponed_interrupt(Cluster()) as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert not interrupted.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_every_process_goes_through_the_same_phases_and_is_watched_no_more_at_the_end():
    """Who has entered fewer phases than the others is behind, so none may depend on the process."""
    entered = []
    for profile in (range(0), range(90, 91)):
        run = Run(num_steps=2, eval_every_steps=2, save_every=1, profile=profile)
        phases = []
        run.cluster.enter = lambda phase, *, into=phases, **_: into.append(
            phase.split(" in run")[0]
        )
        run()
        entered.append(phases)
    step = ["reading a batch", "in a step", "between two steps"]
    save = ["waiting for the checkpoint that was saved last", "saving"]
    evaluation = ["evaluating"] * 3  # Two batches.
    test = ["evaluating"] * 3
    assert entered[0] == [
        *evaluation,
        "between two steps",
        *step,
        *save,
        *step,
        *evaluation,
        "between two steps",
        *save,
        *test,
        "finishing",
        "",
    ]
    assert entered[1] == entered[0]


def test_a_loop_that_fails_is_watched_no_more():
    run = Run(FakeProgram(poison=[_batch_labels(0)[0]]))
    phases = []
    run.cluster.enter = phases.append
    assert isinstance(run().error, NonFiniteError)
    assert phases[-1] == ""
