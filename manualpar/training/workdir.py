"""The folder of a run: a new one, or one that holds a run to go on with."""

import os
from pathlib import Path

import jax
import ml_collections
import numpy as np
from jax.experimental import multihost_utils

from manualpar.checkpoints.retention import find_leftovers, list_steps
from manualpar.training.command_line import CommandLine, UsageError
from manualpar.training.saving import FOLDER, check_continues
from manualpar.watching.writers import check_workdir, create_numbered_folder

RUNS = Path("runs")
LONGEST_PATH = 4096


def check_folder(config: ml_collections.ConfigDict, workdir: Path | None) -> list[str]:
    """Checks that a folder is new or holds a run that a config goes on with.

    Args:
      config: What is asked for.
      workdir: The folder; `None` for a new one.

    Returns:
      The differences between the config and that of the run, a sentence each.

    Raises:
      ValueError: It is not a folder, cannot be written to, or holds a run of another model or data,
        or one that has no checkpoint while the config asks for none, or something that is in the
        way of a checkpoint.
      OSError: Its checkpoints cannot be listed.
    """
    _check_writable(RUNS if workdir is None else workdir)
    if workdir is None:
        return []
    if workdir.exists() and not workdir.is_dir():
        check_workdir(workdir)
    # Without asking jax for anything, which has no devices yet.
    holds_checkpoint = bool(list_steps(workdir / FOLDER))
    if not holds_checkpoint and not config.checkpoint.every_steps:
        check_workdir(workdir)
    if config.checkpoint.every_steps:
        find_leftovers(workdir / FOLDER)  # Not when the first save is due.
    return check_continues(config, workdir)


def choose_workdir(command: CommandLine) -> Path:
    """The folder that a command line names, or a new numbered one, the same for all processes.

    Raises:
      UsageError: A new one cannot be created.
    """
    if command.workdir is not None:
        return command.workdir
    parent = RUNS / command.config_path.stem
    if jax.process_count() == 1:
        return _create(parent)
    # Process 0 tells the others the path. They find it if they share the file system.
    text = np.zeros(LONGEST_PATH, np.uint8)
    failure: UsageError | None = None
    if jax.process_index() == 0:
        try:
            data = str(_create(parent)).encode()
            text[: len(data)] = np.frombuffer(data, np.uint8)
        except UsageError as error:
            failure = error  # The others wait to be told.
    told = bytes(np.asarray(multihost_utils.broadcast_one_to_all(text))).rstrip(b"\0").decode()
    if not told:
        raise failure or UsageError("process 0 could not create a folder for the results.")
    return Path(told)


def _check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be written to or created, and leaves it as it is."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    reason = ""
    if not there.is_dir():
        reason = "is a file, not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        reason = "may not be written to"
    if reason and there != folder:
        raise ValueError(
            f"the results cannot be written to {folder}: {there} {reason}; name another folder "
            "with --workdir."
        )
    if reason and there.is_dir():
        raise ValueError(f"the results cannot be written: {folder} {reason}; name another folder.")


def _create(parent: Path) -> Path:
    """Creates a numbered folder."""
    try:
        return create_numbered_folder(parent)
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --workdir."
        ) from error
