"""Chooses and checks the folder of a run, and restores the run's checkpoint.

A workdir contains `checkpoints/`. A run that finds a checkpoint there resumes from the checkpoint.
In addition to the arrays, a checkpoint has the config, the position in the data, the sums of
metrics that are not reported yet, and the sizes and hashes of the metrics files, all as JSON. A run
that resumes cuts off the lines that were written after the checkpoint, and writes the same lines
again.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections

from manualpar.data import BatchStream
from manualpar.errors import UsageError
from manualpar.system.cluster.agreement import from_first
from manualpar.system.storage import AnyPath, BucketPath, HeldError, hold, hold_file
from manualpar.system.storage.durable_files import WriteError, check_writable, explained
from manualpar.system.storage.untrusted import parse_object, read_object
from manualpar.training.checkpoints import CheckpointError, Checkpoints, Restored, check_resumable
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import explain_failure, read_extra
from manualpar.training.config import field_defaults, flatten_config
from manualpar.training.experiment import Experiment
from manualpar.training.monitoring.run_files import (
    CONFIG_FILE,
    HASHES,
    PLACED_FILES,
    check_workdir,
    create_numbered_folder,
)
from manualpar.training.recorder import parse_state

RUNS = Path("runs")
FOLDER = "checkpoints"
# Metrics whose largest value is the best.
LARGE_IS_GOOD = frozenset({"accuracy"})


class Position(NamedTuple):
    """The progress of a run: the updates made and the training examples read since its start."""

    step: int = 0
    examples: int = 0


START = Position()


def choose_workdir(workdir: AnyPath | None, *, name: str) -> AnyPath:
    """Returns `workdir`; if it is `None`, makes a numbered folder, the same for all processes."""
    if workdir is not None:
        return workdir
    path, failure = "", ""
    if jax.process_index() == 0:
        try:
            path = str(create_numbered_folder(RUNS / name))
        except OSError as error:
            failure = f"the results cannot be written: {error}; name another folder with --workdir."
    # The other processes see the folder if they share the file system with process 0.
    path, failure = from_first([path, failure])
    if failure:
        raise UsageError(failure)
    return Path(path)


def check_folder(config: ml_collections.ConfigDict, workdir: AnyPath | None) -> list[str]:
    """Checks that a folder is new, or contains a run that can be resumed with this config.

    If `workdir` is `None`, the run will make a new folder in `RUNS`. Returns a sentence for each
    difference between this config and the config of the earlier run.

    Raises:
      OSError: The checkpoints in the folder cannot be listed.
    """
    if workdir is None:
        check_writable(RUNS, "--workdir")
        return []
    # Writing to a bucket is tested later, when the run locks the workdir.
    if not isinstance(workdir, BucketPath):
        if os.path.isfile(workdir):
            check_workdir(workdir)
        check_writable(workdir, "--workdir")
    elif workdir.exists() and not workdir.is_dir():
        check_workdir(workdir)
    # This code runs before the devices are chosen, so it must not use JAX.
    if config.checkpoint.every_steps:
        open_folder(workdir / FOLDER).check()
    elif not open_folder(workdir / FOLDER).steps():
        check_workdir(workdir)
    return check_continues(config, workdir)


def check_continues(config: ml_collections.ConfigDict, workdir: AnyPath) -> list[str]:
    """Compares a config with the config of the run in a workdir.

    The run's config is read from the newest checkpoint, because `config.json` may be missing or
    from another run. The checkpoint is not verified here: `restore` verifies it and compares again.

    Returns the allowed differences, a sentence each; raises a `ValueError` for other differences.
    """
    path = workdir / CONFIG_FILE
    written, saved, note = None, _saved_config(workdir), ""
    if path.exists() if isinstance(path, BucketPath) else os.path.lexists(path):
        try:
            written = flatten_config(_read_config(path))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--workdir={workdir} holds a run whose {CONFIG_FILE} cannot be read: {error}; "
                "restore the file from a copy, or name another folder."
            ) from error
    if written is not None and saved is not None:
        try:
            check_resumable(saved, written, defaults=field_defaults(config))
        except ValueError:
            note = f"{CONFIG_FILE} there is from another run than the newest checkpoint"
    earlier = written if saved is None else saved
    changes = [] if earlier is None else _compare(earlier, config, workdir=workdir, note=note)
    lines = [f"changed since the run began: {change}" for change in changes]
    return [f"{note}; the checkpoint's config is used", *lines] if note else lines


def _read_config(path: AnyPath) -> dict[str, Any]:
    if isinstance(path, BucketPath):
        return parse_object(path.read_bytes())
    return read_object(path)


def _saved_config(workdir: AnyPath) -> dict[str, Any] | None:
    """Returns the flattened config of the newest checkpoint; `None` if it cannot be read."""
    steps = open_folder(workdir / FOLDER).steps()
    try:
        config = read_extra(workdir / FOLDER / str(steps[-1])).get("config") if steps else None
    except (OSError, ValueError):
        return None  # `restore` reports the damage, or restores an older checkpoint.
    return flatten_config(config) if isinstance(config, dict) else None


def _compare(
    saved: Mapping[str, Any], config: ml_collections.ConfigDict, *, workdir: AnyPath, note: str = ""
) -> list[str]:
    """Returns the allowed differences; raises a `ValueError` for other differences."""
    asked_for = json.loads(json.dumps(config.to_dict()))
    try:
        return check_resumable(saved, flatten_config(asked_for), defaults=field_defaults(config))
    except ValueError as error:
        raise ValueError(
            f"--workdir={workdir} holds another run: {error}"
            + (f"\n{note}; the checkpoint's config is compared." if note else "")
        ) from error


def _longest_save(stall_seconds: float) -> float:
    """Returns the time limit of a save in seconds: 600 or more, or a week if the argument is 0."""
    return max(2 * stall_seconds, 600.0) if stall_seconds else 7 * 24 * 3600.0


def open_checkpoints(config: ml_collections.ConfigDict, workdir: AnyPath) -> Checkpoints:
    """Opens the checkpoints of a workdir; `config.checkpoint` chooses which of them to keep."""
    checkpoint = config.checkpoint
    return Checkpoints(
        workdir / FOLDER,
        keep=checkpoint.keep,
        keep_every_steps=checkpoint.keep_every_steps,
        best_metric=checkpoint.best_metric,
        best_mode="max" if checkpoint.best_metric in LARGE_IS_GOOD else "min",
        seconds=_longest_save(config.watch.stall_seconds),
    )


def restore(
    checkpoints: Checkpoints,
    experiment: Experiment,
    workdir: AnyPath,
    *,
    report: Callable[[str], None],
) -> Restored:
    """Restores the latest checkpoint, or the latest undamaged checkpoint if the config allows that.

    `report` is called with a sentence for each checkpoint that is not used.

    Raises:
      CheckpointError: The checkpoint is damaged, or comes from another model or other data.
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
            f"{found}, now {expected}): the files of config.data have changed since, so the run "
            "would miss some examples and repeat others. Restore the files, or begin another run "
            "in another workdir."
        )
    if isinstance(stream := experiment.task.dataset.train, BatchStream):
        states = restored.extra.get("stream", [])
        if len(states) == jax.process_count():
            stream.restore(states[jax.process_index()])
    return restored


def _check_extra(restored: Restored) -> None:
    """Refuses a checkpoint whose `extra` JSON does not have the values that a run saves."""
    try:
        extra = parse_object(json.dumps(restored.extra), allow_nan=True)  # Refuses deep JSON.
        parse_state(extra["recorder"])
        files = extra["files"]
        numbers = [extra["position"], *(files[name] for name in PLACED_FILES)]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("the position or the size of a file is not a whole number")
        if HASHES in files and not all(type(files[HASHES][x]) is str for x in PLACED_FILES):
            raise TypeError("the hash of a file is not a string")
        numbers = [saved["number"] for saved in extra.get("stream", [])]
        names = [name for name, _ in extra.get("hooks", [])]
        if not all(type(x) is int for x in numbers) or not all(type(x) is str for x in names):
            raise TypeError("the state of the data or of a hook is malformed")
        if not isinstance(extra["data"], str) or not isinstance(extra.get("config", {}), dict):
            raise TypeError("data is not a string, or config not an object")
    except Exception as error:  # The JSON may have any content, so any error is possible.
        why = explain_failure(error)
        raise CheckpointError(
            f"the checkpoint of step {restored.step} does not hold the JSON that a run saves with "
            f"its arrays ({why}): delete this checkpoint to go on from an earlier one, or begin "
            "another run in another workdir."
        ) from error


def position_of(restored: Restored) -> Position:
    """Returns the position of the run at a checkpoint."""
    return Position(restored.step, restored.extra["position"])


# -------------------------------------------------------------------------------------------------
# Locks a workdir, so that only one run at a time writes there.
#
# The lock is on the file `.lock`, see `manualpar.system.storage.drafts`. Process 0 acquires the
# lock for all processes of a run. Reading a workdir needs no lock.


LOCK_FILE = ".lock"


@contextlib.contextmanager
def lock_workdir(
    workdir: AnyPath, *, report: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Locks a folder against other runs while the context lasts; creates the folder if needed.

    If the file system does not support locks, `report` is called with a sentence and nothing is
    locked. In a bucket, the lock is a lease, see `manualpar.system.storage.drafts`.

    The context yields a function that checks the lock. In a bucket, this function raises an error
    if the lease was lost. On a disk, if the lock file was deleted, the function creates and locks a
    new file; it raises a `WriteError` if another run has locked the new file first.

    Raises:
      WriteError: The file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(workdir, BucketPath):
                check = stack.enter_context(hold(workdir, report=report))
            else:
                check = stack.enter_context(_hold_on_disk(workdir, report))
        except HeldError as error:
            raise _in_use(workdir, error) from None
        yield check


@contextlib.contextmanager
def _hold_on_disk(workdir: Path, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    path = workdir / LOCK_FILE
    with contextlib.ExitStack() as stack:
        with explained(path):
            workdir.mkdir(parents=True, exist_ok=True)
            held = stack.enter_context(hold_file(path, folder=workdir, report=report, remains=True))

        def check() -> None:
            try:
                with explained(path):
                    held.check()
            except HeldError as error:
                raise WriteError(
                    f"{path} was deleted while this run had its lock: {_in_use(workdir, error)}"
                ) from None

        yield check


def _in_use(workdir: AnyPath, error: HeldError) -> UsageError:
    return UsageError(
        f"--workdir={workdir} is in use by another run{error}; wait until it ends, end it, or name "
        "another folder."
    )
