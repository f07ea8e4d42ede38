"""The hub in process 0: receives messages from every process, and informs all processes.

Every process, including process 0, has one connection to the hub and sends heartbeats on it. A
process is lost when its connection closes, when no heartbeat arrives within the timeout, or when
the process hangs (`failure_detector`). The hub then informs the other processes at once, and ends.

The processes connect to the hub before JAX connects them. So the hub reports missing processes and
differing facts before any process waits in a collective. The hub listens on the coordinator's port,
and frees the port for JAX's coordination service when all processes have connected. So one port is
enough, and no stranger can reach the hub during the training.

Invariant: process 0 gets the last message, which makes a process end, after all other processes.
Before this, the hub waits until they have ended, at most `LEAVING_SECONDS`. JAX's coordination
service runs in process 0, and XLA aborts the other processes if this service ends first.
"""

import asyncio
import dataclasses
import itertools
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from manualpar.system.cluster.facts import announce, describe_differences, name_processes
from manualpar.system.cluster.failure_detector import (
    CLOSED,
    NONSENSE,
    SILENT,
    LostProcess,
    ProcessProgress,
    find_hung,
    parse_progress,
    slowest,
)
from manualpar.system.cluster.messages import (
    MAX_HELLO_BYTES,
    TOKEN_VARIABLE,
    Message,
    NonsenseError,
    Terms,
    beats,
    check_said,
    notice_times,
    read_hello,
    receive,
    send,
    send_to_all,
)

# The time that process 0 waits for the other processes to end before it ends itself.
LEAVING_SECONDS = 2.0
# The time that a new connection has to introduce itself, and the maximum number of connections that
# have not introduced themselves.
STRANGER_SECONDS = 10.0
MAX_STRANGERS = 64


@dataclasses.dataclass
class _Member:
    """The hub's record of a process."""

    writer: asyncio.StreamWriter | None = None
    host: str = ""
    pid: int = 0
    silence: float = 0.0
    progress: ProcessProgress = dataclasses.field(default_factory=ProcessProgress)


class Hub:
    """A server for the connections of all processes, which runs in a thread of process 0."""

    def __init__(self, listener: socket.socket, terms: Terms) -> None:
        """Starts the thread, which accepts connections on the listening socket `listener`."""
        self._terms = terms
        self._members = {process: _Member() for process in range(terms.num_processes)}
        # All connections, the oldest first; each with the task that ends when it has closed.
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        # Those of them that have not introduced themselves, the oldest first. (A dict, because a
        # set keeps no order.)
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._num_connected = 0
        # Messages by kind and process. The hub answers a kind when all processes have sent it.
        self._said: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._waited = 0.0
        self._has_warned = False
        self._notices = notice_times(terms.timeout_seconds)
        self._notice_at = next(self._notices)
        self._is_asked_to_stop = False
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self._run(listener)), name="cluster-hub", daemon=True
        )
        self.thread.start()

    async def _run(self, listener: socket.socket) -> None:
        """Serves the connections until all processes are done or a process is lost."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_exception)
        # The message that ends all processes, and the number of the lost process, if any.
        self._end: asyncio.Future[tuple[Message, int | None]] = loop.create_future()
        self._server = await asyncio.start_server(
            self._accept, sock=listener, limit=MAX_HELLO_BYTES, backlog=max(len(self._members), 128)
        )
        async for awake in beats(self._end, self._terms.timeout_seconds):
            self._watch(awake)
            self._tell({"kind": "beat", "steps": self._steps()})
        message, lost = self._end.result()
        writers = {process: one.writer for process, one in self._members.items() if one.writer}
        first = [writers.pop(0)] if 0 in writers else []
        send_to_all(writers.values(), message)
        await self._wait_until_closed(writers[process] for process in writers if process != lost)
        send_to_all(first, message)
        await self._wait_until_closed([*writers.values(), *first])
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()
        await self._wait_until_closed(self._connections)

    async def _wait_until_closed(self, writers: Iterable[asyncio.StreamWriter]) -> None:
        """Waits until the processes have closed these connections, at most `LEAVING_SECONDS`."""
        if tasks := [self._connections[one] for one in writers if one in self._connections]:
            await asyncio.wait(tasks, timeout=LEAVING_SECONDS)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), OSError):
            loop.default_exception_handler(context)
        # Closes connections, because this process has no file descriptors left.
        self._turn_away(len(self._strangers))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.create_task(self._serve(reader, writer))
        self._connections[writer].add_done_callback(lambda _: self._connections.pop(writer))
        self._strangers[writer] = None
        # Closes the oldest connections without an introduction if there are too many, because
        # processes of the run introduce themselves quickly.
        self._turn_away(len(self._strangers) - MAX_STRANGERS - len(self._members))

    def _turn_away(self, number: int) -> None:
        """Closes the oldest connections without an introduction."""
        for stranger in list(itertools.islice(self._strangers, max(number, 0))):
            del self._strangers[stranger]
            stranger.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection; the other end is a stranger until it is admitted as a process."""
        process, challenge = None, secrets.token_hex(16)
        try:
            send(writer, {"kind": "challenge", "challenge": challenge})
            async with asyncio.timeout(STRANGER_SECONDS):
                message = await receive(reader, max_bytes=MAX_HELLO_BYTES)
            if not writer.is_closing():  # Skipped if the hub has closed the connection.
                answer = self._admit(writer, message, challenge)
                send(writer, answer)
                process = message["process"] if answer["kind"] == "admitted" else None
            while process is not None:
                try:
                    message = await receive(reader)
                    if not self._end.done():
                        self._members[process].silence = 0.0
                        self._handle(process, message)
                except NonsenseError:  # `_run` closes all connections, process 0's connection last.
                    self._lose(process, NONSENSE)
        except OSError:
            pass  # The connection has closed, or a stranger has broken the protocol.
        finally:
            self._strangers.pop(writer, None)
            writer.close()
            if process is not None and process not in self._said["done"]:
                self._lose(process, CLOSED)

    def _admit(self, writer: asyncio.StreamWriter, message: Message, challenge: str) -> Message:
        """Admits or refuses a connection that introduces itself; returns the hub's answer."""
        hello = read_hello(message, token=self._terms.token, challenge=challenge)
        if hello is None:
            if "proof" in message and not self._has_warned:
                self._has_warned = True
                announce(f"a connection with another {TOKEN_VARIABLE} was refused")
            return {"kind": "refused", "reason": f"its {TOKEN_VARIABLE} differs from process 0's"}
        if hello.num_processes != len(self._members):
            counts = {0: len(self._members), hello.process: hello.num_processes}
            facts = {process: {"num_processes": str(count)} for process, count in counts.items()}
            answer = {"kind": "differences", "differences": describe_differences(facts)}
            self._end_all(answer)
            return answer
        member = self._members.get(hello.process)
        if member is None or member.writer:
            reason = f"its number is {hello.process}, expected at most {len(self._members) - 1}"
            if member:
                where = f"on {member.host} (pid {member.pid})"
                reason = f"process {hello.process} is connected already, {where}"
            return {"kind": "refused", "reason": reason}
        member.writer, member.host, member.pid = writer, hello.host, hello.pid
        self._strangers.pop(writer, None)
        self._num_connected += 1
        if self._num_connected == len(self._members):
            self._server.close()
            self._turn_away(len(self._strangers))
        return {"kind": "admitted", "host": socket.gethostname(), "pid": os.getpid()}

    def _handle(self, process: int, message: Message) -> None:
        """Handles a process's message; raises a `NonsenseError` if the message is not valid."""
        check_said(message)
        kind = message["kind"]
        if kind == "beat":
            try:
                self._members[process].progress = parse_progress(message["progress"])
            except ValueError:
                raise NonsenseError from None
        elif kind == "failed":
            self._lose(process, message["error"], is_failure=True)
        elif kind == "stop":
            if not self._is_asked_to_stop:
                self._is_asked_to_stop = True
                self._tell({"kind": "hold"})
        else:
            said = self._said[kind]
            said[process] = message if kind == "share" else message["value"]
            if len(said) == len(self._members):
                self._answer(kind, self._said.pop(kind))

    def _answer(self, kind: str, said: dict[int, Any]) -> None:
        """Answers the processes once all of them have sent a message of one kind."""
        if kind == "done":
            self._end_all({"kind": "end"})
        elif kind == "held":
            self._tell({"kind": "stop", "at": max(said.values()) + 1})
        elif kind == "share":
            self._pass_on({process: (one["value"], one["wants"]) for process, one in said.items()})
        elif differences := describe_differences(said):
            self._end_all({"kind": "differences", "differences": differences})
        else:
            self._tell({"kind": "agreed"})

    def _pass_on(self, said: dict[int, tuple[Any, list[int]]]) -> None:
        """Sends each process the values that it wants, a message each, and that these are all."""
        for process, (_, wants) in said.items():
            if (writer := self._members[process].writer) is None:
                continue
            for other in wants:
                if other in said:
                    send(writer, {"kind": "shared", "process": other, "value": said[other][0]})
            send(writer, {"kind": "shared all"})

    def _watch(self, awake: float) -> None:
        """Finds processes that are lost or not connected, `awake` seconds after the last call."""
        members, timeout_seconds = self._members, self._terms.timeout_seconds
        for process, member in members.items():
            member.silence += awake if member.writer else 0.0
            if member.silence > timeout_seconds:
                self._lose(process, SILENT.format(timeout_seconds))
        progress = {process: member.progress for process, member in members.items()}
        if hung := find_hung(progress, timeout_seconds=timeout_seconds):
            self._lose(*hung)
        if self._num_connected == len(members):
            return
        missing = [process for process in members if not members[process].writer]
        join_seconds = self._terms.join_seconds
        self._waited += awake
        if self._waited > join_seconds:
            self._lose(missing[0], f"it has not connected to process 0 within {join_seconds:g} s")
        elif self._waited > self._notice_at:
            told = (
                f"{name_processes(missing)} of {len(members)} not connected after "
                f"{self._notice_at:g} s; waiting up to {join_seconds:g} s"
            )
            self._notice_at = next(self._notices)
            self._tell({"kind": "waiting", "text": told})

    def _steps(self) -> list[tuple[int, int | None, float]]:
        """Returns processes, their last steps and the seconds since then, see `slowest`."""
        return slowest(
            (process, one.progress.step, round(one.progress.step_age + one.silence, 1))
            for process, one in self._members.items()
        )

    def _tell(self, message: Message) -> None:
        send_to_all((one.writer for one in self._members.values() if one.writer), message)

    def _lose(self, process: int | None, reason: str, *, is_failure: bool = False) -> None:
        member = _Member() if process is None else self._members[process]
        loss = LostProcess(process, member.host, member.pid, reason, is_failure)
        self._end_all({"kind": "lost", **dataclasses.asdict(loss)}, lost=process)

    def _end_all(self, message: Message, *, lost: int | None = None) -> None:
        """Makes `_run` send all processes a last message; only the first call has an effect."""
        if not self._end.done():
            self._end.set_result((message, lost))
