"""Makes the parts of a directory of token files, in this process or in several processes.

A process takes the next part when it has finished a part. No process waits for the tokens of
another process, so a slow process delays no other process. All processes end when the process that
started them ends for any reason. The next call makes the unfinished parts again.
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from manualpar.data.dataset import DamagedDataError
from manualpar.data.document_files import DocumentRange
from manualpar.data.token_parts import Encoder, TextPart, TokenProgress, write_part

SECONDS_BETWEEN_REPORTS = 0.2


@dataclasses.dataclass(frozen=True)
class Work:
    """The parts that still have to be made.

    Attributes:
      parts: Number of a part -> the part.
      folder: The folder to which the parts are written.
      make_encoder: Makes the encoder; called in each process.
      done: The work that earlier calls have done.
    """

    parts: dict[int, DocumentRange | TextPart]
    folder: pathlib.Path
    make_encoder: Callable[[], Encoder]
    done: TokenProgress


def make_parts(work: Work, processes: int, report: Callable[[TokenProgress], None]) -> None:
    """Makes all parts that still have to be made.

    Args:
      work: The parts.
      processes: The number of processes. With 1 this process makes the parts.
      report: Called regularly with all the work done so far.

    Raises:
      DamagedDataError: A file is damaged, or a process was killed.
      ValueError, OSError: See `write_part`.
    """
    if not work.parts:
        return
    if processes == 1:
        _make_parts_here(work, report)
        return
    # Spawns processes, because a forked process would inherit the locks of this process's threads.
    spawn = multiprocessing.get_context("spawn")
    # Shared memory: the three numbers of `TokenProgress`, and the number of parts taken so far.
    shared = spawn.Array("q", [*work.done, 0])
    pipes = [spawn.Pipe(duplex=False) for _ in range(min(processes, len(work.parts)))]
    workers = [spawn.Process(target=_work, args=(work, shared, pipe)) for _, pipe in pipes]
    try:
        for worker in workers:
            worker.start()
        while left := [worker for worker in workers if worker.exitcode is None]:
            multiprocessing.connection.wait([w.sentinel for w in left], SECONDS_BETWEEN_REPORTS)
            for worker, (receiver, _) in zip(workers, pipes, strict=True):
                if receiver.poll():
                    raise receiver.recv()
                if worker.exitcode:
                    raise DamagedDataError(
                        "a process that made tokens was killed, perhaps because memory was full; "
                        "run the same command again to continue."
                    )
            with shared.get_lock():
                report(TokenProgress(*shared[:3]))
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _make_parts_here(work: Work, report: Callable[[TokenProgress], None]) -> None:
    encoder, done = work.make_encoder(), work.done
    for number, part in work.parts.items():
        before = done.bytes

        def count(more: TokenProgress) -> None:
            nonlocal done
            done = TokenProgress(*(a + b for a, b in zip(done, more, strict=True)))
            report(done)

        write_part(part, number, work.folder, encoder, count)
        done = done._replace(bytes=before + part.size)
        report(done)


def _work(work: Work, shared: Any, errors: multiprocessing.connection.Connection) -> None:
    """Makes parts until no part is left, or until a part fails."""
    # A terminal sends Ctrl-C to this process too, but only the parent process must handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        encoder, numbers = work.make_encoder(), list(work.parts)
        while (number := _take(shared, numbers)) is not None:
            part, counted = work.parts[number], 0

            def count(more: TokenProgress) -> None:
                nonlocal counted
                counted += more.bytes
                _add(shared, more)

            write_part(part, number, work.folder, encoder, count)
            _add(shared, TokenProgress(part.size - counted, 0, 0))
    except (ValueError, OSError) as error:
        errors.send(error)


def _take(shared: Any, numbers: Sequence[int]) -> int | None:
    with shared.get_lock():
        taken = shared[3]
        shared[3] += 1
    return numbers[taken] if taken < len(numbers) else None


def _add(shared: Any, more: TokenProgress) -> None:
    with shared.get_lock():
        for index, value in enumerate(more):
            shared[index] += value


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
