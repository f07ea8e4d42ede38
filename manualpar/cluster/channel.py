"""One process's side of the channel: beats, tells what happens here, hears what does elsewhere.

A daemon thread owns the link. Whatever it is to send is put on a queue that may be filled from any
thread, and from a signal handler too. It ends with the link: with `end` from the hub, when all are
done, or with a loss.
"""

import dataclasses
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from manualpar.cluster.agreement import StopGate
from manualpar.cluster.facts import DisagreementError, Facts
from manualpar.cluster.hub import beat_seconds
from manualpar.cluster.link import Link, Message
from manualpar.cluster.loss import CLOSED, Loss, describe_silence
from manualpar.cluster.progress import Pace


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
        timeout_seconds: float,
        gate: StopGate,
        pace: Pace,
        on_loss: Callable[[Loss], None],
        announce: Callable[[str], None],
    ) -> None:
        """Takes over a connection to the hub and starts the thread.

        Args:
          connection: The socket, whose process the hub has admitted.
          process: Which process this is.
          timeout_seconds: How long the hub may be silent.
          gate: What the agreement on stopping goes through.
          pace: Who counts what the main thread does.
          on_loss: Called in the thread when a process is lost, at most once.
          announce: Shows a sentence.
        """
        self._link = Link(connection)
        self._process = process
        self._timeout_seconds = timeout_seconds
        self._gate = gate
        self._pace = pace
        self._stuck = (0, 0.0)
        self._on_loss = on_loss
        self._announce = announce
        self._differences: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._first = ("", 0)
        self._others: tuple[float, list[tuple[int, float] | None]] = (time.monotonic(), [])
        self._own_step: tuple[int, float] | None = None
        self._sees_end = False
        self.loss: Loss | None = None
        self.is_over = threading.Event()
        self.is_joined = threading.Event()
        self.thread = threading.Thread(target=self._run, name="cluster-channel", daemon=True)
        self.thread.start()

    def send(self, message: Message) -> None:
        """Has a message sent; safe in any thread and in signal handlers, and never waits."""
        self._outbox.put(message)
        self._wake()

    def agree(self, facts: Facts) -> None:
        """Compares facts with those of the others, and waits for theirs.

        Raises:
          DisagreementError: They differ; the link has ended.
        """
        self.send({"kind": "facts", "facts": dict(facts)})
        if differences := self._differences.get():
            raise DisagreementError(differences)

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
                awake, last = min(now - last, 2 * interval), now
                silence += awake
                self._watch_pace(awake)
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
                if self.loss is None and not self._sees_end:
                    if not self._link.is_open:
                        self.loss = Loss(0, *self._first, CLOSED)
                    elif silence > allowed:
                        self.loss = Loss(0, *self._first, describe_silence(allowed))
        if self.loss is not None:
            self._on_loss(self.loss)
        self._link.close()
        self.is_over.set()
        self.is_joined.set()
        self._differences.put([])

    def _watch_pace(self, awake: float) -> None:
        """Adds up for how long the main thread has been in its phase while this one was awake."""
        count = self._pace.progress.count
        before, seconds = self._stuck
        self._stuck = (count, seconds + awake if count == before else 0.0)

    def _beat(self, now: float) -> dict[str, Any]:
        """The message that says that this process lives."""
        step, at = self._own_step or (None, now)
        progress = dataclasses.asdict(self._pace.progress)
        # The count may be newer than the seconds, which are then those of an earlier phase.
        count, seconds = self._stuck
        progress["stuck"] = round(seconds, 3) if count == progress["count"] else 0.0
        return {"kind": "beat", "step": step, "age": round(now - at, 3), "progress": progress}

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
        elif kind == "waiting":
            self._announce(message["text"])
        elif kind == "agreed":
            self._differences.put([])
        elif kind == "differences":
            self._differences.put(message["differences"])
            self._sees_end = True
        elif kind == "end":
            self._sees_end = True
