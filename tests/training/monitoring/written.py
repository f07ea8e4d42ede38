"""Reads what a run has written, and writes it."""

import json
import os
import struct
from pathlib import Path

from tensorboardX.proto import event_pb2

from manualpar.training.monitoring.run_files import RunWriter


def _event_records(path: Path) -> list[event_pb2.Event]:
    """The events of a file: records of length, checksum, data, checksum."""
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def read_events(workdir: Path) -> list[tuple[int, str, float]]:
    """The scalars in a folder's event file."""
    (path,) = workdir.glob("events.out.tfevents.*")
    return _scalars(_event_records(path))


def _scalars(events: list[event_pb2.Event]) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]


def read_metrics(workdir: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The records of a folder, by a reader that takes no JSON but JSON."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    lines = (workdir / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def write_steps(writer: RunWriter, steps: range) -> None:
    for step in steps:
        writer.write(step, "train", {"loss": 1 / step}, throughput={"seconds": os.getpid()})
