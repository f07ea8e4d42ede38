"""Takes a run's files back to the place where a checkpoint found them.

A run that goes on from a checkpoint computes everything after it again. A *place* is the size
in bytes of each file at the checkpoint, which is the end of a line. The rest of the file, even the
half line of a killed process, moves to `discarded.jsonl` before it is cut off. If the process is
killed in between, both files hold it, and the next resume discards it once more.

`metrics.jsonl` must be what the checkpoint found, because a resumed run leaves the same bytes there
as one that was never interrupted. `throughput.jsonl` differs in every run, so a damaged one is kept
as it is.
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from manualpar.untrusted import open_file
from manualpar.watching.durable_files import LineFile, WriteError, explained

METRICS_FILE = "metrics.jsonl"
THROUGHPUT_FILE = "throughput.jsonl"
DISCARDED_FILE = "discarded.jsonl"
PLACED_FILES = (METRICS_FILE, THROUGHPUT_FILE)  # A place holds their sizes.


def cut_back(
    workdir: Path,
    place: Mapping[str, int],
    *,
    step: int,
    reason: str,
    report: Callable[[str], None],
) -> None:
    """Cuts files back to the place of the checkpoint of `step`, and keeps what is cut off.

    `reason` is the word for it in `discarded.jsonl`; `report` is told if `throughput.jsonl` is
    damaged.

    Raises:
      ValueError: `place` is not a place.
      WriteError: `metrics.jsonl` is shorter than the place or has no end of a line there, and no
        file has been changed; or the folder cannot be written to.
    """
    if set(place) != set(PLACED_FILES) or any(size < 0 for size in place.values()):
        raise ValueError(
            f"place is {dict(place)}, expected the size in bytes of each of "
            f"{' and '.join(PLACED_FILES)}, as RunWriter.place() gives it on process 0."
        )
    lines_beyond = {}
    for name in PLACED_FILES:
        path = workdir / name
        with explained(path):
            data, damage = _read_beyond(path, place[name])
        if damage and name == METRICS_FILE:
            raise WriteError(
                f"{path} cannot be gone on with: {damage}; put the file back as the run "
                "left it, or start a new run in another folder."
            )
        if damage:
            report(f"going on after what there is of {path}: {damage}")
        lines_beyond[name] = data.decode(errors="backslashreplace").splitlines()
    path = workdir / DISCARDED_FILE
    with explained(path):
        _cut(path)
    with contextlib.closing(LineFile(path)) as discarded:
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        note = f"{reason} after step {step}; these lines were written later and cut off"
        entry = {"resumed_after_step": step, "reason": reason, "time": time, "note": note}
        discarded.append(entry | lines_beyond)
        discarded.sync()
    for name in PLACED_FILES:
        with explained(workdir / name):
            _cut(workdir / name, place[name])


def _read_beyond(path: Path, size: int) -> tuple[bytes, str]:
    """What a file holds beyond `size` bytes, and why that is not the end of a line; else `''`."""
    data, found = b"", "there is none"
    if path.exists():
        with open_file(path, follow_links=True) as file:
            file.seek(max(size - 1, 0))
            last = file.read(min(size, 1))
            data = file.read()
            if last == b"\n" or size == 0:
                return data, ""
            length = os.fstat(file.fileno()).st_size
        found = "that is inside of a line" if last else f"it has {length} bytes"
    elif size == 0:
        return b"", ""  # The run was killed before it had opened all of its files.
    return data, f"the checkpoint found the end of a line after {size} bytes, and {found}"


def _cut(path: Path, size: int = sys.maxsize) -> None:
    """Cuts a file that is longer, and ends a last line that has no end."""
    if not path.exists():
        return
    with open_file(path, follow_links=True) as file:
        size = min(size, file.seek(0, os.SEEK_END))
        file.seek(max(size - 1, 0))
        is_whole = file.read(min(size, 1)) in (b"\n", b"")
    os.truncate(path, size)
    if not is_whole:
        with path.open("ab") as file:
            file.write(b"\n")
