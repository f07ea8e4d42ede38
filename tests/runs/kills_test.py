"""A run that is killed at random moments, and started again each time by the same command."""

import random
import signal
import time

import pytest

from tests.runs.small_runs import assert_same_metrics, complete_steps, resumed_from, run_here, start

KILLS = 30
# A state of 5 MB that is saved after every step, so that there is always a save under way.
SAVING = (
    "--config.model.hidden_size=512",
    "--config.model.num_layers=2",
    "--config.training.num_steps=200",
    "--config.training.log_every_steps=2",
    "--config.checkpoint.every_steps=1",
    "--config.checkpoint.keep_every_steps=10",
)


def lines_of(workdir):
    """The lines of metrics that are whole."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.long
def test_killed_at_random_moments(processes, tmp_path, devices8):
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "run"
    mesh = "--config.parallel.mesh={'data': 2}"
    assert run_here(undisturbed, *SAVING, mesh, "--config.checkpoint.every_steps=50") == 0
    expected = lines_of(undisturbed)
    moments = random.Random(0)
    newest, starting, saving, startup = 0, 0, 0, None
    for kill in range(KILLS):
        began = time.monotonic()
        process = start(processes, workdir, *SAVING, devices=2, slow=1, seconds=0.1)
        if kill % 3 == 2:
            time.sleep(moments.uniform(0, startup))  # Imports, compiling, restoring.
        else:
            process.wait_for("step ")
            startup = time.monotonic() - began
            time.sleep(moments.uniform(0, 1.0))
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.err
        starting += "step " not in process.out
        saving += any((workdir / "checkpoints").glob("*.unfinished*"))
        if newest and "going on from" in process.out:
            assert resumed_from(process.out) == newest
        before, steps = newest, complete_steps(workdir)
        newest = max(steps, default=0)
        assert newest >= before
        assert set(range(10, newest, 10)) <= set(steps)
        lines = lines_of(workdir)
        assert lines == expected[: len(lines)]
    print(f"{starting} kills before a first report, {saving} in a save, up to step {newest}")
    assert newest < 200, "the kills were to be over before the run is"
    assert starting > 2
    assert saving > 5
    last = start(processes, workdir, *SAVING, devices=2)
    assert last.wait() == 0, last.err
    assert resumed_from(last.out) == newest
    assert_same_metrics(workdir, undisturbed)
    assert complete_steps(workdir)[-1] == 200
