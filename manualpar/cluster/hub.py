"""Process 0's side of the channel: hears every process, and tells each of them what all must know.

Every process, process 0 included, has one link to the hub and beats on it. The hub declares a
process lost whose link closes or that has been silent for the timeout, tells the others at once,
and ends. Only the time counts as silence in which the hub itself was awake: a process 0 that was
stopped and goes on accuses nobody of its own sleep. A process whose threads live, and which makes
no progress where the others do, is lost as well (`manualpar.cluster.progress`).

The processes meet here before JAX introduces them to each other. So who is missing, or differs in
what all must have in common, is known before anything waits in a collective.

Invariant: process 0 hears of a loss last, when the others are gone or have had `LEAVING_SECONDS`.
JAX's coordination service lives in process 0, and where it goes first XLA aborts the others.
"""

import dataclasses
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from manualpar.cluster.admission import (
    MAX_HELLO_BYTES,
    MAX_STRANGERS,
    STRANGER_SECONDS,
    TOKEN_VARIABLE,
    make_challenge,
    read_hello,
)
from manualpar.cluster.agreement import StopAgreement
from manualpar.cluster.facts import Facts, describe_differences, name_processes
from manualpar.cluster.link import MAX_LINE_BYTES, Link, Message
from manualpar.cluster.loss import CLOSED, Loss, describe_silence
from manualpar.cluster.progress import Progress, find_hung

# How long the others have to leave before process 0 does.
LEAVING_SECONDS = 2.0
ACCEPT_AGAIN_SECONDS = 0.05


@dataclasses.dataclass
class _Member:
    """What the hub knows of a process."""

    link: Link | None = None
    host: str = ""
    pid: int = 0
    silence: float = 0.0
    step: int | None = None
    stepped_at: float = 0.0
    progress: Progress = dataclasses.field(default_factory=Progress)
    facts: Facts | None = None
    is_done: bool = False


@dataclasses.dataclass
class _Stranger:
    """A connection that has not proved yet whose it is."""

    link: Link
    challenge: str
    until: float


class Hub:
    """Serves the processes in a thread; `run` is its target."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        num_processes: int,
        token: str,
        timeout_seconds: float,
        join_seconds: float,
        announce: Callable[[str], None],
    ) -> None:
        """Prepares a hub.

        Args:
          listener: Where the processes connect to, process 0 too; listening.
          num_processes: How many processes there are.
          token: What tells our processes from strangers.
          timeout_seconds: How long a process may be silent.
          join_seconds: How long to wait for all processes to connect.
          announce: Shows a sentence.
        """
        self._listener = listener
        self._token = token
        self._timeout_seconds = timeout_seconds
        self._join_seconds = join_seconds
        self._announce = announce
        self._members = {process: _Member() for process in range(num_processes)}
        self._strangers: list[_Stranger] = []
        self._agreement = StopAgreement(num_processes)
        self._selector = selectors.DefaultSelector()
        self._waited = 0.0
        self._is_complete = False
        self._has_warned = False
        self._has_told_missing = False
        self._has_ended = False
        self.thread = threading.Thread(target=self._run, name="cluster-hub", daemon=True)

    def _run(self) -> None:
        """Serves until all are done or one is lost."""
        interval = beat_seconds(self._timeout_seconds)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        last = beaten_at = time.monotonic()
        while not self._has_ended:
            events = self._selector.select(interval)
            now = time.monotonic()
            awake, last = min(now - last, 2 * interval), now
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
            self._receive(now)
            self._watch(awake)
            if not self._has_ended and now - beaten_at >= interval:
                beaten_at = now
                self._tell({"kind": "beat", "steps": self._steps(now)})
        self._leave()

    def _accept(self) -> None:
        """Lets a connection in, and asks who it is."""
        if len(self._strangers) >= MAX_STRANGERS + len(self._members):
            self._turn_away(self._strangers[0])  # Our own processes answer at once.
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # It was taken back before it was accepted.
        except OSError:  # This process has used up its file descriptors.
            for stranger in list(self._strangers):
                self._turn_away(stranger)
            time.sleep(ACCEPT_AGAIN_SECONDS)
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(connection, max_line_bytes=MAX_HELLO_BYTES)
        challenge = make_challenge()
        self._strangers.append(_Stranger(link, challenge, time.monotonic() + STRANGER_SECONDS))
        self._selector.register(link, selectors.EVENT_READ)
        link.send({"kind": "challenge", "challenge": challenge})

    def _receive(self, now: float) -> None:
        """Takes in all messages, those of processes before their links' ends."""
        for stranger in list(self._strangers):
            messages = stranger.link.receive()
            if messages:
                self._strangers.remove(stranger)
                self._admit(stranger, messages[0])
            elif not stranger.link.is_open or now > stranger.until:
                self._turn_away(stranger)
        for process, member in self._members.items():
            if member.link is not None and member.link.is_open:
                for message in member.link.receive():
                    self._handle(process, member, message)

    def _admit(self, stranger: _Stranger, message: Message) -> None:
        """Takes a connection for that of a process, if it knows the token."""
        link = stranger.link
        hello = read_hello(message, token=self._token, challenge=stranger.challenge)
        if hello is None:
            if message.get("kind") == "hello" and not self._has_warned:
                self._has_warned = True
                self._announce(f"a connection with another {TOKEN_VARIABLE} was refused")
            reason = f"its {TOKEN_VARIABLE} is not that of process 0"
            link.send({"kind": "refused", "reason": reason})
            self._drop(link)
            return
        if hello.num_processes != len(self._members):
            differences = describe_differences(
                {
                    0: {"num_processes": str(len(self._members))},
                    hello.process: {"num_processes": str(hello.num_processes)},
                }
            )
            link.send({"kind": "differences", "differences": differences})
            self._drop(link)
            self._tell_in_order({"kind": "differences", "differences": differences})
            return
        member = self._members.get(hello.process)
        if member is None or member.link is not None:
            who = f"on {member.host} (pid {member.pid})" if member else "of no such number"
            reason = f"there is a process {hello.process} {who} already"
            link.send({"kind": "refused", "reason": reason})
            self._drop(link)
            return
        link.max_line_bytes = MAX_LINE_BYTES
        member.link, member.silence = link, 0.0
        member.host, member.pid = hello.host, hello.pid
        link.send({"kind": "admitted"})
        if all(member.link is not None for member in self._members.values()):
            self._is_complete = True
            self._selector.unregister(self._listener)
            self._listener.close()
            for other in list(self._strangers):
                self._turn_away(other)
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
            member.progress = Progress(**message["progress"])
        elif kind == "facts":
            member.facts = message["facts"]
            self._compare()
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

    def _compare(self) -> None:
        """Compares what the processes say of themselves, when all have said it."""
        facts = {p: member.facts for p, member in self._members.items() if member.facts is not None}
        if len(facts) < len(self._members):
            return
        for member in self._members.values():
            member.facts = None
        if differences := describe_differences(facts):
            self._tell_in_order({"kind": "differences", "differences": differences})
        else:
            self._tell({"kind": "agreed"})

    def _watch(self, awake: float) -> None:
        """Finds out who is lost."""
        if not self._is_complete:
            self._watch_for_missing(awake)
        for process, member in self._members.items():
            if self._has_ended:
                return
            if member.link is None:
                continue
            member.silence += awake
            member.link.flush()
            if not member.link.is_open:
                self._forget(member)
                if not member.is_done:
                    self._tell_loss(Loss(process, member.host, member.pid, CLOSED))
            elif member.silence > self._timeout_seconds:
                reason = describe_silence(self._timeout_seconds)
                self._tell_loss(Loss(process, member.host, member.pid, reason))
        progress = {process: member.progress for process, member in self._members.items()}
        hung = find_hung(progress, timeout_seconds=self._timeout_seconds)
        if hung is not None and not self._has_ended:
            process_, reason = hung
            member = _Member() if process_ is None else self._members[process_]
            self._tell_loss(Loss(process_, member.host, member.pid, reason))

    def _watch_for_missing(self, awake: float) -> None:
        """Says which processes have not come, and gives them up when it has been too long."""
        self._waited += awake
        # Its imports have taken some time already: so it is said within the timeout of the start.
        warn_seconds = self._timeout_seconds / 2
        missing = [process for process, member in self._members.items() if member.link is None]
        if missing and self._waited > self._join_seconds:
            reason = f"it has not connected to process 0 within {self._join_seconds:g} s"
            self._tell_loss(Loss(missing[0], "", 0, reason))
        elif missing and self._waited > warn_seconds and not self._has_told_missing:
            self._has_told_missing = True
            told = (
                f"{name_processes(missing)} of {len(self._members)} not connected after "
                f"{warn_seconds:g} s; waiting up to {self._join_seconds:g} s"
            )
            self._tell({"kind": "waiting", "text": told})

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
        """Tells of a loss."""
        self._tell_in_order(loss.to_message(), lost=loss.process)

    def _tell_in_order(self, message: Mapping[str, Any], *, lost: int | None = None) -> None:
        """Tells what ends all: the others first, process 0 when they have left."""
        self._has_ended = True
        links = {p: member.link for p, member in self._members.items() if member.link is not None}
        others = [link for process, link in links.items() if process not in (0, lost)]
        for process, link in links.items():
            if process != 0:
                link.send(message)
        _wait_until_closed(others)
        if 0 in links:
            links[0].send(message)

    def _leave(self) -> None:
        """Waits a little for the processes to close their links, then closes them all."""
        links = [member.link for member in self._members.values() if member.link is not None]
        _wait_until_closed(links)
        self._selector.close()
        for link in (*links, *(stranger.link for stranger in self._strangers)):
            link.close()
        self._listener.close()

    def _turn_away(self, stranger: _Stranger) -> None:
        """Closes the connection of one that has not said who it is."""
        self._strangers.remove(stranger)
        self._drop(stranger.link)

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
