"""What a run leaves on disk: `config.json`, `metrics.jsonl` and TensorBoard's event files.

Each record is on its way to disk before `write` returns, so a run that is killed loses nothing it
has shown. A line of `metrics.jsonl` is an object with `step`, `split` (`train`, `eval` or `test`)
and the metrics by name. JSON has no infinities and no NaN: they are `null` there; the event file
has them as they are.
"""

import itertools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"


def check_workdir(workdir: Path) -> None:
    """Refuses a folder that cannot hold a new run, an earlier run's above all.

    Raises:
      ValueError: It holds a run, or is not a folder.
    """
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(
            f"--workdir={workdir} is a file, expected a folder or a name for a new one."
        )
    for name in (CONFIG_FILE, METRICS_FILE):
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


class RunWriter:
    """Writes a run's files into its folder. Use it as a context manager.

    `tensorboardX.SummaryWriter` hands events to a queue and a thread, which a killed process takes
    with it; this writes them itself.
    """

    def __init__(self, workdir: Path, *, config: Mapping[str, Any]) -> None:
        """Creates the folder if need be and stores `config` there."""
        workdir.mkdir(parents=True, exist_ok=True)
        self.workdir = workdir
        text = json.dumps(config, indent=2, allow_nan=False)
        (workdir / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        self._metrics = (workdir / METRICS_FILE).open("a", encoding="utf-8")
        self._events = EventsWriter(str(workdir / "events"))

    def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of `split` after `step` updates, buffering nothing."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "split": split, **finite}
        self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            event = event_pb2.Event(step=step, summary=summary.scalar(f"{split}/{name}", value))
            event.wall_time = time.time()
            self._events.write_event(event)
        self._events.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._metrics.close()
        self._events.close()
