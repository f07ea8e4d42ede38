"""A folder that several processes want to make is whole, and only its owner gives it its name."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from manualpar.system.storage import FolderError, HeldError, draft_of, publish, writing


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("manualpar.system.storage.drafts.DYING_SECONDS", 0.1)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_process_owns_the_draft_and_others_are_told_who(tmp_path):
    target = tmp_path / "new" / "model"
    with draft_of(target) as draft:
        (draft / "file").write_text("first")
        with pytest.raises(HeldError, match=f": process {os.getpid()} on "), draft_of(target):
            pass
        message = f"save: {target} is being written by another process: process {os.getpid()} on "
        with pytest.raises(ValueError, match=message), writing("save", target), draft_of(target):
            pass
        with draft_of(tmp_path / "new" / "other") as other:
            assert other.is_dir()
        assert (draft / "file").read_text() == "first"
        publish(draft, target)
    assert names(target) == ["file"]
    assert names(target.parent) == ["model"]
    with pytest.raises(KeyboardInterrupt), draft_of(target):
        raise KeyboardInterrupt
    assert names(target.parent) == ["model"]


KILLED = """
import os, sys
from pathlib import Path
from manualpar.system.storage import draft_of
with draft_of(Path(sys.argv[1])) as draft:
    (draft / "file").write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_the_draft_of_a_killed_process_goes_with_the_next(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "model")]
    assert subprocess.run(command, check=False).returncode == -9
    (left,) = [name for name in names(tmp_path) if name.endswith(".partial")]
    others = [left.replace(".model.", ".model.v2."), ".model.x.partial", ".model.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    with draft_of(tmp_path / "model") as draft:
        assert draft.name != left
        assert not (tmp_path / left).exists()
    assert names(tmp_path) == sorted(others)


def test_where_nothing_locks_the_first_to_end_has_the_name(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    said = []
    monkeypatch.setattr("fcntl.flock", flock)
    monkeypatch.setattr(
        "manualpar.system.storage.drafts.logging.warning", lambda *text: said.append(*text)
    )
    target = tmp_path / "model"
    with draft_of(target) as first, draft_of(target) as second:
        for number, draft in enumerate((first, second)):
            (draft / "file").write_text(str(number))
        target.mkdir()  # An empty folder is replaced.
        publish(second, target)
        with pytest.raises(FolderError, match="model was written by another process in the mean"):
            publish(first, target)
    assert (target / "file").read_text() == "1"
    assert names(tmp_path) == ["model"]
    assert [line.partition(",")[0] for line in said] == [f"{target} is not locked"] * 2


def test_a_lock_file_that_is_deleted_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    flock, lock = fcntl.flock, tmp_path / ".model.lock"

    def late(descriptor, operation):
        monkeypatch.setattr("fcntl.flock", flock)
        lock.unlink()  # As its last owner does at its end.
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", late)
    with draft_of(tmp_path / "model"):
        assert lock.exists()
        with pytest.raises(HeldError), draft_of(tmp_path / "model"):
            pass


def test_errors_of_the_disk_are_sentences(tmp_path):
    full = "make room there, or name another folder."
    large = "too large; name another folder."
    for number, end in ((errno.ENOSPC, f"left on device; {full}"), (errno.EFBIG, large)):
        with (
            pytest.raises(FolderError, match=f"^save: {tmp_path} cannot be written: .*{end}$"),
            writing("save", tmp_path),
        ):
            raise OSError(number, os.strerror(number))
    (tmp_path / "file").touch()
    below, message = tmp_path / "file" / "model", f"save: {tmp_path}/file/model cannot be written:"
    with pytest.raises(FolderError, match=message), writing("save", below), draft_of(below):
        pass
