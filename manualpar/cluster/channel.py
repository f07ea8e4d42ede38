"""One process's side of the channel: beats, tells what happens here, hears what does elsewhere.

A daemon thread owns the link. Whatever it is to send is put on a queue that may be filled from any
thread, and from a signal handler too. It ends with the link: with `end` from the hub, when all are
done, or with a loss.
"""

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from manualpar.cluster.agreement import StopGate
from manualpar.cluster.hub import JOIN_SECONDS, beat_seconds
from manualpar.cluster.link import Link, Message
from manualpar.cluster.loss import CLOSED, Loss, describe_silence


class Channel:
    """A process's connection to the hub.

    Attributes:
      loss: Who is lost, once that is known.
      is_over: Set when the link has ended, whatever ended it.
      is_joined: Set when all processes are connected, or the link has ended.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        process: int,
        token: str,
        timeout_seconds: float,
        gate: StopGate,
        on_loss: Callable[[Loss], None],
    ) -> None:
        """Takes over a connection to the hub and starts the thread.

        Args:
          connection: The socket.
          process: Which process this is.
          token: What tells the hub that it is one of its own.
          timeout_seconds: How long the hub may be silent.
          gate: What the agreement on stopping goes through.
          on_loss: Called in the thread when a process is lost, at most once.
        """
        self._link = Link(connection)
        self._process = process
        self._timeout_seconds = timeout_seconds
        self._gate = gate
        self._on_loss = on_loss
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._first = ("", 0)
        self._others: tuple[float, list[tuple[int, float] | None]] = (time.monotonic(), [])
        self._own_step: tuple[int, float] | None = None
        self._sees_end = False
        self.loss: Loss | None = None
        self.is_over = threading.Event()
        self.is_joined = threading.Event()
        host, pid = socket.gethostname(), os.getpid()
        self.send({"kind": "hello", "token": token, "process": process, "host": host, "pid": pid})
        self.thread = threading.Thread(target=self._run, name="cluster-channel", daemon=True)
        self.thread.start()

    def send(self, message: Message) -> None:
        """Has a message sent; safe in any thread and in signal handlers, and never waits."""
        self._outbox.put(message)
        self._wake()

    def at_step(self, step: int) -> None:
        """Takes note of this process's step; the next beat carries it."""
        if self._own_step is None or self._own_step[0] != step:
            self._own_step = (step, time.monotonic())

    def steps(self) -> dict[int, tuple[int, float]]:
        """The last step of each process that has made one, and the seconds since."""
        now = time.monotonic()
        heard_at, others = self._others
        steps = {
            process: (entry[0], entry[1] + now - heard_at)
            for process, entry in enumerate(others)
            if entry is not None
        }
        if self._own_step is not None:
            step, at = self._own_step
            steps[self._process] = (step, now - at)
        return steps

    def _wake(self) -> None:
        """Has the thread look at the outbox."""
        try:
            os.write(self._wake_writer, b"x")
        except BlockingIOError:
            return  # Full of earlier calls, so it will look.

    def _run(self) -> None:
        """Serves the link until it ends."""
        interval = beat_seconds(self._timeout_seconds)
        silence, last, beaten_at = 0.0, time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while self.loss is None and not self._sees_end:
                events = selector.select(interval)
                now = time.monotonic()
                # As in the hub: what this process itself has slept is not the hub's silence.
                silence, last = silence + min(now - last, 2 * interval), now
                if any(key.fileobj == self._wake_reader for key, _ in events):
                    os.read(self._wake_reader, 4096)
                for message in self._link.receive():
                    silence = 0.0
                    self._handle(message)
                while not self._outbox.empty():
                    self._link.send(self._outbox.get())
                if now - beaten_at >= interval:
                    beaten_at = now
                    self._link.send(self._beat(now))
                self._link.flush()
                allowed = self._timeout_seconds
                if not self.is_joined.is_set():
                    allowed = 2 * max(allowed, JOIN_SECONDS)
                if self.loss is None and not self._sees_end:
                    if not self._link.is_open:
                        self.loss = Loss(0, *self._first, CLOSED)
                    elif silence > allowed:
                        self.loss = Loss(0, *self._first, describe_silence(allowed))
        if self.loss is not None:
            self._on_loss(self.loss)
        self.is_over.set()
        self.is_joined.set()
        self._link.close()

    def _beat(self, now: float) -> dict[str, Any]:
        """The message that says that this process lives."""
        step, at = self._own_step or (None, now)
        return {"kind": "beat", "step": step, "age": round(now - at, 3)}

    def _handle(self, message: Message) -> None:
        """Does what the hub says."""
        kind = message["kind"]
        if kind == "welcome":
            self._first = (message["host"], message["pid"])
            self.is_joined.set()
        elif kind == "beat":
            self._others = (time.monotonic(), message["steps"])
        elif kind == "hold":
            self._link.send({"kind": "held", "calls": self._gate.hold()})
        elif kind == "stop":
            self._gate.release(message["at"])
        elif kind == "lost" and self.loss is None:
            self.loss = Loss.from_message(message)
        elif kind == "end":
            self._sees_end = True
