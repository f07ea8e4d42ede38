"""A training: the hooks of its loop in their order, its checkpoints, and its rollbacks."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from manualpar.checkpoints import Checkpoints
from manualpar.cluster import Cluster
from manualpar.cluster.lost import UNWATCHED
from manualpar.data import evaluation_batches, train_batches
from manualpar.guards.replicas import ReplicaError, ReplicaSentinel
from manualpar.train_state import Batch, TrainState
from manualpar.training.experiment import Experiment
from manualpar.training.loop import (
    BETWEEN_STEPS,
    START,
    Hook,
    Loop,
    Position,
    StoppedError,
    postponed_interrupt,
)
from manualpar.training.recorder import NonFiniteError, Recorder
from manualpar.training.saving import position_of, restore
from manualpar.watching.profiling import StepProfiler
from manualpar.watching.stalls import StallDetector
from manualpar.watching.writers import RunWriter

# So many rollbacks without a new checkpoint between them, and it is not the data.
MAX_ROLLBACKS = 3


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains an experiment, evaluates on the way, and tests at the end.

    Attributes:
      experiment: What to train.
      checkpoints: Those of the run.
      recorder: Receives all metrics.
      writer: Writes the files of the run.
      cluster: The processes that train together.
      detector: Watches for a step that does not end.
      profiler: Records some of the steps.
      report: Is told in a sentence what a user should know.
    """

    experiment: Experiment
    checkpoints: Checkpoints
    recorder: Recorder
    writer: RunWriter
    cluster: Cluster
    detector: StallDetector
    profiler: StepProfiler
    report: Callable[[str], None]

    def train(self, state: TrainState, position: Position = START) -> TrainState:
        """Trains from a position to the last step.

        Args:
          state: The state at `position`; donated.
          position: Where to begin.

        Returns:
          The trained state. The metrics of the test are `recorder.latest("test")`.

        Raises:
          StoppedError: One of the processes received SIGTERM.
          KeyboardInterrupt: Ctrl-C was pressed. The step under way was finished, reported and saved
            first.
          NonFiniteError: The loss or a gradient is not finite. There is no checkpoint of that step
            or of a later one.
          ReplicaError: Copies of the state differ. The step before it was reported first.
        """
        config = self.experiment.config
        loop = self.loop()
        if config.debug.check_replicas_every:
            loop.every(config.debug.check_replicas_every, self._replica_check())
        loop.every(config.training.eval_every_steps, self._evaluate, at_start=True, at_end=True)
        loop.every(1, self._save_or_stop)
        with contextlib.ExitStack() as stack:
            for context in (postponed_interrupt(self.cluster), self.detector, self.profiler):
                stack.enter_context(context)
            # After the loop the processes do different things: process 0 alone writes a report.
            stack.callback(self.cluster.enter, UNWATCHED)
            state = self._run(loop, state, position)
            self._evaluate_on("test", state, config.training.num_steps)
            self.cluster.enter("finishing")
            self.recorder.drain()
        return state

    def loop(self) -> Loop:
        """The loop without the hooks that check, evaluate and save."""
        config, program = self.experiment.config, self.experiment.program

        def take_step(step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
            # Every process enters the same number of phases, although one alone profiles.
            is_profiled = self.profiler.covers(step)
            self.cluster.enter("in a profiled step" if is_profiled else "in a step")
            self.profiler.before(step, state)
            state, metrics = program.train_step(state, batch)
            self.profiler.after(step, state)
            return state, metrics

        loop = Loop(
            take_step=take_step,
            read_from=lambda examples: contextlib.closing(
                train_batches(
                    self.experiment.task.dataset.train,
                    seed=config.seed,
                    batch_size=config.data.batch_size,
                    sharding=program.batch_sharding,
                    start_position=examples,
                    prefetch=config.data.prefetch,
                )
            ),
            recorder=self.recorder,
            cluster=self.cluster,
            batch_size=config.data.batch_size,
            num_steps=config.training.num_steps,
            log_every_steps=config.training.log_every_steps,
        )
        loop.every(1, lambda state, position: self.detector.beat(position.step))
        return loop

    def save(self, state: TrainState, position: Position) -> None:
        """Saves a state once everything that is reported of it is on disk.

        It may return before the checkpoint is on disk.

        Raises:
          CheckpointError: This checkpoint or the one before it cannot be written.
          NonFiniteError: A step up to this one was not finite; nothing is saved.
        """
        self.cluster.enter("saving")
        self.recorder.drain()
        with self.recorder.leave_out(), self.detector.pause():
            extra = {
                "position": position.examples,
                "config": self.experiment.config.to_dict(),
                "data": self.experiment.task.dataset.fingerprint,
                "recorder": self.recorder.state(),
                "files": self.writer.place(),
            }
            self.checkpoints.save(
                self.experiment.program,
                state,
                step=position.step,
                extra=extra,
                metrics=self.recorder.latest("eval"),
            )

    def _save_or_stop(self, state: TrainState, position: Position) -> None:
        """Saves if it is time to, and ends the loop if the run is asked to stop."""
        config, step = self.experiment.config, position.step
        stops = self.cluster.should_stop(step)
        is_last = step == config.training.num_steps
        saves = self._is_due(step) or (config.checkpoint.every_steps > 0 and (stops or is_last))
        if saves:
            self.save(state, position)
        if stops:
            self.recorder.drain()
            self.checkpoints.wait()
            raise StoppedError(step, is_saved=saves)

    def _is_due(self, step: int) -> bool:
        every: int = self.experiment.config.checkpoint.every_steps
        return every > 0 and step % every == 0

    def _run(self, loop: Loop, state: TrainState, position: Position) -> TrainState:
        """Runs a loop; if the config says so, a step that is not finite rolls it back.

        A rollback goes back to the latest checkpoint, and past the batch of the step that failed.
        """
        rollbacks = 0
        while True:
            try:
                return loop.run(state, position)
            except NonFiniteError as error:
                if any(map(self._is_due, range(position.step + 1, error.step))):
                    rollbacks = 0
                rollbacks += 1
                restored = self._go_back() if rollbacks <= MAX_ROLLBACKS else None
                if restored is None:
                    raise
                state, (step, earlier) = restored
                # An earlier rollback may have begun this stretch beyond the checkpoint's position.
                failed = position.examples + (error.step - position.step) * loop.batch_size
                position = Position(step, failed)
                self.report(
                    f"{error}: back to the checkpoint of step {step}, past the "
                    f"{(failed - earlier) // loop.batch_size} batches since then"
                )

    def _go_back(self) -> tuple[TrainState, Position] | None:
        """Takes the run back to its latest checkpoint; `None` if it may not or there is none."""
        config = self.experiment.config
        if config.training.on_nonfinite != "rollback" or not config.checkpoint.every_steps:
            return None
        self.cluster.enter("going back to a checkpoint")
        with self.recorder.leave_out(), self.detector.pause():
            self.checkpoints.wait()
            if self.checkpoints.latest_step() is None:
                return None
            workdir = self.writer.workdir
            restored = restore(self.checkpoints, self.experiment, workdir, report=self.report)
            self.recorder.resume(restored.extra["recorder"])
            self.writer.go_back(restored.extra["files"], step=restored.step, report=self.report)
        return restored.state, position_of(restored)

    def _replica_check(self) -> Hook:
        """A hook that checks that copies of the state are the same, bit for bit; it waits."""
        program = self.experiment.program
        sentinel = ReplicaSentinel(program.mesh, program.layout)

        def check(state: TrainState, position: Position) -> None:
            self.cluster.enter("comparing replicas")
            jax.block_until_ready(state)
            try:
                with self.recorder.leave_out(), self.detector.pause():
                    sentinel.check(state)
            except ReplicaError as error:
                self.recorder.drain()
                raise ReplicaError(f"after step {position.step} {error}") from error

        return check

    def _evaluate(self, state: TrainState, position: Position) -> None:
        self._evaluate_on("eval", state, position.step)
        self.cluster.enter(BETWEEN_STEPS)

    def _evaluate_on(self, split: str, state: TrainState, step: int) -> None:
        """Evaluates a split; the recorder reports the means once they are there."""
        config, program = self.experiment.config, self.experiment.program
        batches = evaluation_batches(
            getattr(self.experiment.task.dataset, split),
            config.data.batch_size,
            program.batch_sharding,
            max_batches=config.training.eval_batches if split == "eval" else 0,
        )
        waiting: Any = None
        self.cluster.enter("evaluating")
        for batch in batches:
            self.cluster.enter("evaluating")
            if waiting is not None:
                self.recorder.put(split, step, waiting, report=False)
            waiting = program.eval_step(state, batch)
            self.detector.beat(step)
        self.recorder.put(split, step, waiting, report=True)
