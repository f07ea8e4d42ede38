"""Stages of a pipeline on several processes: they train as one process does, and end together.

A process that is lost leaves the others in a permutation, which waits for it.
"""

import signal
import time

import pytest

from tests.runs.small_runs import (
    assert_close_metrics,
    complete_steps,
    flag_of_text,
    resumed_from,
    run_here,
    start_cluster,
    start_launcher,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.system.cluster.processes import lines_of_ours

CONFIG = "fsdp_lm.py"
LOST = 4
# Without dropout and in float32 the meshes differ by rounding alone.
SMALL = (
    "--config.model.dtype=float32",
    "--config.model.dropout_rate=0.0",
    "--config.model.num_layers=4",
    "--config.model.num_heads=4",
    "--config.model.num_kv_heads=2",
    "--config.model.mlp_size=16",
    "--config.model.scan_layers=True",
    "--config.data.sequence_length=8",
    "--config.optimizer.num_minibatches=4",
    "--config.parallel.communicate_every=step",
    "--config.sample.num_tokens=0",
    "--config.training.num_steps=15",
    "--config.watch.lost_seconds=5",
)


def mesh(**axes):
    return f"--config.parallel.mesh={axes}"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What all runs have in common; the text is a short one."""
    return (*SMALL, flag_of_text(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory, devices8):
    """A run in one process, without stages."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(workdir, *small, mesh(data=8), config=CONFIG) == 0
    return workdir


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "victim", "links"),
    [
        (2, 1, "data: within a host, stage: 2 within a host x 2 across"),
        (4, 2, "data: within a host, stage: across hosts"),
    ],
)
def test_stages_across_processes_train_as_one_end_together_and_go_on_elsewhere(
    count, victim, links, small, undisturbed, processes, tmp_path, capsys
):
    workdir, stages = tmp_path / "run", mesh(data=2, stage=4)
    options = {"count": count, "devices": 8 // count, "config": CONFIG}
    started = start_cluster(processes, workdir, *small, stages, **options, hang=[victim, 10])
    wait_for_step(started[0], 9)
    wait_for_checkpoint(workdir, 8)
    time.sleep(2)  # The others are in the next step by now, and wait for the one that hangs.
    started[victim].send(signal.SIGKILL)
    others = [process for number, process in enumerate(started) if number != victim]
    for process in others:
        assert process.wait() == LOST, process.err
        named = [line for line in lines_of_ours(process.err) if line.startswith("process ")]
        assert named[0].startswith(f"process {victim} on ")
        assert "Traceback" not in process.err
    shown = f"mesh: data=2, stage=4 on 8 simulated cpu devices ({count} hosts; {links})"
    assert shown in started[0].out
    assert complete_steps(workdir)[-1] == 8
    assert_close_metrics(workdir, undisturbed, until=9)

    capsys.readouterr()
    if count == 2:
        assert run_here(workdir, *small, mesh(data=8), config=CONFIG) == 0
        output = capsys.readouterr().out
    else:
        axes = mesh(data=2, context=2, stage=2)
        launcher = start_launcher(processes, workdir, *small, axes, config=CONFIG)
        assert launcher.wait() == 0, launcher.err
        output = launcher.out
        assert "data: within a host, context: within a host, stage: across hosts" in output
    assert resumed_from(output) == 8
    assert_close_metrics(workdir, undisturbed)
