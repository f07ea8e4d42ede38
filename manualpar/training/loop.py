"""The training loop: steps go to the device ahead of the metrics that come back.

Dispatching a step takes no time, waiting for its metrics does, and a device that nobody feeds
meanwhile idles. So metrics stay on the device in a queue, and those of a step are fetched once
`LAG` later steps have been dispatched. Evaluation goes through the same queue. Only the end of the
training empties it. A check of replicas waits for the device, and is asked for in the config.
"""

import collections
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import jax

from manualpar.program import Program
from manualpar.replicas import ReplicaError, ReplicaSentinel
from manualpar.train_state import TrainState
from manualpar.training.data import (
    Dataset,
    Split,
    evaluation_batches,
    prefetch_to_device,
    train_batch,
)
from manualpar.training.metrics import Metrics, add_metrics, fetch_metrics, mean_metrics
from manualpar.training.progress import TrainingProgress
from manualpar.training.writers import RunWriter

# Small also because of simulated devices: XLA:CPU takes no more than 32 computations in flight, and
# collectives of a loop that runs further ahead wait for each other until it aborts the process.
LAG = 2


class Recorder:
    """Takes in the metrics of steps in the order of dispatch and reports their means when there.

    A training report has the mean over the steps since the one before, the learning rate of the
    last of them and examples per second, which counts the time of training steps only, and neither
    the first step, which compiles, nor evaluation, nor what `leave_out` was told.
    """

    def __init__(
        self,
        writer: RunWriter,
        progress: TrainingProgress,
        *,
        batch_size: int,
        learning_rate: Callable[[int], float],
    ) -> None:
        """Reports to `writer`, then `progress`; `learning_rate` takes the updates made before."""
        self._writer = writer
        self._progress = progress
        self._batch_size = batch_size
        self._learning_rate = learning_rate
        self._queue: collections.deque[tuple[str, int, Metrics, bool]] = collections.deque()
        self._totals: dict[str, Metrics] = {}
        self._latest: dict[str, dict[str, float]] = {}
        self._fetched_at: float | None = None
        self._timed_steps = 0
        self._timed_seconds = 0.0

    def put(self, split: str, step: int, metrics: Metrics, *, report: bool) -> None:
        """Queues metrics of `split` after `step` updates; with `report` they complete a report."""
        self._queue.append((split, step, metrics, report))
        if len(self._queue) > LAG:
            self._fetch_oldest()

    def drain(self) -> None:
        """Waits for everything that is queued."""
        while self._queue:
            self._fetch_oldest()

    def leave_out(self, seconds: float) -> None:
        """Says that the device had nothing to do for as long, since all queued steps were done."""
        if self._fetched_at is not None:
            self._fetched_at += seconds

    def latest(self, split: str) -> dict[str, float]:
        """The latest report of `split`."""
        return self._latest[split]

    def _fetch_oldest(self) -> None:
        """Waits for the oldest entry of the queue and adds it up; reports if it is to be."""
        split, step, metrics, report = self._queue.popleft()
        self._totals[split] = add_metrics(self._totals.get(split), fetch_metrics(metrics))
        # The device works through the queue in order: what passed since the last fetch went into
        # this entry.
        now, before = time.perf_counter(), self._fetched_at
        self._fetched_at = now
        if split == "train":
            if before is not None and step > 1:
                self._timed_steps += 1
                self._timed_seconds += now - before
            self._progress.advance(step)
        if report:
            means = mean_metrics(self._totals.pop(split))
            if split == "train":
                means |= self._training_rates(step)
            self._latest[split] = means
            self._writer.write(step, split, means)
            self._progress.report(step, split, means)

    def _training_rates(self, step: int) -> dict[str, float]:
        """The learning rate, and examples per second unless only the first step was timed."""
        rates = {"learning_rate": float(self._learning_rate(step - 1))}
        if self._timed_seconds:
            examples = self._timed_steps * self._batch_size
            rates["examples_per_second"] = examples / self._timed_seconds
        self._timed_steps, self._timed_seconds = 0, 0.0
        return rates


def train(
    program: Program,
    state: TrainState,
    dataset: Dataset,
    *,
    recorder: Recorder,
    seed: int,
    batch_size: int,
    num_steps: int,
    eval_every_steps: int,
    log_every_steps: int,
    check_replicas_every: int = 0,
) -> TrainState:
    """Trains, evaluates on the way and tests at the end.

    Args:
      program: What to run.
      state: Where to start; donated.
      dataset: What to train on.
      recorder: Who is told the metrics.
      seed: What the order of the examples is drawn from; step `s` takes the same batch in every run
        with it.
      batch_size: Examples a step.
      num_steps: Updates to make.
      eval_every_steps: Updates between evaluations, the first before any update; 0 for none.
      log_every_steps: Updates between training reports.
      check_replicas_every: Updates between checks that copies of the state are the same, bit for
        bit, for which the loop waits; 0 for none.

    Returns:
      The trained state. The metrics are `recorder.latest("test")`.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed. The step under way was finished and reported first.
      ReplicaError: A check failed. The step before it was reported first.
    """
    sentinel = ReplicaSentinel(program.mesh, program.layout) if check_replicas_every else None

    def check_replicas(sentinel: ReplicaSentinel, step: int) -> None:
        jax.block_until_ready(state)
        started = time.perf_counter()
        try:
            sentinel.check(state)
        except ReplicaError as error:
            recorder.drain()
            raise ReplicaError(f"after step {step} {error}") from error
        recorder.leave_out(time.perf_counter() - started)

    def evaluate(split: str, examples: Split, step: int) -> None:
        batches = prefetch_to_device(
            evaluation_batches(examples, batch_size), program.batch_sharding
        )
        last = (len(examples.labels) - 1) // batch_size
        for index, batch in enumerate(batches):
            metrics = program.eval_step(state, batch)
            recorder.put(split, step, metrics, report=index == last)

    batches = prefetch_to_device(
        (
            train_batch(dataset.train, step, batch_size=batch_size, seed=seed)
            for step in range(num_steps)
        ),
        program.batch_sharding,
    )
    with postponed_interrupt() as interrupted:
        if eval_every_steps:
            evaluate("eval", dataset.eval, 0)
        for step, batch in zip(itertools.count(1), batches, strict=False):
            state, metrics = program.train_step(state, batch)
            report = step % log_every_steps == 0 or step == num_steps
            recorder.put("train", step, metrics, report=report)
            if sentinel is not None and step % check_replicas_every == 0:
                check_replicas(sentinel, step)
            if eval_every_steps and (step % eval_every_steps == 0 or step == num_steps):
                evaluate("eval", dataset.eval, step)
            if interrupted.is_set():
                recorder.drain()
                raise KeyboardInterrupt
        evaluate("test", dataset.test, num_steps)
        recorder.drain()
    return state


@contextlib.contextmanager
def postponed_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event to ask for between steps; the second is an exception.

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
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
