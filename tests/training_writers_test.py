"""What a run has written is on disk, valid, and never overwritten."""

import json
import math
import struct
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from manualpar.training.writers import RunWriter, check_workdir, create_numbered_folder


def read_events(workdir: Path) -> list[tuple[int, str, float]]:
    """The scalars in a folder's event file: records of length, checksum, data, checksum."""
    (path,) = workdir.glob("events.out.tfevents.*")
    data, scalars = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + length :]
    return scalars


def read_metrics(workdir: Path) -> list[dict]:
    """The records of a folder, by a reader that takes no JSON but JSON."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path):
    with RunWriter(tmp_path / "new" / "run", config={"seed": 1, "a": {"b": None}}) as writer:
        workdir = writer.workdir
        assert json.loads((workdir / "config.json").read_text()) == {"seed": 1, "a": {"b": None}}
        writer.write(3, "train", {"loss": 0.5, "accuracy": 0.25})
        assert read_metrics(workdir) == [
            {"step": 3, "split": "train", "loss": 0.5, "accuracy": 0.25}
        ]
        assert read_events(workdir) == [(3, "train/loss", 0.5), (3, "train/accuracy", 0.25)]
        writer.write(4, "eval", {"loss": 0.125})
        assert read_metrics(workdir)[1:] == [{"step": 4, "split": "eval", "loss": 0.125}]
        assert read_events(workdir)[2:] == [(4, "eval/loss", 0.125)]


def test_what_is_not_finite_is_null_in_json_and_itself_in_the_events(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert read_metrics(tmp_path) == [
        {"step": 1, "split": "train", "a": None, "b": None, "c": None}
    ]
    values = [value for _, _, value in read_events(tmp_path)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf]


def test_a_folder_with_a_run_in_it_is_refused(tmp_path):
    check_workdir(tmp_path)
    check_workdir(tmp_path / "new")
    (tmp_path / "notes.txt").write_text("mine")
    check_workdir(tmp_path)
    with pytest.raises(ValueError, match=r"notes.txt is a file, expected a folder"):
        check_workdir(tmp_path / "notes.txt")
    with RunWriter(tmp_path / "run", config={}):
        pass
    with pytest.raises(ValueError, match=r"run holds an earlier run \(config.json\), which is not"):
        check_workdir(tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds an earlier run \(metrics.jsonl\)"):
        check_workdir(tmp_path / "run")


def test_numbered_folders_are_new_and_in_order(tmp_path):
    parent = tmp_path / "runs" / "fsdp"
    assert create_numbered_folder(parent) == parent / "001"
    (parent / "002").write_text("in the way")
    folder = create_numbered_folder(parent)
    assert folder == parent / "003"
    assert folder.is_dir()
