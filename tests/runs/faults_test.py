"""What a run does about other models and data, damaged files, full disks, steps not finite."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from manualpar.data import load_dataset, train_batch
from manualpar.training import task
from tests.runs.small_runs import (
    arguments,
    assert_same_metrics,
    assert_same_run,
    at_step,
    complete_steps,
    content,
    environment_of,
    resumed_from,
    run_here,
)
from tests.training.monitoring.written import read_metrics


@pytest.fixture
def workdir(tmp_path, undisturbed):
    """A copy of it, to be damaged."""
    shutil.copytree(undisturbed, tmp_path / "run")
    return tmp_path / "run"


def error_of(capsys):
    """What a run printed as its error: one sentence, and no traceback."""
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


def assert_first_of_all(error):
    """Where nothing can be written, other files fail as well, each in a line."""
    assert all(line.startswith("also: ") for line in error.splitlines()[1:])


@pytest.mark.slow
def test_another_model_or_other_data_is_refused(workdir, capsys):
    before = content(workdir)
    others = ("--config.model.hidden_size=32", "--config.data.source=synthetic")
    assert run_here(workdir, *others) == 2
    error = error_of(capsys)
    assert f"--workdir={workdir} holds another run: " in error
    assert "  model.hidden_size: 16 -> 32\n" in error
    assert "  data.source: 'digits' -> 'synthetic'\n" in error
    assert content(workdir) == before


def array_file(workdir, step):
    """The file of a checkpoint that holds most of the arrays."""
    files = [path for path in (workdir / "checkpoints" / str(step)).rglob("d/*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut_off, os.remove])
def test_a_damaged_checkpoint_stops_a_run_or_the_one_before_is_used(
    damage, workdir, undisturbed, capsys
):
    file = array_file(workdir, 40)
    damage(file)
    before = content(workdir)
    assert run_here(workdir) == 6
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert f"checkpoint {workdir / 'checkpoints' / '40'} is damaged: " in error
    assert file.name in error
    assert "set on_corruption='previous' (in a config config.checkpoint" in error
    after = content(workdir)
    assert {path: after[path] for path in before if "report" not in path.name} == {
        path: data for path, data in before.items() if "report" not in path.name
    }
    if damage is not flip:
        return  # What follows costs a compilation and is the same.
    assert run_here(workdir, "--config.checkpoint.on_corruption=previous") == 0
    output = capsys.readouterr().out
    assert f"checkpoint {workdir / 'checkpoints' / '40'} is damaged: " in output
    assert resumed_from(output) == 36
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_when_all_are_damaged_there_is_nothing_to_go_back_to(workdir, capsys):
    for step in complete_steps(workdir):
        flip(array_file(workdir, step))
    assert run_here(workdir, "--config.checkpoint.on_corruption=previous") == 6
    assert "holds no checkpoint that can be used: [36, 40] are all damaged" in error_of(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_off, os.remove])
def test_metrics_that_are_damaged_are_not_gone_on_with(damage, workdir, capsys):
    damage(workdir / "metrics.jsonl")
    before = content(workdir)
    assert run_here(workdir) == 6
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert f"{workdir / 'metrics.jsonl'} cannot be continued: the checkpoint found" in error
    assert {path: before[path] for path in content(workdir) if path in before} == before


@pytest.mark.slow
def test_lines_that_no_run_writes_are_left_out_and_said(workdir, undisturbed, capsys):
    shutil.rmtree(workdir / "checkpoints" / "40")
    with (workdir / "throughput.jsonl").open("r+b") as file:
        file.write(b"xxxxxxxxx")
    (workdir / "discarded.jsonl").write_bytes(b"\xff\xfe\n" + b"[" * 100_000)
    (workdir / "config.json").unlink()
    before = content(workdir)
    assert run_here(workdir, "--config.seed=9", "--config.model.dropout_rate=0.5") == 2
    error = error_of(capsys)
    assert f"--workdir={workdir} holds another run: " in error
    assert error.endswith("  model.dropout_rate: 0.1 -> 0.5\n  seed: 42 -> 9\n")
    assert content(workdir) == before
    assert run_here(workdir) == 0
    output = capsys.readouterr().out
    assert resumed_from(output) == 36
    lines = [line for line in output.splitlines() if line.startswith("left out ")]
    assert [re.sub(r" of .*/(\w+\.jsonl)", r" of \1", line) for line in lines] == [
        "left out 1 of throughput.jsonl, which no run writes: 1 (line 1 is not JSON (Expecting "
        "value: line 1 column 1 (char 0)))",
        "left out 2 of discarded.jsonl, which no run writes: 1, 2 (line 1 is not UTF-8 (byte 0))",
    ]
    assert_same_run(workdir, undisturbed)


def test_links_are_not_followed(workdir, undisturbed, capsys, tmp_path):
    newest = workdir / "checkpoints" / "40"
    newest.rename(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    assert run_here(workdir) == 6
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert f"checkpoint {newest} is damaged: it is a link, expected a folder" in error
    newest.with_name("40.unfinished").symlink_to(tmp_path / "elsewhere")
    assert run_here(workdir) == 2
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert "40.unfinished is a link, but a save has to create a folder of this name" in error
    assert content(tmp_path / "elsewhere") == before


@pytest.mark.slow
def test_text_that_has_changed_is_refused(tmp_path, capsys, devices8):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(5):
        (text / f"{number}.txt").write_text(f"{number} and no more\n" * 30)
    tiny = (
        f"--config.data.path={text}",
        "--config.data.sequence_length=8",
        "--config.data.batch_size=8",
        "--config.model.mlp_size=8",
        "--config.model.num_heads=1",
        "--config.model.num_kv_heads=1",
        "--config.sample.num_tokens=0",
        "--config.training.num_steps=1",
        "--config.training.eval_every_steps=0",
    )
    assert run_here(tmp_path / "run", *tiny, config="fsdp_lm.py") == 0
    capsys.readouterr()
    (text / "5.txt").write_text("one more\n")
    assert run_here(tmp_path / "run", *tiny, config="fsdp_lm.py") == 6
    error = error_of(capsys)
    assert "the checkpoint of step 1 was saved with other data (fingerprint " in error
    assert "the files of config.data have changed since" in error


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


WIDE = "--config.model.hidden_size=1024"  # Whose checkpoints have about a megabyte.


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_a_sentence(small_disk, capsys):
    workdir = small_disk / "run"
    assert run_here(workdir, WIDE) == 6
    error = error_of(capsys)
    assert_first_of_all(error)
    assert "was not saved: the disk is full: make room there" in error
    assert f"{workdir / 'checkpoints'}" in error
    # With room again, it goes on from what there is, or from the beginning.
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    newest = max(complete_steps(workdir), default=None)
    assert run_here(workdir, WIDE) == 0
    output = capsys.readouterr().out
    assert newest is None or resumed_from(output) == newest
    assert run_here(small_disk / "whole", WIDE) == 0
    assert_same_metrics(workdir, small_disk / "whole")


def test_a_disk_that_is_full_from_the_start(small_disk, capsys):
    (small_disk / "large").write_bytes(bytes(1 << 20)[: 2 * 10**6])
    with contextlib.suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(1 << 20))
    assert run_here(small_disk / "run") == 6
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert "No space left on device; make room there, or name another folder" in error


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [1, 100])
def test_files_that_may_not_grow_end_a_run_with_a_sentence(processes, tmp_path, kilobytes):
    """Of 1 KiB not even the config can be written, of 100 no checkpoint."""
    limited = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "limited"]
    command = [sys.executable, "-m", "experiments.fsdp", *arguments(tmp_path / "run", WIDE)]
    # What the process prints goes to files as well.
    process = processes.start([*limited, *command], **environment_of())
    assert process.wait() == 6
    assert process.err.startswith("error: ")
    assert_first_of_all(process.err)
    reason = "File too large" if kilobytes == 1 else "larger than allowed: raise the limit"
    assert reason in process.err
    assert complete_steps(tmp_path / "run") == []


def test_a_read_only_workdir_is_refused(small_disk, capsys):
    workdir = small_disk / "run"
    workdir.mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert run_here(workdir) == 2
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert f"the results cannot be written: {workdir} may not be written to" in error
    assert run_here(workdir / "new") == 2
    assert f"{workdir} may not be written to; name another folder" in error_of(capsys)


@pytest.fixture
def poison(monkeypatch):
    """Makes one example infinite in the batch of each step that it is called with."""

    def poison(*steps):
        dataset = load_dataset(source="digits", seed=42)
        inputs = dataset.train.inputs.copy()
        for step in steps:
            batch = train_batch(dataset.train, (step - 1) * 32, batch_size=32, seed=42)
            (index, *_) = np.flatnonzero((dataset.train.inputs == batch.inputs[5]).all(axis=1))
            inputs[index] = np.inf
        train = dataclasses.replace(dataset.train, inputs=inputs)
        poisoned = dataclasses.replace(dataset, train=train)
        monkeypatch.setattr(task, "load_dataset", lambda **_: poisoned)

    return poison


def places(workdir):
    return [(record["step"], record["split"]) for record in read_metrics(workdir)]


@pytest.mark.slow
def test_a_step_that_is_not_finite_stops_a_run(tmp_path, poison, undisturbed, capsys):
    poison(10)
    workdir = tmp_path / "run"
    assert run_here(workdir) == 5
    error = error_of(capsys)
    assert error.count("\n") == 1
    assert "the loss or a gradient of step 10 is not finite" in error
    assert "'rollback'" in error
    assert complete_steps(workdir) == [4, 8]
    records = read_metrics(workdir)
    assert records[:-1] == [line for line in read_metrics(undisturbed) if line["step"] < 10]
    assert (records[-1]["step"], records[-1]["loss"]) == (10, None)
    # The same batch comes again.
    assert run_here(workdir) == 5
    assert read_metrics(workdir) == records
    # Another policy gets past it.
    assert run_here(workdir, "--config.training.on_nonfinite=skip") == 0
    assert places(workdir) == places(undisturbed)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, poison, undisturbed):
    poison(10, 11)
    workdir = tmp_path / "run"
    assert run_here(workdir, "--config.training.on_nonfinite=skip") == 0
    assert places(workdir) == places(undisturbed)
    counted = [
        (line["step"], line["skipped_steps"])
        for line in read_metrics(workdir)
        if line["split"] == "train"
    ]
    assert counted == [(step, 0 if step < 10 else 2) for step, _ in counted]


@pytest.mark.slow
def test_a_rollback_goes_past_the_batch(tmp_path, poison, undisturbed, monkeypatch, capsys):
    """The steps after it are those of a run that never saw the batches in between."""
    poison(10)
    rollback = "--config.training.on_nonfinite=rollback"
    workdir = tmp_path / "run"
    assert run_here(workdir, rollback) == 0
    output = capsys.readouterr().out
    assert "step 10 is not finite: back to the checkpoint of step 8, past the 2 batches" in output
    assert places(workdir) == places(undisturbed)
    assert all(None not in record.values() for record in read_metrics(workdir))
    until = [line for line in read_metrics(undisturbed) if line["step"] <= 8]
    assert read_metrics(workdir)[: len(until)] == until

    interrupted = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        at_step(patch, 23, lambda cluster: signal.raise_signal(signal.SIGINT))
        assert run_here(interrupted, rollback) == 130
    assert run_here(interrupted, rollback) == 0
    assert_same_run(interrupted, workdir)


@pytest.mark.slow
def test_a_rollback_after_another_goes_past_both_batches(tmp_path, poison, undisturbed, capsys):
    poison(9, 10, 11)
    workdir = tmp_path / "run"
    assert run_here(workdir, "--config.training.on_nonfinite=rollback") == 0
    said = re.findall(r"step 9 .* step 8, past the (\d) batches", capsys.readouterr().out)
    assert said == ["1", "2", "3"]
    assert places(workdir) == places(undisturbed)


@pytest.mark.slow
def test_rollbacks_far_apart_do_not_add_up(tmp_path, poison, undisturbed, capsys):
    # Each meets the step after a checkpoint, one batch having been left out for each before.
    poison(5, 10, 15, 20)
    workdir = tmp_path / "run"
    more = ("--config.training.on_nonfinite=rollback", "--config.training.num_steps=35")
    assert run_here(workdir, *more) == 0
    said = re.findall(r"back to the checkpoint of step (\d+)", capsys.readouterr().out)
    assert said == ["4", "8", "12", "16"]
    until = [place for place in places(undisturbed) if place[0] < 35]
    assert places(workdir)[: len(until)] == until
