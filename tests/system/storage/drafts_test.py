"""A folder that several processes want to make is whole, and only its owner gives it its name."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from manualpar.system.storage import (
    BucketError,
    FolderError,
    HeldError,
    draft_of,
    hold,
    publish,
    writing,
)
from manualpar.system.storage import drafts as lease


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


# -------------------------------------------------------------------------------------------------
# A lock on a folder of objects: who gets it, when, and what a lost one says.


class Objects:
    """A folder of objects in memory, with the methods of `BucketPath` that a lock needs."""

    def __init__(self, name="", all_objects=None, lock=None, creates_twice=False):
        self.name = name
        self.all = {} if all_objects is None else all_objects
        self.lock = lock or threading.Lock()
        self.creates_twice = creates_twice

    def __truediv__(self, name):
        return Objects(name, self.all, self.lock, self.creates_twice)

    def __str__(self):
        return "s3://bucket/run"

    def names(self):
        return sorted(self.all)

    def read_bytes(self):
        return self.all[self.name]

    def write_bytes(self, data):
        with self.lock:
            if self.all.get("broken"):
                raise BucketError("broken")
            self.all[self.name] = data

    def create(self, data):
        with self.lock:
            if self.creates_twice:
                self.all[self.name] = data
            return self.all.setdefault(self.name, data) == data

    def delete(self):
        self.all.pop(self.name, None)


@pytest.fixture(autouse=True)
def fast_leases(monkeypatch):
    for name, seconds in (("BEAT", 0.05), ("LEASE", 0.4), ("POLL", 0.02)):
        monkeypatch.setattr(lease, f"{name}_SECONDS", seconds)


def owner(**fields):
    fields = {"pid": 1, "host": "elsewhere", "since": "then", "machine": "other"} | fields
    return json.dumps(fields).encode()


def test_one_at_a_time_and_the_next_afterwards():
    folder, said = Objects(), []
    with hold(folder, report=said.append) as check:
        check()
        began = time.monotonic()
        with (
            pytest.raises(HeldError, match=rf"^: process {os.getpid()} on .*, since 20"),
            hold(folder, report=said.append),
        ):
            raise AssertionError
        # It is seen at the owner's next beat, long before a lease would end.
        assert time.monotonic() - began < lease.LEASE_SECONDS
        check()
    assert json.loads(folder.all[".lock-1"])["is_free"]
    with hold(folder, report=said.append) as check:
        check()
        assert folder.names() == [".lock-1", ".lock-2"]
    with hold(folder, report=said.append):
        assert folder.names() == [".lock-2", ".lock-3"]
    assert not said


@pytest.mark.slow
def test_of_many_at_once_one_has_it(monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)  # A busy machine may stop all threads.
    for first in ({}, {".lock-4": owner(is_free=True)}):
        folder, inside, held, barrier = Objects(all_objects=first), [], [], threading.Barrier(6)

        def try_it(folder=folder, inside=inside, held=held, barrier=barrier):
            barrier.wait()
            try:
                with hold(folder, report=print):
                    inside.append(1)
                    time.sleep(lease.LEASE_SECONDS * 2)
            except HeldError:
                held.append(1)

        threads = [threading.Thread(target=try_it) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(inside), len(held)) == (1, 5)


def test_a_lock_that_nobody_renews_is_taken_over():
    folder, said = Objects(all_objects={".lock-7": owner()}), []
    began = time.monotonic()
    with hold(folder, report=said.append):
        assert time.monotonic() - began >= lease.LEASE_SECONDS
    assert said == [
        "s3://bucket/run is taken over from a run that has ended"
        ": process 1 on elsewhere, since then"
    ]


def test_of_a_process_that_this_machine_had_it_is_taken_over_at_once():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    found = owner(pid=ended.pid, machine=lease._machine())
    folder = Objects(all_objects={".lock-1": found})
    began = time.monotonic()
    with hold(folder, report=print):
        assert time.monotonic() - began < lease.LEASE_SECONDS / 2
    folder = Objects(all_objects={".lock-1": owner(pid=os.getpid(), machine=lease._machine())})
    began = time.monotonic()
    with hold(folder, report=print):
        assert time.monotonic() - began >= lease.LEASE_SECONDS


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": "x"}', b'{"is_free": 0}'])
def test_whatever_stands_in_a_lock_it_is_one(text):
    folder = Objects(all_objects={".lock-1": text, ".lock-x": b"", "other": b""})
    began = time.monotonic()
    with hold(folder, report=print):
        assert time.monotonic() - began >= lease.LEASE_SECONDS
        assert ".lock-2" in folder.all


def test_who_was_cut_off_finds_that_another_has_it():
    folder = Objects()
    with hold(folder, report=print) as check:
        folder.all[".lock-2"] = owner()
        with pytest.raises(BucketError, match="could not renew its lock for so long that another"):
            check()
        del folder.all[".lock-2"]
        check()
        folder.all["broken"] = True  # Nothing can be written for a while.
        time.sleep(lease.LEASE_SECONDS * 1.5)
        with pytest.raises(BucketError, match="nothing more is written there"):
            check()
        del folder.all["broken"]
        time.sleep(lease.BEAT_SECONDS * 3)
        check()


def test_a_server_that_creates_what_is_there_locks_nothing():
    said = []
    with hold(Objects(creates_twice=True), report=said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("s3://bucket/run is not locked, because its server lets a sec")
