"""The training loop: it reads a batch, takes a step, and does what is due.

Everything else that happens between two steps is an action: `trainer.every(n, action)` calls
`action(state, position)` after every `n` steps. Actions are called in the order in which they were
added, and an exception that an action raises ends the loop. `Trainer.train` adds, in this order,
the check of replicas, evaluation, the user's hooks, and saving. So the checkpoint of step s is
saved after all reports of step s. A run that resumes from this checkpoint repeats no report and
leaves out no report.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax

from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import TrainState
from manualpar.data import Batches, BatchStream, evaluation_batches, train_batches
from manualpar.parameter_average import ema_params
from manualpar.system.cluster import UNWATCHED, Cluster
from manualpar.system.cluster.agreement import gather_in_first
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.experiment import Experiment
from manualpar.training.hooks import Hooks
from manualpar.training.monitoring import run_record as run_times
from manualpar.training.monitoring.profiling import StepProfiler
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.run_record import TimeLedger
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.recorder import NonFiniteError, Recorder
from manualpar.training.replicas import ReplicaError, ReplicaSentinel
from manualpar.training.workdir import START, Position, position_of, restore

# After this many rollbacks without a new checkpoint the run ends, because the cause is then
# probably not the data.
MAX_ROLLBACKS = 3
BETWEEN_STEPS = "between two steps"
EXTRA_SECONDS = 30.0

Action = Callable[[TrainState, Position], None]


class StoppedError(Exception):
    """The run was asked to stop, and stopped after `step`; it can resume if the step is saved."""

    def __init__(self, step: int, *, is_saved: bool) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.is_saved = is_saved


class EndedEarlyError(Exception):
    """A hook ended the training after `step`; the run is tested as after its last step."""

    def __init__(self, state: TrainState, step: int) -> None:
        super().__init__(f"a hook ended the training after step {step}")
        self.state, self.step = state, step


class _Scheduled(NamedTuple):
    action: Action
    steps: int
    at_start: bool
    at_end: bool


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains an experiment, evaluates during the training, and tests at the end."""

    experiment: Experiment
    checkpoints: Checkpoints
    recorder: Recorder
    writer: RunWriter
    cluster: Cluster
    detector: StallDetector
    profiler: StepProfiler
    report: Callable[[str], None]  # Called with a sentence for the user.
    hooks: Hooks = dataclasses.field(default_factory=Hooks)
    times: TimeLedger = dataclasses.field(default_factory=TimeLedger)
    _actions: list[_Scheduled] = dataclasses.field(default_factory=list)
    _saving: list[int] = dataclasses.field(default_factory=list)  # Steps not yet on disk.

    def train(self, state: TrainState, position: Position = START) -> TrainState:
        """Trains from a position to the last step, and tests; `state` is donated.

        The metrics of the test are `recorder.latest("test")`.

        Raises:
          StoppedError: One of the processes received SIGTERM or SIGUSR1.
          KeyboardInterrupt: Ctrl-C was pressed. The current step was first finished, reported and
            saved.
          NonFiniteError: The loss or a gradient is not finite. There is no checkpoint of that step
            or of a later one.
          ReplicaError: Copies of the state differ. All steps before the check were reported first.
          Exception: The data or a hook raised it. The current step was first reported and saved, if
            there is only one process.
        """
        config = self.experiment.config
        if config.debug.check_replicas_every:
            self.every(config.debug.check_replicas_every, self._replica_check())
        if self.experiment.task.dataset.eval is not None:
            self.every(config.training.eval_every_steps, self._evaluate, at_start=True, at_end=True)
        if self.hooks.have("on_step"):
            self.every(1, lambda state, position: self.hooks.call("on_step", position.step, state))
        self.every(1, self._save_or_stop)
        with contextlib.ExitStack() as stack:
            for context in (postponed_interrupt(self.cluster), self.detector, self.profiler):
                stack.enter_context(context)
            # After the loop the processes do different work (only process 0 writes a report), so
            # their phases are no longer compared.
            stack.callback(self.cluster.enter, UNWATCHED)
            last = config.training.num_steps
            self.times.enter(run_times.TRAINING)
            try:
                state = self._run_and_roll_back(state, position)
            except EndedEarlyError as error:
                self.report(str(error))
                state, last = error.state, error.step
            if self.experiment.task.dataset.test is not None:
                with self.times.during(run_times.EVALUATING):
                    self._evaluate_on("test", state, last)
            self.times.enter(run_times.ENDING)
            self.cluster.enter("finishing")
            self.recorder.drain()
            if self._saving and self.hooks.have("on_checkpoint"):
                self._wait_for_checkpoint()
        return state

    def every(
        self, steps: int, action: Action, *, at_start: bool = False, at_end: bool = False
    ) -> None:
        """Adds an action, which the loop calls after every `steps` steps with (state, position).

        The next step donates the state, so the action must not keep it. If `steps` is 0, the action
        is never called. If `at_start`, it is also called before the first step of a run. If
        `at_end`, it is also called after the last step, even if that is no multiple of `steps`.
        """
        if steps:
            self._actions.append(_Scheduled(action, steps, at_start, at_end))

    def run(self, state: TrainState, position: Position) -> TrainState:
        """Runs the loop. On return, the recorder may not have fetched the last metrics yet."""
        config = self.experiment.config
        num_steps, log_every = config.training.num_steps, config.training.log_every_steps
        if self.hooks.should_stop():  # This may be a run that a hook had ended.
            raise EndedEarlyError(state, position.step)
        if not position.step:
            for each in self._actions:
                if each.at_start:
                    each.action(state, position)
        with contextlib.ExitStack() as stack:
            batches = stack.enter_context(contextlib.closing(self.read_from(position.examples)))
            stack.push(lambda _, error, __: self._save_before(error, state, position))
            while position.step < num_steps:
                self.cluster.enter("reading a batch")
                with self.hooks.user_code():
                    batch = next(batches)
                step = position.step + 1
                position = Position(step, position.examples + config.data.batch_size)
                # All processes must enter the same number of phases, so a process that does not
                # profile enters a phase too.
                is_profiled = self.profiler.covers(step)
                self.cluster.enter("in a profiled step" if is_profiled else "in a step")
                self.profiler.begin_step(step, state)
                call = self.experiment.program.step_at(step)
                state, metrics = self.recorder.screen.call("training step", call, state, batch)
                metrics = _of_one_copy(metrics, batches.copies)
                self.times.set_step(step)
                self.profiler.end_step(step, state)
                self.cluster.enter(BETWEEN_STEPS)
                is_last = step == num_steps
                is_reported = is_last or step % log_every == 0
                self.recorder.put("train", step, metrics, report=is_reported)
                self.detector.beat(step)
                if is_reported:
                    self.times.flush()
                for each in self._actions:
                    if step % each.steps == 0 or (is_last and each.at_end):
                        each.action(state, position)
        return state

    def read_from(self, examples: int) -> Batches:
        """Returns an endless iterator of batches after the first `examples` examples; close it."""
        config = self.experiment.config
        return train_batches(
            self.experiment.task.dataset.train,
            seed=config.seed,
            batch_size=config.data.batch_size,
            sharding=self.experiment.program.batch_sharding,
            start_position=examples,
            prefetch=config.data.prefetch,
            multiple=self._multiple,
        )

    @property
    def _multiple(self) -> int:
        """The number that has to divide the examples of a batch."""
        return self.experiment.division.devices * self.experiment.division.minibatches

    def _run_and_roll_back(self, state: TrainState, position: Position) -> TrainState:
        """Runs the loop; after a non-finite loss or gradient, rolls back if the config allows it.

        A rollback restores the latest checkpoint. The run then continues with the batches after the
        batch that failed.
        """
        batch_size, rollbacks = self.experiment.config.data.batch_size, 0
        while True:
            try:
                return self.run(state, position)
            except NonFiniteError as error:
                if any(map(self._is_due, range(position.step + 1, error.step))):
                    rollbacks = 0
                rollbacks += 1
                restored = self._go_back() if rollbacks <= MAX_ROLLBACKS else None
                if restored is None:
                    raise
                state, (step, earlier) = restored
                # This counts from `position`, because the checkpoint's position may be too small:
                # an earlier rollback to the same checkpoint skipped batches.
                failed = position.examples + (error.step - position.step) * batch_size
                position = Position(step, failed)
                self.report(
                    f"{error}: back to the checkpoint of step {step}, past the "
                    f"{(failed - earlier) // batch_size} batches since then"
                )

    def _go_back(self) -> tuple[TrainState, Position] | None:
        """Restores the latest checkpoint, if the config allows it and there is one; else `None`."""
        config = self.experiment.config
        if config.training.on_nonfinite != "rollback" or not config.checkpoint.every_steps:
            return None
        self.cluster.enter("going back to a checkpoint")
        with self._not_training(run_times.RESTORING, "going back to a checkpoint"):
            self.checkpoints.wait()
            if self.checkpoints.latest_step() is None:
                return None
            workdir = self.checkpoints.folder.parent
            restored = restore(self.checkpoints, self.experiment, workdir, report=self.report)
            self.recorder.resume(restored.extra["recorder"])
            self.hooks.restore(restored.extra.get("hooks", []))
            self.writer.go_back(restored.extra["files"], step=restored.step, report=self.report)
            self.times.set_step(restored.step)
        return restored.state, position_of(restored)

    def _replica_check(self) -> Action:
        """Makes an action that checks that copies of the state are equal, bit for bit."""
        program = self.experiment.program
        sentinel = ReplicaSentinel(program.mesh, program.layout)

        def check(state: TrainState, position: Position) -> None:
            self.cluster.enter("comparing replicas")
            jax.block_until_ready(state)
            try:
                with self._not_training(run_times.COMPARING, "comparing replicas"):
                    sentinel.check(state)
            except ReplicaError as error:
                self.recorder.drain()
                raise ReplicaError(f"after step {position.step} {error}") from error

        return check

    @contextlib.contextmanager
    def _not_training(self, what: str, work: str) -> Iterator[None]:
        """Does `work` in the context: its time counts as `what`, and not in the rates."""
        with self.recorder.leave_out(), self.detector.during(work), self.times.during(what):
            yield

    def _evaluate(self, state: TrainState, position: Position) -> None:
        with self.times.during(run_times.EVALUATING):
            self._evaluate_on("eval", state, position.step)
        self.cluster.enter(BETWEEN_STEPS)

    def _evaluate_on(self, split: str, state: TrainState, step: int) -> None:
        """Evaluates a split, with the moving average of the parameters if the run keeps one.

        The recorder reports the mean metrics once it has fetched them.
        """
        config, program = self.experiment.config, self.experiment.program
        batches = evaluation_batches(
            getattr(self.experiment.task.dataset, split),
            config.data.batch_size,
            program.batch_sharding,
            max_batches=config.training.eval_batches if split == "eval" else 0,
            multiple=self._multiple,
        )
        waiting: Any = None
        self.cluster.enter("evaluating")
        if config.optimizer.ema_decay:
            state = ema_params(state)
        while True:
            try:
                with self.hooks.user_code():
                    batch = next(batches, None)
            except Exception:
                self.recorder.drop(split)
                raise
            if batch is None:
                break
            self.cluster.enter("evaluating")
            if waiting is not None:
                self.recorder.put(split, step, waiting, report=False)
            waiting = self.recorder.screen.call("evaluation step", program.eval_step, state, batch)
            waiting = _of_one_copy(waiting, batches.copies)
            self.detector.beat(step)
        self.recorder.put(split, step, waiting, report=True)

    def _save_before(
        self, error: BaseException | None, state: TrainState, position: Position
    ) -> None:
        """Saves the state before an error of the user's code ends the run.

        Several processes do not agree on such an error, so they cannot save together.
        """
        step, saves = position.step, self.experiment.config.checkpoint.every_steps > 0
        failed = self.hooks.error
        if failed is None or error is not failed:
            return
        if not saves or not step or self.cluster.num_processes > 1:
            return
        try:
            self._wait_for_checkpoint()
            if self.checkpoints.latest_step() != step:
                self.save(state, position)
                self._wait_for_checkpoint()
        except Exception as failure:
            failed.add_note(f"The state after step {step} is not saved: {failure}")
        else:
            self.report(f"the state after step {step} is saved, because the user's code failed")

    def _save_or_stop(self, state: TrainState, position: Position) -> None:
        """Saves if a save is due, and ends the loop if the run was asked to stop."""
        config, step = self.experiment.config, position.step
        stops = self.cluster.should_stop(step)
        is_last = step == config.training.num_steps
        ends = self.hooks.should_stop() and not is_last
        is_end = stops or ends or is_last
        if stops:
            self.times.enter(run_times.STOPPING)
        saves = self._is_due(step) or (config.checkpoint.every_steps > 0 and is_end)
        if saves:
            self.save(state, position)
        if stops:
            self.recorder.drain()
            self._wait_for_checkpoint()
            if saves:
                self.cluster.nothing_to_lose()
            raise StoppedError(step, is_saved=saves)
        if ends:
            raise EndedEarlyError(state, step)

    def _is_due(self, step: int) -> bool:
        every: int = self.experiment.config.checkpoint.every_steps
        return every > 0 and step % every == 0

    def _wait_for_checkpoint(self) -> None:
        """Waits until the latest save is on disk, even if the disk is slow."""
        work = f"waiting for the checkpoint that was saved last in {self.checkpoints.folder}"
        # `Checkpoints` has a shorter limit, so that its more precise error is raised first.
        limit = self.checkpoints.longest_save + EXTRA_SECONDS
        self.cluster.enter(work, limit=limit, varies=True)
        with self._not_training(run_times.SAVING, work):
            self.checkpoints.wait()
        while self._saving:
            step = self._saving.pop(0)
            self.hooks.call("on_checkpoint", step, self.checkpoints.folder / str(step))

    def save(self, state: TrainState, position: Position) -> None:
        """Saves a state after all of its reports are on disk.

        This may return before the checkpoint is on disk.

        Raises:
          CheckpointError: This checkpoint or the previous checkpoint cannot be written.
          NonFiniteError: The loss or a gradient of this or an earlier step was not finite; nothing
            is saved.
        """
        self.recorder.drain()
        self._wait_for_checkpoint()
        work = f"saving in {self.checkpoints.folder}"
        self.cluster.enter(work, limit=self.checkpoints.longest_save)
        with self._not_training(run_times.SAVING, work):
            dataset = self.experiment.task.dataset
            extra = {
                "position": position.examples,
                "config": self.experiment.config.to_dict(),
                "data": dataset.fingerprint,
                "recorder": self.recorder.state(),
                "files": self.writer.place(),
                "hooks": self.hooks.state(),
                "division": list(self.experiment.division),
            }
            if isinstance(dataset.train, BatchStream):
                extra["stream"] = gather_in_first(self.cluster, dataset.train.state())
            self.checkpoints.save(
                self.experiment.program,
                state,
                step=position.step,
                extra=extra,
                metrics=self.recorder.latest("eval"),
            )
        self._saving.append(position.step)


def _of_one_copy(metrics: Metrics, copies: int) -> Metrics:
    """Returns the metrics of a batch that has each of its examples `copies` times."""
    return metrics if copies == 1 else jax.tree.map(lambda x: x / copies, metrics)


@contextlib.contextmanager
def postponed_interrupt(cluster: Cluster) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a request to stop between two steps.

    The run then stops with a `StoppedError`, and this context raises a `KeyboardInterrupt` instead.
    A second Ctrl-C raises a `KeyboardInterrupt` at once. The signal handler raises nothing at the
    first Ctrl-C, because its exception could appear in any code, even where Python discards it.
    """
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    # Background jobs of a shell ignore Ctrl-C. If the handler is None, Python cannot restore it.
    if not main_thread or previous in (signal.SIG_IGN, None):
        yield interrupted
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        interrupted.set()
        cluster.request_stop()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    except StoppedError as error:
        if interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
