"""What a run goes on from is what its checkpoint says, whatever else lies in the folder."""

import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import types

import pytest

from manualpar.errors import UsageError
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints import CheckpointError, Restored
from manualpar.training.checkpoints.retention import list_steps
from manualpar.training.config import load_config
from manualpar.training.monitoring.run_record import read_run
from manualpar.training.workdir import (
    LOCK_FILE,
    check_continues,
    check_folder,
    lock_workdir,
    restore,
)
from tests.paths import ROOT
from tests.runs.small_runs import (
    complete_steps,
    resumed_from,
    start,
    start_launcher,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.system.cluster.processes import HANG_SECONDS
from tests.training.monitoring.written import read_metrics

CONFIG = ROOT / "configs" / "fsdp.py"


def config_with(**changes):
    config = load_config(CONFIG)
    with config.unlocked():
        for name, value in changes.items():
            config.update_from_flattened_dict({name.replace("__", "."): value})
    return config


def put_config(workdir, config):
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))


def put_checkpoint(workdir, config, step=20):
    """As much of a checkpoint as is looked at before there are devices."""
    folder = workdir / "checkpoints" / str(step) / "extra"
    folder.mkdir(parents=True)
    extra = {"position": 640} | ({} if config is None else {"config": config.to_dict()})
    (folder / "metadata").write_text(json.dumps(extra).replace("640", "NaN"))


def test_the_checkpoint_has_the_config_where_the_file_is_gone(tmp_path):
    put_checkpoint(tmp_path, config_with())
    assert check_folder(config_with(), tmp_path) == []
    assert check_folder(config_with(training__num_steps=7), tmp_path) == [
        "changed since the run began: training.num_steps: 1000 -> 7"
    ]
    with pytest.raises(ValueError, match=r"holds another run: the config ch[^$]*  seed: 42 -> 9$"):
        check_folder(config_with(seed=9, model__dropout_rate=0.5), tmp_path)


def test_the_newest_checkpoint_counts(tmp_path):
    put_checkpoint(tmp_path, config_with(seed=1), step=9)
    put_checkpoint(tmp_path, config_with(seed=2), step=10)
    assert check_continues(config_with(seed=2), tmp_path) == []


def test_where_the_file_is_of_another_run_the_checkpoint_counts(tmp_path):
    put_checkpoint(tmp_path, config_with())
    put_config(tmp_path, config_with(seed=9))
    note = "config.json there is from another run than the newest checkpoint"
    assert check_continues(config_with(), tmp_path) == [f"{note}; the checkpoint's config is used"]
    counts = rf"  seed: 42 -> 9\n{note}; the checkpoint's config is compared\."
    with pytest.raises(ValueError, match=counts):
        check_continues(config_with(seed=9), tmp_path)


def test_a_file_that_a_resume_has_changed_is_of_the_same_run(tmp_path):
    put_checkpoint(tmp_path, config_with())
    put_config(tmp_path, config_with(training__num_steps=7))
    assert check_continues(config_with(), tmp_path) == []


@pytest.mark.parametrize("damage", ["old", "cut", "deep", "a link", "a list"])
def test_a_checkpoint_without_a_config_leaves_it_to_the_file(tmp_path, damage):
    put_checkpoint(tmp_path, None if damage == "old" else config_with(seed=1))
    folder = tmp_path / "checkpoints" / "20"
    path = folder / "extra" / "metadata"
    if damage == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif damage != "old":
        texts = {"cut": path.read_text()[:50], "deep": "[" * 100_000, "a list": "[1]"}
        path.write_text(texts[damage])
    assert check_continues(config_with(), tmp_path) == []
    put_config(tmp_path, config_with())
    with pytest.raises(ValueError, match="seed: 42 -> 9"):
        check_continues(config_with(seed=9), tmp_path)


def test_something_in_the_way_of_a_checkpoint_is_said_before_the_run_begins(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "20.unfinished").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"/20\.unfinished is a link, but a save has to create"):
        check_folder(config_with(checkpoint__every_steps=10), tmp_path)


EXTRA = {
    "position": 640,
    "data": "abc",
    "recorder": {"totals": {"train": {"loss": [1.0, 2]}}, "latest": {}, "skipped": 0},
    "files": {"metrics.jsonl": 3, "throughput.jsonl": 0},
}


def restored_with(tmp_path, extra, **changes):
    """What `restore` makes of a checkpoint with such an `extra`."""
    checkpoints = types.SimpleNamespace(
        restore=lambda *_, **__: Restored(20, state=None, extra=extra)
    )
    dataset = types.SimpleNamespace(fingerprint="abc", train=None)
    experiment = types.SimpleNamespace(
        program=None, config=config_with(**changes), task=types.SimpleNamespace(dataset=dataset)
    )
    return restore(checkpoints, experiment, tmp_path, report=print)


def test_a_whole_checkpoint_is_compared_again(tmp_path):
    extra = EXTRA | {"config": json.loads(json.dumps(config_with().to_dict()))}
    assert restored_with(tmp_path, extra).step == 20
    assert restored_with(tmp_path, EXTRA, seed=9).step == 20, "an old one says nothing of it"
    assert dataclasses.is_dataclass(restored_with(tmp_path, extra, training__num_steps=7))
    with pytest.raises(UsageError, match=r"holds another run[^$]*seed: 42 -> 9"):
        restored_with(tmp_path, extra, seed=9)
    with pytest.raises(CheckpointError, match="was saved with other data"):
        restored_with(tmp_path, extra | {"data": "def"})


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "abc"},
        {"position": -1},
        {"position": True},
        {"position": 10**40},
        {"position": None},
        {"files": {}},
        {"files": []},
        {"files": {"metrics.jsonl": 3.5, "throughput.jsonl": 0}},
        {"files": {"metrics.jsonl": 10**40, "throughput.jsonl": 0}},
        {"recorder": None},
        {"recorder": {"totals": {}, "latest": {}}},
        {"recorder": {"totals": {"train": {"loss": [1]}}, "latest": {}, "skipped": 0}},
        {"recorder": {"totals": {}, "latest": {"eval": {"loss": "x"}}, "skipped": 0}},
        {"recorder": {"totals": [], "latest": {}, "skipped": 0}},
        {"data": 3},
        {"config": [1]},
        {"config": {"a": eval("[" * 90 + "]" * 90)}},
    ],
)
def test_what_no_run_saves_is_refused(tmp_path, changes):
    with pytest.raises(CheckpointError, match="of step 20 does not hold the JSON that a run saves"):
        restored_with(tmp_path, EXTRA | changes)
    missing = {name: value for name, value in EXTRA.items() if name not in changes}
    if len(missing) < len(EXTRA):
        with pytest.raises(CheckpointError, match="does not hold the JSON that a run saves"):
            restored_with(tmp_path, missing)


# -------------------------------------------------------------------------------------------------
# One run at a time in a workdir, and nobody is kept out by the dead.


def no_report(line):
    raise AssertionError(f"nothing to report, but: {line}")


def test_the_second_is_refused_and_told_who_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("manualpar.system.storage.drafts.DYING_SECONDS", 0.1)
    workdir = tmp_path / "new" / "run"
    for _ in range(2):  # The file that the first leaves is nobody's.
        with lock_workdir(workdir, report=no_report):
            owner = rf"process {os.getpid()} on {socket.gethostname()}, since 20\S+; wait until"
            with (
                pytest.raises(UsageError, match=rf"new/run is in use by another run: {owner}"),
                lock_workdir(workdir, report=no_report),
            ):
                pass
            assert read_run(workdir).left_out == []
            assert list_steps(workdir) == []
        assert (workdir / LOCK_FILE).read_bytes() == b""
    with lock_workdir(workdir, report=no_report):
        for text in (b"", b"{}", b"[" * 4000, b"\xff"):
            (workdir / LOCK_FILE).write_bytes(text)
            with (
                pytest.raises(UsageError, match=r"is in use by another run; wait until it ends"),
                lock_workdir(workdir, report=no_report),
            ):
                pass


def test_a_lock_whose_file_was_deleted_is_taken_again_or_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("manualpar.system.storage.drafts.DYING_SECONDS", 0.1)
    in_use = "is in use by another run"
    with lock_workdir(tmp_path, report=no_report) as check:
        check()
        (tmp_path / LOCK_FILE).unlink()
        check()
        with pytest.raises(UsageError, match=in_use), lock_workdir(tmp_path, report=no_report):
            pass
        (tmp_path / LOCK_FILE).unlink()
        lost = rf"{LOCK_FILE} was deleted while this run had its lock: .* {in_use}: process"
        with lock_workdir(tmp_path, report=no_report):
            for _ in range(2):
                with pytest.raises(WriteError, match=lost):
                    check()
            owner = (tmp_path / LOCK_FILE).read_bytes()
        assert owner, "who has the lock was wiped out"


# Holds the lock, as do, if it is inherited, a copy of the process and a program that it starts.
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from manualpar.training.workdir import lock_workdir
with lock_workdir(Path(sys.argv[1]), report=print):
    children = [subprocess.Popen(["sleep", "600"], close_fds=False).pid, os.fork()]
    if not children[1]:
        time.sleep(600)
    print(*children, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_dead_and_their_orphans_hold_nothing(tmp_path, monkeypatch):
    patience = "manualpar.system.storage.drafts.DYING_SECONDS"
    monkeypatch.setattr(patience, 0.1)
    arguments = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        children = [int(pid) for pid in holder.stdout.readline().split()]
        try:
            with (
                pytest.raises(UsageError, match=f"process {holder.pid} on "),
                lock_workdir(tmp_path, report=no_report),
            ):
                pass
            monkeypatch.setattr(patience, HANG_SECONDS / 3)  # On a busy machine copies let go late.
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            with lock_workdir(tmp_path, report=no_report):
                assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
            for pid in children:
                os.kill(pid, 0)  # They are still there.
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    said = []
    with lock_workdir(tmp_path, report=said.append):
        (line,) = said
    assert f"{tmp_path} is not locked, because its file system has no flock (" in line
    assert line.endswith("make sure that no other run writes there")


def test_what_is_no_lock_file_is_refused(tmp_path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / LOCK_FILE).symlink_to("precious")
    with (
        pytest.raises(WriteError, match=r"\.lock: is a link"),
        lock_workdir(tmp_path, report=print),
    ):
        pass
    assert (tmp_path / "precious").read_text() == "keep"
    (tmp_path / LOCK_FILE).unlink()
    os.mkfifo(tmp_path / LOCK_FILE)
    with (
        pytest.raises(WriteError, match=r"\.lock: is a FIFO"),
        lock_workdir(tmp_path, report=print),
    ):
        pass


@pytest.mark.slow
@pytest.mark.long
def test_two_runs_in_one_workdir(tmp_path, processes):
    workdir = tmp_path / "run"
    first = start(processes, workdir, slow=20, seconds=2)
    wait_for_step(first, 3)
    second = start(processes, workdir)
    assert second.wait() == 2
    assert (
        f"--workdir={workdir} is in use by another run: process {first.popen.pid} on" in second.err
    )
    assert second.err.count("\n") == 1
    wait_for_checkpoint(workdir, 20)
    first.popen.kill()
    first.wait()
    third = start(processes, workdir)
    assert third.wait() == 0, third.err
    assert resumed_from(third.out) >= 20
    steps = [line["step"] for line in read_metrics(workdir) if line["split"] == "train"]
    assert sorted(set(steps)) == steps
    assert complete_steps(workdir)[-1] == 40


@pytest.mark.slow
def test_the_processes_of_a_run_do_not_keep_each_other_out(tmp_path, processes):
    workdir = tmp_path / "run"
    launcher = start_launcher(processes, workdir, slow=5, seconds=5)
    wait_for_step(launcher, 3)
    second = start_launcher(processes, workdir)
    assert second.wait() == 2
    assert "is in use by another run: process " in second.err + second.out
    launcher.popen.kill()
    launcher.wait()
