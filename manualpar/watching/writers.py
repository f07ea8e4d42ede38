"""What a run leaves on disk: its config, its metrics, its throughput and TensorBoard's event files.

    config.json        the config in force; config.1.json, config.2.json, ... were, before a resume
    metrics.jsonl      what the training computes: the same lines whether a run was killed or not
    throughput.jsonl   what depends on the clock and the machine: other lines in every run
    discarded.jsonl    a line for each resume and rollback, with the lines cut off from those two
    events.out.*       all of the numbers for TensorBoard, an event file for each start
    .lock              locked by the run that writes here, see `manualpar.training.workdir_lock`

A line of `metrics.jsonl` or `throughput.jsonl` is an object with `step`, `split` (`train`, `eval`
or `test`) and numbers by name. JSON has no infinities and no NaN: they are `null` there; the event
file has them as they are.

Each record is on its way to disk before `write` returns, so a run that is killed loses nothing it
has shown. What a run wrote after its last checkpoint is computed again by the run that resumes from
it, so `RunWriter.resume` cuts the files back to where that checkpoint found them, its *place*: the
bytes that each file had.
"""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from manualpar.untrusted import parse_object, read_file
from manualpar.watching.durable_files import LineFile, explained, replace_file
from manualpar.watching.event_file import EventFile
from manualpar.watching.rewinding import (
    METRICS_FILE,
    PLACED_FILES,
    THROUGHPUT_FILE,
    cut_back,
    first_step_after,
)

CONFIG_FILE = "config.json"
NO_RATES: Mapping[str, float] = {}


def check_workdir(workdir: Path) -> None:
    """Refuses a folder that cannot hold a new run, an earlier run's above all.

    Raises:
      ValueError: It holds a run, or is not a folder.
    """
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(
            f"--workdir={workdir} is a file, expected a folder or a name for a new one."
        )
    for name in (CONFIG_FILE, *PLACED_FILES):
        if (workdir / name).exists():
            raise ValueError(
                f"--workdir={workdir} holds an earlier run ({name}), which is not overwritten; "
                "name another folder or move that one away."
            )


def create_numbered_folder(parent: Path) -> Path:
    """Creates the next of `parent/001`, `parent/002`, ..., also when several runs start at once."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("itertools.count ends nowhere")


class Writer(Protocol):
    """Where a training loop writes: a `RunWriter` on process 0, a `SilentWriter` on the others."""

    workdir: Path

    def write(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, float],
        *,
        throughput: Mapping[str, float] = NO_RATES,
    ) -> None:
        """Writes the numbers of `split` after `step` updates."""

    def place(self) -> dict[str, int]:
        """How long the files are, once all that was written is on disk."""

    def go_back(
        self, place: Mapping[str, int], *, step: int, report: Callable[[str], None] = print
    ) -> None:
        """Cuts off what was written after a place."""


class SilentWriter:
    """Stands in for `RunWriter` on processes other than 0: takes everything and writes nothing."""

    def __init__(self, workdir: Path) -> None:
        """Remembers the folder, which may not even exist for this process."""
        self.workdir = workdir

    def write(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, float],
        *,
        throughput: Mapping[str, float] = NO_RATES,
    ) -> None:
        """Leaves it to process 0."""

    def place(self) -> dict[str, int]:
        """Nothing: the place that a checkpoint holds is that of process 0."""
        return {}

    def go_back(
        self, place: Mapping[str, int], *, step: int, report: Callable[[str], None] = print
    ) -> None:
        """Leaves it to process 0."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves nothing behind."""


class RunWriter:
    """Writes a run's files into its folder. Use it as a context manager."""

    def __init__(self, workdir: Path, *, config: Mapping[str, Any]) -> None:
        """Creates the folder if need be and stores `config` there.

        Raises:
          WriteError: The folder cannot be written to.
        """
        self.workdir = workdir
        with explained(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
        _store_config(workdir, config)
        self._files = {name: LineFile(workdir / name) for name in PLACED_FILES}
        self._events = EventFile(workdir)

    @classmethod
    def resume(
        cls,
        workdir: Path,
        *,
        config: Mapping[str, Any],
        place: Mapping[str, int],
        step: int,
        report: Callable[[str], None] = print,
    ) -> Self:
        """Opens the files of an earlier run where a checkpoint found them.

        What they hold beyond goes to `discarded.jsonl`. A config that differs from the one in
        `config.json` takes its place; the old one is kept as `config.<n>.json`. TensorBoard is told
        to forget what comes after `step`.

        Args:
          workdir: The folder of the run.
          config: The config to go on with.
          place: What `place` returned when the checkpoint was saved.
          step: The updates made by then.
          report: Is told what is missing of `throughput.jsonl`.

        Returns:
          The writer.

        Raises:
          ValueError: `metrics.jsonl` is missing, shorter than the place or has no end of a line
            there, or `place` is not a place.
          WriteError: The folder cannot be written to.
        """
        cut_back(workdir, place, step=step, reason="resumed", report=report)
        writer = cls(workdir, config=config)
        writer._events.add_restart(first_step_after(place, step))
        return writer

    def go_back(
        self, place: Mapping[str, int], *, step: int, report: Callable[[str], None] = print
    ) -> None:
        """Goes on where a checkpoint found the files, as `resume` does, without a new start.

        Args:
          place: What `place` returned when the checkpoint was saved.
          step: The updates made by then.
          report: See `resume`.

        Raises:
          ValueError: See `resume`.
          WriteError: The folder cannot be written to.
        """
        cut_back(self.workdir, place, step=step, reason="rolled back", report=report)
        self._events.add_restart(first_step_after(place, step))

    def write(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, float],
        *,
        throughput: Mapping[str, float] = NO_RATES,
    ) -> None:
        """Writes the numbers of `split` after `step` updates, buffering nothing.

        Args:
          step: The updates made.
          split: What they are of.
          metrics: What another run of the same config computes too.
          throughput: What depends on the clock and the machine; without any there is no line.

        Raises:
          WriteError: The disk is full, or the folder cannot be written to any more.
        """
        self._files[METRICS_FILE].append({"step": step, "split": split, **_finite(metrics)})
        if throughput:
            record = {"step": step, "split": split, **_finite(throughput)}
            self._files[THROUGHPUT_FILE].append(record)
        self._events.add_scalars(step, split, {**metrics, **throughput})

    def place(self) -> dict[str, int]:
        """How long the files are, for `resume`; what they hold survives the machine's fall.

        Returns:
          The size in bytes of each file, the end of a line.

        Raises:
          WriteError: The disk does not take what was written.
        """
        return {name: lines.sync() for name, lines in self._files.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for lines in self._files.values():
            lines.close()
        self._events.close()


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Numbers as JSON has them."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _store_config(workdir: Path, config: Mapping[str, Any]) -> None:
    """Writes the config, if it is another one than there, which is copied to the next free name."""
    path, text = workdir / CONFIG_FILE, json.dumps(config, indent=2, allow_nan=False) + "\n"
    with explained(path):
        if path.exists():
            earlier = read_file(path, follow_links=True)
            # The order of the fields means nothing.
            if _is_same_json(earlier, text):
                return
            number = 1
            while (workdir / f"config.{number}.json").exists():
                number += 1
            last = workdir / f"config.{number - 1}.json"
            # A resume that was killed here has copied it before.
            if not last.exists() or read_file(last, follow_links=True) != earlier:
                replace_file(workdir / f"config.{number}.json", earlier)
    replace_file(path, text)


def _is_same_json(first: bytes, second: str) -> bool:
    """Whether two texts are the same object; one that is not JSON is like no other."""
    try:
        return parse_object(first) == parse_object(second)
    except ValueError:
        return False
