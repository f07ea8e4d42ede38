"""Decides which checkpoints stay, and deletes the others.

A folder of checkpoints has one folder per step, and the step number is its name. A checkpoint gets
that name in one atomic renaming, when everything in it is on the disk, and loses it before it is
deleted. So the leftovers of a killed process have other names (`12.unfinished...`, `12.deleted`).
The next save deletes them.

`ocp.CheckpointManager`, tried under our manifest, is not kill-safe: it deletes a checkpoint under
its own name, so a kill leaves `1` listed and damaged (and with `todelete_subdir` never deletes it).
Having gone back to 10 of [10, 20, 30], it skips a save of 11 and refuses one of 20.
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
    """The checkpoints to keep: the last, multiples of a step, the best; see `Checkpoints`."""

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
        """Chooses the steps to keep by the metrics of each; among equally good ones the newest."""
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
    # This package never gives a name such as "007".
    return sorted(int(n) for n in _names(folder) if n.isdecimal() and str(int(n)) == n)


def read_metrics(folder: Path, steps: list[int]) -> dict[int, Mapping[str, float]]:
    """Reads the metrics of checkpoints by step; leaves out checkpoints with a damaged manifest."""
    metrics = {}
    for step in steps:
        try:
            metrics[step] = read_manifest(folder / str(step)).metrics
        except (DamagedError, OSError):
            continue  # `restore` reports it; here it is ignored and not deleted.
    return metrics


def put_in_place(folder: Path, step: int, *, after: int) -> None:
    """Gives a complete checkpoint its name.

    This checkpoint goes on from step `after`, so checkpoints of later steps were given up. They are
    renamed, not deleted, because going back may have been an experiment. But the new one must be
    the newest, because the next start goes on from the newest.
    """
    for other in list_steps(folder):
        if other > after:
            names = (folder / f"{other}{SUPERSEDED}-{number}" for number in itertools.count(1))
            os.rename(folder / str(other), next(n for n in names if not os.path.lexists(n)))
    os.rename(folder / f"{step}{UNFINISHED}", folder / str(step))
    sync(folder)


def delete_steps(folder: Path, steps: list[int]) -> None:
    """Deletes checkpoints, so that no part of one ever has a checkpoint's name."""
    for step in steps:
        os.rename(folder / str(step), folder / f"{step}{DELETED}")
        shutil.rmtree(folder / f"{step}{DELETED}")


def delete_leftovers(folder: Path) -> None:
    """Deletes the folders that `find_leftovers` finds.

    Some files of a failed save may still be being written. They are written by name, so that a
    renamed folder does not change while it is deleted.
    """
    leftovers = find_leftovers(folder)
    for path in sorted(leftovers, key=lambda path: not path.name.endswith(DELETED)):
        if not path.name.endswith(DELETED):
            path = path.rename(path.with_name(path.name + DELETED))
        shutil.rmtree(path)


def find_leftovers(folder: Path) -> list[Path]:
    """Finds the leftovers of killed saves and deletions in a folder.

    Raises:
      ValueError: Something has such a name and is not a folder. No save leaves that, so it is the
        user's and is not deleted; and writes under the name of a link would go elsewhere.
    """
    leftovers = []
    for name in _names(folder):
        step, _, rest = name.partition(".")
        if step.isdecimal() and f".{rest}".startswith((UNFINISHED, DELETED)):
            path = folder / name
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                raise ValueError(
                    f"{path} is {kind_of(mode)}, and a save needs the name for a folder of its "
                    "own; move it away"
                )
            leftovers.append(path)
    return leftovers


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []
