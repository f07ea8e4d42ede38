"""A folder of checkpoints: saves in the background, restores on any mesh, and detects damage.

Orbax copies the arrays to the host and writes them while the training continues. Each process
writes its own shards to `12.unfinished`. When all processes have finished, process 0 hashes every
file, flushes it to the disk, adds the manifest, and renames the folder to `12`. So a folder named
by a number is a complete checkpoint, even if a process was killed. Older checkpoints are deleted
only after the rename. See `saved_state` for the stored content and `manifest` for the checks.

All processes share one folder. Every method is collective: all processes must call it, and they
wait for each other in the calling thread. There is one exception: if the context of a `Checkpoints`
ends with an error, a process waits only for its own writes.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import types
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax

from manualpar.core.program.program import Program
from manualpar.core.program.state_arrays import check_alive
from manualpar.core.state.train_state import TrainState
from manualpar.system.cluster.agreement import JSON, first_failure, from_first
from manualpar.system.storage import AnyPath, BucketPath, as_path
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.manifest import DamagedError
from manualpar.training.checkpoints.retention import Retention
from manualpar.training.checkpoints.saved_state import (
    CheckpointError,
    cannot_write,
    explain_failure,
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint: its step, its state on the program's devices, and its `extra` JSON."""

    step: int
    state: TrainState
    extra: Mapping[str, JSON]


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints in one folder; a context manager.

    `close`, and the end of the context, wait until everything is on the disk. If a process ends
    before this, it may leave an unfinished checkpoint, which is ignored.

    Raises:
      ValueError: `keep` or `keep_every_steps` is too small, or `best_mode` is unknown.
    """

    # A folder in a bucket or on a file system that all processes share. The first save creates it.
    folder: AnyPath
    _: dataclasses.KW_ONLY
    keep: int = 3  # The number of newest checkpoints to keep.
    keep_every_steps: int = 0  # Keeps each checkpoint whose step is a multiple of this; 0: none.
    best_metric: str = ""  # Also keeps the checkpoint that is best by this metric; '': none.
    best_mode: Literal["min", "max"] = "min"  # Whether the smallest or largest value is the best.
    asynchronous: bool = True  # Whether `save` returns before everything is on the disk.
    # The limit in seconds for writing a save: without a limit, a disk that hangs would block all
    # processes. In a bucket the limit is at least an hour.
    seconds: float = 600.0

    def __post_init__(self) -> None:
        path = as_path(self.folder)
        self.folder = path if isinstance(path, BucketPath) else path.absolute()
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds={self.seconds!r}, expected a positive, finite number.")
        self._place = open_folder(self.folder, self.seconds)
        self._retention = Retention(
            self.keep, self.keep_every_steps, self.best_metric, self.best_mode
        )
        self._arrays = self._place.arrays()
        self._is_shared = False  # Set once all processes are known to see the same folder.
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, concurrent.futures.Future[str]] | None = None
        self._current: int | None = None  # The step that was saved or restored last.

    @property
    def longest_save(self) -> float:
        """The limit for writing a save, in seconds; a save that takes longer fails."""
        return self._place.seconds

    def steps(self) -> list[int]:
        """Finds the steps of the complete checkpoints, ascending, as process 0 sees them."""
        steps, failure = [], ""
        if jax.process_index() == 0:
            try:
                steps = self._place.steps()
            except OSError as error:
                failure = f"checkpoints in {self.folder} can't be listed: {explain_failure(error)}."
        steps, failure = from_first([steps, failure])
        if failure:
            raise CheckpointError(failure)
        return steps

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None if there is none."""
        return max(self.steps(), default=None)

    def check_shared(self) -> None:
        """Creates the folder, and checks that all processes see the same folder.

        The first save makes the same check. If this method is called before the training, an error
        does not waste the steps before the first save.

        Raises:
          CheckpointError: A process does not see the folder, or the folder cannot be written to.
        """
        if self._is_shared or jax.process_count() == 1:
            return
        mark, failure, host = "", "", socket.gethostname()
        if jax.process_index() == 0:
            try:
                mark = self._place.mark()
            except OSError as error:
                failure = f"checkpoints in {self.folder} cannot be saved: {explain_failure(error)}."
        mark, failure, first_host = from_first([mark, failure, host])
        if mark:
            if not self._place.has_mark(mark):
                failure = (
                    f"checkpoints cannot be saved: process {jax.process_index()} on {host} does "
                    f"not see in {self.folder} the file that process 0 on {first_host} wrote; "
                    "give the absolute path of a folder on a file system that all hosts share."
                )
            failure = first_failure(failure)
            if jax.process_index() == 0:
                # If this fails, the next save deletes the mark.
                with contextlib.suppress(OSError):
                    self._place.unmark(mark)
        if failure:
            raise CheckpointError(failure)
        self._is_shared = True

    def save(
        self,
        program: Program,
        state: TrainState,
        *,
        step: int,
        extra: Mapping[str, JSON] = types.MappingProxyType({}),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a state; returns once the state has been copied to the host.

        The call first waits for the previous save. If this object has just saved or restored
        `step`, nothing is written. If an earlier training left checkpoints of later steps, these
        are renamed to `<step>.superseded-1`, so that the checkpoint of the latest step is always
        the checkpoint that was saved last.

        Args:
          program: The program that made the state.
          state: The state. As soon as this call returns, the next step may donate the state.
          step: The number of updates made so far.
          extra: Additional JSON to store, such as the data's position and the config.
          metrics: Metrics measured on this state, for `best_metric`.

        Raises:
          CheckpointError: This save, or the previous save, could not be written.
          TypeError: `extra` is not JSON.
          ValueError: `step` is negative, or the state has been donated.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}, expected an integer, at least 0.")
        check_alive("save", state=state)
        try:
            # Copies `extra`, because the caller may change the original during the write.
            extra = json.loads(json.dumps(dict(extra)))
        except (TypeError, ValueError) as error:
            raise TypeError(f"extra={extra!r}, expected values of JSON: {error}.") from None
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self.wait()
        if step == self._current:
            return
        self.check_shared()
        path = self.folder / str(step)
        after = step - 1 if self._current is None else min(step - 1, self._current)
        failure = self._make_room(step, after=after) if jax.process_index() == 0 else ""
        if failure := first_failure(failure):
            raise CheckpointError(failure)
        with _writing(path):
            unfinished: Any = self._place.unfinished(step)
            self._arrays.save(unfinished, program, state, extra=extra)
        self._pending = (step, self._background.submit(self._finish, step, after, numbers))
        if not self.asynchronous:
            self.wait()

    def _make_room(self, step: int, *, after: int) -> str:
        """Deletes the leftovers of killed processes; returns the failure as a sentence, or ''."""
        path = self.folder / str(step)
        try:
            self._place.make_room(step, after=after)
        except ValueError as error:
            return f"checkpoint {path} was not saved: {error}."
        except OSError as error:
            return str(cannot_write(path, error))
        return ""

    def wait(self) -> None:
        """Waits until the last save is complete on the disk, or raises a `CheckpointError`."""
        if self._pending is None:
            return
        (step, finishing), self._pending = self._pending, None
        # If a write failed, `result()` raises: the other processes are blocked in Orbax's barrier
        # and could not answer `first_failure`. Otherwise all processes have written their arrays.
        if failure := first_failure(finishing.result()):
            raise CheckpointError(failure)
        self._current = step

    def restore(
        self,
        program: Program,
        *,
        step: int | None = None,
        on_corruption: Literal["stop", "previous"] = "stop",
        report: Callable[[str], None],
    ) -> Restored:
        """Restores a state for a program on any mesh, under any strategy.

        Every file is checked first. Then each device reads its own part of every array. The next
        save renames the checkpoints that are later than the restored checkpoint.

        Args:
          program: The program; its state must have the shapes and dtypes of the checkpoint's state.
          step: The step of the checkpoint to restore; None for the newest.
          on_corruption: If the checkpoint is damaged, `"stop"` raises an error, and `"previous"`
            restores the newest earlier checkpoint that is not damaged.
          report: Called with a sentence for each unexpected event.

        Raises:
          CheckpointError: The checkpoint does not exist, is damaged, or is of another model.
          ValueError: `on_corruption` is unknown.
        """
        if on_corruption not in ("stop", "previous"):
            raise ValueError(f"on_corruption={on_corruption!r}, expected 'stop' or 'previous'.")
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint of step {step}; there are only steps {steps}."
            )
        candidates = [s for s in steps if step is None or s <= step]
        for candidate in reversed(candidates):
            damage = self._find_damage(candidate)
            if not damage:
                restored = self._read(program, candidate, report)
                self._current = candidate
                if later := [s for s in steps if s > candidate]:
                    report(
                        f"Going on from step {candidate}; the next save sets the later checkpoints "
                        f"{later} aside."
                    )
                return restored
            if on_corruption == "stop":
                raise CheckpointError(
                    f"{damage}. To go on from the checkpoint before it, set "
                    "on_corruption='previous' (in a config config.checkpoint.on_corruption), or "
                    "delete the folder."
                )
            report(f"{damage}. Trying the checkpoint before it.")
        raise CheckpointError(
            f"{self.folder} holds no checkpoint that can be used"
            + (f": {candidates} are all damaged." if candidates else ".")
        )

    def close(self) -> None:
        """Waits until the last save is complete, and ends the background threads."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        first = error
        try:
            if error is None:
                self.wait()
            # If the `with` block raised an error, the user must see it first. The other processes
            # do not have it, so this process must not wait for them in a collective.
            elif self._pending is not None and (failure := self._pending[1].result()):
                error.add_note(failure)
        except CheckpointError as second:
            if error is None:
                first = second
                raise
            error.add_note(str(second))
        finally:
            self._background.shutdown()
            try:
                self._arrays.close()
            except Exception as third:
                if first is None:
                    raise
                # After a failed save, Orbax raises the save's error once more.
                if not isinstance(first, CheckpointError):
                    first.add_note(f"Orbax was not closed: {explain_failure(third)}")

    def _finish(self, step: int, after: int, metrics: Mapping[str, float]) -> str:
        """Waits for the write; process 0 completes the checkpoint. Returns the failure, or ''."""
        path = self.folder / str(step)
        with _writing(path):
            self._arrays.wait()
        if jax.process_index() != 0:
            return ""
        try:
            self._place.complete(step, after=after, metrics=metrics)
        except (OSError, WriteError) as error:
            return str(cannot_write(path, error))
        try:
            known = self._place.metrics()
            for old in sorted(set(known) - self._retention.choose(known)):
                self._place.delete(old)
        except OSError as error:
            return (
                f"checkpoint {path} was saved, but older checkpoints could not be deleted: "
                f"{explain_failure(error)}."
            )
        return ""

    def _find_damage(self, step: int) -> str:
        """Describes a checkpoint's damage, or returns ''; each process checks some of the files."""
        path, failure = self.folder / str(step), ""
        try:
            manifest = self._place.read_manifest(step)
            if manifest.step != step:
                raise DamagedError(f"manifest.json is of step {manifest.step}, expected {step}")
            part, parts = jax.process_index(), jax.process_count()
            self._place.verify(step, manifest, part=part, parts=parts)
        except DamagedError as error:
            failure = f"checkpoint {path} is damaged: {error}"
        except OSError as error:
            failure = f"checkpoint {path} can't be read: {explain_failure(error)}"
        return first_failure(failure)

    def _read(self, program: Program, step: int, report: Callable[[str], None]) -> Restored:
        """Reads a checkpoint whose files have been checked."""
        path: Any = self.folder / str(step)
        try:
            state, extra = self._arrays.read(path, program, report=report)
        except CheckpointError:
            raise
        except Exception as error:  # Orbax and tensorstore raise errors of any type.
            raise CheckpointError(
                f"checkpoint {path} can't be read, although its files have the right checksums: "
                f"{explain_failure(error)}."
            ) from error.with_traceback(None)
        return Restored(step, state, extra)


@contextlib.contextmanager
def _writing(path: AnyPath) -> Iterator[None]:
    """Turns any error of Orbax and tensorstore into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise cannot_write(path, error) from error.with_traceback(None)
