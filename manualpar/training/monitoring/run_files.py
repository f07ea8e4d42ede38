"""The files of a run: its config, its metrics, its throughput, and TensorBoard's event files.

    config.json        the current config; config.1.json, ... are the configs before a resume
    metrics.jsonl      results of the training: the same lines even if a run was killed and resumed
    throughput.jsonl   numbers that depend on clock and machine: different lines in every run
    times.jsonl        what process 0 spent its time on, see `run_times`; never cut back
    discarded.jsonl    a line for each resume and rollback, with the lines cut off from the files
    events.out.*       all of the numbers for TensorBoard, an event file for each start
    .lock              locked by the run that writes here, see `manualpar.training.workdir`

A line of `metrics.jsonl` or `throughput.jsonl` is an object with `step`, `split` (`train`, `eval`
or `test`) and numbers by name. JSON has no infinity or NaN, so the lines have `null` for them. The
event file has the original values.

A run that resumes from a checkpoint repeats all steps after the checkpoint. So `metrics.jsonl` and
`throughput.jsonl` are cut back to their *place*: their sizes in bytes at the checkpoint. A place is
always the end of a line, and has the SHA-256 of the bytes before it, which shows if an old line was
changed. The lines after the place are first copied to `discarded.jsonl` and then cut off. If the
process is killed between the copy and the cut, the next resume copies the lines once more.

`write` returns after it has passed the lines and events to the operating system, so a killed run
loses none of them.
No file here may be a link or have a second name, see `manualpar.system.storage.untrusted`. The
writers of tensorboardX would follow a link, so only its messages and checksums are used here.
"""

import contextlib
import datetime
import hashlib
import itertools
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from manualpar.system.storage import AnyPath
from manualpar.system.storage.durable_files import (
    AppendedFile,
    LineFile,
    WriteError,
    explained,
    replace_file,
)
from manualpar.system.storage.untrusted import COPIED_BYTES, open_file, parse_object, read_file

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
THROUGHPUT_FILE = "throughput.jsonl"
DISCARDED_FILE = "discarded.jsonl"
PLACED_FILES = (METRICS_FILE, THROUGHPUT_FILE)  # A place has the sizes of these files.
HASHES = "sha256"  # A place's key for the hashes of these files; old checkpoints have none.


def check_workdir(workdir: AnyPath, flag: str = "--workdir") -> None:
    """Raises a `ValueError` if `workdir` is a file, or a folder with files of an earlier run."""
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"{flag}={workdir} is a file, expected a folder or a name for a new one.")
    for name in (CONFIG_FILE, *PLACED_FILES):
        if (workdir / name).exists():
            raise ValueError(
                f"{flag}={workdir} holds an earlier run ({name}), which is not overwritten; "
                "name another folder or move that one away."
            )


def create_numbered_folder(parent: Path) -> Path:
    """Creates the next folder of `parent/001`, `parent/002`, ...; safe for two runs at once."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (folder := parent / f"{number:03d}").mkdir()
            return folder
    raise AssertionError("itertools.count ends nowhere")


class RunWriter:
    """Writes a run's files into its folder. Use it as a context manager.

    Only process 0 writes files; on other processes every method does nothing. Every method raises a
    `WriteError` if the disk is full, if the folder cannot be written to, or if a file was deleted
    or replaced.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        config: Mapping[str, Any],
        place: Mapping[str, Any] | None = None,
        step: int = 0,
        report: Callable[[str], None] = print,
        process: int = 0,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the files of a new run, or cuts an earlier run's files back to its checkpoint.

        If `config.json` contains another config, it is first copied to `config.<n>.json`.

        Args:
          workdir: The folder of the run, which is created if it does not exist.
          place: The value that `place()` returned at the checkpoint; `None` for a new run.
          report: Called with a sentence if `throughput.jsonl` is damaged.
          publish: Copies the files to their destination, if the destination is not `workdir`.

        Raises:
          WriteError: `metrics.jsonl` is missing, is shorter than its size in `place`, has no line
            that ends at this size, or has other bytes before it than at the checkpoint; or one of
            the files is a link or no file.
        """
        self.workdir = workdir
        self._publish = publish
        self._files: dict[str, LineFile] = {}
        if process:
            return
        if place is not None:
            _keep_lines_beyond(workdir, place, step=step, reason="resumed", report=report)
        with explained(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
        _store_config(workdir, config)
        with contextlib.ExitStack() as stack:
            for name in PLACED_FILES:
                self._files[name] = stack.enter_context(
                    contextlib.closing(LineFile(workdir / name))
                )
            self._events = stack.enter_context(contextlib.closing(_open_events(workdir)))
            self._write_event(file_version="brain.Event:2")
            if place is not None:
                self._cut_back(place, step)
            publish()
            self._opened = stack.pop_all()  # After an error, the files are closed here.

    def write(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, float],
        *,
        throughput: Mapping[str, float] | None = None,
    ) -> None:
        """Writes the numbers of a split after `step` updates.

        `metrics` are the same in every run of the same config. `throughput` depends on the clock
        and the machine; if it is empty, `throughput.jsonl` gets no line.
        """
        if not self._files:
            return
        for name, values in ((METRICS_FILE, metrics), (THROUGHPUT_FILE, throughput or {})):
            if values or name == METRICS_FILE:
                finite = {key: x if math.isfinite(x) else None for key, x in values.items()}
                self._files[name].append({"step": step, "split": split, **finite})
        values = {**metrics, **(throughput or {})}
        scalars = [{"tag": f"{split}/{key}", "simple_value": values[key]} for key in values]
        self._write_event(step=step, summary={"value": scalars})

    def place(self) -> dict[str, Any]:
        """Flushes the files in `PLACED_FILES` to the disk, and returns their sizes in bytes.

        A checkpoint stores these sizes, and the hash of each file under `HASHES`. Later `__init__`
        or `go_back` cuts the files back to these sizes, and compares the hashes. On processes other
        than 0 the result is empty.
        """
        if not self._files:
            return {}
        for lines in self._files.values():
            lines.sync()
        self._publish()
        sizes = {name: lines.size for name, lines in self._files.items()}
        return {**sizes, HASHES: {name: lines.sha256 for name, lines in self._files.items()}}

    def go_back(
        self, place: Mapping[str, Any], *, step: int, report: Callable[[str], None] = print
    ) -> None:
        """Cuts the files back to a checkpoint during the run, as `__init__` does at a resume."""
        if self._files:
            _keep_lines_beyond(self.workdir, place, step=step, reason="rolled back", report=report)
            self._cut_back(place, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self._files:
            return
        try:
            self._opened.close()
        except WriteError:
            if error is None:  # Otherwise only `error` is reported, because it came first.
                raise

    def _cut_back(self, place: Mapping[str, Any], step: int) -> None:
        """Cuts the files back to a place, and makes TensorBoard drop all later events."""
        for name, lines in self._files.items():
            lines.cut(place[name])
        # If the run starts over, it writes the evaluation of step 0 again.
        first = step + 1 if any(place[name] for name in PLACED_FILES) else 0
        self._write_event(step=first, session_log={"status": "START"})

    def _write_event(self, **fields: Any) -> None:
        """Writes an `Event` of TensorBoard with these fields and the time, as a TFRecord."""
        # Imported here, because tensorboardX imports torch if it is installed.
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._events.write(length + checksums[0] + data + checksums[1])


def _open_events(workdir: Path) -> AppendedFile:
    """Opens a new event file; TensorBoard reads event files in the order of their names."""
    # A name contains the time of the start in seconds; the number orders files of the same second.
    number = len(list(workdir.glob("events.out.tfevents.*")))
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{number:04d}"
    return AppendedFile(workdir / name)


def _store_config(workdir: Path, config: Mapping[str, Any]) -> None:
    """Writes the config to `config.json`; first copies an earlier, different config elsewhere."""
    path, text = workdir / CONFIG_FILE, json.dumps(config, indent=2, allow_nan=False) + "\n"
    with explained(path):
        if path.exists():
            earlier = read_file(path)
            # A file that is not JSON differs from every config.
            with contextlib.suppress(ValueError):
                if parse_object(earlier) == parse_object(text):  # Fields may be in another order.
                    return
            number = 1
            while (workdir / f"config.{number}.json").exists():
                number += 1
            last = workdir / f"config.{number - 1}.json"
            # A resume that was killed at this place may already have copied the earlier config.
            if not last.exists() or read_file(last) != earlier:
                replace_file(workdir / f"config.{number}.json", earlier)
    replace_file(path, text)


def _keep_lines_beyond(
    workdir: Path,
    place: Mapping[str, Any],
    *,
    step: int,
    reason: str,
    report: Callable[[str], None],
) -> None:
    """Copies the lines after the place of the checkpoint of `step` to `discarded.jsonl`.

    If `metrics.jsonl` is damaged before the place, the function raises an error and changes no
    file. If `throughput.jsonl` is damaged, it is only reported, because the lines of this file
    differ in every run.
    """
    sizes = {name: size for name, size in place.items() if name != HASHES}
    if set(sizes) != set(PLACED_FILES) or any(size < 0 for size in sizes.values()):
        raise ValueError(
            f"place is {dict(place)}, expected the size in bytes of each of "
            f"{' and '.join(PLACED_FILES)}, as RunWriter.place() gives it on process 0."
        )
    lines_beyond = {}
    for name in PLACED_FILES:
        path = workdir / name
        with explained(path):
            data, damage = _read_beyond(path, place[name], place.get(HASHES, {}).get(name))
        if damage and name == METRICS_FILE:
            raise WriteError(
                f"{path} cannot be continued: {damage}; put the file back as the run left it, or "
                "start a new run in another folder."
            )
        if damage:
            report(f"continuing {path} although lines are missing or changed: {damage}")
        lines_beyond[name] = data.decode(errors="backslashreplace").splitlines()
    with contextlib.closing(LineFile(workdir / DISCARDED_FILE)) as discarded:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        note = f"{reason} after step {step}; these lines were written later and cut off"
        entry = {"resumed_after_step": step, "reason": reason, "time": now, "note": note}
        discarded.append(entry | lines_beyond)
        discarded.sync()


def _read_beyond(path: Path, size: int, sha256: str | None) -> tuple[bytes, str]:
    """Returns a file's bytes after the first `size`, and how the earlier bytes are damaged.

    Without `sha256`, only the last of the earlier bytes is checked: a line must end there.
    """
    data, found = b"", "but the file is missing"
    if os.path.lexists(path):
        with open_file(path) as file:
            before, last, left = hashlib.sha256(), b"", size
            while left and (part := file.read(min(left, COPIED_BYTES))):
                before.update(part)
                last, left = part[-1:], left - len(part)
            data = file.read()
        if left:
            found = f"but the file has {size - left} bytes"
        elif last != b"\n":
            found = "but that is inside a line"
        elif sha256 not in (None, before.hexdigest()):
            found = "but bytes before that have changed since"
        else:
            return data, ""
    # If `size` is 0, the file may be missing: the run was killed before it opened all files.
    damage = f"the checkpoint found the end of a line after {size} bytes, {found}"
    return data, damage if size else ""
