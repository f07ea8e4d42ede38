"""Runs whose replicas meet seldom: from a config to a checkpoint, stopped between two meetings."""

import json
import signal

import pytest

from manualpar.system.cluster import Cluster
from tests.runs.small_runs import (
    assert_same_run,
    at_step,
    checkpoint_arrays,
    complete_steps,
    resumed_from,
    run_here,
    start_cluster,
    wait_for_checkpoint,
    wait_for_step,
)


def run(workdir, *more):
    return run_here(workdir, *more, config="diloco.py")


@pytest.mark.slow
def test_a_run_that_is_stopped_between_two_meetings_is_the_run_that_was_not(
    tmp_path, monkeypatch, capsys, devices8
):
    """Dropout is on, so that the keys of the replicas count too."""
    assert run(tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        at_step(patch, 17, Cluster.request_stop)
        assert run(tmp_path / "stopped") == 75
    assert complete_steps(tmp_path / "stopped")[-1] == 17
    arrays = checkpoint_arrays(tmp_path / "stopped", 17)
    kernel = arrays["['local']['params']['input_dense']['kernel']"]
    assert kernel.shape == (2, 64, 16)
    assert (kernel[0] != kernel[1]).any()
    capsys.readouterr()
    assert run(tmp_path / "stopped") == 0
    assert resumed_from(capsys.readouterr().out) == 17
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    arrays = checkpoint_arrays(tmp_path / "whole", 40)
    kernel = arrays["['local']['params']['input_dense']['kernel']"]
    for copy in kernel:  # Step 40 is a meeting.
        assert (copy == arrays["['params']['input_dense']['kernel']"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["dp", "zero2"])
def test_a_config_chooses_the_strategy_of_a_replica(tmp_path, inner, capsys, devices8):
    options = {"inner": inner, "outer_momentum": 0.5, "outer_code": "int8"}
    options |= {"outer_fragments": 3, "outer_overlap": inner == "zero2"}
    more = [f"--config.parallel.{name}={value}" for name, value in options.items()]
    assert run(tmp_path / "run", *more) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "eval"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("training.num_steps=42", "num_steps is 42 and config.parallel.every is 10"),
        ("optimizer.ema_decay=0.9", "ema_decay is 0.9 and config.parallel.strategy is 'diloco'"),
        ("parallel.mode=auto", "diloco: mode='auto', expected 'manual'"),
        ("parallel.inner=hsdp", "config.parallel.inner is 'hsdp', expected one of 'dp'"),
        ("parallel.mesh={'data': 8}", "has the axes ['data'], expected 'replica' too"),
    ],
)
def test_a_config_that_does_not_fit_ends_in_one_sentence(tmp_path, field, words, capsys):
    assert run(tmp_path / "run", f"--config.{field}") == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_replicas(tmp_path, monkeypatch, capsys, devices8):
    """As after one was lost: with four of two devices in place of two of four, and on fewer."""
    step = 24  # Between two meetings.
    with monkeypatch.context() as patch:
        at_step(patch, step, Cluster.request_stop)
        assert run(tmp_path / "run") == 75
    before = checkpoint_arrays(tmp_path / "run", step)
    capsys.readouterr()
    more = "--config.parallel.mesh={'replica': 4, 'data': 2}"
    with monkeypatch.context() as patch:
        at_step(patch, step + 1, Cluster.request_stop)
        assert run(tmp_path / "run", more) == 75
    assert resumed_from(capsys.readouterr().out) == step
    after = checkpoint_arrays(tmp_path / "run", step + 1)
    name = "['params']['input_dense']['kernel']"
    assert (after[name] == before[name]).all()  # The anchor.
    assert after[f"['local']{name}"].shape == (4, 64, 16)
    assert run(tmp_path / "run", "--config.parallel.mesh={'replica': 1, 'data': 4}") == 0
    assert resumed_from(capsys.readouterr().out) == step + 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "eval"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.long
def test_a_lost_replica_ends_the_run_which_goes_on_with_the_rest(processes, tmp_path, capsys):
    """Each replica is a process of its own."""
    workdir, more = tmp_path / "run", "--config.watch.lost_seconds=5"
    started = start_cluster(processes, workdir, more, config="diloco.py", slow=26)
    wait_for_step(started[0], 21)
    wait_for_checkpoint(workdir, 20)
    started[1].send(signal.SIGKILL)
    assert started[0].wait() == 4, started[0].err
    assert "process 1 on " in started[0].err
    saved = complete_steps(workdir)[-1]
    one = "--config.parallel.mesh={'replica': 1, 'data': 4}"
    assert run(workdir, more, one) == 0
    assert resumed_from(capsys.readouterr().out) == saved
    assert complete_steps(workdir)[-1] == 40
