"""Fetches metrics from the device, a few steps behind the step being dispatched, and reports them.

Dispatching a step takes no time. Waiting for its metrics takes time, and a device with an empty
queue idles during the wait. So metrics stay on the device in a queue, and the metrics of a step are
fetched once `LAG` later steps have been dispatched. Evaluation uses the same queue. A checkpoint
and the end of the training empty it.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manualpar.core.state.metrics import (
    AnyMetrics,
    Metrics,
    add_metrics,
    fetch_metrics,
    mean_metrics,
)
from manualpar.training.monitoring.progress import TrainingProgress
from manualpar.training.monitoring.run_files import RunWriter

# XLA:CPU, which simulates devices, allows at most 32 computations in flight. If a loop runs further
# ahead, its collectives wait for each other until XLA aborts the process.
LAG = 2

NONFINITE = "nonfinite"  # Metric name: whether the program found infinities or NaN.
SKIPPED = "skipped_steps"


class NonFiniteError(Exception):
    """The loss or a gradient is infinite or NaN in the step `step`, counted from 1.

    If `is_empty`, the step had nothing to learn: the weights of its examples are all 0, so its loss
    is 0 / 0.
    """

    def __init__(self, step: int, *, is_empty: bool = False) -> None:
        super().__init__(
            f"step {step} had nothing to learn, because the count of its loss is 0: all examples "
            "are masked"
            if is_empty
            else f"the loss or a gradient of step {step} is not finite"
        )
        self.step = step


def parse_state(
    state: Mapping[str, Any],
) -> tuple[dict[str, AnyMetrics], dict[str, dict[str, float]], int]:
    """Parses the JSON of a `Recorder.state()`; malformed JSON raises an exception of any type.

    Returns the totals and the latest report of each split, and the number of skipped steps.
    """
    totals: dict[str, AnyMetrics] = {
        split: {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
        for split, metrics in state["totals"].items()
    }
    latest = {
        split: {name: float(mean) for name, mean in means.items()}
        for split, means in state["latest"].items()
    }
    return totals, latest, int(state["skipped"])


@dataclasses.dataclass(eq=False)
class Recorder:
    """Receives the metrics of steps in the order of dispatch, and reports their means.

    A training report has the means over the steps since the last report, the learning rate of the
    last step, and rates such as examples per second. The rates count only the time of training
    steps, without the first step of the process, because this step compiles. The time in
    evaluations and in `leave_out` does not count either.
    """

    writer: RunWriter  # Every report is written here before it is shown on `screen`.
    screen: TrainingProgress  # Shows reports; also updated after every training step.
    _: dataclasses.KW_ONLY
    # Returns the rate for the number of earlier updates; `None` if it is not known.
    learning_rate: Callable[[int], Any] | None
    rates: Callable[[int, float], Mapping[str, float]]  # Computes rates from (steps, seconds).
    # Turns the means of a split into the reported numbers.
    derive: Callable[[str, dict[str, float]], dict[str, float]] = lambda split, means: means
    # Whether the program skips the update of a step whose loss or gradients are not finite. If so,
    # the recorder counts the step and leaves it out of the means. If not, it raises
    # `NonFiniteError`.
    skips_nonfinite: bool = False
    # Called with the step, the split and the numbers of each report.
    on_report: Callable[[int, str, Mapping[str, float]], Any] = lambda step, split, values: None
    # The metrics on the device, oldest first: (split, step, metrics, whether these metrics complete
    # a report, learning rate).
    _queue: collections.deque[tuple[str, int, Metrics, bool, Any]] = dataclasses.field(
        default_factory=collections.deque
    )
    _totals: dict[str, AnyMetrics] = dataclasses.field(default_factory=dict)
    _latest: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    _skipped: int = 0
    _fetched_at: float | None = None
    _has_compiled: bool = False
    _timed_steps: int = 0
    _timed_seconds: float = 0.0

    def put(self, split: str, step: int, metrics: Metrics, *, report: bool) -> None:
        """Queues metrics of `split` after `step` updates.

        If `report`, these metrics complete a report, which is made when they are fetched.

        Raises:
          NonFiniteError: The loss or a gradient of an earlier step, fetched now, was not finite.
        """
        # The device computes the learning rate too, after everything in its queue. If the
        # computation started at the time of the report, it would wait for all steps dispatched
        # since then. So it is dispatched now.
        rate = self._rate(step) if report and split == "train" else None
        self._queue.append((split, step, metrics, report, rate))
        if len(self._queue) > LAG:
            self._fetch_oldest()

    def drain(self) -> None:
        """Fetches everything in the queue; raises the errors of `put`."""
        while self._queue:
            self._fetch_oldest()

    def drop(self, split: str) -> None:
        """Forgets the metrics of `split` that are not reported yet, of an unfinished evaluation."""
        kept = [entry for entry in self._queue if entry[0] != split]
        self._queue.clear()
        self._queue.extend(kept)
        self._totals.pop(split, None)

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Leaves the time in this context out of the rates, because the device idles."""
        started = time.perf_counter()
        yield
        if self._fetched_at is not None:
            self._fetched_at += time.perf_counter() - started

    def latest(self, split: str) -> dict[str, float]:
        """Returns the latest report of `split`; empty if there was no report."""
        return self._latest.get(split, {})

    def state(self) -> dict[str, Any]:
        """Returns the state for `resume`, as values for JSON; the queue must be empty."""
        assert not self._queue, "drained before"
        totals = {split: dict(metrics) for split, metrics in self._totals.items()}
        return {"totals": totals, "latest": self._latest, "skipped": self._skipped}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state()` returned, and drops the queue."""
        self._queue.clear()
        self._totals, self._latest, self._skipped = parse_state(state)
        self._fetched_at = None
        self._timed_steps, self._timed_seconds = 0, 0.0

    def _fetch_oldest(self) -> None:
        split, step, device_metrics, report, rate = self._queue.popleft()
        metrics: dict[str, Any] = fetch_metrics(device_metrics)
        # Without this metric `config.training.on_nonfinite` is "ignore".
        is_ignored = NONFINITE not in metrics
        is_nonfinite = bool(metrics.pop(NONFINITE, (0.0, 1.0))[0])
        is_empty = split == "train" and not is_ignored and not metrics.get("loss", (0, 1))[1]
        is_fatal = (is_nonfinite or is_empty) and not self.skips_nonfinite
        if is_nonfinite and self.skips_nonfinite:
            self._skipped += 1
            metrics = dict.fromkeys(metrics, (0.0, 0.0))
        self._totals[split] = add_metrics(self._totals.get(split), metrics)
        # The device works through the queue in order, so the time since the last fetch is the time
        # that this entry took.
        now, before = time.perf_counter(), self._fetched_at
        self._fetched_at = now
        if split == "train":
            if before is not None and self._has_compiled:
                self._timed_steps += 1
                self._timed_seconds += now - before
            self._has_compiled = True
            self.screen.advance(step)
        if report or is_fatal:
            self._report(split, step, rate)
        if is_fatal:
            raise NonFiniteError(step, is_empty=is_empty and not is_nonfinite)

    def _report(self, split: str, step: int, rate: Any) -> None:
        means = self.derive(split, mean_metrics(self._totals.pop(split)))
        rates: Mapping[str, float] = {}
        if split == "train":
            rate = self._rate(step) if rate is None else rate
            if rate is not None:
                means["learning_rate"] = float(rate)
            if self.skips_nonfinite:
                means[SKIPPED] = float(self._skipped)
            if self._timed_seconds:
                rates = self.rates(self._timed_steps, self._timed_seconds)
            self._timed_steps, self._timed_seconds = 0, 0.0
        self._latest[split] = means
        self.writer.write(step, split, means, throughput=rates)
        self.screen.report(step, split, {**means, **rates})
        self.on_report(step, split, {**means, **rates})

    def _rate(self, step: int) -> Any:
        return None if self.learning_rate is None else self.learning_rate(step - 1)
