"""Decides which checkpoints to keep, and deletes the others.

A folder of checkpoints has one folder per step, named by the step number. A checkpoint gets that
name in one atomic rename, when all of its files are on the disk. Before a checkpoint is deleted, it
is renamed again. So the leftovers of a killed process have other names (`12.unfinished...`,
`12.deleted`). The next save deletes these leftovers.

This package does not use `ocp.CheckpointManager`, because that class is not safe if the process is
killed. It deletes a checkpoint without renaming it first. So after a kill, a damaged folder `1` is
still listed; with `todelete_subdir` the folder is never deleted. And after a run went back to step
10 of [10, 20, 30], the manager skips a save of step 11 and refuses a save of step 20.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from manualpar.system.storage import sync
from manualpar.system.storage.untrusted import kind_of
from manualpar.training.checkpoints.manifest import DamagedError, read_manifest

UNFINISHED = ".unfinished"
DELETED = ".deleted"
SUPERSEDED = ".superseded"


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rules that choose the checkpoints to keep; `Checkpoints` documents the fields."""

    keep: int
    keep_every_steps: int
    best_metric: str
    best_mode: str

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("keep_every_steps", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name}={value!r}, expected an integer, at least {least}.")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={self.best_mode!r}, expected 'min' or 'max'.")

    def choose(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Chooses the steps to keep. `metrics` maps the step of each checkpoint to its metrics.

        If several checkpoints are equally good, the newest of them counts as the best.
        """
        steps = sorted(metrics)
        kept = set(steps[-self.keep :])
        if self.keep_every_steps:
            kept |= {step for step in steps if step % self.keep_every_steps == 0}
        sign = 1.0 if self.best_mode == "max" else -1.0
        scored = [
            (sign * metrics[step][self.best_metric], step)
            for step in steps
            if self.best_metric in metrics[step]
        ]
        return kept | ({max(scored)[1]} if scored else set())


def list_steps(folder: Path) -> list[int]:
    """Finds the steps of the checkpoints in a folder, ascending."""
    # This package never writes a name such as "007".
    return sorted(int(n) for n in _names(folder) if n.isdecimal() and str(int(n)) == n)


def read_metrics(folder: Path, steps: list[int]) -> dict[int, Mapping[str, float]]:
    """Reads the metrics of each checkpoint, by step; skips checkpoints with a damaged manifest."""
    metrics = {}
    for step in steps:
        try:
            metrics[step] = read_manifest(folder / str(step)).metrics
        except (DamagedError, OSError):
            continue  # Not listed, so not deleted; `restore` reports the damage.
    return metrics


def put_in_place(folder: Path, step: int, *, after: int) -> None:
    """Renames a complete checkpoint to its final name.

    `after` is the step of the checkpoint that the run saved or restored before this one. So the run
    has abandoned all other checkpoints of later steps. These are renamed, because the next start
    resumes from the newest checkpoint. They are not deleted, because the user may still want them.
    """
    for other in list_steps(folder):
        if other > after:
            names = (folder / f"{other}{SUPERSEDED}-{number}" for number in itertools.count(1))
            os.rename(folder / str(other), next(n for n in names if not os.path.lexists(n)))
    os.rename(folder / f"{step}{UNFINISHED}", folder / str(step))
    sync(folder)


def delete_steps(folder: Path, steps: list[int]) -> None:
    """Renames and deletes checkpoints, so that a half-deleted checkpoint is never listed."""
    for step in steps:
        os.rename(folder / str(step), folder / f"{step}{DELETED}")
        shutil.rmtree(folder / f"{step}{DELETED}")


def delete_leftovers(folder: Path) -> None:
    """Deletes the folders that `find_leftovers` finds.

    A failed save may still be writing files under the folder's old path. So each folder is renamed
    before it is deleted: then no file can appear in it during the deletion.
    """
    leftovers = find_leftovers(folder)
    for path in sorted(leftovers, key=lambda path: not path.name.endswith(DELETED)):
        if not path.name.endswith(DELETED):
            path = path.rename(path.with_name(path.name + DELETED))
        shutil.rmtree(path)


def find_leftovers(folder: Path) -> list[Path]:
    """Finds the leftovers of killed saves and deletions in a folder.

    A file or a link with the name of a leftover is refused. Saves leave only folders, so the file
    belongs to the user and is not deleted. A save to a link would write outside the folder.
    """
    leftovers = []
    for name in _names(folder):
        step, _, rest = name.partition(".")
        if step.isdecimal() and f".{rest}".startswith((UNFINISHED, DELETED)):
            path = folder / name
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                raise ValueError(
                    f"{path} is {kind_of(mode)}, but a save has to create a folder of this name; "
                    "move it away"
                )
            leftovers.append(path)
    return leftovers


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []
