"""The training loop: it reads a batch, takes a step, and calls the hooks that are due.

Everything else that happens between two steps is a hook: `loop.every(n, hook)` calls
`hook(state, position)` after every `n` steps. Hooks are called in the order in which they were
added, and an exception that a hook raises ends the loop. `manualpar.training.run` adds, in this
order, the check of replicas, evaluation, and saving. So a checkpoint of step s holds everything
that is reported of step s, and a run that goes on from it reports nothing twice and leaves nothing
out.
"""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from manualpar.cluster import Cluster
from manualpar.train_state import Batch, TrainState
from manualpar.training.recorder import Recorder

BETWEEN_STEPS = "between two steps"


class Position(NamedTuple):
    """How far a run is.

    Attributes:
      step: The number of updates made.
      examples: The number of examples taken from the endless stream of training examples.
    """

    step: int = 0
    examples: int = 0


START = Position()

Hook = Callable[[TrainState, Position], None]
# Given the number of a step, counted from 1, a state, which is donated, and a batch.
TakeStep = Callable[[int, TrainState, Batch], tuple[TrainState, Any]]


class StoppedError(Exception):
    """The run was asked to stop. It did so between two steps, and can go on from there.

    Attributes:
      step: The last step.
      is_saved: Whether there is a checkpoint of it.
    """

    def __init__(self, step: int, *, is_saved: bool) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step
        self.is_saved = is_saved


class _Scheduled(NamedTuple):
    hook: Hook
    steps: int
    at_start: bool
    at_end: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """Trains from a position to the last step.

    Attributes:
      take_step: Makes an update, such as `program.train_step`.
      read_from: Reads batches from a number of examples on, within a context.
      recorder: Receives the metrics of every step.
      cluster: The processes that train together.
      batch_size: Examples in a step.
      num_steps: Updates to make.
      log_every_steps: Updates between two training reports.
    """

    take_step: TakeStep
    read_from: Callable[[int], contextlib.AbstractContextManager[Iterator[Batch]]]
    recorder: Recorder
    cluster: Cluster
    batch_size: int
    num_steps: int
    log_every_steps: int
    _hooks: list[_Scheduled] = dataclasses.field(default_factory=list)

    def every(
        self, steps: int, hook: Hook, *, at_start: bool = False, at_end: bool = False
    ) -> None:
        """Calls a hook with the state, which the next step donates, and the position.

        Args:
          steps: How many updates lie between two calls; 0 for no call.
          hook: The hook.
          at_start: Whether to call it before the first update of a run too.
          at_end: Whether to call it after the last update in any case.
        """
        if steps:
            self._hooks.append(_Scheduled(hook, steps, at_start, at_end))

    def run(self, state: TrainState, position: Position = START) -> TrainState:
        """Trains.

        Args:
          state: The state at `position`; donated.
          position: Where to begin.

        Returns:
          The state after the last step. The recorder may still wait for the last metrics.

        Raises:
          NonFiniteError: The loss or a gradient is not finite.
          Exception: Whatever a hook raises.
        """
        if not position.step:
            for each in self._hooks:
                if each.at_start:
                    each.hook(state, position)
        with self.read_from(position.examples) as batches:
            while position.step < self.num_steps:
                self.cluster.enter("reading a batch")
                batch = next(batches)
                position = Position(position.step + 1, position.examples + self.batch_size)
                state, metrics = self.take_step(position.step, state, batch)
                self.cluster.enter(BETWEEN_STEPS)
                is_last = position.step == self.num_steps
                report = is_last or position.step % self.log_every_steps == 0
                self.recorder.put("train", position.step, metrics, report=report)
                for each in self._hooks:
                    if position.step % each.steps == 0 or (is_last and each.at_end):
                        each.hook(state, position)
        return state


@contextlib.contextmanager
def postponed_interrupt(cluster: Cluster) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a request to stop between two steps.

    The `StoppedError` that follows becomes a `KeyboardInterrupt`. A second Ctrl-C is one at once.
    An exception raised in a signal handler can come up anywhere, also where Python discards it,
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
    except StoppedError as error:
        if interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
