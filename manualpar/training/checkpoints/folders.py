"""The folder of checkpoints that `store` uses: a local folder, or a folder in a bucket.

A local checkpoint is written under a temporary name and renamed at the end. So a local checkpoint
with its final name is complete. Objects in a bucket cannot be renamed. There a checkpoint is
complete if it has a manifest. The manifest is written last, in one request, and deleted first. A
checkpoint without a manifest was left by a killed process: such a checkpoint is ignored, and the
next save deletes it.

If a run goes back to an earlier step, the checkpoints of later steps get other names. A save in a
bucket writes under the final name. So in a bucket the later checkpoints are copied to their new
names before the first byte of the new checkpoint is written.
"""

import itertools
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax

from manualpar.system.storage import AnyPath, BucketPath
from manualpar.system.storage.untrusted import write_file
from manualpar.training.checkpoints import bucket_arrays, manifest, retention
from manualpar.training.checkpoints.bucket_arrays import BucketArrays
from manualpar.training.checkpoints.manifest import MANIFEST, DamagedError, Manifest
from manualpar.training.checkpoints.retention import SUPERSEDED, UNFINISHED
from manualpar.training.checkpoints.saved_state import OrbaxFiles

# For this many seconds, a process may not see a new file of another host, for example on NFS.
SEEN_SECONDS = 10.0


class Folder(Protocol):
    """A folder of checkpoints.

    All processes call `arrays`, `unfinished`, `has_mark` and `verify`. Only process 0 calls the
    other methods.
    """

    seconds: float  # The limit for writing a checkpoint; if a write takes longer, it fails.

    def arrays(self) -> OrbaxFiles | BucketArrays:
        """Returns the object that writes and reads the arrays of a checkpoint."""

    def mark(self) -> str:
        """Creates an empty folder for `has_mark` to find, and returns its name; '' in a bucket."""

    def has_mark(self, name: str) -> bool:
        """Returns whether this process sees the empty folder that process 0 created in `mark`."""

    def unmark(self, name: str) -> None:
        """Deletes the empty folder that `mark` created."""

    def steps(self) -> list[int]:
        """Finds the steps of the complete checkpoints, ascending."""

    def check(self) -> None:
        """Raises a `ValueError` if a file or a link has a name that a save needs."""

    def make_room(self, step: int, *, after: int) -> None:
        """Deletes the leftovers of killed processes; called before a checkpoint is written."""

    def unfinished(self, step: int) -> AnyPath:
        """Returns the path to which all processes write the checkpoint of `step`."""

    def complete(self, step: int, *, after: int, metrics: Mapping[str, float]) -> None:
        """Completes the checkpoint of `step`, whose arrays have been written.

        `after` is the step of the checkpoint that the run saved or restored before this one. Other
        checkpoints of steps later than `after` are renamed.
        """

    def metrics(self) -> dict[int, Mapping[str, float]]:
        """Reads the metrics of each complete checkpoint that has a readable manifest, by step."""

    def delete(self, step: int) -> None:
        """Deletes a complete checkpoint, so that a half-deleted checkpoint never counts as one."""

    def read_manifest(self, step: int) -> Manifest:
        """Reads the manifest of a checkpoint; raises `DamagedError` if it is damaged."""

    def verify(self, step: int, found: Manifest, *, part: int, parts: int) -> None:
        """Checks part `part` of the checkpoint's files; raises `DamagedError` if a file differs."""


def open_folder(path: AnyPath, seconds: float = 600.0) -> Folder:
    """Opens the folder of checkpoints at a path; creates nothing.

    Writing a checkpoint may take at most `seconds`; in a bucket the limit is at least an hour.
    """
    if isinstance(path, BucketPath):
        return _BucketFolder(path, max(seconds, bucket_arrays.WAIT_SECONDS))
    return _LocalFolder(path, seconds)


class _LocalFolder:
    """A folder on a file system that all processes share; see `retention`."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self.seconds = path, seconds

    def arrays(self) -> OrbaxFiles:
        return OrbaxFiles(self.seconds)

    def mark(self) -> str:
        # The folder is named like an unfinished checkpoint. So if this process is killed, the next
        # save deletes the folder.
        name = f"0{UNFINISHED}-{secrets.token_hex(8)}"
        (self._path / name).mkdir(parents=True)
        return name

    def has_mark(self, name: str) -> bool:
        until = time.monotonic() + SEEN_SECONDS
        while not (self._path / name).is_dir():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def unmark(self, name: str) -> None:
        (self._path / name).rmdir()

    def steps(self) -> list[int]:
        return retention.list_steps(self._path)

    def check(self) -> None:
        retention.find_leftovers(self._path)

    def make_room(self, step: int, *, after: int) -> None:
        del step, after
        self._path.mkdir(parents=True, exist_ok=True)
        retention.delete_leftovers(self._path)

    def unfinished(self, step: int) -> Path:
        return self._path / f"{step}{UNFINISHED}"

    def complete(self, step: int, *, after: int, metrics: Mapping[str, float]) -> None:
        manifest.write_manifest(self.unfinished(step), step=step, metrics=metrics)
        retention.put_in_place(self._path, step, after=after)

    def metrics(self) -> dict[int, Mapping[str, float]]:
        return retention.read_metrics(self._path, self.steps())

    def delete(self, step: int) -> None:
        retention.delete_steps(self._path, [step])

    def read_manifest(self, step: int) -> Manifest:
        return manifest.read_manifest(self._path / str(step))

    def verify(self, step: int, found: Manifest, *, part: int, parts: int) -> None:
        manifest.verify_files(self._path / str(step), found, part=part, parts=parts)


class _BucketFolder:
    """A folder in a bucket; the checkpoint of step 12 is complete if `12/manifest.json` exists."""

    def __init__(self, path: BucketPath, seconds: float) -> None:
        self._path, self.seconds = path, seconds

    def arrays(self) -> BucketArrays:
        return BucketArrays()

    def mark(self) -> str:
        return ""

    def has_mark(self, name: str) -> bool:
        raise AssertionError("there is none")

    def unmark(self, name: str) -> None:
        raise AssertionError("there is none")

    def steps(self) -> list[int]:
        return sorted(step for step in self._numbers() if self._is_complete(str(step)))

    def check(self) -> None:
        """Does nothing, because in a bucket no object can prevent a save from using a name."""

    def make_room(self, step: int, *, after: int) -> None:
        """Deletes leftovers; renames later checkpoints, because a save writes to the final name."""
        for name in self._path.names():
            begins, _, ends = name.partition(".")
            is_ours = begins.isdecimal() and (not ends or f".{ends}".startswith(SUPERSEDED))
            if is_ours and not self._is_complete(name):
                (self._path / name).delete_files()
        for other in self.steps():
            if other > after or other == step:
                self._set_aside(str(other))

    def unfinished(self, step: int) -> BucketPath:
        return self._path / str(step)

    def complete(self, step: int, *, after: int, metrics: Mapping[str, float]) -> None:
        del after
        path, processes = self.unfinished(step), jax.process_count()
        files = bucket_arrays.complete_checkpoint(path, processes=processes, seconds=self.seconds)
        text = manifest.manifest_text(Manifest(step, manifest.finite(metrics), files))
        write_file(path / MANIFEST, text)
        bucket_arrays.delete_parts(path, processes=processes)

    def metrics(self) -> dict[int, Mapping[str, float]]:
        metrics = {}
        for step in self.steps():
            try:
                metrics[step] = self.read_manifest(step).metrics
            except DamagedError:
                continue  # Not listed, so not deleted; `restore` reports the damage.
        return metrics

    def delete(self, step: int) -> None:
        (self._path / str(step)).delete_files(MANIFEST)

    def read_manifest(self, step: int) -> Manifest:
        try:
            return manifest.parse_manifest((self._path / str(step) / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise DamagedError(f"{MANIFEST} is missing") from None

    def verify(self, step: int, found: Manifest, *, part: int, parts: int) -> None:
        files = dict(manifest.deal(found, part=part, parts=parts))
        hashed = bucket_arrays.hash_files(self._path / str(step), list(files))
        for name, (size, digest) in hashed.items():
            if size < 0:
                raise DamagedError(f"{name} is missing")
            manifest.compare(name, files[name], size=size, digest=digest)

    def _numbers(self) -> list[int]:
        names = self._path.names()
        return [int(name) for name in names if name.isdecimal() and str(int(name)) == name]

    def _is_complete(self, name: str) -> bool:
        return (self._path / name / MANIFEST).is_file()

    def _set_aside(self, name: str) -> None:
        """Moves a checkpoint to a new name; copies the manifest last and deletes it first."""
        names = (f"{name}{SUPERSEDED}-{number}" for number in itertools.count(1))
        there = set(self._path.names())
        source, target = self._path / name, self._path / next(n for n in names if n not in there)
        files = sorted(source.files(), key=lambda each: each == MANIFEST)
        for each in files:
            (source / each).copy_to(target / each)
        source.delete_files(MANIFEST)
