"""The processes that train together, as one of them sees the others.

The processes run the same steps, so they end together. If a process dies, is stopped, fails or
hangs, all processes end within `timeout_seconds`, each with a sentence that names the lost process.
If any process is asked to stop, all processes stop after the same step. With a single process, the
same code runs, and calls that concern other processes do nothing.

When another process is lost, a thread ends this process at once with `os._exit`, because the main
thread may be waiting in a collective that never finishes. So everything that must be on disk is
written at once, and a checkpoint becomes visible in one atomic step.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from manualpar.system.cluster.facts import DisagreementError, Facts, announce
from manualpar.system.cluster.failure_detector import (
    CLOSED,
    NONSENSE,
    SILENT,
    LostProcess,
    Pace,
    causes,
)
from manualpar.system.cluster.hub import LEAVING_SECONDS, Hub
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
from manualpar.system.cluster.stopping import StopGate, on_stop_signal

# A scheduler reads from the exit code why a process ended. This code means that this process had an
# error, and that its traceback was printed.
FAILED_EXIT_CODE = 1
# Another process was lost. Nothing is wrong with this process: start the run again.
LOST_PROCESS_EXIT_CODE = 4
# A second SIGTERM came before the end of the run. The code is 128 + 15, as in a shell.
TERMINATED_EXIT_CODE = 143

# If another process has failed, a process waits this long before it ends, because its own main
# thread may be about to report an error too, often the same error.
OWN_ERROR_SECONDS = 0.5
FLUSH_SECONDS = 0.5
# After an error of the runtime, the time to wait for a message that another process is lost.
NEWS_SECONDS = 2.0
# The time that `close` waits for processes that are alive but do not end.
CLOSE_SECONDS = 300.0
# The types of errors that the loss of a process causes in other processes.
FROM_OTHERS = (jax.errors.JaxRuntimeError, OSError, TimeoutError)


class Cluster(contextlib.AbstractContextManager["Cluster", None]):
    """The processes of a run, made by `initialize`. Use it as a context manager.

    Attributes:
      process_id: The number of this process.
      num_processes: The number of processes.
      timeout_seconds: The time that a process may be silent before it counts as lost.
    """

    def __init__(
        self, *, process_id: int = 0, num_processes: int = 1, timeout_seconds: float = 10.0
    ) -> None:
        """Makes a `Cluster` that is not connected yet; `initialize` calls `connect`."""
        self.process_id = process_id
        self.num_processes = num_processes
        self.timeout_seconds = timeout_seconds
        self._gate = StopGate()
        self._pace = Pace()
        self._has_failed = False
        self._has_nothing_to_lose = False
        self._is_running = threading.Lock()
        self._hub: Hub | None = None
        self._channel: Channel | None = None
        self._ends, self._has_flushed = threading.Event(), threading.Event()

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes all files that only one process may write."""
        return self.process_id == 0

    def should_stop(self, step: int) -> bool:
        """Returns whether to stop before the next step; true at the same step in all processes.

        Every process must call this method once per step, in the same place of its loop. Usually a
        call costs a microsecond. After a request to stop, one call takes as long as a few messages.
        After the first true result, all results are true. `step` is the number of updates made so
        far, which `steps` reports.
        """
        self._pace.at_step(step)
        return self._gate.should_stop()

    def request_stop(self) -> None:
        """Asks all processes to stop soon, after the same step; safe in a signal handler."""
        if self._channel:
            self._channel.send({"kind": "stop"})
        else:
            self._gate.release(0)

    @contextlib.contextmanager
    def one_run(self) -> Iterator[None]:
        """Opens the context of a run; the processes can't do the work of two runs at once.

        Raises:
          ValueError: Another thread is in this context.
        """
        if not self._is_running.acquire(blocking=False):
            raise ValueError(
                "cluster: another thread of this process is training with it, expected one run at "
                "a time; start this run when the other one has ended, or in its own processes."
            )
        try:
            yield
        finally:
            self._is_running.release()

    @contextlib.contextmanager
    def stop_on_sigterm(self) -> Iterator[None]:
        """Stops all processes on the first SIGTERM or SIGUSR1, after the same step.

        Enter the context in the main thread. A second SIGTERM ends this process at once, with
        `TERMINATED_EXIT_CODE`; a second SIGUSR1, and the first SIGTERM after a SIGUSR1, do not.
        After `nothing_to_lose`, both signals have no effect. With several processes they then have
        no effect after the context either, because a process of a cluster normally ends only after
        `nothing_to_lose`.
        """

        def first(number: signal.Signals) -> None:
            announce(f"{number.name}: stopping after this step; a second SIGTERM ends this process")
            self.request_stop()

        def second() -> None:
            os._exit(TERMINATED_EXIT_CODE)

        with on_stop_signal(
            first,
            second,
            is_over=lambda: self._has_nothing_to_lose,
            stays_over=self.num_processes > 1,
        ):
            yield

    def nothing_to_lose(self) -> None:
        """Declares that everything is saved, so that SIGTERM no longer changes the exit code.

        Schedulers send SIGTERM to the remaining processes when the first process has ended.
        """
        self._has_nothing_to_lose = True

    def enter(self, phase: str, *, limit: float = 0.0, varies: bool = False) -> None:
        """Records that this process enters a phase of its work, so that a hang can be noticed.

        Every process must enter the same number of phases in the same order. A process counts as
        lost if it has entered fewer phases than the others, and its phase takes `timeout_seconds`
        longer than the longest phase so far. A call costs a microsecond. The phase `UNWATCHED` has
        no limit.

        Args:
          phase: The name of the phase, such as `"in a step"`.
          limit: The seconds that the phase may take the first few times. If it is 0, the phase may
            these times take ten minutes longer than the longest phase so far, or any time while all
            processes are in it.
          varies: Whether `limit` holds every time, not only the first few times.
        """
        self._pace.enter(phase, limit=limit, varies=varies)

    def agree(self, facts: Facts) -> None:
        """Compares the facts of all processes, and waits until all have called `agree`.

        The comparison needs no device and no collective.

        Raises:
          DisagreementError: A fact differs. Every process raises this error, and the connection to
            the hub has ended.
        """
        if self._channel:
            self._channel.agree(facts)

    def share(self, value: Message, wants: Sequence[int]) -> dict[int, Message]:
        """Gives the other processes a value, and returns the values of the processes in `wants`.

        Waits until all processes have called `share`. The hub sends a process only what it wants.
        The values are JSON objects. The exchange needs no device and no collective. If the
        connection to the hub has ended, the result is empty.
        """
        if self._channel:
            return self._channel.share(value, wants)
        return {self.process_id: value} if self.process_id in wants else {}

    def addresses(self) -> tuple[str, str]:
        """Returns the address at which this host talks to the hub, and the hub's address."""
        return self._channel.own_and_other_address() if self._channel else ("127.0.0.1",) * 2

    def steps(self) -> dict[int, tuple[int, float] | None]:
        """Returns the last steps of the slowest processes, and the seconds since then.

        A process that has not finished a step has `None`. The numbers of other processes are from
        their last heartbeat, at most a second ago.
        """
        steps = self._channel.steps() if self._channel else {}
        own = self._pace.progress()
        if own.step is not None:
            steps[self.process_id] = (own.step, own.step_age)
        return steps

    def explain_failure(self, error: BaseException) -> str | None:
        """Returns a sentence that names the lost process, if its loss caused the error.

        When a process is lost, collectives in the other processes fail, often before these
        processes know which process is lost. So after an error of the runtime this method waits
        `NEWS_SECONDS` for a message from the hub. If a process was lost, the method usually does
        not return, because the channel's thread prints the sentence and ends this process with
        `LOST_PROCESS_EXIT_CODE`. The method returns `None` if this process caused the error.
        """
        if not self._channel or not any(isinstance(one, FROM_OTHERS) for one in causes(error)):
            return None
        self._channel.is_over.wait(NEWS_SECONDS)
        loss = self._channel.loss
        return None if loss is None or loss.process == self.process_id else str(loss)

    def failed(self, error: BaseException) -> None:
        """Tells the other processes that this process has failed; call `os._exit` afterwards.

        An ordinary exit would wait in JAX's exit barrier for processes that wait for this process.
        The method returns when the other processes have been told of the error, and in process 0
        when they have ended. This takes a second or two.
        """
        self._has_failed = True
        if self._channel:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._channel.send({"kind": "failed", "error": text[:2000]})
            self._channel.is_over.wait(2 * LEAVING_SECONDS)

    def close(self) -> None:
        """Disconnects without an error: waits until all processes call this, and leaves with them.

        If a process is lost while this method waits, all other processes end. After this call no
        computation may use several processes.
        """
        if self._channel is None:
            return
        self._channel.send({"kind": "done", "value": None})
        if not self._channel.is_over.wait(CLOSE_SECONDS):
            announce(
                f"process {self.process_id} has waited {CLOSE_SECONDS:g} s for the others to "
                "finish, and ends without them"
            )
        if self._hub:
            self._hub.thread.join(2 * LEAVING_SECONDS)
        jax.distributed.shutdown()
        self._channel = None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()

    def connect(
        self, hosts: Sequence[str], port: int, terms: Terms, hub: Hub | None = None
    ) -> None:
        """Connects to the hub on one of `hosts`; only `initialize` calls this.

        Process 0 passes the `hub` that it runs.
        """
        self._hub = hub
        # The thread starts now, because later there may be too little memory to start a thread.
        threading.Thread(target=self._flush_at_end, name="cluster-flush", daemon=True).start()
        self._channel = Channel(
            hosts, port, terms, gate=self._gate, pace=self._pace, on_loss=self._end_because_of
        )

    def _end_because_of(self, loss: LostProcess) -> None:
        """Ends this process because another process is lost; runs in the channel's thread."""
        if loss.is_failure and not self._has_failed:
            time.sleep(OWN_ERROR_SECONDS)
        if self._has_failed:
            return  # The main thread is reporting its own error, and ends the process afterwards.
        is_own_failure = loss.is_failure and loss.process == self.process_id
        if is_own_failure:
            announce(str(loss))
        elif loss.process == self.process_id:
            announce(f"the other processes have given up this process: {loss}")
        else:
            announce(f"{loss}; process {self.process_id} ends too")
        if loss.process in (None, self.process_id):
            faulthandler.dump_traceback()  # Shows where the main thread waits.
        self._ends.set()
        self._has_flushed.wait(FLUSH_SECONDS)
        os._exit(FAILED_EXIT_CODE if is_own_failure else LOST_PROCESS_EXIT_CODE)

    def _flush_at_end(self) -> None:
        """Flushes stdout and stderr; runs in its own thread, which may hang on a stream's lock."""
        self._ends.wait()
        for stream in (sys.stdout, sys.stderr):
            # The stream may be closed, or may no longer have a reader.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._has_flushed.set()


# -------------------------------------------------------------------------------------------------
# A process's connection to the hub: sends heartbeats and messages, and receives messages.
#
# A daemon thread runs the event loop of the connection. Connection and thread end when all
# processes are done, when the facts of the processes differ, or when a process is lost.


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
