"""Takes a run's files back to the place where a checkpoint found them.

What a run wrote after its last checkpoint is computed again by whoever goes on from there. A
*place* is the size in bytes of each file at a checkpoint, the end of a line. What lies beyond, and
be it half a line of a process that was killed, is moved to `discarded.jsonl` before it is cut off:
killed in between, a resume finds it in both and discards it once more.
"""

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path

from manualpar.watching.durable_files import WriteError, explained, replace_file

METRICS_FILE = "metrics.jsonl"
THROUGHPUT_FILE = "throughput.jsonl"
DISCARDED_FILE = "discarded.jsonl"
# Whose size a place holds.
PLACED_FILES = (METRICS_FILE, THROUGHPUT_FILE)


def cut_back(workdir: Path, place: Mapping[str, int], *, step: int, reason: str) -> None:
    """Cuts files back to a place, and keeps what is cut off.

    Args:
      workdir: The folder of the run.
      place: The size in bytes of each file of `PLACED_FILES`.
      step: The updates made by then.
      reason: What to call it in `discarded.jsonl`.

    Raises:
      ValueError: It is not a place.
      WriteError: A file is shorter than the place or has no end of a line there, and no file has
        been changed; or the folder cannot be written to.
    """
    if set(place) != set(PLACED_FILES) or any(size < 0 for size in place.values()):
        raise ValueError(
            f"place is {dict(place)}, expected the size in bytes of each of "
            f"{' and '.join(PLACED_FILES)}, as RunWriter.place() gives it on process 0."
        )
    with explained(workdir):
        beyond = {name: _beyond(workdir / name, place[name]) for name in PLACED_FILES}
    record = {
        "resumed_after_step": step,
        "reason": reason,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "note": f"{reason} after step {step}; these lines were written later and cut off",
        **{name: text.splitlines() for name, text in beyond.items()},
    }
    path = workdir / DISCARDED_FILE
    with explained(path):
        earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    replace_file(path, earlier + json.dumps(record) + "\n")
    for name, size in place.items():
        with explained(workdir / name):
            if (workdir / name).exists():
                os.truncate(workdir / name, size)


def _beyond(path: Path, size: int) -> str:
    """What a file holds beyond `size` bytes, after which a line must end."""
    found = "there is none"
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(size - 1, 0))
            last = file.read(min(size, 1))
            if last == b"\n" or size == 0:
                return file.read().decode(errors="backslashreplace")
        found = "that is inside of a line" if last else f"it has {path.stat().st_size} bytes"
    elif size == 0:
        return ""  # The run was killed before it had opened all of its files.
    raise WriteError(
        f"{path} cannot be gone on with: the checkpoint found the end of a line after {size} "
        f"bytes, and {found}; put the file back as the run left it, or start a new run in "
        "another folder."
    )


def first_step_after(place: Mapping[str, int], step: int) -> int:
    """The first step that is written again; at the very beginning that is 0, an evaluation."""
    return step + 1 if any(place.values()) else 0
