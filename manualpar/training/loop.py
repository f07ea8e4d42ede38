"""The training loop: what happens in which order, and what ends it.

After a step come, in this order: the check of replicas, evaluation, the question whether to stop,
and a checkpoint. So a checkpoint of step s lies after everything that is reported of step s, and a
run that goes on from it reports nothing twice and leaves nothing out.
"""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import jax

from manualpar.cluster import Cluster
from manualpar.cluster.progress import UNWATCHED
from manualpar.core.program import Program
from manualpar.data import Dataset, evaluation_batches, train_batches
from manualpar.guards.replicas import ReplicaError, ReplicaSentinel
from manualpar.train_state import TrainState
from manualpar.training.recorder import NonFiniteError, Recorder
from manualpar.watching.profiling import StepProfiler
from manualpar.watching.stalls import StallDetector

# Rollbacks without a new checkpoint between them: then it is not the data.
MAX_ROLLBACKS = 3


class Place(NamedTuple):
    """How far a run is.

    Attributes:
      step: Updates made.
      position: Examples taken from the endless stream of training examples.
    """

    step: int = 0
    position: int = 0


START = Place()


class Saver(Protocol):
    """Keeps checkpoints of a run."""

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` updates."""

    def save(self, state: TrainState, place: Place) -> None:
        """Keeps a state, and where its run is; may return before it is on disk."""

    def wait(self) -> None:
        """Waits until the latest save is on disk."""

    def go_back(self) -> tuple[TrainState, Place] | None:
        """Takes the run back to the latest checkpoint; `None` if there is none."""


class StoppedError(Exception):
    """The run was asked to stop, did so between two steps, and can go on from there.

    Attributes:
      step: The last step.
      is_saved: Whether there is a checkpoint of it.
    """

    def __init__(self, step: int, *, is_saved: bool) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.is_saved = is_saved


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training of one program.

    Attributes:
      program: What to run.
      dataset: What to train on.
      recorder: Who is told the metrics.
      seed: What the order of the examples is drawn from.
      batch_size: Examples a step.
      num_steps: Updates to make.
      eval_every_steps: Updates between evaluations, the first before any update; 0 for none.
      eval_batches: Batches of an evaluation, 0 for all that there are; the test takes all.
      log_every_steps: Updates between training reports.
      check_replicas_every: Updates between checks that copies of the state are the same, bit for
        bit, for which the loop waits; 0 for none.
      prefetch: Batches that are read ahead.
      saver: Who keeps checkpoints, if anybody.
      cluster: The processes that train together.
      detector: Who is told that the loop moves, if anybody.
      profiler: Who records some of the steps, if anybody.
      rolls_back: Whether a step that is not finite takes the run back to the latest checkpoint,
        and past the batch of that step.
    """

    program: Program
    dataset: Dataset
    recorder: Recorder
    cluster: Cluster
    seed: int
    batch_size: int
    num_steps: int
    eval_every_steps: int
    log_every_steps: int
    eval_batches: int = 0
    check_replicas_every: int = 0
    prefetch: int = 2
    saver: Saver | None = None
    detector: StallDetector | None = None
    profiler: StepProfiler | None = None
    rolls_back: bool = False
    report: Callable[[str], None] = lambda line: None

    def run(self, state: TrainState, place: Place = START) -> TrainState:
        """Trains, evaluates on the way and tests at the end.

        Args:
          state: Where to start; donated.
          place: How far the run was when that was its state.

        Returns:
          The trained state. The metrics are `recorder.latest("test")`.

        Raises:
          StoppedError: The run was asked to stop, by SIGTERM to any of its processes.
          KeyboardInterrupt: Ctrl-C was pressed. The step under way was finished, reported and
            saved first.
          NonFiniteError: The loss or a gradient is not finite. There is no checkpoint of such a
            step or a later one.
          ReplicaError: A check failed. The step before it was reported first.
        """
        rollbacks = 0
        with contextlib.ExitStack() as stack:
            interrupted = stack.enter_context(postponed_interrupt(self.cluster))
            for context in (self.detector, self.profiler):
                if context is not None:
                    stack.enter_context(context)
            # Afterwards nothing is in step any more: process 0 alone writes a report.
            stack.callback(self.cluster.enter, UNWATCHED)
            while True:
                try:
                    return self._run_from(state, place, interrupted)
                except NonFiniteError as error:
                    since = range(place.step + 1, error.step)
                    if self.saver and any(map(self.saver.is_due, since)):
                        rollbacks = 0
                    rollbacks += 1
                    saved = None
                    if self.rolls_back and self.saver and rollbacks <= MAX_ROLLBACKS:
                        self.cluster.enter("going back to a checkpoint")
                        with self._idle():
                            saved = self.saver.go_back()
                    if saved is None:
                        raise
                    state, (step, earlier) = saved
                    # Past the batch of the step that failed. An earlier rollback may have begun
                    # this stretch further on than where the checkpoint was.
                    position = place.position + (error.step - place.step) * self.batch_size
                    place = Place(step, position)
                    self.report(
                        f"{error}: back to the checkpoint of step {step}, past the "
                        f"{(position - earlier) // self.batch_size} batches since then"
                    )

    def _run_from(
        self, state: TrainState, place: Place, interrupted: threading.Event
    ) -> TrainState:
        """Trains from a place to the end."""
        step, position = place
        if self.eval_every_steps and not step:
            self._evaluate("eval", state, step)
        batches = train_batches(
            self.dataset.train,
            seed=self.seed,
            batch_size=self.batch_size,
            sharding=self.program.batch_sharding,
            start_position=position,
            prefetch=self.prefetch,
        )
        sentinel = (
            ReplicaSentinel(self.program.mesh, self.program.layout)
            if self.check_replicas_every
            else None
        )
        with contextlib.closing(batches):
            while step < self.num_steps:
                self.cluster.enter("reading a batch")
                batch = next(batches)
                step, position = step + 1, position + self.batch_size
                is_profiled = self.profiler is not None and self.profiler.covers(step)
                self.cluster.enter("in a profiled step" if is_profiled else "in a step")
                if self.profiler is not None:
                    self.profiler.before(step, state)
                state, metrics = self.program.train_step(state, batch)
                if self.profiler is not None:
                    self.profiler.after(step, state)
                self.cluster.enter("between two steps")
                is_last = step == self.num_steps
                report = is_last or step % self.log_every_steps == 0
                self.recorder.put("train", step, metrics, report=report)
                self._beat(step)
                if sentinel is not None and step % self.check_replicas_every == 0:
                    self._check_replicas(sentinel, state, step)
                if self.eval_every_steps and (is_last or step % self.eval_every_steps == 0):
                    self._evaluate("eval", state, step)
                    self.cluster.enter("between two steps")
                stops = self.cluster.should_stop(step)
                is_saved = self._save(state, Place(step, position), at_once=stops or is_last)
                if stops:
                    self.recorder.drain()
                    if self.saver is not None:
                        self.saver.wait()
                    if interrupted.is_set():
                        raise KeyboardInterrupt
                    raise StoppedError(step, is_saved=is_saved)
        self._evaluate("test", state, step)
        self.cluster.enter("finishing")
        self.recorder.drain()
        return state

    def _evaluate(self, split: str, state: TrainState, step: int) -> None:
        """Queues the metrics of a split."""
        examples = getattr(self.dataset, split)
        limit = self.eval_batches if split == "eval" else 0
        batches = evaluation_batches(
            examples, self.batch_size, self.program.batch_sharding, max_batches=limit
        )
        waiting: Any = None
        self.cluster.enter("evaluating")
        for batch in batches:
            self.cluster.enter("evaluating")
            if waiting is not None:
                self.recorder.put(split, step, waiting, report=False)
            waiting = self.program.eval_step(state, batch)
            self._beat(step)
        self.recorder.put(split, step, waiting, report=True)

    def _beat(self, step: int) -> None:
        """Says that the loop moves."""
        if self.detector is not None:
            self.detector.beat(step)

    def _save(self, state: TrainState, place: Place, *, at_once: bool) -> bool:
        """Saves if it is time to; says whether."""
        if self.saver is None or not (at_once or self.saver.is_due(place.step)):
            return False
        # Nothing that is not finite gets into a checkpoint, and all that was reported is on disk.
        self.cluster.enter("saving")
        self.recorder.drain()
        with self._idle():
            self.saver.save(state, place)
        return True

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Around what takes its time while the device has nothing to do."""
        started = time.perf_counter()
        with self.detector.pause() if self.detector else contextlib.nullcontext():
            yield
        self.recorder.leave_out(time.perf_counter() - started)

    def _check_replicas(self, sentinel: ReplicaSentinel, state: TrainState, step: int) -> None:
        """Compares copies of the state."""
        self.cluster.enter("comparing replicas")
        jax.block_until_ready(state)
        try:
            with self._idle():
                sentinel.check(state)
        except ReplicaError as error:
            self.recorder.drain()
            raise ReplicaError(f"after step {step} {error}") from error


@contextlib.contextmanager
def postponed_interrupt(cluster: Cluster) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a request to stop between steps; the second is an exception.

    An exception out of a signal handler can come up anywhere, also where Python throws it away,
    such as in a callback of the garbage collector.
    """
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    # A shell's background jobs ignore Ctrl-C, and None is a handler that Python cannot put back.
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
    finally:
        signal.signal(signal.SIGINT, previous)
