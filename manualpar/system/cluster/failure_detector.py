"""Finds the lost process: by its silence, a closed connection, its error, or a phase that hangs.

A process may hang although its threads are alive. All processes do the same work in the same order,
so each process counts the phases that it enters: reading a batch, a step, a save. The process with
the lowest count is behind, and sooner or later the others wait for it in a collective. This process
counts as hanging if it has been in its phase for `timeout_seconds` longer than the longest phase of
any process so far.

A phase that was completed fewer than `KNOWN_AFTER` times may take much longer, because the first
steps compile: `FIRST_SECONDS` longer than the longest phase so far, or as long as the phase's own
limit. A phase whose time varies, such as waiting for a disk, always has its own limit.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from manualpar.system.cluster.facts import name_processes

KNOWN_AFTER = 3
MOST_TOLD = 16
FIRST_SECONDS = 600.0
# The name of a phase that may take any time.
UNWATCHED = ""
CLOSED = "its connection closed"
NONSENSE = "it sent a message that no process of this run sends"
SILENT = "it has been silent for {:g} s"  # The process is stopped, or the network is broken.


@dataclasses.dataclass(frozen=True)
class LostProcess:
    """A process that is lost, so that the other processes must end."""

    process: int | None  # The number of the process; `None` if it is not known.
    host: str  # The name of the process's host; empty if it is not known.
    pid: int  # The process id on this host.
    reason: str  # The reason why the process counts as lost, or the error that it reported.
    is_failure: bool = False  # Whether `reason` is an error that the process reported.

    def __str__(self) -> str:
        if self.process is None:
            return f"the processes stand still: {self.reason}"
        where = f" on {self.host} (pid {self.pid})" if self.host else ""
        outcome = "failed" if self.is_failure else "was lost"
        return f"process {self.process}{where} {outcome}: {self.reason}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes: the errors from which or during which it was raised."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and not any(current is other for other in seen):
            seen.append(current)
            pending += [current.__context__, current.__cause__]
            yield current


@dataclasses.dataclass(frozen=True)
class ProcessProgress:
    """The progress of a process; all times are in seconds."""

    count: int = 0  # The number of phases that the process has entered.
    phase: str = UNWATCHED  # The current phase.
    is_known: bool = False  # False until it was completed `KNOWN_AFTER` times, or if it varies.
    limit: float = 0.0  # The limit of the phase as long as it is not known; 0 for the default.
    longest: float = 0.0  # The time of the process's longest phase so far.
    stuck: float = 0.0  # The time that the process has spent in the current phase.
    step: int | None = None  # The last finished step; `None` before the first.
    step_age: float = 0.0  # The time since this step was finished.


def parse_progress(said: Mapping[str, Any]) -> ProcessProgress:
    """Parses the progress that a process has sent; raises a `ValueError` if it is not valid."""
    names = [field.name for field in dataclasses.fields(ProcessProgress)]
    if sorted(said) != sorted(names):
        raise ValueError(f"the fields are {sorted(said)}, expected {sorted(names)}")
    progress = ProcessProgress(**said)
    expected = dataclasses.replace(ProcessProgress(), step=0 if progress.step is not None else None)
    for name in names:
        value = getattr(progress, name)
        if type(value) is not type(getattr(expected, name)):
            raise ValueError(f"{name} is {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    return progress


class Pace:
    """Counts the phases and steps of this process's main thread; another thread may read them."""

    def __init__(self, *, get_time: Callable[[], float] = time.monotonic) -> None:
        """Starts in the phase `UNWATCHED`. `get_time` returns the time in seconds."""
        self._get_time = get_time
        self._entered_at = get_time()
        self._completed: Counter[str] = Counter()
        self._step: tuple[int, float] | None = None
        self._stuck = (0, 0.0)
        self._progress = ProcessProgress()

    def enter(self, phase: str, *, limit: float = 0.0, varies: bool = False) -> None:
        """Records that the main thread enters a phase; see `Cluster.enter`."""
        now, earlier = self._get_time(), self._progress
        longest = earlier.longest
        if earlier.phase != UNWATCHED:
            longest = max(longest, now - self._entered_at)
            self._completed[earlier.phase] += 1
        self._entered_at = now
        # One assignment replaces all fields at once, because another thread reads them.
        self._progress = ProcessProgress(
            earlier.count + 1,
            phase,
            not varies and self._completed[phase] >= KNOWN_AFTER,
            float(limit),
            longest,
        )

    def at_step(self, step: int) -> None:
        """Records that this process has finished the step."""
        if self._step is None or self._step[0] != step:
            self._step = (step, self._get_time())

    def watch(self, awake: float) -> None:
        """Adds `awake` seconds, in which this process was not stopped, to the time in the phase."""
        count, (before, seconds) = self._progress.count, self._stuck
        self._stuck = (count, seconds + awake if count == before else 0.0)

    def progress(self) -> ProcessProgress:
        """Returns the current progress of this process."""
        step, since = self._step or (None, self._get_time())
        # If the main thread has just entered a phase, `seconds` belongs to an earlier phase.
        progress, (count, seconds) = self._progress, self._stuck
        return dataclasses.replace(
            progress,
            stuck=seconds if count == progress.count else 0.0,
            step=step,
            step_age=self._get_time() - since,
        )


def slowest(
    steps: Iterable[tuple[int, int | None, float]],
) -> list[tuple[int, int | None, float]]:
    """Returns the items of the slowest processes, at most `MOST_TOLD`.

    An item has a process, its last step, which is `None` before the first, and the seconds since
    then. The processes without a step come first, then the processes with the lowest steps. One of
    the items is ahead of the slowest, if any process is. The hub sends these items to all
    processes. If it sent all items to all processes, the bytes would grow with the square of the
    number of processes.
    """
    ordered = sorted(steps, key=lambda one: (-1 if one[1] is None else one[1], -one[2]))
    told = ordered[:MOST_TOLD]
    if len(ordered) > MOST_TOLD and told[0][1] == told[-1][1]:
        ahead = (one for one in ordered[MOST_TOLD:] if one[1] != told[0][1])
        told[-1] = next(ahead, told[-1])
    return told


def find_hung(
    processes: Mapping[int, ProcessProgress], *, timeout_seconds: float
) -> tuple[int | None, str] | None:
    """Returns the number of the process that hangs, and the reason; `None` if no process hangs.

    The number is `None` if all processes have the same count of phases, because then it is not
    known which process hangs. A phase may take `timeout_seconds` longer than the longest phase so
    far, and the first few times much longer, see the module's docstring.
    """
    longest = max(one.longest for one in processes.values())
    lowest = min(one.count for one in processes.values())
    behind = {process: one for process, one in processes.items() if one.count == lowest}
    all_equal = len(behind) == len(processes)
    # The default limit of a phase that was completed only a few times. If all processes are in it,
    # for example in a long compilation, it may take any time. If some process is ahead, it has
    # completed this phase, so that the time of the phase is limited.
    first = float("inf") if all_equal else longest + max(FIRST_SECONDS, timeout_seconds)

    def allowed(one: ProcessProgress) -> float:
        return longest + timeout_seconds if one.is_known else one.limit or first

    overdue = [
        process
        for process, one in sorted(behind.items())
        if one.phase != UNWATCHED and one.stuck > allowed(one)
    ]
    if not overdue or (all_equal and len(overdue) < len(processes)):
        return None
    seconds = min(processes[process].stuck for process in overdue)
    phase = processes[overdue[0]].phase
    if all_equal:
        return None, f"no process has made progress for {seconds:.0f} s, all are {phase}"
    rest = [process for process in behind if process != overdue[0]]
    beside = f", like {name_processes(rest)}," if rest else ""
    return overdue[0], (
        f"it has made no progress{beside} for {seconds:.0f} s ({phase}), but other processes are "
        "ahead"
    )
