"""Takes a run's files back to the place where a checkpoint found them.

What a run wrote after its last checkpoint is computed again by whoever goes on from there. A
*place* is the size in bytes of each file at a checkpoint, the end of a line. What lies beyond, and
be it half a line of a process that was killed, is moved to `discarded.jsonl` before it is cut off:
killed in between, a resume finds it in both and discards it once more.

`metrics.jsonl` has to be what the checkpoint found: with it a run that was resumed leaves the same
bytes as one that was not. `throughput.jsonl` is another in every run, so of a damaged one what
there is will do, and so of `discarded.jsonl`, of which nobody has to read anything to go on.
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
# Whose size a place holds.
PLACED_FILES = (METRICS_FILE, THROUGHPUT_FILE)


def cut_back(
    workdir: Path,
    place: Mapping[str, int],
    *,
    step: int,
    reason: str,
    report: Callable[[str], None],
) -> None:
    """Cuts files back to a place, and keeps what is cut off.

    Args:
      workdir: The folder of the run.
      place: The size in bytes of each file of `PLACED_FILES`.
      step: The updates made by then.
      reason: What to call it in `discarded.jsonl`.
      report: Is told in a sentence if `throughput.jsonl` has no end of a line at the place.

    Raises:
      ValueError: It is not a place.
      WriteError: `metrics.jsonl` is shorter than the place or has no end of a line there, and no
        file has been changed; or the folder cannot be written to.
    """
    if set(place) != set(PLACED_FILES) or any(size < 0 for size in place.values()):
        raise ValueError(
            f"place is {dict(place)}, expected the size in bytes of each of "
            f"{' and '.join(PLACED_FILES)}, as RunWriter.place() gives it on process 0."
        )
    beyond = {}
    for name in PLACED_FILES:
        with explained(workdir / name):
            beyond[name], damage = _beyond(workdir / name, place[name])
        if damage and name == METRICS_FILE:
            raise WriteError(
                f"{workdir / name} cannot be gone on with: {damage}; put the file back as the run "
                "left it, or start a new run in another folder."
            )
        if damage:
            report(f"going on after what there is of {workdir / name}: {damage}")
    record = {
        "resumed_after_step": step,
        "reason": reason,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "note": f"{reason} after step {step}; these lines were written later and cut off",
        **{
            name: data.decode(errors="backslashreplace").splitlines()
            for name, data in beyond.items()
        },
    }
    path = workdir / DISCARDED_FILE
    with explained(path):
        _cut(path)
    with contextlib.closing(LineFile(path)) as discarded:
        discarded.append(record)
        discarded.sync()
    for name in PLACED_FILES:
        with explained(workdir / name):
            _cut(workdir / name, place[name])


def _beyond(path: Path, size: int) -> tuple[bytes, str]:
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
    """Cuts a file, if there is one and it is longer, and ends its last line if that has no end."""
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


def first_step_after(place: Mapping[str, int], step: int) -> int:
    """The first step that is written again; at the very beginning that is 0, an evaluation."""
    return step + 1 if any(place.values()) else 0
