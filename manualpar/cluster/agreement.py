"""After which step all processes stop, when any of them is asked to.

Between two steps each process asks whether to stop, all of them equally often: the n-th call in one
process belongs to the n-th in every other. To stop, process 0 asks for the calls that each has
behind it, and all stop in the call after the largest number, which none has made.

A process answers from a thread of its own, and from then on its calls wait until the answer is
known. So nobody waits for another's *step*: a process may be in the middle of a collective that
needs the rest, which are held in their calls for no longer than the messages take.
"""

import threading


class StopGate:
    """One process's side: what its calls go through."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._is_held = False
        self._stop_at: int | None = None

    def hold(self) -> int:
        """Makes calls wait; returns how many have been let through."""
        with self._changed:
            self._is_held = self._stop_at is None
            return self._calls

    def release(self, stop_at: int) -> None:
        """Lets calls through, that of the given number being told to stop."""
        with self._changed:
            self._stop_at = stop_at
            self._is_held = False
            self._changed.notify_all()

    def should_stop(self) -> bool:
        """A call: whether to stop here. Waits while the processes agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._calls += 1
            return self._stop_at is not None and self._calls >= self._stop_at


class StopAgreement:
    """Process 0's side: asks once, collects the answers, and finds the call to stop in."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._calls: dict[int, int] = {}
        self._is_asked = False

    def request(self) -> bool:
        """A request to stop; says whether everybody is to be asked now, for it is the first."""
        first, self._is_asked = not self._is_asked, True
        return first

    def answer(self, process: int, calls: int) -> int | None:
        """Takes in an answer; with the last of them, returns the number of the call to stop in."""
        self._calls[process] = calls
        if len(self._calls) < self._num_processes:
            return None
        return max(self._calls.values()) + 1
