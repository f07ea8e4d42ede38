"""Which checkpoints stay, and how the others go.

A folder of checkpoints holds one folder a step, named by the number alone: it gets that name, in
one atomic renaming, when everything in it is written, hashed and on the disk. Whatever a killed
process leaves has another name (`12.unfinished...`, `12.deleted`) and goes with the next save. A
checkpoint that is to go loses its name first, so that a half-deleted one is never taken for one.
"""

import dataclasses
import itertools
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from manualpar.checkpoints.manifest import DamagedError, read_manifest, sync_folder
from manualpar.untrusted import kind_of

UNFINISHED = ".unfinished"
DELETED = ".deleted"
SUPERSEDED = ".superseded"


def list_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, ascending; none if there is no such folder.

    Raises:
      OSError: The folder can't be listed.
    """
    try:
        with os.scandir(folder) as entries:
            # "007" is no name that was given here.
            return sorted(
                int(entry.name)
                for entry in entries
                if entry.name.isdecimal() and str(int(entry.name)) == entry.name
            )
    except FileNotFoundError:
        return []


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the last, those at round numbers, the best.

    Attributes:
      keep: How many of the last to keep.
      keep_every_steps: Those at a multiple of this are kept; 0 for none.
      best_metric: The metric by which one more is kept; '' for none. Those that were saved without
        it don't compete, and of equals the newest stays.
      best_mode: 'min' or 'max', which values are better.
    """

    keep: int
    keep_every_steps: int
    best_metric: str
    best_mode: str

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("keep_every_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}, expected an integer, at least {least}.")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={self.best_mode!r}, expected 'min' or 'max'.")

    def choose(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps whose checkpoints stay, from the metrics of each by its step."""
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


def read_metrics(folder: Path, steps: list[int]) -> dict[int, Mapping[str, float]]:
    """The metrics of checkpoints by step, without those whose manifest can't be relied on."""
    metrics = {}
    for step in steps:
        try:
            metrics[step] = read_manifest(folder / str(step)).metrics
        except (DamagedError, OSError):
            continue  # Restoring speaks of it; here it neither counts nor goes.
    return metrics


def put_in_place(folder: Path, step: int, *, after: int) -> None:
    """Gives a checkpoint that is complete its name.

    Those of steps after the one that it goes on from belong to a course of training that was given
    up, by going on from an earlier checkpoint. They are renamed, not deleted, since that may have
    been for a try; the new one must be the newest, or the next start would go on there.

    Args:
      folder: The folder.
      step: The step of the checkpoint.
      after: The step that it goes on from.

    Raises:
      OSError: Something can't be renamed.
    """
    for other in list_steps(folder):
        if other > after:
            _rename_to_free_name(folder, other)
    os.rename(folder / f"{step}{UNFINISHED}", folder / str(step))
    sync_folder(folder)


def delete_steps(folder: Path, steps: list[int]) -> None:
    """Deletes checkpoints, so that at no moment a part of one has a checkpoint's name.

    Raises:
      OSError: Something can't be renamed or deleted.
    """
    for step in steps:
        os.rename(folder / str(step), folder / f"{step}{DELETED}")
        shutil.rmtree(folder / f"{step}{DELETED}")


def find_leftovers(folder: Path) -> list[Path]:
    """What killed saves and deletions have left in a folder; none if there is no such folder.

    Raises:
      ValueError: Something has such a name and is no folder. No save leaves it, so it is somebody's
        and not deleted; and a draft that is written under a link's name would end elsewhere.
      OSError: The folder can't be listed.
    """
    leftovers = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                step, _, rest = entry.name.partition(".")
                if not step.isdecimal() or not rest.startswith((UNFINISHED[1:], DELETED[1:])):
                    continue
                mode = entry.stat(follow_symlinks=False).st_mode
                if not stat.S_ISDIR(mode):
                    raise ValueError(
                        f"{entry.path} is {kind_of(mode)}, and a save needs the name for a folder "
                        "of its own; move it away"
                    )
                leftovers.append(Path(entry.path))
    except FileNotFoundError:
        pass
    return leftovers


def delete_leftovers(folder: Path) -> None:
    """Deletes what killed saves and deletions have left; nothing may be being saved.

    Raises:
      ValueError: See `find_leftovers`.
      OSError: Something can't be deleted.
    """
    for leftover in find_leftovers(folder):
        shutil.rmtree(leftover)


def _rename_to_free_name(folder: Path, step: int) -> None:
    """Takes the name from a checkpoint that another course of training has left."""
    for number in itertools.count(1):
        aside = folder / f"{step}{SUPERSEDED}-{number}"
        if not os.path.lexists(aside):
            os.rename(folder / str(step), aside)
            return
