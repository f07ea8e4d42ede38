"""A full disk, a folder that can't be written to: each has its sentence."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from manualpar.training.checkpoints.saved_state import (
    CheckpointError,
    cannot_write,
    explain_failure,
)
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "the disk is full: make room there"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied: choose a workdir"),
        (errno.EFBIG, "a file is larger than allowed"),
    ],
)
def test_system_errors_are_found_however_they_come(number, expected):
    error = OSError(number, os.strerror(number), "file")
    assert explain_failure(error).startswith(expected)
    assert explain_failure(
        ValueError(f"ABORTED: {os.strerror(number)} [os_error_code]")
    ).startswith(expected)
    outer = RuntimeError("saving failed")
    outer.__cause__ = error
    assert explain_failure(outer).startswith(expected)
    error.__context__ = outer  # A circle.
    assert explain_failure(outer).startswith(expected)


def test_what_is_not_known_keeps_its_text():
    error = cannot_write(Path("/run/7"), ValueError("odd.\nand long"))
    assert isinstance(error, CheckpointError)
    assert str(error) == "checkpoint /run/7 was not saved: ValueError: odd."
    assert explain_failure(KeyError()) == "KeyError: "


def test_a_save_that_takes_too_long_is_told_what_governs_it():
    error = RuntimeError("the barrier")
    error.__cause__ = TimeoutError("ChainedFuture completed 3/4 futures")
    assert str(cannot_write(Path("/run/7"), error)).startswith(
        "checkpoint /run/7 was not saved: it was not written in time; check that all processes can "
        "write there, or raise the limit for a slow disk: seconds= of Checkpoints, which"
    )


def run_worker(folder, size, *before):
    """Saves a small, two large and a small state in a process of its own."""
    done = subprocess.run(
        [
            *before,
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.training.checkpoints.worker",
            folder,
            size,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing of Orbax, tensorstore and asyncio gets to the screen"
    return done.stdout.splitlines()


def assert_large_failed(lines, folder, reason):
    assert lines == [
        "1: returned",
        "2: returned",
        f"2: checkpoint {folder}/2 was not saved: {reason}.",
        "3: returned",
        f"3: checkpoint {folder}/3 was not saved: {reason}.",
        "4: returned",
        "[1, 4]",
    ]


def can_mount():
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        check=False,
    ).returncode


@pytest.mark.slow
def test_a_file_that_gets_too_large(tmp_path):
    """The limit acts where a full disk does: in tensorstore's threads, in the middle of a write."""
    lines = run_worker(str(tmp_path), "60000", "sh", "-c", 'ulimit -f 200; exec "$@"', "sh")
    assert_large_failed(
        lines,
        tmp_path,
        "a file is larger than allowed: raise the limit (`ulimit -f`), or choose another file "
        "system",
    )


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    if not can_mount():
        pytest.skip("no small file system can be mounted here")
    mount = 'mount -t tmpfs -o size=3m none "$0" && exec "$@"'
    lines = run_worker(
        str(tmp_path / "run"), "60000", "unshare", "-Urm", "sh", "-c", mount, str(tmp_path)
    )
    assert_large_failed(
        lines,
        tmp_path / "run",
        "the disk is full: make room there, or choose another workdir",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mode", "mount"])
def test_a_folder_that_cannot_be_written_to(tmp_path, kind):
    folder = tmp_path / "run"
    folder.mkdir()
    if kind == "mode":
        if os.getuid() == 0:
            pytest.skip("root may write anywhere")
        folder.chmod(0o555)
        before = []
        reason = "permission denied: choose a workdir that you may write to, or change its mode"
    else:
        if not can_mount():
            pytest.skip("no read-only file system can be mounted here")
        mount = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
        before = ["unshare", "-Urm", "sh", "-c", mount, str(folder)]
        reason = "the file system is read-only: choose a workdir that can be written to"
    lines = run_worker(str(folder), "16", *before)
    path = folder
    assert lines == [
        *(f"{step}: checkpoint {path}/{step} was not saved: {reason}." for step in (1, 2, 3, 4)),
        "[]",
    ]
