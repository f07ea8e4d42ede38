"""A run's checkpoints: the state, and where its data, its metrics and its reports were.

A workdir holds `checkpoints/`, and a run that finds one there goes on from it. What a checkpoint
has besides the arrays is JSON: the config, the place in the data, the sums of metrics that are not
reported yet, and how long the files of metrics were, so that what was written after it can be cut
off and is written again, the same.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from manualpar.checkpoints import CheckpointError, Checkpoints, Restored, check_resumable
from manualpar.checkpoints.failures import explain
from manualpar.checkpoints.orbax_files import read_extra
from manualpar.checkpoints.retention import list_steps
from manualpar.cluster import Cluster
from manualpar.train_state import TrainState
from manualpar.training.command_line import UsageError
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment
from manualpar.training.loop import Loop, Position, StoppedError
from manualpar.training.recorder import NonFiniteError, Recorder, parse_state
from manualpar.untrusted import parse_object, read_object
from manualpar.watching.rewinding import PLACED_FILES
from manualpar.watching.stalls import StallDetector
from manualpar.watching.writers import CONFIG_FILE, RunWriter

FOLDER = "checkpoints"
# So many rollbacks without a new checkpoint between them, and it is not the data.
MAX_ROLLBACKS = 3
# Metrics of which the best is the largest.
LARGE_IS_GOOD = frozenset({"accuracy"})


def open_checkpoints(config: ml_collections.ConfigDict, workdir: Path) -> Checkpoints:
    """The checkpoints of a workdir, kept as the config says."""
    checkpoint = config.checkpoint
    return Checkpoints(
        workdir / FOLDER,
        keep=checkpoint.keep,
        keep_every_steps=checkpoint.keep_every_steps,
        best_metric=checkpoint.best_metric,
        best_mode="max" if checkpoint.best_metric in LARGE_IS_GOOD else "min",
    )


def check_continues(config: ml_collections.ConfigDict, workdir: Path) -> list[str]:
    """Compares a config with that of the run that a workdir holds.

    A checkpoint has the config of its run too, and what it says counts: `config.json` may be gone,
    or from another run. The checkpoint is only looked at here; `restore` checks that it is whole,
    and compares again.

    Args:
      config: What is asked for.
      workdir: A folder, which need not exist.

    Returns:
      The differences that are allowed, a sentence each; none if the folder holds no run.

    Raises:
      ValueError: They differ in what a run cannot change; the message shows the differences.
    """
    path = workdir / CONFIG_FILE
    written, saved, note = None, _saved_config(workdir), ""
    if os.path.lexists(path):
        try:
            written = flatten_config(read_object(path, follow_links=True))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--workdir={workdir} holds a run whose {CONFIG_FILE} cannot be read: {error}; "
                "restore the file from a copy, or name another folder."
            ) from error
    if written is not None and saved is not None:
        try:
            check_resumable(saved, written)
        except ValueError:
            note = f"{CONFIG_FILE} there is not of the run whose checkpoint is the newest"
    earlier = written if saved is None else saved
    changes = [] if earlier is None else _compare(earlier, config, workdir=workdir, note=note)
    lines = [f"changed since the run began: {change}" for change in changes]
    return [f"{note}; going on as the checkpoint says", *lines] if note else lines


def _saved_config(workdir: Path) -> dict[str, Any] | None:
    """The config in the newest checkpoint, flat; `None` if there is none, or it is not readable."""
    steps = list_steps(workdir / FOLDER)
    try:
        config = read_extra(workdir / FOLDER / str(steps[-1])).get("config") if steps else None
    except (OSError, ValueError):
        return None  # Restoring says what is wrong with it, or takes the one before.
    return flatten_config(config) if isinstance(config, dict) else None


def _compare(
    saved: Mapping[str, Any], config: ml_collections.ConfigDict, *, workdir: Path, note: str = ""
) -> list[str]:
    """The differences that are allowed; a `ValueError` where there are others."""
    asked_for = json.loads(json.dumps(config.to_dict()))
    try:
        return check_resumable(saved, flatten_config(asked_for))
    except ValueError as error:
        raise ValueError(
            f"--workdir={workdir} holds another run: {error}"
            + (f"\n{note}, and the checkpoint counts." if note else "")
        ) from error


@dataclasses.dataclass
class RunSaver:
    """A hook, called after every step, that saves a run and stops it; it also rolls it back.

    It saves as often as the config says, after the last step, and where the run is asked to stop.

    Attributes:
      checkpoints: Where to.
      experiment: What is running.
      recorder: Holds the metrics that are not reported yet.
      writer: Writes the files of the run.
      cluster: The processes that train together.
      detector: Is not to take a save for a stall.
      report: Is told of what went wrong.
    """

    checkpoints: Checkpoints
    experiment: Experiment
    recorder: Recorder
    writer: RunWriter
    cluster: Cluster
    detector: StallDetector
    report: Callable[[str], None]

    def __call__(self, state: TrainState, position: Position) -> None:
        """Saves if it is time to, and ends the loop if the run is asked to stop.

        Raises:
          StoppedError: The run is asked to stop.
          CheckpointError: This checkpoint or the one before it cannot be written.
          NonFiniteError: A step up to this one was not finite; it is not saved.
        """
        step = position.step
        stops = self.cluster.should_stop(step)
        is_last = step == self.experiment.config.training.num_steps
        saves = self._is_due(step) or (self._every > 0 and (stops or is_last))
        if saves:
            self.save(state, position)
        if stops:
            self.recorder.drain()
            self.checkpoints.wait()
            raise StoppedError(step, is_saved=saves)

    def save(self, state: TrainState, position: Position) -> None:
        """Saves a state once everything that is reported of it is on disk.

        It may return before the checkpoint is on disk.

        Raises:
          CheckpointError: This checkpoint or the one before it cannot be written.
          NonFiniteError: A step up to this one was not finite; nothing is saved.
        """
        self.cluster.enter("saving")
        self.recorder.drain()
        with self.recorder.leave_out(), self.detector.pause():
            extra = {
                "position": position.examples,
                "config": self.experiment.config.to_dict(),
                "data": self.experiment.task.dataset.fingerprint,
                "recorder": self.recorder.state(),
                "files": self.writer.place(),
            }
            self.checkpoints.save(
                self.experiment.program,
                state,
                step=position.step,
                extra=extra,
                metrics=self.recorder.latest("eval"),
            )

    def train(self, loop: Loop, state: TrainState, position: Position) -> TrainState:
        """Runs a loop; if the config says so, a step that is not finite rolls it back.

        A rollback goes back to the latest checkpoint, and past the batch of the step that failed.

        Raises:
          NonFiniteError: The config does not ask for rollbacks, there is no checkpoint, or
            `MAX_ROLLBACKS` in a row did not help.
        """
        rollbacks = 0
        while True:
            try:
                return loop.run(state, position)
            except NonFiniteError as error:
                if any(map(self._is_due, range(position.step + 1, error.step))):
                    rollbacks = 0
                rollbacks += 1
                restored = None
                rolls_back = self.experiment.config.training.on_nonfinite == "rollback"
                if rolls_back and self._every and rollbacks <= MAX_ROLLBACKS:
                    self.cluster.enter("going back to a checkpoint")
                    with self.recorder.leave_out(), self.detector.pause():
                        restored = self.go_back()
                if restored is None:
                    raise
                state, (step, earlier) = restored
                # An earlier rollback may have begun this stretch beyond the checkpoint's position.
                failed = position.examples + (error.step - position.step) * loop.batch_size
                position = Position(step, failed)
                self.report(
                    f"{error}: back to the checkpoint of step {step}, past the "
                    f"{(failed - earlier) // loop.batch_size} batches since then"
                )

    def go_back(self) -> tuple[TrainState, Position] | None:
        """Takes recorder and files back to the latest checkpoint; `None` if there is none."""
        self.checkpoints.wait()
        if self.checkpoints.latest_step() is None:
            return None
        restored = restore(
            self.checkpoints, self.experiment, self.writer.workdir, report=self.report
        )
        self.recorder.resume(restored.extra["recorder"])
        self.writer.go_back(restored.extra["files"], step=restored.step, report=self.report)
        return restored.state, position_of(restored)

    @property
    def _every(self) -> int:
        every: int = self.experiment.config.checkpoint.every_steps
        return every

    def _is_due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0


def restore(
    checkpoints: Checkpoints,
    experiment: Experiment,
    workdir: Path,
    *,
    report: Callable[[str], None],
) -> Restored:
    """The latest checkpoint, or the latest that is whole if the config says so.

    Args:
      checkpoints: Those of the run.
      experiment: What is to go on.
      workdir: The folder of the run.
      report: Is told of checkpoints that are not used.

    Returns:
      The checkpoint.

    Raises:
      CheckpointError: It is damaged, or another model's, or of other data.
      UsageError: Its config differs in what a run cannot change.
    """
    restored = checkpoints.restore(
        experiment.program,
        on_corruption=experiment.config.checkpoint.on_corruption,
        report=report,
    )
    _check_extra(restored)
    if "config" in restored.extra:
        try:
            saved = flatten_config(restored.extra["config"])
            _compare(saved, experiment.config, workdir=workdir)
        except ValueError as error:
            raise UsageError(str(error)) from None
    found, expected = restored.extra["data"], experiment.task.dataset.fingerprint
    if found != expected:
        raise CheckpointError(
            f"the checkpoint of step {restored.step} was saved with other data (fingerprint "
            f"{found}, now {expected}): the files of config.data have changed since, and the run "
            "would not see the examples it has not seen yet. Bring them back as they were, or "
            "begin another run in another workdir."
        )
    return restored


def _check_extra(restored: Restored) -> None:
    """Refuses a checkpoint that has the right arrays, but not what a run saves besides them."""
    try:
        extra = parse_object(json.dumps(restored.extra), allow_nan=True)  # Not nested too deep.
        parse_state(extra["recorder"])
        numbers = [extra["position"], *(extra["files"][name] for name in PLACED_FILES)]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("the position or the size of a file is not a number of them")
        if not isinstance(extra["data"], str) or not isinstance(extra.get("config", {}), dict):
            raise TypeError("data is not a string, or config not an object")
    except Exception as error:  # Anything may be in there.
        raise CheckpointError(
            f"the checkpoint of step {restored.step} does not hold what a run saves besides its "
            f"arrays ({explain(error)}): begin another run in another workdir, or go on from an "
            "earlier checkpoint, by deleting this one."
        ) from error


def position_of(restored: Restored) -> Position:
    """How far the run was that saved a checkpoint."""
    return Position(restored.step, int(restored.extra["position"]))
