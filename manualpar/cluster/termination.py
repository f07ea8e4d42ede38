"""SIGTERM, heard by a thread: also while the main thread stands in a compilation or a collective.

Python runs signal handlers in the main thread, between two of its own instructions, and two signals
that come before that as one. So here Python's C handler writes the signal's number to a socket
(`signal.set_wakeup_fd`), where a thread reads it.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_sigterm(first: Callable[[], None], second: Callable[[], None]) -> Iterator[None]:
    """Within, SIGTERM does not end the process, but calls functions from a thread.

    Args:
      first: What the first SIGTERM does.
      second: What every later one does.

    Raises:
      ValueError: It is not called in the main thread.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    calls = [first]
    earlier_writer = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while data := reader.recv(64):
            for number in data:
                if number == signal.SIGTERM:
                    (calls.pop() if calls else second)()
            if earlier_writer != -1:
                with contextlib.suppress(BlockingIOError):  # Full: who reads it is awake anyway.
                    os.write(earlier_writer, data)

    thread = threading.Thread(target=listen, name="cluster-sigterm", daemon=True)
    thread.start()
    # The handler does nothing; that there is one keeps the signal from ending the process.
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        # None stands for a handler in C, which Python cannot put back.
        signal.signal(signal.SIGTERM, earlier if earlier is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(earlier_writer, warn_on_full_buffer=False)
        writer.close()
        thread.join()
        reader.close()
