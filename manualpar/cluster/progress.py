"""Whether a process stands still although its threads live.

The processes do the same things in the same order, so every process counts the phases that it
enters: reading a batch, a step, a save. Who has the lowest count is behind, and the others sooner
or later wait for it in a collective. A process is hung when it is behind for longer than anything
has taken so far in any process, and the timeout besides.

What has been done fewer than `KNOWN_AFTER` times may still become slower than it was, because the
first steps compile and a save waits for the one before it. It is allowed `FIRST_SECONDS` instead.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping

from manualpar.cluster.facts import name_processes

KNOWN_AFTER = 3
FIRST_SECONDS = 600.0
# Between the phases that are watched: nothing is expected of a process then.
UNWATCHED = ""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a process is.

    Attributes:
      count: How many phases it has entered.
      phase: The one it is in.
      is_known: Whether it has been through that phase often enough to know how long it takes.
      longest: The seconds that its longest phase took so far.
      stuck: The seconds that it has been in this phase.
    """

    count: int = 0
    phase: str = UNWATCHED
    is_known: bool = False
    longest: float = 0.0
    stuck: float = 0.0


class Pace:
    """Counts the phases of this process, and remembers how long they took."""

    def __init__(self, *, get_time: Callable[[], float] = time.monotonic) -> None:
        """Begins outside any phase. `get_time` is a clock in seconds."""
        self._get_time = get_time
        self._entered_at = get_time()
        self._completed: Counter[str] = Counter()
        self.progress = Progress()

    def enter(self, phase: str) -> None:
        """Leaves the phase that this process is in for another."""
        now, earlier = self._get_time(), self.progress
        longest = earlier.longest
        if earlier.phase != UNWATCHED:
            longest = max(longest, now - self._entered_at)
            self._completed[earlier.phase] += 1
        self._entered_at = now
        # In one assignment, because another thread reads it.
        self.progress = Progress(
            earlier.count + 1, phase, self._completed[phase] >= KNOWN_AFTER, longest
        )


def find_hung(
    processes: Mapping[int, Progress], *, timeout_seconds: float
) -> tuple[int | None, str] | None:
    """Finds out whether a process is hung.

    Args:
      processes: The progress of every process, by its number.
      timeout_seconds: How long a process may take beyond what anything has taken so far.

    Returns:
      `None` if there is none; else its number and how it shows. The number is `None` if all are
      equally far, so that nobody knows which one the others wait for.
    """
    longest = max(one.longest for one in processes.values())
    lowest = min(one.count for one in processes.values())
    behind = {process: one for process, one in processes.items() if one.count == lowest}
    all_equal = len(behind) == len(processes)
    overdue = []
    for process, one in sorted(behind.items()):
        # Who is ahead has shown that the phase ends. If nobody has, it may only be a long one.
        first = float("inf") if all_equal else max(FIRST_SECONDS, timeout_seconds)
        allowed = longest + (timeout_seconds if one.is_known else first)
        if one.phase != UNWATCHED and one.stuck > allowed:
            overdue.append(process)
    if not overdue or (all_equal and len(overdue) < len(processes)):
        return None
    seconds = min(processes[process].stuck for process in overdue)
    phase = processes[overdue[0]].phase
    if all_equal:
        return None, f"none has made progress for {seconds:.0f} s, all are {phase}"
    rest = [process for process in behind if process != overdue[0]]
    beside = f", like {name_processes(rest)}," if rest else ""
    return overdue[0], (
        f"it has made no progress{beside} for {seconds:.0f} s ({phase}), and the others are ahead"
    )
