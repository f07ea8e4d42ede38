"""Process 0's side of the channel: hears every process, and tells each of them what all must know.

Every process, process 0 included, has one link to the hub and beats on it. The hub declares a
process lost whose link closes or that has been silent for the timeout, tells the others at once,
and ends. Only the time counts as silence in which the hub itself was awake: a process 0 that was
stopped and goes on accuses nobody of its own sleep.

Invariant: process 0 hears of a loss last, when the others are gone or have had `LEAVING_SECONDS`.
JAX's coordination service lives in process 0, and where it goes first XLA aborts the others.
"""

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from manualpar.cluster.agreement import StopAgreement
from manualpar.cluster.link import Link, Message
from manualpar.cluster.loss import CLOSED, Loss, describe_silence

# How long to wait for all to connect, at least; the timeout, if that is longer.
JOIN_SECONDS = 60.0
# How long the others have to leave before process 0 does.
LEAVING_SECONDS = 2.0


@dataclasses.dataclass
class _Member:
    """What the hub knows of a process."""

    link: Link | None = None
    host: str = ""
    pid: int = 0
    silence: float = 0.0
    step: int | None = None
    stepped_at: float = 0.0
    is_done: bool = False


class Hub:
    """Serves the processes in a thread; `run` is its target."""

    def __init__(
        self,
        listener: socket.socket,
        own: socket.socket,
        *,
        num_processes: int,
        token: str,
        timeout_seconds: float,
    ) -> None:
        """Prepares a hub.

        Args:
          listener: Where the other processes connect to; listening.
          own: The hub's end of process 0's own link.
          num_processes: How many processes there are.
          token: What tells our processes from strangers.
          timeout_seconds: How long a process may be silent.
        """
        self._listener = listener
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._members = {process: _Member() for process in range(num_processes)}
        self._strangers = [Link(own)]
        self._agreement = StopAgreement(num_processes)
        self._selector = selectors.DefaultSelector()
        self._is_complete = False
        self._has_ended = False
        self.thread = threading.Thread(target=self._run, name="cluster-hub", daemon=True)

    def _run(self) -> None:
        """Serves until all are done or one is lost."""
        interval = beat_seconds(self._timeout_seconds)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._strangers[0], selectors.EVENT_READ)
        last = beaten_at = time.monotonic()
        while not self._has_ended:
            events = self._selector.select(interval)
            now = time.monotonic()
            awake, last = min(now - last, 2 * interval), now
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
            self._receive()
            self._watch(awake)
            if not self._has_ended and now - beaten_at >= interval:
                beaten_at = now
                self._tell({"kind": "beat", "steps": self._steps(now)})
        self._leave()

    def _accept(self) -> None:
        """Lets connections in; who they are they have to say."""
        # One that was taken back before it was accepted.
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._strangers.append(Link(connection))
            self._selector.register(self._strangers[-1], selectors.EVENT_READ)

    def _receive(self) -> None:
        """Takes in all messages, those of processes before their links' ends."""
        for link in list(self._strangers):
            messages = link.receive()
            if messages:
                self._strangers.remove(link)
                self._admit(link, messages[0])
                messages = messages[1:]
            elif not link.is_open:
                self._strangers.remove(link)
                self._drop(link)
            for message in messages:
                for process, member in self._members.items():
                    if member.link is link:
                        self._handle(process, member, message)
        for process, member in self._members.items():
            if member.link is not None and member.link.is_open:
                for message in member.link.receive():
                    self._handle(process, member, message)

    def _admit(self, link: Link, hello: Message) -> None:
        """Takes a connection for that of a process, if it knows the token."""
        if hello.get("token") != self._token:
            self._drop(link)
            return
        member = self._members[hello["process"]]
        member.link, member.silence = link, 0.0
        member.host, member.pid = str(hello["host"]), int(hello["pid"])
        if all(member.link is not None for member in self._members.values()):
            self._is_complete = True
            self._selector.unregister(self._listener)
            self._listener.close()
            first = self._members[0]
            self._tell({"kind": "welcome", "host": first.host, "pid": first.pid})

    def _handle(self, process: int, member: _Member, message: Message) -> None:
        """Does what a process asks for."""
        member.silence = 0.0
        kind = message["kind"]
        if self._has_ended:
            return
        if kind == "beat":
            if message["step"] is not None:
                member.step = message["step"]
                member.stepped_at = time.monotonic() - message["age"]
        elif kind == "stop":
            if self._agreement.request():
                self._tell({"kind": "hold"})
        elif kind == "held":
            stop_at = self._agreement.answer(process, message["calls"])
            if stop_at is not None:
                self._tell({"kind": "stop", "at": stop_at})
        elif kind == "failed":
            loss = Loss(process, member.host, member.pid, message["error"], is_failure=True)
            self._tell_loss(loss)
        elif kind == "done":
            member.is_done = True
            if all(member.is_done for member in self._members.values()):
                self._has_ended = True
                self._tell({"kind": "end"})

    def _watch(self, awake: float) -> None:
        """Finds out who is lost."""
        allowed = self._timeout_seconds
        if not self._is_complete:
            allowed = max(allowed, JOIN_SECONDS)
        for process, member in self._members.items():
            if self._has_ended:
                return
            member.silence += awake
            if member.link is not None:
                member.link.flush()
            if member.link is not None and not member.link.is_open:
                self._forget(member)
                if not member.is_done:
                    self._tell_loss(Loss(process, member.host, member.pid, CLOSED))
            elif member.silence > allowed and not (member.is_done and member.link is None):
                reason = describe_silence(allowed)
                if member.link is None:
                    reason = f"it has not connected to process 0 within {allowed:g} s"
                self._tell_loss(Loss(process, member.host, member.pid, reason))

    def _steps(self, now: float) -> list[tuple[int, float] | None]:
        """How far each process is, and for how long."""
        return [
            None if member.step is None else (member.step, round(now - member.stepped_at, 3))
            for member in self._members.values()
        ]

    def _tell(self, message: Message) -> None:
        """Tells every process."""
        for member in self._members.values():
            if member.link is not None:
                member.link.send(message)

    def _tell_loss(self, loss: Loss) -> None:
        """Tells of a loss: the others first, process 0 when they have left."""
        self._has_ended = True
        others = [
            member.link
            for process, member in self._members.items()
            if process not in (0, loss.process) and member.link is not None
        ]
        lost, own = self._members[loss.process].link, self._members[0].link
        for link in (*others, lost if lost is not own else None):
            if link is not None:
                link.send(loss.to_message())
        _wait_until_closed(others)
        if own is not None:
            own.send(loss.to_message())

    def _leave(self) -> None:
        """Waits a little for the processes to close their links, then closes them all."""
        links = [member.link for member in self._members.values() if member.link is not None]
        _wait_until_closed(links)
        self._selector.close()
        for link in (*links, *self._strangers):
            link.close()
        self._listener.close()

    def _forget(self, member: _Member) -> None:
        """Closes the link of a process that is gone."""
        if member.link is not None:
            self._drop(member.link)
            member.link = None

    def _drop(self, link: Link) -> None:
        """Closes a link."""
        self._selector.unregister(link)
        link.close()


def _wait_until_closed(links: Sequence[Link]) -> None:
    """Waits until the other ends are closed, but no longer than `LEAVING_SECONDS`."""
    until = time.monotonic() + LEAVING_SECONDS
    while any(link.is_open for link in links) and time.monotonic() < until:
        for link in links:
            link.flush()
            link.receive()
        time.sleep(0.01)


def beat_seconds(timeout_seconds: float) -> float:
    """How often a process beats, so that several must go missing before it is taken for lost."""
    return min(timeout_seconds / 8, 1.0)
