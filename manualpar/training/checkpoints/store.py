"""A folder of checkpoints: saving in the background, restoring on any mesh, noticing damage.

Orbax copies the arrays off the devices and writes them while training goes on, each process its own
shards. It writes to `12.unfinished`. When all processes have finished, process 0 hashes every file,
forces it to the disk, adds the manifest and renames the folder to `12`. So a folder whose name is a
number is a complete checkpoint, whenever a process was killed. Only then are older ones deleted.
See `saved_state` for the stored content and `manifest` for the checks.

Several processes share one folder, and every method is collective: all processes call it, and
wait for each other in the calling thread. There is one exception: leaving the context by an error
waits only for this process's writes.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import jax

from manualpar.core.program.guarded_step import check_alive
from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.system.cluster.agreement import JSON, first_failure, from_first
from manualpar.system.storage import AnyPath, BucketPath, as_path
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints.failures import CheckpointError, cannot_write, explain_failure
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.manifest import DamagedError
from manualpar.training.checkpoints.retention import Retention


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint: its step, its state on the program's devices, and the extras."""

    step: int
    state: TrainState
    extra: Mapping[str, JSON]


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints in one folder; a context manager.

    Leaving the context, and `close`, wait until everything is on the disk. A process that ends
    without that leaves half a checkpoint, which does not count as one.

    Raises:
      ValueError: A number is too small, or `best_mode` unknown.
    """

    # On a file system that all processes share, or in a bucket. The first save creates it.
    folder: AnyPath
    _: dataclasses.KW_ONLY
    keep: int = 3  # How many of the last checkpoints to keep.
    keep_every_steps: int = 0  # Checkpoints of a multiple of this are kept for good; 0 for none.
    best_metric: str = ""  # The metric by which the best one is kept as well; '' for none.
    best_mode: Literal["min", "max"] = "min"  # Whether small or large values are better.
    asynchronous: bool = True  # Whether `save` returns before everything is on the disk.
    # How long a save may write: a process whose disk hangs holds up all others. In a bucket the
    # limit is at least an hour.
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
        self._is_shared = False  # Whether all processes are known to see the same folder.
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, concurrent.futures.Future[str]] | None = None
        self._current: int | None = None  # The step that was saved or restored last.

    @property
    def longest_save(self) -> float:
        """The seconds after which a save that has not been written is an error."""
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
        """Returns the newest of `steps`, or None."""
        return max(self.steps(), default=None)

    def check_shared(self) -> None:
        """Checks that all processes see the folder that process 0 sees, and creates it.

        The first save does so too; a run that checks it before has not trained in vain.

        Raises:
          CheckpointError: A process does not see it, or it cannot be written to.
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
                    f"not find in {self.folder} what process 0 on {first_host} has written there; "
                    "name a folder on a file system that all hosts share, by its whole path."
                )
            failure = first_failure(failure)
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):  # The next save deletes it.
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
        extra: Mapping[str, JSON],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Saves a state; returns once it has been copied off the devices.

        First waits for the last save. The step that this object has just saved or restored is not
        written again. Checkpoints of later steps, left by an earlier training, are renamed to
        `<step>.superseded-1`, because the last save has to be the newest.

        Args:
          program: The program that the state is of.
          state: The state. It may be donated to the next step as soon as this returns.
          step: The number of updates it has seen.
          extra: JSON to store too, such as the data's position and the config.
          metrics: Measured on this state, for `best_metric`.

        Raises:
          CheckpointError: This save, or the one before, could not be written.
          TypeError: `extra` is not JSON.
          ValueError: `step` is negative, or the state has been donated.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step={step!r}, expected an integer, at least 0.")
        check_alive("save", state=state)
        try:
            extra = json.loads(json.dumps(extra))  # The caller's may change while this is written.
        except (TypeError, ValueError) as error:
            raise TypeError(f"extra={extra!r}, expected what JSON can hold: {error}.") from None
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
        """Deletes the leftovers of killed processes; returns the failure, '' if there is none."""
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
        # If arrays could not be written, this raises: the other processes are held up in Orbax's
        # barrier and would not answer. Otherwise all processes have written theirs.
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

        Every file is checked first, then each device reads its own part of every array. The next
        save sets aside any checkpoints later than the restored one.

        Args:
          program: The program; its shapes and dtypes must equal the checkpoint's.
          step: Which checkpoint; None for the newest.
          on_corruption: Whether a damaged checkpoint raises, or the one before is taken.
          report: Called with a sentence for each unexpected event.

        Raises:
          CheckpointError: There is none, it is damaged, or it is of another model.
          ValueError: on_corruption is unknown.
        """
        if on_corruption not in ("stop", "previous"):
            raise ValueError(f"on_corruption={on_corruption!r}, expected 'stop' or 'previous'.")
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint of step {step}; there are {steps}."
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
                    "config.checkpoint.on_corruption='previous', or delete the folder."
                )
            report(f"{damage}. Trying the checkpoint before it.")
        raise CheckpointError(
            f"{self.folder} holds no checkpoint that can be used"
            + (f": {candidates} are all damaged." if candidates else ".")
        )

    def close(self) -> None:
        """Waits as `wait` does and ends the background threads."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
            # The user must see the first error. Other processes do not know of it, so they are
            # not asked.
            elif self._pending is not None and (failure := self._pending[1].result()):
                error.add_note(failure)
        except CheckpointError as second:
            if error is None:
                raise
            error.add_note(str(second))
        finally:
            self._background.shutdown()
            self._arrays.close()

    def _finish(self, step: int, after: int, metrics: Mapping[str, float]) -> str:
        """Waits for Orbax; then process 0 names the checkpoint, and returns why it could not."""
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
                f"checkpoint {path} was saved, but no older one deleted: {explain_failure(error)}."
            )
        return ""

    def _find_damage(self, step: int) -> str:
        """Describes a checkpoint's damage, '' if there is none; processes share out its files."""
        path, failure = self.folder / str(step), ""
        try:
            manifest = self._place.read_manifest(step)
            if manifest.step != step:
                raise DamagedError(f"manifest.json is of step {manifest.step}")
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
        except Exception as error:  # Orbax and tensorstore raise any type.
            raise CheckpointError(
                f"checkpoint {path} can't be read, though its files are as they were written: "
                f"{explain_failure(error)}."
            ) from error.with_traceback(None)
        return Restored(step, state, extra)


@contextlib.contextmanager
def _writing(path: AnyPath) -> Iterator[None]:
    """Turns whatever Orbax and tensorstore raise into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise cannot_write(path, error) from error.with_traceback(None)
