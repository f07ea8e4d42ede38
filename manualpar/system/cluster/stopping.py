"""Stops all processes after the same step, when a signal asks one of them to save and stop.

Between two steps each process calls `should_stop`. The n-th call in one process belongs to the same
step as the n-th call in every other process. To stop, the hub asks each process how many calls it
has made. All processes then stop in the call after the largest of these numbers, because no process
has made this call yet.

In each process a thread answers the hub. After the answer, the process's next call waits until the
hub has sent the number of the call in which to stop. A call waits only for messages and never for
another process's step, so it cannot cause a deadlock with a process that is in a collective.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

# The signals that ask a run to save and stop. SIGUSR1 is the warning that Slurm can send some time
# before a job's time limit. Windows does not have it.
STOP_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class StopGate:
    """Decides in which call of `should_stop` this process stops."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = 0
        self._is_held = False
        self._stop_at: int | None = None

    def hold(self) -> int:
        """Makes later calls wait; returns the number of calls that have returned so far."""
        with self._changed:
            self._is_held = self._stop_at is None
            return self._calls

    def release(self, stop_at: int) -> None:
        """Lets waiting calls return; the call number `stop_at` and later calls return true."""
        with self._changed:
            self._stop_at = stop_at
            self._is_held = False
            self._changed.notify_all()

    def should_stop(self) -> bool:
        """Counts a call, waits while the processes agree on a step, returns whether to stop now."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            self._calls += 1
            return self._stop_at is not None and self._calls >= self._stop_at


@contextlib.contextmanager
def on_stop_signal(
    first: Callable[[signal.Signals], None],
    second: Callable[[], None],
    *,
    is_over: Callable[[], bool] = lambda: False,
    stays_over: bool = False,
) -> Iterator[None]:
    """Calls `first` for the first SIGTERM and the first SIGUSR1, in a thread.

    It calls `second` for every later SIGTERM. A later SIGUSR1 has no effect, so that a SIGTERM soon
    after a SIGUSR1 does not interrupt the save.

    Once `is_over` returns true, both signals have no effect; with `stays_over` they have no effect
    after the context either. Enter the context in the main thread.

    A Python signal handler would run in the main thread, only after the compilation or collective
    that the main thread may be in, and only once for two signals in a row. So instead Python's C
    handler writes the number of each signal to a socket (`signal.set_wakeup_fd`), and a thread
    reads the numbers from the socket.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    received: set[int] = set()
    earlier_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while data := reader.recv(64):
            for number in data:
                if number not in STOP_SIGNALS or is_over():
                    continue
                if number not in received:
                    received.add(number)
                    first(signal.Signals(number))
                elif number == signal.SIGTERM:
                    second()
            if earlier_writer != -1:
                # If the socket is full, its reader has signals to read anyway.
                with contextlib.suppress(BlockingIOError):
                    os.write(earlier_writer, data)

    thread = threading.Thread(target=listen, name="cluster-signals", daemon=True)
    thread.start()
    # The handler does nothing, but without a handler the signal would end the process.
    earlier = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            # `None` stands for a handler that was not installed by Python and cannot be restored.
            after = handler if handler is not None else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if stays_over and is_over() else after)
        signal.set_wakeup_fd(earlier_writer, warn_on_full_buffer=False)
        writer.close()
        thread.join()
        reader.close()
