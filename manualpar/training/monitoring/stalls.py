"""Reports why a run stalls: every thread's stack, and the late process.

A training that hangs looks like a slow training. The loop calls `beat` in every step. If there is
no call for a configured time, the detector's thread reports a stall, and reports again each time
the silence has doubled. The detector never ends the run. So a false report does no harm, for
example in a first step that takes long to compile.

The detector reads the stacks with Python. So a thread that hangs in C code and holds Python's
global lock also blocks the detector. `py-spy dump` shows such a thread from another process.
"""

import contextlib
import dataclasses
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Self, TextIO

SHOWN_NAMES = 8


@dataclasses.dataclass(eq=False)
class StallDetector:
    """Watches a loop from a separate thread. Use it as a context manager, in any thread."""

    seconds: float  # A stall is reported after this time without a step; 0: never.
    _: dataclasses.KW_ONLY
    stream: TextIO | None = None  # The stream for the reports; standard error by default.
    # Returns the steps of the slowest processes, see `describe_late`. The detector's thread calls
    # it, and only in a stall.
    others: Callable[[], Mapping[int, tuple[int, float] | None]] | None = None
    num_processes: int = 0
    # Called in the thread of `beat` with the seconds of a stall that is over.
    on_over: Callable[[float], None] = lambda seconds: None
    get_time: Callable[[], float] = time.monotonic
    _step: int | None = None
    _work: list[str] = dataclasses.field(default_factory=list)
    _reports: int = 0
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._heard_at = self.get_time()

    def beat(self, step: int) -> None:
        """Records progress: `step` steps are done, or the work after them goes on."""
        with self._lock:
            now = self.get_time()
            silence, reports = now - self._heard_at, self._reports
            self._step, self._heard_at, self._reports = step, now, 0
        if reports:
            self._write(f"stall: over after {silence:.0f} s, at step {step}.\n")
            self.on_over(silence)

    @contextlib.contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Restarts the timer at entry and at exit; a report within the context names `work`."""
        with self._lock:
            self._work.append(work)
            self._heard_at, self._reports = self.get_time(), 0
        try:
            yield
        finally:
            with self._lock:
                self._work.pop()
                self._heard_at, self._reports = self.get_time(), 0

    def check(self) -> float:
        """Reports a stall if a report is due; returns the seconds until the next report."""
        if not self.seconds:
            return math.inf
        with self._lock:
            step, allowed = self._step, self.seconds
            work = f", while {self._work[-1]}" if self._work else ""
            silence = self.get_time() - self._heard_at
            due = allowed * 2**self._reports
            if silence < due:
                return due - silence
            while allowed * 2**self._reports <= silence:
                self._reports += 1
            wait = allowed * 2**self._reports - silence
        since = "since the start, the first step included" if step is None else f"after step {step}"
        stall = f"stall: no step for {silence:.0f} s, {since}{work}."
        self._write("\n".join(["", stall, *thread_stacks(), ""]))
        if self.others is not None:
            # This call comes last, because the cause of the stall may make it hang or fail too.
            try:
                late = describe_late(self.others(), num_processes=self.num_processes)
            except Exception as error:
                late = f"Which process is late is not known: {type(error).__name__}: {error}"
            self._write(f"{late}\n")
        return wait

    def __enter__(self) -> Self:
        if self.seconds:
            with self._lock:
                self._heard_at = self.get_time()
            self._thread = threading.Thread(target=self._watch, name="stall detector", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self.check()):
            pass

    def _write(self, text: str) -> None:
        """Writes a text in one call, so that the lines of several threads do not mix."""
        stream = sys.stderr if self.stream is None else self.stream
        stream.write(text)
        stream.flush()


def describe_late(told: Mapping[int, tuple[int, float] | None], *, num_processes: int = 0) -> str:
    """Returns a sentence that names the late processes.

    `told` maps the slowest processes to their last step and the seconds since then, or to `None`
    if they have made no step. The other processes of `num_processes` are not slower than these.
    """
    steps = {process: done for process, done in told.items() if done}
    if not steps:
        return "Which process is late is not known: no process has reported a step."
    lowest = min(step for step, _ in steps.values())
    is_all_told = len(told) >= num_processes
    if missing := sorted(process for process, done in told.items() if not done):
        names = _list_names([f"process {process}" for process in missing], is_all_told)
        return f"Late: {names}, with no step yet; the others are at step {lowest} or later."
    if len(steps) == 1:
        ((process, (step, seconds)),) = steps.items()
        return f"Only process {process} has reported a step: step {step}, {seconds:.0f} s ago."
    late = sorted(process for process, (step, _) in steps.items() if step == lowest)
    if len(late) == len(steps):
        longest = max(steps, key=lambda process: steps[process][1])
        return (
            f"All {max(len(steps), num_processes)} processes are at step {lowest}; the longest "
            f"silent is process {longest}, for {steps[longest][1]:.0f} s."
        )
    ahead = min(step for step, _ in steps.values() if step != lowest)
    names = _list_names(
        [f"process {process} ({steps[process][1]:.0f} s ago)" for process in late], is_all_told
    )
    return f"Late: {names}, at step {lowest}; the others are at step {ahead} or later."


def _list_names(names: list[str], is_all_told: bool) -> str:
    """Lists names; says if they are not all, because only some processes are told."""
    return ", ".join(names if is_all_told else [*names[:SHOWN_NAMES], "and maybe others"])


def thread_stacks() -> list[str]:
    """Formats the stack of every other Python thread, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"Thread {names.get(ident, ident)!r}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
