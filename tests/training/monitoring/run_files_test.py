"""What a run has written is on disk, valid, and never overwritten."""

import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from manualpar.system.storage.durable_files import WriteError
from manualpar.training.monitoring.run_files import (
    RunWriter,
    check_workdir,
    create_numbered_folder,
)
from tests.training.monitoring.written import _event_records, read_events, read_metrics, write_steps


def _shown_by_tensorboard(workdir: Path) -> list[int]:
    """The steps that TensorBoard shows: it drops what a restart says is written again."""
    shown: list[event_pb2.Event] = []
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        for event in _event_records(path):
            if event.session_log.status == event_pb2.SessionLog.START:
                shown = [earlier for earlier in shown if earlier.step < event.step]
            shown += [event] if event.summary.value else []
    return [event.step for event in shown]


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


def test_event_files_of_one_second_are_read_in_the_order_in_which_they_were_made(tmp_path):
    names = []
    for _ in range(12):
        with RunWriter(tmp_path, config={}):
            pass
        (new,) = {path.name for path in tmp_path.glob("events.*")} - set(names)
        names.append(new)
    assert sorted(names) == names


def test_an_event_file_that_takes_no_more_is_a_sentence_and_ends_the_run(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunWriter(tmp_path, config={}) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
        try:
            with pytest.raises(WriteError, match=r"/events\.out\S+: File too large; name another"):
                writer.write(1, "train", {"loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


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


def test_what_depends_on_the_clock_has_a_file_of_its_own(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 0.5})
        writer.write(2, "train", {"loss": 0.25}, throughput={"seconds": 2.0, "mfu": math.nan})
    assert read_metrics(tmp_path)[1:] == [{"step": 2, "split": "train", "loss": 0.25}]
    assert read_metrics(tmp_path, "throughput.jsonl") == [
        {"step": 2, "split": "train", "seconds": 2.0, "mfu": None}
    ]
    assert [tag for _, tag, _ in read_events(tmp_path)][1:] == [
        "train/loss",
        "train/seconds",
        "train/mfu",
    ]


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_leaves_the_lines_of_one_that_was_not(tmp_path):
    with RunWriter(tmp_path / "whole", config={}) as writer:
        write_steps(writer, range(1, 9))
    interrupted = tmp_path / "interrupted"
    program = f"""
import json, os, signal, sys
from pathlib import Path
from manualpar.training.monitoring.run_files import RunWriter
from tests.training.monitoring.written import write_steps
writer = RunWriter(Path({str(interrupted)!r}), config={{}})
write_steps(writer, range(1, 5))
print(json.dumps(writer.place()), flush=True)
write_steps(writer, range(5, 7))
with open({str(interrupted / "metrics.jsonl")!r}, "ab", buffering=0) as file:
    file.write(b'{{"step": 7, "spl')
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    place = json.loads(killed.stdout)
    with RunWriter(interrupted, config={}, place=place, step=4) as writer:
        write_steps(writer, range(5, 9))
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (interrupted / "metrics.jsonl").read_bytes() == whole
    steps = [record["step"] for record in read_metrics(interrupted, "throughput.jsonl")]
    assert steps == list(range(1, 9))
    assert _shown_by_tensorboard(interrupted) == list(range(1, 9))
    (discarded,) = read_metrics(interrupted, "discarded.jsonl")
    assert discarded["resumed_after_step"] == 4
    assert discarded["metrics.jsonl"][-1] == '{"step": 7, "spl'
    assert [json.loads(line)["step"] for line in discarded["metrics.jsonl"][:-1]] == [5, 6]
    assert [json.loads(line)["step"] for line in discarded["throughput.jsonl"]] == [5, 6]


def test_tensorboard_is_told_to_drop_what_a_resumed_run_computes_again(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        write_steps(writer, range(1, 4))
        place = writer.place()
    with RunWriter(tmp_path, config={}, place=place, step=3) as writer:
        write_steps(writer, range(4, 5))
    first, second = sorted(tmp_path.glob("events.out.tfevents.*"))
    assert len(_event_records(first)) == 1 + 3
    assert _shown_by_tensorboard(tmp_path) == [1, 2, 3, 4]
    version, start, *others = _event_records(second)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == event_pb2.SessionLog.START
    assert start.step == 4, "TensorBoard drops this step and those after it"
    assert [event.step for event in others] == [4]


def test_every_resume_is_noted_also_where_nothing_was_lost(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        place = writer.place()
    assert place.pop("sha256").keys() == place.keys()  # As in checkpoints of before hashes.
    assert place == {"metrics.jsonl": 0, "throughput.jsonl": 0}
    for step in (0, 7):
        with RunWriter(tmp_path, config={}, place=place, step=step) as writer:
            pass
    notes = read_metrics(tmp_path, "discarded.jsonl")
    assert [note["resumed_after_step"] for note in notes] == [0, 7]
    assert all(note["metrics.jsonl"] == note["throughput.jsonl"] == [] for note in notes)


def test_the_configs_before_are_kept(tmp_path):
    with RunWriter(tmp_path, config={"a": (1, 2), "b": 0}) as writer:
        place = writer.place()

    def resume(config: dict) -> dict[str, dict]:
        with RunWriter(tmp_path, config=config, place=place, step=0):
            pass
        paths = sorted(tmp_path.glob("config*.json"))
        return {path.name: json.loads(path.read_text()) for path in paths}

    first, second = {"a": [1, 2], "b": 0}, {"a": [1, 2], "b": 1}
    assert resume({"b": 0, "a": (1, 2)}) == {"config.json": first}
    assert resume(second) == {"config.json": second, "config.1.json": first}
    assert resume(first) == {
        "config.json": first,
        "config.1.json": first,
        "config.2.json": second,
    }
    # As after a kill between the copy and the new config.
    (tmp_path / "config.3.json").write_text((tmp_path / "config.json").read_text())
    assert sorted(resume(second)) == [
        "config.1.json",
        "config.2.json",
        "config.3.json",
        "config.json",
    ]


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (
            lambda path: path.write_text("{}\n"),
            r"metrics.jsonl .* but the file has 3 bytes; put the file ba",
        ),
        (lambda path: path.unlink(), r"metrics.jsonl .* but the file is missing; put"),
        (
            lambda path: path.write_text("x" * 1000),
            r"the end of a line after 52 bytes, but that is inside a line",
        ),
        (
            lambda path: path.write_text(path.read_text().replace("0.01", "0.02")),
            r"a line after 52 bytes, but bytes before that have changed since; put the file back",
        ),
    ],
)
def test_files_that_somebody_edited_are_refused_and_left_alone(tmp_path, edit, found):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 0.0123456789})
        place = writer.place()
        writer.write(2, "train", {})
    assert place["metrics.jsonl"] == 52
    edit(tmp_path / "metrics.jsonl")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=found):
        RunWriter(tmp_path, config={"new": 1}, place=place, step=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_process_leaves_nothing(tmp_path):
    with RunWriter(tmp_path / "run", config={}, process=1) as writer:
        writer.write(1, "train", {"loss": 1.0}, throughput={"seconds": 1.0})
        assert writer.place() == {}
        writer.go_back({}, step=2)
        assert writer.workdir == tmp_path / "run"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_that_names_the_file(tmp_path, monkeypatch):
    sentence = (
        r"^the results cannot be written: .*/throughput.jsonl: No space left on device; make room "
        r"there, or name another folder with --workdir\.$"
    )
    with RunWriter(tmp_path, config={}) as writer:
        lines = writer._files["throughput.jsonl"]
        with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
            file = lines._file
            on_full_disk = types.SimpleNamespace(
                fileno=file.fileno, write=full.write, truncate=file.truncate
            )
            patch.setattr(lines, "_file", on_full_disk)
            with pytest.raises(WriteError, match=sentence):
                writer.write(1, "train", {"loss": 1.0}, throughput={"seconds": 1.0})
        writer.write(2, "train", {"loss": 1.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "throughput.jsonl", "events.out.*", ""])
def test_files_that_are_gone_are_missed_before_anything_is_written_to_them(tmp_path, name):
    """A deleted file that is open takes every line, and they are gone with the process."""
    folder = tmp_path / "run"
    numbers = {"loss": 1.0}, {"seconds": 1.0}
    with RunWriter(folder, config={}) as writer:
        writer.write(1, "train", numbers[0], throughput=numbers[1])
        place = writer.place()
        if name:
            (path,) = folder.glob(name)
            path.unlink()
        else:
            shutil.rmtree(folder)
        what = (
            rf"{path} was deleted while this run was writing to it; start the same command again"
            if name
            else rf"{folder}/metrics.jsonl was deleted with its folder .*; name another folder"
        )
        with pytest.raises(WriteError, match=f"^the results cannot be written: {what}"):
            writer.write(2, "train", numbers[0], throughput=numbers[1])
    if name:  # Whatever was written is there, so that the run can go on.
        with RunWriter(folder, config={}, place=place, step=1) as writer:
            writer.write(2, "train", numbers[0], throughput=numbers[1])
        assert [record["step"] for record in read_metrics(folder)] == [1, 2]


def test_a_file_that_an_editor_has_replaced_is_missed_and_left_as_it_is(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(1, "train", {"loss": 1.0})
        (tmp_path / "new").write_text("theirs\n")
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
        with pytest.raises(WriteError, match=r"metrics\.jsonl was replaced by another file while"):
            writer.place()
    assert (tmp_path / "metrics.jsonl").read_text() == "theirs\n"


def test_a_run_that_goes_back_leaves_the_lines_of_one_that_did_not(tmp_path):
    with RunWriter(tmp_path / "straight", config={}) as writer:
        write_steps(writer, range(1, 6))
    with RunWriter(tmp_path / "back", config={}) as writer:
        write_steps(writer, range(1, 3))
        place = writer.place()
        write_steps(writer, range(3, 5))
        writer.go_back(place, step=2)
        write_steps(writer, range(3, 6))
        assert writer.place().keys() == place.keys()
    straight = (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "back" / "metrics.jsonl").read_bytes() == straight
    (discarded,) = read_metrics(tmp_path / "back", "discarded.jsonl")
    assert discarded["reason"] == "rolled back"
    assert [json.loads(line)["step"] for line in discarded["metrics.jsonl"]] == [3, 4]
    (path,) = (tmp_path / "back").glob("events.out.tfevents.*")
    starts = [event.step for event in _event_records(path) if event.HasField("session_log")]
    assert starts == [3]
    assert _shown_by_tensorboard(tmp_path / "back") == [1, 2, 3, 4, 5]


def test_a_run_does_not_go_back_to_lines_that_were_changed(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        write_steps(writer, range(1, 3))
        place = writer.place()
        write_steps(writer, range(3, 5))
        path = tmp_path / "metrics.jsonl"
        with path.open("r+b") as file:
            file.write(path.read_bytes().replace(b'"loss": 0.5', b'"loss": 0.7'))
        before = path.read_bytes()
        with pytest.raises(WriteError, match="a line after 86 bytes, but bytes before that have"):
            writer.go_back(place, step=2)
        assert path.read_bytes() == before


def test_a_run_that_was_killed_while_it_began_begins_again(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        writer.write(0, "eval", {"loss": 1.0})
    (tmp_path / "throughput.jsonl").unlink()
    nothing = {"metrics.jsonl": 0, "throughput.jsonl": 0}
    with RunWriter(tmp_path, config={}, place=nothing, step=0) as writer:
        writer.write(0, "eval", {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 0, "split": "eval", "loss": 2.0}]
    _, path = sorted(tmp_path.glob("events.out.tfevents.*"))
    assert _event_records(path)[1].step == 0, "TensorBoard keeps the old evaluation"


@pytest.mark.parametrize(
    ("edit", "left", "found"),
    [
        (lambda path: os.truncate(path, 50), 2, "a line after 92 bytes, but the file has 50 bytes"),
        (lambda path: path.unlink(), 0, "a line after 92 bytes, but the file is missing"),
        (lambda path: path.write_bytes(b""), 0, "a line after 92 bytes, but the file has 0 bytes"),
        (lambda path: path.write_bytes(b"x" * 200), 1, "but that is inside a line"),
        (lambda path: path.write_bytes(b"\xff" * 91 + b"\n"), 1, "before that have changed since"),
    ],
)
def test_damage_to_the_throughput_is_said_and_does_not_stop_a_resume(tmp_path, edit, left, found):
    with RunWriter(tmp_path, config={}) as writer:
        for step in (1, 2):
            writer.write(step, "train", {"loss": 0.5}, throughput={"seconds": 1.0})
        place = writer.place()
        writer.write(3, "train", {"loss": 0.5})
    assert place["throughput.jsonl"] == 92
    edit(tmp_path / "throughput.jsonl")
    said = []
    with RunWriter(tmp_path, config={}, place=place, step=2, report=said.append) as writer:
        writer.write(3, "train", {"loss": 0.5}, throughput={"seconds": 2.0})
    assert "".join(said).endswith(found)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    lines = (tmp_path / "throughput.jsonl").read_bytes().split(b"\n")
    assert len(lines) == left + 2
    assert json.loads(lines[-2]) == {"step": 3, "split": "train", "seconds": 2.0}


def test_what_was_discarded_before_stays_as_it_is_damaged_or_not(tmp_path):
    with RunWriter(tmp_path, config={}) as writer:
        place = writer.place()
    damaged = b"\xff\xfe{\n" + b'{"resumed_after_st'
    (tmp_path / "discarded.jsonl").write_bytes(damaged)
    with RunWriter(tmp_path, config={}, place=place, step=0):
        pass
    data = (tmp_path / "discarded.jsonl").read_bytes()
    assert data.startswith(damaged + b"\n")
    assert json.loads(data.split(b"\n")[2])["reason"] == "resumed"


def _fifo(path: Path, other: Path) -> None:
    del other
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("put", "found"),
    [
        (_fifo, "is a FIFO, expected a file; name another"),
        (lambda path, other: path.symlink_to(other), "is a link, expected a file; name another"),
        (lambda path, other: path.hardlink_to(other), r"has \d names \(hard links\), expected one"),
    ],
    ids=["fifo", "link", "hard link"],
)
def test_a_fifo_is_not_waited_for_and_a_link_not_followed(tmp_path, monkeypatch, put, found):
    (tmp_path / "precious").write_text("keep")
    run = tmp_path / "run"
    with RunWriter(run, config={"a": 1}) as writer:
        place = writer.place()
    (run / ".config.json.draft").symlink_to(tmp_path / "precious")
    with RunWriter(run, config={"a": 2}, place=place, step=0):
        pass
    assert json.loads((run / "config.json").read_text()) == {"a": 2}
    assert (tmp_path / "precious").read_text() == "keep"
    names = ["metrics.jsonl", "throughput.jsonl", "discarded.jsonl"]
    if "names" not in found:  # The config is read, and replaced by a new file.
        names.append("config.json")
    for name in names:
        content = (run / name).read_bytes()
        (run / name).unlink()
        put(run / name, tmp_path / "precious")
        with pytest.raises(WriteError, match=f"{name}: {found}"):
            RunWriter(run, config={}, place=place, step=0)
        (run / name).unlink()
        (run / name).write_bytes(content)
    events = run / f"events.out.tfevents.1700000000.{socket.gethostname()}.0003"
    put(events, tmp_path / "precious")
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1700000000.0)
        with pytest.raises(WriteError, match=f"{events.name}: {found}"):
            RunWriter(run, config={}, place=place, step=0)
    put(tmp_path / "metrics.jsonl", tmp_path / "precious")
    with pytest.raises(WriteError, match=rf"metrics\.jsonl: {found}"):
        RunWriter(tmp_path, config={})
    assert (tmp_path / "precious").read_text() == "keep"
