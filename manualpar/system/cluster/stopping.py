"""Stops all processes after the same step, when one of them is asked to stop (by SIGTERM, say).

Between two steps each process asks whether to stop. All processes ask equally often: the n-th call
in one process belongs to the n-th call in every other process. To stop, the hub asks each process
for the number of its calls. All processes stop in the call after the largest number, because no
process has made this call yet.

A thread of each process answers, and from then on the process's calls wait until the hub has sent
the number of the last call. So no process waits for another's *step*. A process in the middle of a
collective needs the other processes, which wait in their calls only as long as the messages take.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


class StopGate:
    """Lets a process's calls through, holds them, or tells them to stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._is_held = False
        self._stop_at: int | None = None

    def hold(self) -> int:
        """Makes calls wait; returns how many calls have been let through."""
        with self._changed:
            self._is_held = self._stop_at is None
            return self._calls

    def release(self, stop_at: int) -> None:
        """Lets calls through; calls from number `stop_at` on return that they must stop."""
        with self._changed:
            self._stop_at = stop_at
            self._is_held = False
            self._changed.notify_all()

    def should_stop(self) -> bool:
        """Counts a call and returns whether to stop here. Waits while the processes agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._calls += 1
            return self._stop_at is not None and self._calls >= self._stop_at


@contextlib.contextmanager
def on_sigterm(
    first: Callable[[], None],
    second: Callable[[], None],
    *,
    is_over: Callable[[], bool] = lambda: False,
    stays_over: bool = False,
) -> Iterator[None]:
    """Calls `first` for the first SIGTERM and `second` for every later SIGTERM, in a thread.

    Once `is_over` returns true, SIGTERM does nothing; with `stays_over` it does nothing after the
    context either.

    Python would run a signal handler in the main thread, which may be in a compilation or a
    collective, and would run it once for two signals in a row. So Python's C handler writes each
    signal's number to a socket (`signal.set_wakeup_fd`), and the thread reads it there. Call this
    function in the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    calls = [first]
    earlier_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while data := reader.recv(64):
            for number in data:
                if number == signal.SIGTERM and not is_over():
                    (calls.pop() if calls else second)()
            if earlier_writer != -1:
                # If the socket is full, its reader is awake anyway.
                with contextlib.suppress(BlockingIOError):
                    os.write(earlier_writer, data)

    thread = threading.Thread(target=listen, name="cluster-sigterm", daemon=True)
    thread.start()
    # The handler does nothing, but without a handler the signal would end the process.
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        # None stands for a handler in C, which Python cannot put back.
        after = earlier if earlier is not None else signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN if stays_over and is_over() else after)
        signal.set_wakeup_fd(earlier_writer, warn_on_full_buffer=False)
        writer.close()
        thread.join()
        reader.close()
