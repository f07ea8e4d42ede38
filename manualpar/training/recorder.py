"""Takes metrics off the device, a few steps behind the step that is being dispatched, and reports.

Dispatching a step takes no time, waiting for its metrics does, and a device that nobody feeds
meanwhile idles. So metrics stay on the device in a queue, and those of a step are fetched once
`LAG` later steps have been dispatched. Evaluation goes through the same queue. A checkpoint and the
end of the training empty it.

What is reported comes in two kinds: metrics, which are the same in every run of a config, and
rates, which depend on the machine and the moment.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from manualpar.metrics import Metrics, add_metrics, fetch_metrics, mean_metrics
from manualpar.watching.writers import RunWriter

# Small also because of simulated devices: XLA:CPU takes no more than 32 computations in flight, and
# collectives of a loop that runs further ahead wait for each other until it aborts the process.
LAG = 2

NONFINITE = "nonfinite"  # The metric that programs add when they look for it.
SKIPPED = "skipped_steps"

Rates = Callable[[int, float], Mapping[str, float]]


class Screen(Protocol):
    """Shows reports."""

    def advance(self, step: int) -> None:
        """Says that `step` updates are done."""

    def report(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Shows metrics and rates of `split` after `step` updates."""


class NonFiniteError(Exception):
    """The loss or a gradient of a step is infinite or not a number.

    Attributes:
      step: Which, from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss or a gradient of step {step} is not finite")
        self.step = step


def parse_state(
    state: Mapping[str, Any],
) -> tuple[dict[str, Metrics], dict[str, dict[str, float]], int]:
    """What a `Recorder.state()` says, once it was stored as JSON.

    Args:
      state: The object.

    Returns:
      The totals and the latest report of each split, and the number of steps that were skipped.

    Raises:
      Exception: It is no such state.
    """
    totals: dict[str, Metrics] = {
        split: {name: (float(first), float(second)) for name, (first, second) in metrics.items()}
        for split, metrics in state["totals"].items()
    }
    latest = {
        split: {name: float(mean) for name, mean in means.items()}
        for split, means in state["latest"].items()
    }
    return totals, latest, int(state["skipped"])


class Recorder:
    """Takes in the metrics of steps in the order of dispatch and reports their means when there.

    A training report has the mean over the steps since the one before and the learning rate of the
    last of them; its rates count the time of training steps only, and neither the first step of the
    process, which compiles, nor evaluation, nor what `leave_out` was told.
    """

    def __init__(
        self,
        writer: RunWriter,
        screen: Screen,
        *,
        learning_rate: Callable[[int], Any],
        rates: Rates,
        derive: Callable[[str, dict[str, float]], dict[str, float]] = lambda split, means: means,
        skips_nonfinite: bool = False,
    ) -> None:
        """Starts with nothing queued.

        Args:
          writer: Who is told first.
          screen: Who is told then, and of every training step that is done.
          learning_rate: A function of the updates made before; a number, on a device or not.
          rates: What to report about so many steps that took so many seconds.
          derive: Turns the means of a split into what is reported of it.
          skips_nonfinite: Whether the program skips the update of a step that is not finite; such
            steps are then counted and leave the means alone. Otherwise they are an error.
        """
        self._writer = writer
        self._screen = screen
        self._learning_rate = learning_rate
        self._rates = rates
        self._derive = derive
        self._skips_nonfinite = skips_nonfinite
        self._queue: collections.deque[tuple[str, int, Metrics, bool, Any]] = collections.deque()
        self._totals: dict[str, Metrics] = {}
        self._latest: dict[str, dict[str, float]] = {}
        self._skipped = 0
        self._fetched_at: float | None = None
        self._has_compiled = False
        self._timed_steps = 0
        self._timed_seconds = 0.0

    def put(self, split: str, step: int, metrics: Metrics, *, report: bool) -> None:
        """Queues metrics of `split` after `step` updates; with `report` they complete a report.

        Raises:
          NonFiniteError: An earlier step, now fetched, was not finite.
        """
        # A schedule computes on the device as well, after all that is queued there: asked for when
        # it is reported, it would wait until the device has nothing left to do.
        rate = self._learning_rate(step - 1) if report and split == "train" else None
        self._queue.append((split, step, metrics, report, rate))
        if len(self._queue) > LAG:
            self._fetch_oldest()

    def drain(self) -> None:
        """Waits for everything that is queued.

        Raises:
          NonFiniteError: One of the steps was not finite.
        """
        while self._queue:
            self._fetch_oldest()

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leaves the time within out of the rates, because the device has nothing to do."""
        started = time.perf_counter()
        yield
        if self._fetched_at is not None:
            self._fetched_at += time.perf_counter() - started

    def latest(self, split: str) -> dict[str, float]:
        """The latest report of `split`; nothing if there was none."""
        return self._latest.get(split, {})

    def state(self) -> dict[str, Any]:
        """What a run that goes on from here must know, as JSON; the queue must be empty."""
        assert not self._queue, "drained before"
        totals = {split: dict(metrics) for split, metrics in self._totals.items()}
        return {"totals": totals, "latest": self._latest, "skipped": self._skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state()`, forgetting what is queued."""
        self._queue.clear()
        self._totals, self._latest, self._skipped = parse_state(state)
        self._fetched_at = None
        self._timed_steps, self._timed_seconds = 0, 0.0

    def _fetch_oldest(self) -> None:
        """Waits for the oldest entry of the queue and adds it up; reports if it is to be."""
        split, step, device_metrics, report, rate = self._queue.popleft()
        metrics: dict[str, Any] = fetch_metrics(device_metrics)
        is_nonfinite = bool(metrics.pop(NONFINITE, (0.0, 1.0))[0])
        if is_nonfinite and self._skips_nonfinite:
            self._skipped += 1
            metrics = dict.fromkeys(metrics, (0.0, 0.0))
        self._totals[split] = add_metrics(self._totals.get(split), metrics)
        # The device works through the queue in order: what passed since the last fetch went into
        # this entry.
        now, before = time.perf_counter(), self._fetched_at
        self._fetched_at = now
        if split == "train":
            if before is not None and self._has_compiled:
                self._timed_steps += 1
                self._timed_seconds += now - before
            self._has_compiled = True
            self._screen.advance(step)
        is_fatal = is_nonfinite and not self._skips_nonfinite
        if report or is_fatal:
            self._report(split, step, rate)
        if is_fatal:
            raise NonFiniteError(step)

    def _report(self, split: str, step: int, rate: Any) -> None:
        """Reports what has been added up for a split; `rate` is the learning rate, if known."""
        means = self._derive(split, mean_metrics(self._totals.pop(split)))
        rates: Mapping[str, float] = {}
        if split == "train":
            rate = self._learning_rate(step - 1) if rate is None else rate
            means["learning_rate"] = float(rate)
            if self._skips_nonfinite:
                means[SKIPPED] = float(self._skipped)
            if self._timed_seconds:
                rates = self._rates(self._timed_steps, self._timed_seconds)
            self._timed_steps, self._timed_seconds = 0, 0.0
        self._latest[split] = means
        self._writer.write(step, split, means, throughput=rates)
        self._screen.report(step, split, {**means, **rates})
