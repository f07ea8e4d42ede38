"""A run's checkpoints: the state, and where its data, its metrics and its reports were.

A workdir holds `checkpoints/`, and a run that finds one there goes on from it. What a checkpoint
has besides the arrays is JSON: the config, the place in the data, the sums of metrics that are not
reported yet, and how long the files of metrics were, so that what was written after it can be cut
off and is written again, the same.
"""

import json
from collections.abc import Callable
from pathlib import Path

import ml_collections

from manualpar.checkpoints import CheckpointError, Checkpoints, Restored, check_resumable
from manualpar.train_state import TrainState
from manualpar.training.config import flatten_config
from manualpar.training.experiment import Experiment
from manualpar.training.loop import Place
from manualpar.training.recorder import Recorder
from manualpar.watching.writers import CONFIG_FILE, Writer

FOLDER = "checkpoints"
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

    Args:
      config: What is asked for.
      workdir: A folder, which need not exist.

    Returns:
      The differences that are allowed, a line each; none if the folder holds no run.

    Raises:
      ValueError: They differ in what a run cannot change; the message shows the differences.
    """
    path = workdir / CONFIG_FILE
    if not path.exists():
        return []
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--workdir={workdir} holds a run whose {CONFIG_FILE} cannot be read: {error}; restore "
            "the file from a copy, or name another folder."
        ) from error
    asked_for = json.loads(json.dumps(config.to_dict()))
    try:
        return check_resumable(flatten_config(saved), flatten_config(asked_for))
    except ValueError as error:
        raise ValueError(f"--workdir={workdir} holds another run: {error}") from error


class RunSaver:
    """Saves a run as its loop goes, and takes it back."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        experiment: Experiment,
        *,
        recorder: Recorder,
        writer: Writer,
        report: Callable[[str], None],
    ) -> None:
        """Takes what a checkpoint is made of, and who is told of what went wrong."""
        self._checkpoints = checkpoints
        self._experiment = experiment
        self._recorder = recorder
        self._writer = writer
        self._report = report

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` updates."""
        return step % self._experiment.config.checkpoint.every_steps == 0

    def save(self, state: TrainState, place: Place) -> None:
        """Saves a state; all metrics up to it must have been reported.

        Raises:
          CheckpointError: This checkpoint or the one before it cannot be written.
        """
        extra = {
            "position": place.position,
            "config": self._experiment.config.to_dict(),
            "data": self._experiment.task.dataset.fingerprint,
            "recorder": self._recorder.state(),
            "files": self._writer.place(),
        }
        self._checkpoints.save(
            self._experiment.program,
            state,
            step=place.step,
            extra=extra,
            metrics=self._recorder.latest("eval"),
        )

    def wait(self) -> None:
        """Waits until the latest save is on disk.

        Raises:
          CheckpointError: It cannot be written.
        """
        self._checkpoints.wait()

    def go_back(self) -> tuple[TrainState, Place] | None:
        """Takes the run back to its latest checkpoint; `None` if there is none."""
        self._checkpoints.wait()
        if self._checkpoints.latest_step() is None:
            return None
        restored = restore(self._checkpoints, self._experiment, report=self._report)
        self._recorder.resume(restored.extra["recorder"])
        self._writer.go_back(restored.extra["files"], step=restored.step)
        return restored.state, place_of(restored)


def restore(
    checkpoints: Checkpoints, experiment: Experiment, *, report: Callable[[str], None]
) -> Restored:
    """The latest checkpoint, or the latest that is whole if the config says so.

    Args:
      checkpoints: Those of the run.
      experiment: What is to go on.
      report: Is told of checkpoints that are not used.

    Returns:
      The checkpoint.

    Raises:
      CheckpointError: It is damaged, or another model's, or of other data.
    """
    restored = checkpoints.restore(
        experiment.program,
        on_corruption=experiment.config.checkpoint.on_corruption,
        report=report,
    )
    found, expected = restored.extra["data"], experiment.task.dataset.fingerprint
    if found != expected:
        raise CheckpointError(
            f"the checkpoint of step {restored.step} was saved with other data (fingerprint "
            f"{found}, now {expected}): the files of config.data have changed since, and the run "
            "would not see the examples it has not seen yet. Bring them back as they were, or "
            "begin another run in another workdir."
        )
    return restored


def place_of(restored: Restored) -> Place:
    """How far a run was that saved a checkpoint."""
    return Place(restored.step, int(restored.extra["position"]))
