"""The hooks of a run, and the order in which the loop calls them."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import ml_collections

from manualpar.cluster import UNWATCHED, Cluster
from manualpar.core.program import Program
from manualpar.data import Dataset, evaluation_batches, train_batches
from manualpar.guards.replicas import ReplicaError, ReplicaSentinel
from manualpar.train_state import Batch, TrainState
from manualpar.training.loop import (
    BETWEEN_STEPS,
    START,
    Hook,
    Loop,
    Position,
    TakeStep,
    postponed_interrupt,
)
from manualpar.training.recorder import Recorder
from manualpar.training.saving import RunSaver
from manualpar.watching.profiling import StepProfiler
from manualpar.watching.stalls import StallDetector


def train(
    config: ml_collections.ConfigDict,
    program: Program,
    dataset: Dataset,
    *,
    state: TrainState,
    position: Position = START,
    recorder: Recorder,
    saver: RunSaver,
    cluster: Cluster,
    detector: StallDetector,
    profiler: StepProfiler,
) -> TrainState:
    """Trains as a config says, evaluates on the way, and tests at the end.

    Args:
      config: See `manualpar.training.config`.
      program: The program.
      dataset: Its data.
      state: The state to begin with; donated.
      position: How far the run was when that was its state.
      recorder: Receives all metrics.
      saver: Saves, stops and rolls back.
      cluster: The processes that train together.
      detector: Watches for a step that does not end.
      profiler: Records some of the steps.

    Returns:
      The trained state. The metrics of the test are `recorder.latest("test")`.

    Raises:
      StoppedError: One of the processes received SIGTERM.
      KeyboardInterrupt: Ctrl-C was pressed. The step under way was finished, reported and saved
        first.
      NonFiniteError: The loss or a gradient is not finite. There is no checkpoint of that step or
        of a later one.
      ReplicaError: Copies of the state differ. The step before it was reported first.
    """
    training, batch_size = config.training, config.data.batch_size
    read = functools.partial(
        train_batches,
        dataset.train,
        seed=config.seed,
        batch_size=batch_size,
        sharding=program.batch_sharding,
        prefetch=config.data.prefetch,
    )
    evaluation = Evaluation(
        program, dataset, recorder, cluster, detector, batch_size, training.eval_batches
    )
    loop = Loop(
        take_step=profiled(program, profiler, cluster),
        read_from=lambda examples: contextlib.closing(read(start_position=examples)),
        recorder=recorder,
        cluster=cluster,
        batch_size=batch_size,
        num_steps=training.num_steps,
        log_every_steps=training.log_every_steps,
    )
    loop.every(1, lambda state, position: detector.beat(position.step))
    if config.debug.check_replicas_every:
        check = replica_check(program, recorder, cluster, detector)
        loop.every(config.debug.check_replicas_every, check)
    loop.every(training.eval_every_steps, evaluation, at_start=True, at_end=True)
    loop.every(1, saver)
    with contextlib.ExitStack() as stack:
        for context in (postponed_interrupt(cluster), detector, profiler):
            stack.enter_context(context)
        # After the loop the processes do different things: process 0 alone writes a report.
        stack.callback(cluster.enter, UNWATCHED)
        state = saver.train(loop, state, position)
        evaluation.evaluate("test", state, training.num_steps)
        cluster.enter("finishing")
        recorder.drain()
    return state


def profiled(program: Program, profiler: StepProfiler, cluster: Cluster) -> TakeStep:
    """The step of a program, in a profile where one is asked for."""

    def take_step(step: int, state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        # Every process enters the same number of phases, and one of them profiles.
        cluster.enter("in a profiled step" if profiler.covers(step) else "in a step")
        profiler.before(step, state)
        state, metrics = program.train_step(state, batch)
        profiler.after(step, state)
        return state, metrics

    return take_step


def replica_check(
    program: Program, recorder: Recorder, cluster: Cluster, detector: StallDetector
) -> Hook:
    """A hook that checks that copies of the state are the same, bit for bit; it waits for them."""
    sentinel = ReplicaSentinel(program.mesh, program.layout)

    def check(state: TrainState, position: Position) -> None:
        cluster.enter("comparing replicas")
        jax.block_until_ready(state)
        try:
            with recorder.leave_out(), detector.pause():
                sentinel.check(state)
        except ReplicaError as error:
            recorder.drain()
            raise ReplicaError(f"after step {position.step} {error}") from error

    return check


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A hook that evaluates a state.

    Attributes:
      program: What evaluates it.
      dataset: What it is evaluated on.
      recorder: Receives the metrics.
      cluster: The processes that evaluate together.
      detector: Is told that the evaluation goes on.
      batch_size: Examples in a batch.
      max_batches: Batches of an evaluation while training; 0 for all. The test takes all.
    """

    program: Program
    dataset: Dataset
    recorder: Recorder
    cluster: Cluster
    detector: StallDetector
    batch_size: int
    max_batches: int

    def __call__(self, state: TrainState, position: Position) -> None:
        """Evaluates on the split `eval`."""
        self.evaluate("eval", state, position.step)
        self.cluster.enter(BETWEEN_STEPS)

    def evaluate(self, split: str, state: TrainState, step: int) -> None:
        """Evaluates on a split; the recorder reports the means once they are there."""
        batches = evaluation_batches(
            getattr(self.dataset, split),
            self.batch_size,
            self.program.batch_sharding,
            max_batches=self.max_batches if split == "eval" else 0,
        )
        waiting: Any = None
        self.cluster.enter("evaluating")
        for batch in batches:
            self.cluster.enter("evaluating")
            if waiting is not None:
                self.recorder.put(split, step, waiting, report=False)
            waiting = self.program.eval_step(state, batch)
            self.detector.beat(step)
        self.recorder.put(split, step, waiting, report=True)
