"""A process's connection to the hub: sends heartbeats and messages, and receives messages.

A daemon thread runs the event loop of the connection. Connection and thread end when all processes
are done, when the facts of the processes differ, or when a process is lost.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from manualpar.system.cluster.facts import DisagreementError, Facts, announce
from manualpar.system.cluster.failure_detector import CLOSED, NONSENSE, SILENT, LostProcess, Pace
from manualpar.system.cluster.messages import (
    Hello,
    Message,
    NonsenseError,
    NotMetError,
    Terms,
    beats,
    make_hello,
    notice_times,
    receive,
    send,
)
from manualpar.system.cluster.stopping import StopGate

CONNECT_SECONDS = 5.0
KNOCK_SECONDS = 0.1
# A process is short of memory if allocations of `LEAST_MEMORY_BYTES` fail for this many seconds.
LEAST_MEMORY_BYTES = 2**20
SHORT_OF_MEMORY_SECONDS = 2.0


NO_MEMORY = (
    "it cannot allocate memory; raise its memory limit (`ulimit -v`, the job's limit), or make the "
    "model or the batch smaller"
)


class Channel:
    """A process's connection to the hub.

    Attributes:
      loss: The lost process; `None` as long as no process is known to be lost.
      is_over: An event that is set when the connection has ended, for any reason.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        terms: Terms,
        *,
        gate: StopGate,
        pace: Pace,
        on_loss: Callable[[LostProcess], None],
    ) -> None:
        """Starts the thread, and waits until the hub has admitted this process; see `knock`.

        The thread calls `on_loss` at most once.
        """
        self._gate, self._pace, self._on_loss = gate, pace, on_loss
        self._differences: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._shared: dict[int, Message] = {}
        self._all_shared: queue.SimpleQueue[dict[int, Message]] = queue.SimpleQueue()
        self._heard_at = time.monotonic()
        self._others: list[tuple[int, int | None, float]] = []
        self._silence = 0.0
        self._admitted = concurrent.futures.Future[None]()
        self.loss: LostProcess | None = None
        self.is_over = threading.Event()
        threading.Thread(
            target=self._run, args=(hosts, port, terms), name="cluster-channel", daemon=True
        ).start()
        self._admitted.result()

    def send(self, message: Message) -> None:
        """Gives a message to the thread without waiting; may be called in a signal handler."""
        with contextlib.suppress(RuntimeError):  # The loop is closed: the connection has ended.
            self._loop.call_soon_threadsafe(send, self._writer, message)

    def agree(self, facts: Facts) -> None:
        """Compares the facts of all processes, see `Cluster.agree`."""
        self.send({"kind": "facts", "value": dict(facts)})
        if differences := self._differences.get():
            raise DisagreementError(differences)

    def share(self, value: Message, wants: Sequence[int]) -> dict[int, Message]:
        """Gives the others a value, and waits for theirs, see `Cluster.share`."""
        self.send({"kind": "share", "value": value, "wants": list(wants)})
        return self._all_shared.get()

    def own_and_other_address(self) -> tuple[str, str]:
        """Returns the addresses of the connection to the hub: this host's and process 0's."""
        sockname, peername = (self._writer.get_extra_info(x) for x in ("sockname", "peername"))
        return str(sockname[0]), str(peername[0])

    def steps(self) -> dict[int, tuple[int, float] | None]:
        """Returns the last known steps, and the seconds since then, see `Cluster.steps`."""
        since = time.monotonic() - self._heard_at
        return {
            process: None if step is None else (step, age + since)
            for process, step, age in self._others
        }

    def _run(self, hosts: Sequence[str], port: int, terms: Terms) -> None:
        try:
            asyncio.run(self._knock_and_serve(hosts, port, terms))
        finally:
            self.is_over.set()
            self._differences.put([])
            self._all_shared.put({})

    async def _knock_and_serve(self, hosts: Sequence[str], port: int, terms: Terms) -> None:
        try:
            reader, self._writer, first = await knock(hosts, port, terms)
        except Exception as error:
            self._admitted.set_exception(error)
            return
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[LostProcess | None] = self._loop.create_future()
        self._admitted.set_result(None)

        def lose_hub(reason: str) -> None:
            self._finish(LostProcess(0, first["host"], first["pid"], reason))

        async def hear() -> None:
            try:
                while True:
                    self._handle(await receive(reader))
            except (NonsenseError, KeyError, TypeError, ValueError):
                lose_hub(NONSENSE)
            finally:
                lose_hub(CLOSED)

        hearing, short = asyncio.create_task(hear()), 0.0
        async for awake in beats(self._end, terms.timeout_seconds):
            before, short = short, 0.0 if _can_get_memory() else short + awake
            if before <= SHORT_OF_MEMORY_SECONDS < short:
                # The hub informs all processes, including this process, whose main thread may be
                # waiting forever for a thread that could not start for lack of memory.
                send(self._writer, {"kind": "failed", "error": NO_MEMORY})
            self._pace.watch(awake)
            progress = dataclasses.asdict(self._pace.progress())
            send(self._writer, {"kind": "beat", "progress": progress})
            self._silence += awake
            if self._silence > terms.timeout_seconds:
                lose_hub(SILENT.format(terms.timeout_seconds))
        self.loss = self._end.result()
        if self.loss:
            self._on_loss(self.loss)
        self._writer.transport.abort()
        with contextlib.suppress(OSError):  # The connection has ended.
            await hearing

    def _handle(self, message: Message) -> None:
        """Handles a message from the hub."""
        self._silence = 0.0
        kind = message.pop("kind")
        if kind == "beat":
            self._heard_at, self._others = time.monotonic(), message["steps"]
        elif kind == "hold":
            send(self._writer, {"kind": "held", "value": self._gate.hold()})
        elif kind == "stop":
            self._gate.release(message["at"])
        elif kind == "waiting":
            announce(message["text"])
        elif kind == "shared":
            self._shared[message["process"]] = message["value"]
        elif kind == "shared all":
            self._all_shared.put(self._shared)
            self._shared = {}
        elif kind == "agreed":
            self._differences.put([])
        elif kind == "differences":
            self._differences.put(message["differences"])
            self._finish(None)
        elif kind == "lost":
            self._finish(LostProcess(**message))
        elif kind == "end":
            self._finish(None)
        else:
            raise NonsenseError

    def _finish(self, loss: LostProcess | None) -> None:
        if not self._end.done():
            self._end.set_result(loss)


def _can_get_memory() -> bool:
    try:
        mmap.mmap(-1, LEAST_MEMORY_BYTES).close()
    except (MemoryError, OSError):
        return False
    return True


async def knock(
    hosts: Sequence[str], port: int, terms: Terms
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """Connects to the hub as soon as it listens on one of `hosts`, and introduces this process.

    Returns the connection on which the hub has admitted this process, and the hub's answer with its
    host and process id. At the `notice_times` a message on standard error says that process 0 does
    not answer.

    Raises:
      NotMetError: Process 0 did not listen in time.
      DisagreementError: The number of processes differs.
      ValueError: Process 0 does not accept this process as part of its run.
    """
    began, notices = time.monotonic(), notice_times(terms.timeout_seconds)
    notice_at = next(notices)
    while True:
        failures = []
        for host in dict.fromkeys(hosts):
            try:
                return await _introduce(host, port, terms)
            except (OSError, KeyError) as error:
                failures.append(f"{host}: {str(error) or 'timed out'}")
        waited, reasons = time.monotonic() - began, "; ".join(failures)
        if waited > terms.join_seconds:
            raise NotMetError(
                f"initialize: process 0 cannot be reached on its port {port} within "
                f"{terms.join_seconds:g} s, expected an open network between the hosts of a run, "
                f"and all processes to be started with the same address ({reasons})"
            )
        if waited > notice_at:
            announce(
                f"process 0 does not answer after {notice_at:g} s, at port {port} ({reasons}); "
                f"waiting up to {terms.join_seconds:g} s"
            )
            notice_at = next(notices)
        await asyncio.sleep(KNOCK_SECONDS)


async def _introduce(
    host: str, port: int, terms: Terms
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    """Connects to the hub, answers its challenge, and waits until the hub admits this process."""
    # This call blocks the event loop, which has no other work yet.
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    reader, writer = await asyncio.open_connection(sock=connection)
    hello = Hello(terms.process, terms.num_processes, socket.gethostname(), os.getpid())
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            challenge = str((await receive(reader))["challenge"])
            send(writer, make_hello(hello, token=terms.token, challenge=challenge))
            answer = await receive(reader)
        if answer["kind"] == "admitted":
            return reader, writer, answer
        if answer["kind"] == "differences":
            raise DisagreementError([str(line) for line in answer["differences"]])
        raise ValueError(
            f"initialize: process 0 refuses process {hello.process}: {answer['reason']}; start all "
            "processes with the same token, and each with a different number."
        )
    except BaseException:
        writer.transport.abort()
        raise
