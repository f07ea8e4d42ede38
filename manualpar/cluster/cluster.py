"""The processes that train together, as one of them sees them.

They make the same steps, so they share their fate. A process that dies, is stopped or fails ends
all of them within `timeout_seconds`, each with a sentence that names it. So does one whose main
thread hangs, after `timeout_seconds` more than anything has taken so far. A request to stop, made
to any of them, stops all after the same step. With a single process the same calls do what is left.

What ends a process because of another is a thread, at once and by `os._exit`: the main thread may
stand in a collective that nobody will ever finish. So what must be on disk is written when it is
reported, and checkpoints are committed in one step.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import jax

from manualpar.cluster.agreement import StopGate
from manualpar.cluster.channel import Channel
from manualpar.cluster.exit_codes import LOST_PROCESS_EXIT_CODE, TERMINATED_EXIT_CODE
from manualpar.cluster.facts import Facts
from manualpar.cluster.hub import LEAVING_SECONDS, Hub
from manualpar.cluster.loss import Loss
from manualpar.cluster.progress import Pace
from manualpar.cluster.termination import on_sigterm

# So long a process that hears of another's error may still report its own, which is often the same.
OWN_ERROR_SECONDS = 0.5
FLUSH_SECONDS = 0.5


def print_announcement(sentence: str) -> None:
    """Writes a sentence to standard error, past all buffers and their locks."""
    os.write(2, f"{sentence}\n".encode())


class Cluster:
    """The processes of a run, made by `manualpar.cluster.initialize`. Use it as a context manager.

    Attributes:
      process_id: Which of the processes this is.
      num_processes: How many there are.
      timeout_seconds: How long a process may be silent before it is taken for lost.
    """

    def __init__(
        self,
        *,
        process_id: int = 0,
        num_processes: int = 1,
        timeout_seconds: float = 10.0,
        close_seconds: float = 300.0,
        announce: Callable[[str], None] = print_announcement,
    ) -> None:
        """Makes a process that nobody is connected to yet.

        Args:
          process_id: Which of the processes this is.
          num_processes: How many there are.
          timeout_seconds: How long a process may be silent.
          close_seconds: How long `close` waits for processes that live but do not come to an end.
          announce: Shows a sentence; called from any thread.
        """
        self.process_id = process_id
        self.num_processes = num_processes
        self.timeout_seconds = timeout_seconds
        self._close_seconds = close_seconds
        self._announce = announce
        self._gate = StopGate()
        self._pace = Pace()
        self._stops = False
        self._has_failed = False
        self._step: tuple[int, float] | None = None
        self._hub: Hub | None = None
        self._channel: Channel | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which alone writes what only one may write."""
        return self.process_id == 0

    def should_stop(self, step: int) -> bool:
        """Says, between two steps, whether to stop here; true after the same step in all processes.

        Every process calls it equally often and in the same place of its loop. Usually it costs a
        microsecond; once, after a request to stop, as long as a few messages take.

        Args:
          step: The number of updates made, for `steps`.

        Returns:
          Whether to stop after this step. Once true, it stays so.
        """
        self.at_step(step)
        return self._gate.should_stop() if self._channel else self._stops

    def request_stop(self) -> None:
        """Asks all processes to stop after the same step, soon; safe in a signal handler."""
        self._stops = True
        if self._channel:
            self._channel.send({"kind": "stop"})

    @contextlib.contextmanager
    def stop_on_sigterm(self) -> Iterator[None]:
        """Within, the first SIGTERM asks all processes to stop; the second ends this one at once.

        Call it in the main thread. The second ends the process with `TERMINATED_EXIT_CODE`.
        """

        def first() -> None:
            self._announce("SIGTERM: stopping after this step; a second SIGTERM ends this process")
            self.request_stop()

        with on_sigterm(first, lambda: os._exit(TERMINATED_EXIT_CODE)):
            yield

    def at_step(self, step: int) -> None:
        """Says how far this process is, for the others' `steps`."""
        if self._channel:
            self._channel.at_step(step)
        elif self._step is None or self._step[0] != step:
            self._step = (step, time.monotonic())

    def enter(self, phase: str) -> None:
        """Says what this process does next, so that the others notice when it hangs.

        Every process enters the same number of phases in the same order. Who is behind for
        `timeout_seconds` longer than any phase has taken so far is lost. It costs a microsecond.

        Args:
          phase: What it is doing, such as `"in a step"`; `""` where it is not to be watched.
        """
        self._pace.enter(phase)

    def agree(self, facts: Facts) -> None:
        """Compares facts with those of the other processes, and waits until all have called it.

        It needs no device and no collective.

        Args:
          facts: What has to be the same in all processes, by a name that a user knows.

        Raises:
          DisagreementError: Something differs. Every process has this error, and the channel has
            ended.
        """
        if self._channel:
            self._channel.agree(facts)

    def steps(self) -> dict[int, tuple[int, float]]:
        """How far each process is: its last step and the seconds since it came to that.

        Processes that have not made a step are missing. What is known of the others is as old as
        their last beat, a second at most.
        """
        if self._channel:
            return self._channel.steps()
        return {0: (self._step[0], time.monotonic() - self._step[1])} if self._step else {}

    def explain_failure(self, error: BaseException, *, wait_seconds: float = 2.0) -> str | None:
        """Finds out whether an error is only another process's end as it looks from here.

        When a process is gone the others' collectives fail, often before it is known who is gone.
        Only errors of the runtime are waited for. With the usual `Cluster` it does not return then:
        the process ends with the sentence and `LOST_PROCESS_EXIT_CODE`.

        Args:
          error: The error.
          wait_seconds: How long to wait for the news.

        Returns:
          A sentence that names the lost process; `None` if the error is this process's own.
        """
        if self._channel is None or not _may_come_from_others(error):
            return None
        # The channel's thread, not this one, ends the process.
        self._channel.is_over.wait(wait_seconds)
        loss = self._channel.loss
        return None if loss is None or loss.process == self.process_id else str(loss)

    def failed(self, error: BaseException) -> None:
        """Tells the others that this process ends with an error; end it with `os._exit` then.

        An ordinary end would wait in JAX's exit barrier for processes that wait for this one. It
        returns when the others know, in process 0 when they are gone: a second or two.
        """
        self._has_failed = True
        if self._channel is None:
            return
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._channel.send({"kind": "failed", "error": text[:2000]})
        self._channel.is_over.wait(2 * LEAVING_SECONDS)

    def close(self) -> None:
        """Ends in peace: waits until all processes are here, then leaves JAX's cluster with them.

        A process that is lost meanwhile still ends all. Nothing may be computed on several
        processes afterwards.
        """
        if self._channel is None:
            return
        self._channel.send({"kind": "done"})
        if not self._channel.is_over.wait(self._close_seconds):
            self._announce(
                f"process {self.process_id} has waited {self._close_seconds:g} s for the others to "
                "finish, and ends without them"
            )
        if self._hub:
            self._hub.thread.join(2 * LEAVING_SECONDS)
        jax.distributed.shutdown()
        self._channel = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def connect(self, connection: socket.socket) -> None:
        """Waits until all processes have met; `initialize` does.

        Args:
          connection: A connection to the hub, which has admitted this process.
        """
        self._channel = Channel(
            connection,
            process=self.process_id,
            timeout_seconds=self.timeout_seconds,
            gate=self._gate,
            pace=self._pace,
            on_loss=self._end_because_of,
            announce=self._announce,
        )
        self._channel.is_joined.wait()

    def serve(self, hub: Hub) -> None:
        """Runs the hub that the others connect to; `initialize` does, in process 0."""
        self._hub = hub
        hub.thread.start()

    def _end_because_of(self, loss: Loss) -> None:
        """Ends this process because another is lost; runs in the channel's thread."""
        if loss.is_failure and not self._has_failed:
            time.sleep(OWN_ERROR_SECONDS)
        if self._has_failed:
            return  # The main thread reports its own error and ends the process.
        if loss.process == self.process_id:
            self._announce(f"this process was taken for lost by the others: {loss}")
        else:
            self._announce(f"{loss}; process {self.process_id} ends too")
        if loss.process in (None, self.process_id):
            faulthandler.dump_traceback()  # Where the main thread stands.
        _flush()
        os._exit(LOST_PROCESS_EXIT_CODE)


def _may_come_from_others(error: BaseException) -> bool:
    """Whether the error, or one behind it, is of the kind that a lost process brings about."""
    seen: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        if isinstance(current, jax.errors.JaxRuntimeError | OSError | TimeoutError):
            return True
        seen.append(current)
        pending += [current.__cause__, current.__context__]
    return False


def _flush() -> None:
    """Flushes what Python holds back, unless another thread holds it."""

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # Closed, or nobody reads it any more.
                stream.flush()

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(FLUSH_SECONDS)
