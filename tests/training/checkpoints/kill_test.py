"""Processes killed in the middle of saving: what was complete stays so."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from manualpar.training.checkpoints import Checkpoints
from tests.paths import ROOT
from tests.training.checkpoints.worker import Model, make_program, shared_program


def kill_while_saving(folder, delay):
    """Kills the worker a while after its first save; returns the steps it had said are complete."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.training.checkpoints.worker", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        first = worker.stdout.readline()
        assert first, "the worker ended by itself"
        time.sleep(delay)
    finally:
        worker.send_signal(signal.SIGKILL)
        rest, _ = worker.communicate()
    # The last line may have been cut off.
    return [int(line) for line in (first + rest).splitlines(keepends=True) if line.endswith("\n")]


def check(folder, program, said):
    """The newest checkpoint is whole and of its step, and none that had to stay is gone."""
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps()
    assert steps[-1] >= said[-1]
    # keep=2, keep_every_steps=5; at the moment of a kill one more may still be there.
    must_stay = {steps[-1], max(steps[-1] - 1, 1), *range(5, steps[-1], 5)}
    assert must_stay <= set(steps)
    assert len(set(steps) - must_stay) <= 1
    reports = []
    for step in (steps[-1], steps[0]):
        restored = checkpoints.restore(program, step=step, report=reports.append)
        assert restored.extra == {"position": step}
        for x in jax.tree.leaves(restored.state.replace(rng=None)):
            np.testing.assert_array_equal(x, np.full(x.shape, step, x.dtype))
    checkpoints.close()
    return steps[-1]


def kill_several_times(folder, kills, longest):
    random = np.random.default_rng(0)
    program = make_program("fsdp", jax.devices(), model=Model(hidden_size=1024))
    newest = 0
    leftovers = 0
    for _ in range(kills):
        said = kill_while_saving(folder, random.uniform(0, longest))
        leftovers += any(folder.glob("*.*"))
        assert said[0] >= newest, "it went on from the newest"
        newest = check(folder, program, said)
    return leftovers


class Killed(BaseException):
    """Ends what process 0 does in the background, at a place of the test's choosing."""


def die_at(monkeypatch, number):
    """Has the process die before its operation of that number; returns the list of operations."""
    done = []

    def wrap(module, name):
        operation = getattr(module, name)

        def run(path, *args, **kwargs):
            done.append(f"{name} {Path(path).name}")
            if len(done) == number:
                if name == "rmtree":  # In the middle of it.
                    next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
                raise Killed(done[-1])
            return operation(path, *args, **kwargs)

        monkeypatch.setattr(module, name, run)

    for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
        wrap(module, name)
    return done


@pytest.mark.slow
def test_killed_at_every_step_of_putting_it_in_place(tmp_path, monkeypatch):
    program = shared_program("fsdp")
    state = program.init(jax.random.key(0))

    def save_one_and_the_next(folder, number):
        with Checkpoints(folder, keep=1) as checkpoints:
            checkpoints.save(program, state, step=1, extra={"position": 1})
            checkpoints.wait()
            with monkeypatch.context() as patch:
                operations = die_at(patch, number)
                checkpoints.save(program, state, step=2, extra={"position": 2})
                if number:
                    with pytest.raises(Killed):
                        checkpoints.wait()
                else:
                    checkpoints.wait()
        return operations

    operations = save_one_and_the_next(tmp_path / "all", 0)
    assert operations[-4:] == [
        "replace .manifest.json.draft",
        "rename 2.unfinished",
        "rename 1",
        "rmtree 1.deleted",
    ]
    for backwards, expected in enumerate(([2], [1, 2], [1], [1])):
        folder = tmp_path / str(backwards)
        save_one_and_the_next(folder, len(operations) - backwards)
        # Whatever has the name of a checkpoint is one, and there is always one.
        with Checkpoints(folder, keep=1) as checkpoints:
            assert checkpoints.steps() == expected
            for step in expected:  # The newest last: it goes on there.
                restored = checkpoints.restore(program, step=step, report=lambda line: None)
                assert restored.extra == {"position": step}
            checkpoints.save(program, state, step=3, extra={})
        assert sorted(path.name for path in folder.iterdir()) == ["3"]


@pytest.mark.slow
def test_killed_while_saving(tmp_path):
    kill_several_times(tmp_path, kills=1, longest=0.5)


@pytest.mark.slow
@pytest.mark.long
def test_killed_while_saving_many_times(tmp_path):
    assert kill_several_times(tmp_path, kills=18, longest=2.0) > 3, "some kills hit a save"
