"""Checkpoints in a bucket: what a checkpoint is there, killed saves, servers that fail.

A process that is killed sends nothing any more. For the bucket that is the same as a server that
refuses everything from one request on, which is how most kills are made here: a process takes
seconds to start. The last test kills processes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from manualpar.system.storage import CONTEXT
from manualpar.system.storage import bucket_path as requests
from manualpar.training.checkpoints import CheckpointError, Checkpoints
from manualpar.training.checkpoints.bucket_arrays import chunk_shape
from manualpar.training.checkpoints.saved_state import read_extra
from tests.paths import ROOT
from tests.system.cluster.processes import free_port
from tests.system.storage.s3_server import SECRET, Proxy, download, environment_of, upload
from tests.training.checkpoints.worker import Model, make_program, shared_program, state_of_step

server = pytest.mark.slow


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(requests, "WAITS", (0.01, 0.02))
    retries = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "20ms"}
    for name in ("s3_request_retries", "gcs_request_retries"):
        monkeypatch.setitem(CONTEXT, name, retries)


def save(folder, steps, *, program=None, keep=1, **options):
    program = program or shared_program("fsdp")
    state = program.init(jax.random.key(0))
    with Checkpoints(folder, keep=keep, **options) as checkpoints:
        for step in steps:
            checkpoints.save(
                program, state_of_step(state, step), step=step, extra={"position": step}
            )


def check(folder, step, program=None):
    """The checkpoint of a step is whole, and every number in it is of that step."""
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(
            program or shared_program("fsdp"), step=step, report=lambda line: None
        )
    assert restored.extra == {"position": step}
    for x in jax.tree.leaves(restored.state.replace(rng=None)):
        np.testing.assert_array_equal(x, np.full(x.shape, step, x.dtype))


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((), 4, ()),
        ((3, 5), 4, (3, 5)),
        ((1024, 1024), 4, (512, 512)),
        ((7, 1 << 20), 4, (7, 1 << 15)),
        ((1048583,), 4, (1,)),  # A prime number.
        ((0, 3), 4, (1, 3)),
    ],
)
def test_chunks_divide_a_shard(shape, itemsize, expected):
    assert chunk_shape(shape, itemsize) == expected


@server
@pytest.mark.parametrize("name", ["fsdp_pad", "zero1", "dp"])
def test_a_checkpoint_restores_under_other_strategies(bucket_folder, name):
    program = shared_program(name)
    state = program.init(jax.random.key(3))
    with Checkpoints(bucket_folder) as checkpoints:
        checkpoints.save(program, state, step=7, extra={"nested": [1, None, float("inf")]})
        checkpoints.wait()
        for other in ("dp", "zero2_pad" if name == "dp" else "zero2", "hsdp", "fsdp_pad"):
            restored = checkpoints.restore(shared_program(other), report=print)
            assert restored.step == 7
            assert restored.extra == {"nested": [1, None, float("inf")]}
            found, expected = (
                jax.tree.leaves(jax.tree.map(np.asarray, p.whole(s)))
                for p, s in ((shared_program(other), restored.state), (program, state))
            )
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x, y)
            for key in (restored.state.rng, state.rng):
                np.testing.assert_array_equal(
                    jax.random.key_data(key), jax.random.key_data(state.rng)
                )
    assert read_extra(bucket_folder / "7") == {"nested": [1, None, float("inf")]}


@server
def test_a_checkpoint_copied_to_a_disk_is_a_local_one_and_the_other_way_round(
    bucket_folder, tmp_path
):
    save(bucket_folder / "there", [1, 2], keep=2)
    check(download(bucket_folder / "there", tmp_path / "here"), 2, shared_program("hsdp"))
    save(tmp_path / "made", [5])
    upload(tmp_path / "made", bucket_folder / "back")
    check(bucket_folder / "back", 5, shared_program("zero2"))


@server
def test_damage_shows_and_the_one_before_is_taken(bucket_folder):
    save(bucket_folder, [1, 2], keep=2)
    data = next(name for name in (bucket_folder / "2").files() if "process_0/d/" in name)
    whole = (bucket_folder / "2" / data).read_bytes()
    (bucket_folder / "2" / data).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    program = shared_program("fsdp")
    with Checkpoints(bucket_folder) as checkpoints:
        with pytest.raises(CheckpointError, match=rf"{data} is not as it was written: its SHA-256"):
            checkpoints.restore(program, report=print)
        said = []
        restored = checkpoints.restore(program, on_corruption="previous", report=said.append)
        assert restored.step == 1
        (bucket_folder / "2" / data).delete()
        with pytest.raises(CheckpointError, match=rf"2 is damaged: {data} is missing"):
            checkpoints.restore(program, report=print)
        (bucket_folder / "2" / "manifest.json").write_bytes(b"{}")
        with pytest.raises(CheckpointError, match=r"manifest\.json is not as it was written"):
            checkpoints.restore(program, report=print)
        model = make_program("fsdp", jax.devices(), model=Model(hidden_size=24))
        with pytest.raises(CheckpointError, match=r"is of another model: .*Dense_0/bias"):
            checkpoints.restore(model, step=1, report=print)


@server
def test_going_back_sets_later_ones_aside_and_the_best_stays(bucket_folder):
    program = shared_program("fsdp")
    save(bucket_folder, [10, 20, 30], keep=9)
    with Checkpoints(bucket_folder, keep=9) as checkpoints:
        restored = checkpoints.restore(program, step=10, report=print)
        checkpoints.save(program, restored.state, step=20, extra={"position": 20})
    names = {"10", "20", "20.superseded-1", "30.superseded-1"}
    assert set(bucket_folder.names()) == names
    with Checkpoints(bucket_folder, keep=1, best_metric="loss") as checkpoints:
        for step, loss in ((21, 0.5), (22, 0.9), (23, 0.7)):
            checkpoints.save(
                program, restored.state, step=step, extra={}, metrics={"loss": loss, "x": np.nan}
            )
    assert set(bucket_folder.names()) == (names - {"10", "20"}) | {"21", "23"}


@pytest.mark.long
@server
def test_killed_at_every_request_nothing_is_lost(bucket_folder, s3_port, use_s3, fast):
    """Before a request, and after it has been carried out and before its answer."""

    class Killed:
        at = after = -1  # Requests that change nothing have the number 0.
        is_dead = False

        def __call__(self, method, path, number):
            if self.is_dead or number == self.at:
                self.is_dead = True
                return 403
            return self.die if number == self.after else None

        def die(self):
            self.is_dead = True

    folder = bucket_folder / "all"
    save(folder, [1])
    with Proxy(s3_port) as proxy:
        use_s3(port=proxy.port)
        save(folder, [2])
    count = len(proxy.changes)
    assert sum("manifest.json" in path for _, path in proxy.changes) == 2, "one put, one deleted"
    lost = 0
    for number in range(1, count + 1):
        for when in ("at", "after"):
            folder = bucket_folder / f"{number}-{when}"
            use_s3()
            save(folder, [1])
            killed = Killed()
            setattr(killed, when, number)
            with Proxy(s3_port, killed) as proxy:
                use_s3(port=proxy.port)
                failed = False
                try:
                    save(folder, [2])
                except CheckpointError:
                    failed = True
                assert killed.is_dead
            use_s3()
            with Checkpoints(folder) as checkpoints:
                steps = checkpoints.steps()
            assert steps in ([1], [1, 2], [2])
            assert failed or steps[-1] == 2
            lost += steps == [1]
            for step in steps:
                check(folder, step)
            if number % 5 == 0:  # It goes on from there, and nothing is left.
                save(folder, [3])
                assert folder.names() == ["3"]
                assert {name.split("/")[0] for name in (folder / "3").files()} == {
                    "_CHECKPOINT_METADATA",
                    "extra",
                    "keys",
                    "manifest.json",
                    "state",
                }
    assert lost > count / 2, "most of the requests come before the manifest"


@server
def test_a_server_that_is_busy_and_one_that_stays_so(
    bucket_folder, s3_port, use_s3, fast, capfd, monkeypatch
):
    moments, few = random.Random(0), requests.WAITS
    monkeypatch.setattr(requests, "WAITS", (0.01,) * 9)  # Two of ten requests fail.
    with Proxy(s3_port, lambda *request: moments.choice([None] * 8 + [503, "cut"])) as proxy:
        use_s3(port=proxy.port)
        save(bucket_folder, [1, 2])
        check(bucket_folder, 2)
        monkeypatch.setattr(requests, "WAITS", few)
        proxy.fault = lambda *request: 503
        with pytest.raises(CheckpointError, match=r"answered 503, in each of 3 tries: check the n"):
            Checkpoints(bucket_folder).steps()
        broken = []

        def fail_arrays(method, path, number):
            broken.append(path)
            return 500 if "ocdbt" in path and method == "PUT" else None

        proxy.fault = fail_arrays
        with pytest.raises(CheckpointError, match=r"3 was not saved: .*answered 500, in each of 3"):
            save(bucket_folder, [3])
        proxy.fault = lambda method, path, number: 403 if number else None
        with pytest.raises(CheckpointError, match=r"was not saved: .*access is refused \(403\)"):
            save(bucket_folder, [3])
    use_s3()
    check(bucket_folder, 2)
    shown = capfd.readouterr()
    assert SECRET not in shown.out + shown.err


def start(folder, port, *arguments):
    command = [
        sys.executable,
        "-m",
        "tests.training.checkpoints.worker",
        str(folder),
        *map(str, arguments),
    ]
    environment = {**os.environ, **environment_of(port), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.long
@server
def test_processes_killed_while_they_save(bucket_folder, s3_port):
    moments = random.Random(0)
    program = make_program("fsdp", jax.devices(), model=Model(hidden_size=1024))
    newest, unfinished = 0, 0
    for _ in range(6):
        worker = start(bucket_folder, s3_port)
        try:
            first = worker.stdout.readline()
            assert first, "the worker ended by itself"
            time.sleep(moments.uniform(0, 2.0))
        finally:
            worker.send_signal(signal.SIGKILL)
            rest, _ = worker.communicate()
        said = [int(line) for line in (first + rest).splitlines(keepends=True) if line[-1] == "\n"]
        assert said[0] >= newest, "it went on from the newest"
        with Checkpoints(bucket_folder) as checkpoints:
            steps = checkpoints.steps()
        unfinished += len([name for name in bucket_folder.names() if int(name) not in steps])
        assert steps[-1] >= said[-1]
        # keep=2, keep_every_steps=5; at the moment of a kill one more may still be there.
        must_stay = {steps[-1], max(steps[-1] - 1, 1), *range(5, steps[-1], 5)}
        assert must_stay <= set(steps)
        assert len(set(steps) - must_stay) <= 1
        for step in (steps[-1], steps[0]):
            check(bucket_folder, step, program)
        newest = steps[-1]
    assert unfinished, "some kills hit a save"


@server
def test_two_processes_save_and_restore(bucket_folder, s3_port):
    outputs = []
    for action in ("save", "restore"):
        address = f"127.0.0.1:{free_port()}"
        workers = [start(bucket_folder, s3_port, action, address, 2, index) for index in (0, 1)]
        outputs.append([worker.communicate(timeout=240)[0] for worker in workers])
        assert [worker.returncode for worker in workers] == [0, 0]
    saved, restored = ([lines.splitlines()[-1] for lines in both] for both in outputs)
    assert saved[0] == saved[1] == restored[0] == restored[1]
    assert saved[0].startswith("[2, 3] ")
    files = json.loads((bucket_folder / "3" / "manifest.json").read_bytes())["files"]
    assert {name.split("/")[1] for name in files if "ocdbt.process" in name} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    with Checkpoints(bucket_folder) as checkpoints:
        program = make_program("fsdp_pad", jax.devices())
        assert checkpoints.restore(program, report=print).extra == {"position": 3}
