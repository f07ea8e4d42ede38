"""Checkpoints: written in the background, damage named, nothing lost or silently left out."""

import errno
import gc
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import tensorstore

from manualpar.training.checkpoints import CheckpointError, Checkpoints, store
from manualpar.training.checkpoints.folders import open_folder
from manualpar.training.checkpoints.saved_state import OrbaxFiles
from tests.training.checkpoints.worker import shared_program, state_of_step, train


def no_report(line):
    raise AssertionError(f"nothing to report, but: {line}")


@pytest.fixture(scope="module")
def program():
    return shared_program("fsdp")


@pytest.fixture(scope="module")
def state(program):
    return program.init(jax.random.key(0))


@pytest.fixture(scope="module")
def saved(program, state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(program, state_of_step(state, 3), step=3, extra={"position": 1})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def numbers(state):
    """A copy of all that a state holds."""
    plain = state.replace(rng=jax.random.key_data(state.rng))
    return [np.array(x, copy=True) for x in jax.tree.leaves(plain)]


@pytest.mark.slow
def test_donating_the_state_at_once_does_not_change_what_is_written(program, tmp_path):
    expected = []
    state = program.init(jax.random.key(0))
    for step in range(4):
        expected.append(numbers(state))
        state, _ = train(program, state, range(step, step + 1))
    state = program.init(jax.random.key(0))
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for step in range(4):  # Nobody looks at a state before the next step takes it.
            checkpoints.save(program, state, step=step, extra={})
            state, _ = train(program, state, range(step, step + 1))
        for step in (3, 0, 2, 1):
            restored = checkpoints.restore(program, step=step, report=lambda line: None)
            for x, y in zip(numbers(restored.state), expected[step], strict=True):
                np.testing.assert_array_equal(x, y)


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << 4
    path.write_bytes(data)


def all_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_one_flipped_byte_in_any_file_is_noticed(folder, program):
    random = np.random.default_rng(0)
    step = folder / "3"
    with Checkpoints(folder) as checkpoints:
        for path in all_files(step):
            position = int(random.integers(path.stat().st_size))
            flip(path, position)
            with pytest.raises(CheckpointError, match="on_corruption='previous'") as caught:
                checkpoints.restore(program, report=no_report)
            assert f"checkpoint {step} is damaged: {path.relative_to(step)}" in str(caught.value)
            flip(path, position)
        checkpoints.restore(program, report=no_report)


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer"])
def test_missing_and_truncated_files_are_named(damage, folder, program):
    step = folder / "3"
    with Checkpoints(folder) as checkpoints:
        for path in all_files(step):
            data = path.read_bytes()
            path.write_bytes(data + b" " if damage == "longer" else data[: len(data) // 2])
            if damage == "missing":
                path.unlink()
            with pytest.raises(CheckpointError) as caught:
                checkpoints.restore(program, report=no_report)
            assert f"checkpoint {step} is damaged: {path.relative_to(step)} " in str(caught.value)
            path.write_bytes(data)


@pytest.mark.slow
def test_the_one_before_is_used_where_configured(program, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(program, state_of_step(state, step), step=step, extra={})
    flip(tmp_path / "3" / "manifest.json", 40)
    (tmp_path / "2" / "extra" / "metadata").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        reports = []
        restored = checkpoints.restore(program, on_corruption="previous", report=reports.append)
        assert restored.step == int(restored.state.step) == 1
        assert [line for line in reports if "damaged: manifest.json is not as" in line]
        assert [line for line in reports if "damaged: extra/metadata is missing" in line]
        assert "Going on from step 1" in reports[-1]
        # The run goes on: what is saved next is the newest, and nothing was deleted.
        checkpoints.save(program, state_of_step(state, 2), step=2, extra={})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        assert (tmp_path / "3.superseded-1").is_dir()
        assert (tmp_path / "2.superseded-1").is_dir()
        restored = checkpoints.restore(program, report=no_report)
        assert restored.step == int(restored.state.step) == 2
    for step in (1, 2):
        (tmp_path / str(step) / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"\[1, 2\] are all damaged"):
        Checkpoints(tmp_path).restore(program, on_corruption="previous", report=reports.append)


def test_a_checkpoint_under_another_number_is_noticed(folder, program):
    (folder / "3").rename(folder / "4")
    with pytest.raises(CheckpointError, match=r"4 is damaged: manifest\.json is of step 3"):
        Checkpoints(folder).restore(program, report=no_report)


def test_one_that_cannot_be_deleted_is_told_apart(program, state, tmp_path, monkeypatch):
    def rmtree(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr("manualpar.training.checkpoints.retention.shutil.rmtree", rmtree)
            checkpoints.save(program, state, step=2, extra={})
            with pytest.raises(
                CheckpointError,
                match="2 was saved, but older checkpoints could not be deleted: per",
            ):
                checkpoints.wait()
        assert checkpoints.steps() == [2]


def test_there_is_none(tmp_path, program):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == []
    assert checkpoints.latest_step() is None
    with pytest.raises(CheckpointError, match="holds no checkpoint that can be used"):
        checkpoints.restore(program, report=no_report)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 4; there are"):
        checkpoints.restore(program, step=4, report=no_report)
    with pytest.raises(ValueError, match="on_corruption='ignore', expected 'stop' or 'previous'"):
        checkpoints.restore(program, on_corruption="ignore", report=no_report)
    assert not (tmp_path / "none").exists()


def test_runs_in_several_threads_keep_all_their_checkpoints(program, state, tmp_path):
    """A save of one run must not be mistaken for the save of another run."""
    steps, together = [1, 2], threading.Barrier(3)

    def run(number):
        with Checkpoints(tmp_path / str(number), keep=len(steps)) as checkpoints:
            try:
                for step in steps:
                    together.wait()
                    checkpoints.save(program, state, step=step, extra={"of": number})
                    checkpoints.wait()
            except BaseException:
                together.abort()
                raise
            restored = checkpoints.restore(program, report=no_report)
            return checkpoints.steps(), restored.extra

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(run, number) for number in range(3)]
    assert [each.result() for each in runs] == [(steps, {"of": number}) for number in range(3)]


@pytest.mark.slow
def test_retention_and_the_best(program, state, tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: 1.0, 4: 4.0, 5: float("nan"), 6: 2.0, 7: 2.5, 8: 3.0}
    with Checkpoints(tmp_path, keep=2, keep_every_steps=4, best_metric="loss") as checkpoints:
        for step, loss in losses.items():
            metrics = {"loss": loss}
            checkpoints.save(program, state, step=step, extra={}, metrics=metrics)
    assert Checkpoints(tmp_path).steps() == [3, 4, 7, 8]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "7", "8"]


def test_leftovers_of_a_killed_process_go_with_the_next_save(program, state, tmp_path):
    for name in ("4.unfinished", "5.unfinished.orbax-checkpoint-tmp", "1.deleted"):
        (tmp_path / name).mkdir()
    for name in ("notes", "notes.unfinished", "007"):
        (tmp_path / name).mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(program, state, step=4, extra={})
        checkpoints.wait()
        assert checkpoints.steps() == [4]
    assert {p.name for p in tmp_path.iterdir()} == {"4", "007", "notes", "notes.unfinished"}


def test_saves_leave_no_objects_in_memory(program, state, tmp_path, monkeypatch):
    # tensorstore never releases the JSON objects that it gives to Python; docs/limits.md says so.
    monkeypatch.setattr(tensorstore, "experimental_collect_matching_metrics", lambda *_, **__: [])
    counts = []

    def is_counted(x):
        # A cache of etils, of limited size, keeps paths of each save, and pathlib keeps the parts
        # of a path in lists: two or four for each save, by the version of Python.
        is_path = type(x) is list and x and all(type(part) is str for part in x)
        return type(x) in (dict, list, type(state.step)) and not is_path

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(program, state, step=step, extra={"position": step})
            checkpoints.wait()
            if step in (3, 8):
                gc.collect()
                counts.append(sum(map(is_counted, gc.get_objects())))
    assert counts[1] - counts[0] < 5  # Less than one in each save.


def test_a_step_is_written_once_and_never_silently_left_out(program, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state_of_step(state, 4), step=4, extra={"which": 1})
        checkpoints.save(program, state_of_step(state, 4), step=4, extra={"which": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["4"]
    with Checkpoints(tmp_path) as checkpoints:  # Another run, which has not seen that one.
        checkpoints.save(program, state_of_step(state, 4), step=4, extra={"which": 2})
        assert checkpoints.restore(program, report=no_report).extra == {"which": 2}


@pytest.mark.slow
def test_going_on_from_an_earlier_one_sets_the_later_aside(program, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 3, 5):
            checkpoints.save(program, state, step=step, extra={"course": 1})
    with Checkpoints(tmp_path) as checkpoints:
        reports = []
        checkpoints.restore(program, step=1, report=reports.append)
        assert reports == [
            "Going on from step 1; the next save sets the later checkpoints [3, 5] aside."
        ]
        checkpoints.save(program, state, step=4, extra={"course": 2})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4]
        checkpoints.save(program, state, step=5, extra={"course": 2})
        assert checkpoints.restore(program, report=no_report).extra == {"course": 2}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"1", "4", "5", "3.superseded-1", "5.superseded-1"}


def test_what_was_restored_is_not_written_again(folder, program):
    before = sorted(folder.iterdir())
    inode = (folder / "3").stat().st_ino
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(program, report=no_report)
        checkpoints.save(program, restored.state, step=3, extra=restored.extra)
    assert sorted(folder.iterdir()) == before
    assert (folder / "3").stat().st_ino == inode


def test_what_the_caller_changes_later_is_not_written(program, state, tmp_path, monkeypatch):
    extra = {"position": [1]}
    save = OrbaxFiles.save

    def save_later(self, *args, **kwargs):
        extra["position"].append(2)
        save(self, *args, **kwargs)

    monkeypatch.setattr(OrbaxFiles, "save", save_later)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra=extra)
        assert checkpoints.restore(program, report=no_report).extra == {"position": [1]}


@pytest.mark.slow
def test_an_exception_in_the_context_is_the_one_that_is_seen(
    program, state, tmp_path, capfd, monkeypatch
):
    before = set(threading.enumerate())

    def save_and_raise(step):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(program, state, step=step, extra={})
            raise KeyError("in training")

    with pytest.raises(KeyError, match="in training"):
        save_and_raise(1)
    assert Checkpoints(tmp_path).steps() == [1]  # What was being written still arrived.
    fail_to_sync(monkeypatch)
    # Other processes may be anywhere: nothing may wait for them then.
    monkeypatch.setattr("manualpar.training.checkpoints.store.first_failure", ask_others_once())
    with pytest.raises(KeyError, match="in training") as caught:
        save_and_raise(2)
    (note,) = caught.value.__notes__
    assert note.startswith(f"checkpoint {tmp_path / '2'} was not saved: the disk is full")
    assert set(threading.enumerate()) <= before
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_the_first_error_is_seen_although_orbax_fails_as_well(tmp_path, monkeypatch):
    def fail(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def not_saved(self):
        raise CheckpointError("not saved")

    monkeypatch.setattr(OrbaxFiles, "close", fail)
    with pytest.raises(KeyError, match="in training") as caught, Checkpoints(tmp_path):
        raise KeyError("in training")
    reason = "too many files are open: raise the limit (`ulimit -n`)"
    assert caught.value.__notes__ == [f"Orbax was not closed: {reason}"]
    with pytest.raises(OSError, match="Too many open files"), Checkpoints(tmp_path):
        pass
    with pytest.raises(CheckpointError, match="not saved"), Checkpoints(tmp_path):
        not_saved(None)
    monkeypatch.setattr(Checkpoints, "wait", not_saved)
    with pytest.raises(CheckpointError, match="not saved"), Checkpoints(tmp_path):
        pass


def ask_others_once():
    """What stands for asking the other processes: fails from the second time on."""
    asked = []

    def first_failure(failure):
        asked.append(failure)
        assert len(asked) == 1, "only while saving"
        return failure

    return first_failure


def fail_to_sync(monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("manualpar.training.checkpoints.manifest.os.fsync", fsync)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_process_that_sees_another_folder_is_named_before_anything_is_saved(
    process, is_shared, tmp_path, monkeypatch
):
    """Two processes in one: what one of them gathers comes from a list."""
    mine = tmp_path / "mine"
    with Checkpoints(mine) as checkpoints:
        theirs = open_folder(mine if is_shared or process == 0 else tmp_path / "theirs")
        failure = "" if is_shared else "checkpoints cannot be saved: process 1 on hB does not"
        if process:
            mark = theirs.mark()
            monkeypatch.setattr(store, "from_first", lambda value: [mark, "", "hA"])
            monkeypatch.setattr(store, "first_failure", lambda failure: failure)
        else:
            monkeypatch.setattr(store, "from_first", lambda value: value)
            monkeypatch.setattr(store, "first_failure", lambda own: own or failure)
        monkeypatch.setattr("manualpar.training.checkpoints.folders.SEEN_SECONDS", 0.1)
        monkeypatch.setattr(store.jax, "process_count", lambda: 2)
        monkeypatch.setattr(store.jax, "process_index", lambda: process)
        if is_shared:
            checkpoints.check_shared()
        else:
            with pytest.raises(CheckpointError, match=r"cannot be saved: process 1 on .* does not"):
                checkpoints.check_shared()
        if process and is_shared:
            theirs.unmark(mark)
        elif process:
            assert not mine.exists()
        monkeypatch.undo()
    if mine.exists():
        assert list(mine.iterdir()) == []


def test_a_failure_in_the_background_is_raised_by_the_next_save(
    program, state, tmp_path, monkeypatch
):
    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            fail_to_sync(patch)
            checkpoints.save(program, state, step=1, extra={})
            with pytest.raises(CheckpointError, match="1 was not saved: the disk is full"):
                checkpoints.save(program, state, step=2, extra={})
        assert checkpoints.steps() == []
        checkpoints.save(program, state, step=3, extra={})  # There is room again.
        checkpoints.wait()
        assert checkpoints.steps() == [3]
