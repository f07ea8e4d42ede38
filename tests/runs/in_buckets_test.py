"""Runs whose workdir is in a bucket: killed, stopped, moved, refused, and silent on secrets."""

import functools
import random
import re
import signal
import sys
import time

import pytest

from manualpar.errors import UsageError
from manualpar.system.storage import bucket_path as requests
from manualpar.system.storage import drafts as lease
from tests.runs.small_runs import (
    arguments,
    assert_same_run,
    environment_of,
    resumed_from,
    run_here,
    start,
    start_launcher,
    steps_shown,
)
from tests.system.cluster.processes import HANG_SECONDS
from tests.system.storage.s3_server import KEY_ID, SECRET, Proxy, download
from tests.system.storage.s3_server import environment_of as server_at

pytestmark = pytest.mark.slow


@pytest.fixture
def in_bucket(processes, bucket_folder, s3_port, monkeypatch):
    """The folder of a run in a bucket; processes that are started find the server."""
    started = processes.start
    environment = server_at(s3_port)
    monkeypatch.setattr(
        processes, "start", lambda command, **more: started(command, **{**environment, **more})
    )
    return bucket_folder / "run"


def download_run(folder, target):
    """Copies a run to a disk, without checkpoints that are not complete."""
    files = folder.files()

    def is_of_incomplete(name):
        step = re.match(r"checkpoints/[^/]+/", name)
        return step and f"{step[0]}manifest.json" not in files

    return download(folder, target, is_of_incomplete)


def steps(folder):
    """The steps of complete checkpoints."""
    names = (re.fullmatch(r"checkpoints/(\d+)/manifest.json", name) for name in folder.files())
    return sorted(int(found[1]) for found in names if found)


def wait_for(condition):
    until = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_killed_then_told_to_stop_then_moved_to_a_disk(
    processes, in_bucket, tmp_path, undisturbed, capsys
):
    killed = start(processes, in_bucket, kill=22)
    assert killed.wait() == -signal.SIGKILL, killed.err
    newest = steps(in_bucket)[-1]
    assert newest in (16, 20)  # The last one may not have been complete.

    stopped = start(processes, in_bucket, slow=30)
    wait_for(lambda: max([0, *steps_shown(stopped.out)]) >= 28)
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == 75, stopped.err
    assert resumed_from(stopped.out) == newest
    saved = steps(in_bucket)[-1]
    assert 28 <= saved < 40
    assert stopped.err.splitlines()[-1] == (
        f"stopped after step {saved}, which is saved; the same command with "
        f"--workdir={in_bucket} goes on"
    )
    copy = download_run(in_bucket, tmp_path / "copy")

    capsys.readouterr()
    assert run_here(in_bucket) == 0
    assert resumed_from(capsys.readouterr().out) == saved
    assert_same_run(download_run(in_bucket, tmp_path / "finished"), undisturbed)
    # What was copied to a disk goes on there.
    assert run_here(copy) == 0
    assert resumed_from(capsys.readouterr().out) == saved
    assert_same_run(copy, undisturbed)
    for name in ("report.html", "config.json", "discarded.jsonl", "throughput.jsonl"):
        assert (tmp_path / "finished" / name).stat().st_size
    assert not [name for name in in_bucket.files() if "draft" in name or "written" in name]


def kill_at(at, process, kinds, method, path, number):
    """Kills a process at a request, which is not carried out."""
    if number != at:
        return None
    kinds.add("checkpoint" if "checkpoints" in path else "results")
    process.send(signal.SIGKILL)
    return 403


@pytest.mark.long
def test_killed_at_random_requests(processes, in_bucket, s3_port, tmp_path, undisturbed):
    moments, newest, kinds = random.Random(1), 0, set()
    for _ in range(6):
        with Proxy(s3_port) as proxy:
            victim = start_at(processes, proxy.port, in_bucket)
            at = moments.randrange(1, 70)
            proxy.fault = functools.partial(kill_at, at, victim, kinds)
            assert victim.wait() == -signal.SIGKILL, victim.err
        if newest:
            assert resumed_from(victim.out) == newest
        found = steps(in_bucket)
        assert max(found, default=0) >= newest
        newest = max(found, default=0)
        lines = (in_bucket / "metrics.jsonl").read_bytes() if newest else b""
        expected = (undisturbed / "metrics.jsonl").read_bytes()
        assert expected.startswith(lines[: lines.rfind(b"\n") + 1])
    assert kinds == {"checkpoint", "results"}
    last = start(processes, in_bucket)
    assert last.wait() == 0, last.err
    assert_same_run(download_run(in_bucket, tmp_path / "finished"), undisturbed)


def start_at(processes, port, workdir):
    command = [sys.executable, "-m", "experiments.fsdp", *arguments(workdir), "--devices=8"]
    return processes.start(command, **{**environment_of(), **server_at(port)})


def test_two_processes_go_on_where_one_was_killed(processes, in_bucket, undisturbed, tmp_path):
    first = start(processes, in_bucket, kill=22)
    assert first.wait() == -signal.SIGKILL, first.err
    launcher = start_launcher(processes, in_bucket)
    assert launcher.wait() == 0, launcher.err
    finished = download_run(in_bucket, tmp_path / "finished")
    lines, expected = (
        (folder / "metrics.jsonl").read_text().splitlines() for folder in (finished, undisturbed)
    )
    assert [line.split(",")[0] for line in lines] == [line.split(",")[0] for line in expected]


def test_a_second_run_is_refused_and_a_killed_one_keeps_nobody_out(
    processes, in_bucket, capsys, monkeypatch
):
    first = start(processes, in_bucket, slow=1, seconds=3600)
    wait_for(lambda: (in_bucket / ".lock-1").is_file())
    assert run_here(in_bucket) == 2
    error = capsys.readouterr().err
    assert re.search(rf"--workdir={in_bucket} is in use by another run: process \d+ on ", error)
    first.send(signal.SIGKILL)
    first.wait()
    monkeypatch.setattr(lease, "LEASE_SECONDS", 3600.0)  # This machine knows that it has ended.
    assert run_here(in_bucket) == 0


def test_no_secret_is_written_or_said_anywhere(
    in_bucket, s3_port, use_s3, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(requests, "WAITS", (0.01,))
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}-token")
    assert run_here(in_bucket) == 0
    with Proxy(s3_port, lambda method, path, number: 403 if number > 25 else None) as proxy:
        use_s3(port=proxy.port)
        assert run_here(in_bucket.parent / "other") == 6
    said = capfd.readouterr()
    assert "access is refused (403): check AWS_ACCESS_KEY_ID" in said.err
    assert "Traceback" not in said.err
    use_s3()
    everything = {name: (in_bucket / name).read_bytes() for name in in_bucket.files()}
    assert {"config.json", "report.html", "metrics.jsonl"} <= everything.keys()
    everything |= {"out": said.out.encode(), "err": said.err.encode()}
    for name, content in everything.items():
        for secret in (SECRET, KEY_ID):
            assert secret.encode() not in content, name
    for word in ("s3://USER:hush@bucket/run", "s3://bucket:hush/run"):
        with pytest.raises(UsageError, match="credentials come from the environment") as refused:
            run_here(word)
        assert "hush" not in str(refused.value)


@pytest.mark.long
def test_a_server_that_fails_for_a_while_is_waited_for(
    in_bucket, s3_port, use_s3, tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setattr(requests, "WAITS", (0.01,) * 9)  # Two of fourteen requests fail.
    moments = random.Random(0)
    with Proxy(s3_port, lambda *request: moments.choice([None] * 12 + [503, "cut"])) as proxy:
        use_s3(port=proxy.port)
        assert run_here(in_bucket) == 0
    use_s3()
    assert_same_run(download_run(in_bucket, tmp_path / "finished"), undisturbed)


def test_mistakes_about_buckets_are_one_sentence(use_s3, capsys):
    use_s3()
    assert run_here("s3://no-such-bucket/run") == 6
    error = capsys.readouterr().err
    assert error.startswith("error: s3://no-such-bucket/run: there is no such bucket: check its n")
    assert error.count("\n") == 1
