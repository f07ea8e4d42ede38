"""The folder of a run: a new one, or one that holds a run to go on with."""

import os
from pathlib import Path

import jax
import ml_collections

from manualpar.checkpoints.retention import find_leftovers, list_steps
from manualpar.cluster.agreement import from_first
from manualpar.training.command_line import CommandLine
from manualpar.training.saving import FOLDER, check_continues
from manualpar.usage import UsageError
from manualpar.watching.writers import check_workdir, create_numbered_folder

RUNS = Path("runs")


def check_folder(config: ml_collections.ConfigDict, workdir: Path | None) -> list[str]:
    """Checks that a folder is new, or holds a run that goes on with this config.

    Args:
      config: The config.
      workdir: The folder; `None` for a new one.

    Returns:
      The differences between the config and that of the run, a sentence each.

    Raises:
      ValueError: It is not a folder, or cannot be written to; it holds the run of another model or
        data, or one without a checkpoint while the config asks for none; or something is in the
        way of a checkpoint.
      OSError: Its checkpoints cannot be listed.
    """
    _check_writable(RUNS if workdir is None else workdir)
    if workdir is None:
        return []
    if workdir.exists() and not workdir.is_dir():
        check_workdir(workdir)
    # This runs before there are devices, so that it may not ask jax for anything.
    if config.checkpoint.every_steps:
        find_leftovers(workdir / FOLDER)
    elif not list_steps(workdir / FOLDER):
        check_workdir(workdir)
    return check_continues(config, workdir)


def choose_workdir(command: CommandLine) -> Path:
    """The folder that a command line names, or a new numbered one, the same for all processes.

    Raises:
      UsageError: A new one cannot be created.
    """
    workdir: Path | None = command.flags.workdir
    if workdir is not None:
        return workdir
    path, failure = "", ""
    if jax.process_index() == 0:
        try:
            path = str(create_numbered_folder(RUNS / command.config_path.stem))
        except OSError as error:
            failure = f"the results cannot be written: {error}; name another folder with --workdir."
    # The other processes find it if they share the file system.
    path, failure = from_first([path, failure])
    if failure:
        raise UsageError(failure)
    return Path(path)


def _check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be written to or created, without creating it."""
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
