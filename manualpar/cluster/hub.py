"""Process 0's side of the channel: hears every process, and tells all of them what all must know.

Every process, process 0 included, has one link to the hub and beats on it. A process is lost when
its link closes, when it has been silent for the timeout, or when it is hung (`lost`). The hub then
tells the others at once, and ends.

The processes meet here before JAX introduces them to each other. So it is known who is missing, or
what differs between them, before anything waits in a collective.

Invariant: process 0 hears the end last, when the others are gone or have had `LEAVING_SECONDS`.
JAX's coordination service lives in process 0, and XLA aborts the others if that ends first.
"""

import asyncio
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from manualpar.cluster.facts import Facts, announce, describe_differences, name_processes
from manualpar.cluster.link import MAX_LINE_BYTES, Link, Message, beats
from manualpar.cluster.lost import CLOSED, Loss, Progress, describe_silence, find_hung
from manualpar.cluster.meeting import MAX_HELLO_BYTES, TOKEN_VARIABLE, Terms, read_hello

# How long the others have to leave before process 0 does.
LEAVING_SECONDS = 2.0
# A stranger may take this long to say who it is, and this many may be connected at once.
STRANGER_SECONDS = 10.0
MAX_STRANGERS = 64


@dataclasses.dataclass
class _Member:
    """What the hub knows of a process."""

    link: Link | None = None
    host: str = ""
    pid: int = 0
    silence: float = 0.0
    progress: Progress = dataclasses.field(default_factory=Progress)
    heard_at: float = 0.0
    facts: Facts | None = None
    calls: int | None = None
    is_done: bool = False


class Hub:
    """Serves the processes from a thread."""

    def __init__(self, listener: socket.socket, terms: Terms) -> None:
        """Starts the thread on a listening socket, which process 0 connects to as well."""
        self._terms = terms
        self._members = {process: _Member() for process in range(terms.num_processes)}
        self._strangers: dict[Link, str] = {}  # The challenge of each, the oldest first.
        self._waited = 0.0
        self._is_asked_to_stop = False
        self._has_warned = False
        self._has_told_missing = False
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self._run(listener)), name="cluster-hub", daemon=True
        )
        self.thread.start()

    async def _run(self, listener: socket.socket) -> None:
        """Serves until all are done or one is lost."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_exception)
        # The message that ends all, and the process that is lost.
        self._end: asyncio.Future[tuple[Message, int | None]] = loop.create_future()
        self._server = await loop.create_server(
            self._make_link, sock=listener, backlog=max(len(self._members), 128)
        )
        async for now, awake in beats(self._end, timeout_seconds=self._terms.timeout_seconds):
            self._watch(awake)
            self._tell({"kind": "beat", "steps": self._steps(now)})
        message, lost = self._end.result()
        links = {p: member.link for p, member in self._members.items() if member.link}
        others = {process: link for process, link in links.items() if process != 0}
        for link in others.values():
            link.send(message)
        await _wait_until_closed([link for process, link in others.items() if process != lost])
        if 0 in links:
            links[0].send(message)
        await _wait_until_closed(list(links.values()))
        self._server.close()
        left = [*links.values(), *self._strangers]
        for link in left:
            link.close()
        await _wait_until_closed(left)

    def _make_link(self) -> Link:
        return Link(
            opened=self._challenge,
            received=self._receive,
            closed=self._notice_closed,
            max_line_bytes=MAX_HELLO_BYTES,
        )

    def _challenge(self, link: Link) -> None:
        """Asks a new connection who it is."""
        if len(self._strangers) >= MAX_STRANGERS + len(self._members):
            self._turn_away(next(iter(self._strangers)))  # Our own processes answer sooner.
        self._strangers[link] = challenge = secrets.token_hex(16)
        link.send({"kind": "challenge", "challenge": challenge})
        asyncio.get_running_loop().call_later(STRANGER_SECONDS, self._turn_away, link)

    def _turn_away(self, link: Link) -> None:
        if self._strangers.pop(link, None):
            link.close()

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), OSError):
            loop.default_exception_handler(context)
        for link in list(self._strangers):  # This process has used up its file descriptors.
            self._turn_away(link)

    def _receive(self, link: Link, message: Message) -> None:
        if challenge := self._strangers.pop(link, None):
            if answer := self._admit(link, message, challenge):
                link.send(answer)
                link.close()
            return
        for process, member in self._members.items():
            if member.link is link and not self._end.done():
                member.silence = 0.0
                self._handle(process, member, message)

    def _admit(self, link: Link, message: Message, challenge: str) -> Message | None:
        """Takes a connection for that of a process; returns why not, if it does not."""
        hello = read_hello(message, token=self._terms.token, challenge=challenge)
        if hello is None:
            if message.get("kind") == "hello" and not self._has_warned:
                self._has_warned = True
                announce(f"a connection with another {TOKEN_VARIABLE} was refused")
            return {"kind": "refused", "reason": f"its {TOKEN_VARIABLE} is not that of process 0"}
        if hello.num_processes != len(self._members):
            differences = describe_differences(
                {
                    0: {"num_processes": str(len(self._members))},
                    hello.process: {"num_processes": str(hello.num_processes)},
                }
            )
            answer = {"kind": "differences", "differences": differences}
            self._end_all(answer)
            return answer
        member = self._members.get(hello.process)
        if member is None or member.link:
            who = f"on {member.host} (pid {member.pid})" if member else "of no such number"
            reason = f"there is a process {hello.process} {who} already"
            return {"kind": "refused", "reason": reason}
        link.max_line_bytes = MAX_LINE_BYTES
        member.link, member.host, member.pid = link, hello.host, hello.pid
        link.send({"kind": "admitted"})
        if all(member.link for member in self._members.values()):
            self._server.close()
            for stranger in list(self._strangers):
                self._turn_away(stranger)
            first = self._members[0]
            self._tell({"kind": "welcome", "host": first.host, "pid": first.pid})
        return None

    def _handle(self, process: int, member: _Member, message: Message) -> None:
        """Does what a process asks for."""
        kind = message["kind"]
        if kind == "beat":
            member.progress, member.heard_at = Progress(**message["progress"]), time.monotonic()
        elif kind == "facts":
            member.facts = message["facts"]
            self._compare_facts()
        elif kind == "stop" and not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            self._tell({"kind": "hold"})
        elif kind == "held":
            member.calls = message["calls"]
            calls = [m.calls for m in self._members.values() if m.calls is not None]
            if len(calls) == len(self._members):
                self._tell({"kind": "stop", "at": max(calls) + 1})
        elif kind == "failed":
            self._lose(process, message["error"], is_failure=True)
        elif kind == "done":
            member.is_done = True
            if all(member.is_done for member in self._members.values()):
                self._end_all({"kind": "end"})

    def _compare_facts(self) -> None:
        facts = {p: member.facts for p, member in self._members.items() if member.facts is not None}
        if len(facts) < len(self._members):
            return
        for member in self._members.values():
            member.facts = None
        if differences := describe_differences(facts):
            self._end_all({"kind": "differences", "differences": differences})
        else:
            self._tell({"kind": "agreed"})

    def _notice_closed(self, link: Link) -> None:
        self._strangers.pop(link, None)
        for process, member in self._members.items():
            if member.link is link and not member.is_done:
                self._lose(process, CLOSED)

    def _watch(self, awake: float) -> None:
        """Finds out who is lost."""
        missing = [process for process, member in self._members.items() if not member.link]
        if missing:
            self._watch_for(missing, awake)
        for process, member in self._members.items():
            member.silence += awake if member.link else 0.0
            if member.silence > self._terms.timeout_seconds:
                self._lose(process, describe_silence(self._terms.timeout_seconds))
        progress = {process: member.progress for process, member in self._members.items()}
        if hung := find_hung(progress, timeout_seconds=self._terms.timeout_seconds):
            self._lose(*hung)

    def _watch_for(self, missing: list[int], awake: float) -> None:
        """Says which processes have not come, and gives them up when it has been too long."""
        self._waited += awake
        # Process 0 has spent time on its imports before, so it does not wait for the whole timeout.
        warn_seconds = self._terms.timeout_seconds / 2
        if self._waited > self._terms.join_seconds:
            self._lose(
                missing[0],
                f"it has not connected to process 0 within {self._terms.join_seconds:g} s",
            )
        elif self._waited > warn_seconds and not self._has_told_missing:
            self._has_told_missing = True
            told = (
                f"{name_processes(missing)} of {len(self._members)} not connected after "
                f"{warn_seconds:g} s; waiting up to {self._terms.join_seconds:g} s"
            )
            self._tell({"kind": "waiting", "text": told})

    def _steps(self, now: float) -> list[tuple[int, float] | None]:
        """How far each process is, and for how long."""
        return [
            None
            if (progress := member.progress).step is None
            else (progress.step, round(progress.step_age + now - member.heard_at, 3))
            for member in self._members.values()
        ]

    def _tell(self, message: Message) -> None:
        for member in self._members.values():
            if member.link:
                member.link.send(message)

    def _lose(self, process: int | None, reason: str, *, is_failure: bool = False) -> None:
        member = _Member() if process is None else self._members[process]
        loss = Loss(process, member.host, member.pid, reason, is_failure)
        self._end_all({"kind": "lost", **dataclasses.asdict(loss)}, lost=process)

    def _end_all(self, message: Message, *, lost: int | None = None) -> None:
        """Has `_run` tell all processes how this ends; the first to be told counts."""
        if not self._end.done():
            self._end.set_result((message, lost))


async def _wait_until_closed(links: Sequence[Link]) -> None:
    """Waits until the other ends have closed, but no longer than `LEAVING_SECONDS`."""
    if links:
        await asyncio.wait([link.is_closed for link in links], timeout=LEAVING_SECONDS)
