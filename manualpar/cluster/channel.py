"""One process's side of the channel: beats, tells what happens here, hears what happens elsewhere.

A daemon thread runs the event loop that the link to the hub belongs to. It ends with the link: when
all are done, when the processes differ, or when one is lost.
"""

import asyncio
import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable

from manualpar.cluster.facts import DisagreementError, Facts, announce
from manualpar.cluster.link import Link, Message, beats
from manualpar.cluster.lost import CLOSED, Loss, Pace, describe_silence
from manualpar.cluster.stopping import StopGate


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
        timeout_seconds: float,
        gate: StopGate,
        pace: Pace,
        on_loss: Callable[[Loss], None],
    ) -> None:
        """Starts the thread on a connection on which the hub has admitted this process.

        The hub may be silent for `timeout_seconds`. The thread calls `on_loss` at most once.
        """
        self._timeout_seconds = timeout_seconds
        self._gate = gate
        self._pace = pace
        self._on_loss = on_loss
        self._differences: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._first = ("", 0)  # Host and process id of process 0.
        self._heard_at = time.monotonic()
        self._others: list[tuple[int, float] | None] = []
        self._silence = 0.0
        self._loop = asyncio.new_event_loop()
        self._is_connected = threading.Event()
        self.loss: Loss | None = None
        self.is_over = threading.Event()
        self.is_joined = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(connection,), name="cluster-channel", daemon=True
        )
        self.thread.start()
        self._is_connected.wait()

    def send(self, message: Message) -> None:
        """Hands a message to the thread; safe anywhere, also in signal handlers; never waits."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: there is nobody left to tell.
            self._loop.call_soon_threadsafe(self._link.send, message)

    def agree(self, facts: Facts) -> None:
        """See `Cluster.agree`."""
        self.send({"kind": "facts", "facts": dict(facts)})
        if differences := self._differences.get():
            raise DisagreementError(differences)

    def steps(self) -> dict[int, tuple[int, float]]:
        """The last known step of each process, and the seconds since it came to that."""
        since = time.monotonic() - self._heard_at
        return {
            process: (entry[0], entry[1] + since)
            for process, entry in enumerate(self._others)
            if entry is not None
        }

    def _run(self, connection: socket.socket) -> None:
        self._loop.run_until_complete(self._serve(connection))
        self._loop.close()
        self.is_over.set()
        self.is_joined.set()
        self._differences.put([])

    async def _serve(self, connection: socket.socket) -> None:
        """Serves the link until it ends."""
        self._end: asyncio.Future[Loss | None] = self._loop.create_future()
        self._link = Link(
            opened=lambda link: self._is_connected.set(),
            received=self._receive,
            closed=lambda link: self._finish(Loss(0, *self._first, CLOSED)),
        )
        await self._loop.create_connection(lambda: self._link, sock=connection)
        async for _, awake in beats(self._end, timeout_seconds=self._timeout_seconds):
            self._pace.watch(awake)
            progress = dataclasses.asdict(self._pace.progress())
            self._link.send({"kind": "beat", "progress": progress})
            self._silence += awake
            if self._silence > self._timeout_seconds:
                self._finish(Loss(0, *self._first, describe_silence(self._timeout_seconds)))
        self.loss = self._end.result()
        if self.loss:
            self._on_loss(self.loss)
        self._link.close()
        await self._link.is_closed

    def _receive(self, link: Link, message: Message) -> None:
        """Does what the hub says."""
        self._silence = 0.0
        kind = message.pop("kind")
        if kind == "welcome":
            self._first = (message["host"], message["pid"])
            self.is_joined.set()
        elif kind == "beat":
            self._heard_at, self._others = time.monotonic(), message["steps"]
        elif kind == "hold":
            link.send({"kind": "held", "calls": self._gate.hold()})
        elif kind == "stop":
            self._gate.release(message["at"])
        elif kind == "lost":
            self._finish(Loss(**message))
        elif kind == "waiting":
            announce(message["text"])
        elif kind == "agreed":
            self._differences.put([])
        elif kind == "differences":
            self._differences.put(message["differences"])
            self._finish(None)
        elif kind == "end":
            self._finish(None)

    def _finish(self, loss: Loss | None) -> None:
        if not self._end.done():
            self._end.set_result(loss)
