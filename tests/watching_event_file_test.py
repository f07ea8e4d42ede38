"""Event files are read in order, are what TensorBoard reads, and a full disk is said so."""

import resource

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import RecordWriter

from manualpar.watching.durable_files import WriteError
from manualpar.watching.event_file import EventFile


def test_files_of_one_second_are_read_in_the_order_in_which_they_were_made(tmp_path):
    names = []
    for _ in range(12):
        EventFile(tmp_path).close()
        (new,) = {path.name for path in tmp_path.iterdir()} - set(names)
        names.append(new)
    assert sorted(names) == names


def test_records_are_those_that_tensorboardx_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1234.5)
    events = EventFile(tmp_path)
    events.add_scalars(3, "train", {"loss": 0.5})
    events.close()
    (path,) = tmp_path.iterdir()
    expected = RecordWriter(str(tmp_path / "expected"))
    version = event_pb2.Event(wall_time=1234.5, file_version="brain.Event:2")
    scalar = event_pb2.Event(wall_time=1234.5, step=3)
    scalar.summary.value.add(tag="train/loss", simple_value=0.5)
    for event in (version, scalar):
        expected.write(event.SerializeToString())
    expected.close()
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_full_disk_is_a_sentence_and_the_file_can_be_closed(tmp_path):
    events = EventFile(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(WriteError, match=r"/events.out.tfevents.*: File too large; name anoth"):
            events.add_scalars(1, "train", {"loss": 1.0})
        events.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
