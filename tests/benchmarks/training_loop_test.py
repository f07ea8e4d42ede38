"""What the benchmark of the training loop times, and what it makes of the times."""

import argparse
import math
import re
import textwrap
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import checkpoint_costs, training_loop
from benchmarks.loop_blocks import SAVED_AFTER, Bench
from benchmarks.turns import estimate, ratios, table, take_turns
from manualpar.training.checkpoints import Checkpoints
from tests.paths import ROOT


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file of a model that takes no time."""
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    text = f"""
        from manualpar.training.config import load_config
        from pathlib import Path

        def get_config():
            config = load_config(Path({str(ROOT / "configs" / "fsdp.py")!r})).unlock()
            config.data.batch_size = 8
            config.model.hidden_size = 16
            config.model.num_layers = 1
            config.optimizer.num_minibatches = 1
            config.training.log_every_steps = 2
            config.checkpoint.every_steps = 10
            return config.lock()
    """
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def bench(config, tmp_path, devices8):
    with Bench(config, tmp_path / "bench") as made:
        yield made


def steps_made(bench):
    return int(jax.device_get(bench.state.step))


def test_the_interval_holds_the_median_of_so_many_samples():
    generator = np.random.default_rng(0)
    for count, least in ((1, 0.0), (4, 0.85), (5, 0.92), (6, 0.95), (9, 0.95), (30, 0.95)):
        held = 0
        for _ in range(2000):
            found = estimate(generator.exponential(size=count))
            assert found.low <= found.median <= found.high
            held += found.low <= math.log(2) <= found.high
        assert held / 2000 > least - 0.015, count
    assert estimate(range(9)) == (4, 1, 7)  # All but one on either side.
    assert estimate(range(6)) == (2.5, 0, 5)


def test_blocks_take_turns_in_either_order():
    calls = []

    def block(name):
        return lambda steps: calls.append((name, steps)) or len(calls)

    seconds = take_turns({name: block(name) for name in "ab"}, steps=5, rounds=3)
    assert "".join(name for name, _ in calls) == "ab" + "abbaab"
    assert {steps for _, steps in calls} == {5}
    # The first of each is not counted.
    assert seconds == {"a": [3, 6, 7], "b": [4, 5, 8]}
    assert ratios(seconds["a"], seconds["b"]) == [3 / 4, 6 / 5, 7 / 8]


@pytest.mark.slow
def test_every_block_makes_the_steps_that_it_is_timed_for(bench):
    made = steps_made(bench)
    seconds = training_loop.measure_loops(bench, steps=3, rounds=1)
    assert len(seconds) == 7
    assert all(len(values) == 1 and values[0] > 0 for values in seconds.values())
    assert steps_made(bench) == made + 2 * 3 * len(seconds)
    lines = (bench.folder / "run" / "metrics.jsonl").read_text().splitlines()
    # Three kinds of block are the loop's: step 2 is reported, and step 3, the last.
    assert len(lines) == 2 * 3 * 2


@pytest.mark.slow
def test_calls_are_counted_and_the_state_goes_on(bench):
    made = steps_made(bench)
    seconds = training_loop.measure_calls(bench, calls=2)
    assert [len(values) for values in seconds.values()] == [2, 2, 2]
    assert steps_made(bench) == made + 6


@pytest.mark.slow
def test_a_block_of_the_loop_ends_when_its_checkpoint_is_complete(bench, monkeypatch):
    folder = bench.folder / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        is_waited_for = threading.Event()
        finish, wait = checkpoints._finish, checkpoints.wait

        def finish_late(*args):
            is_waited_for.wait(5)
            return finish(*args)

        def note_and_wait():
            if checkpoints._pending is not None:
                is_waited_for.set()
            wait()

        monkeypatch.setattr(checkpoints, "_finish", finish_late)
        monkeypatch.setattr(checkpoints, "wait", note_and_wait)
        made = steps_made(bench)
        times = bench.loop(3, saver=(checkpoints, 7))
        assert is_waited_for.is_set()
        assert [path.name for path in folder.iterdir()] == ["7"]
        assert 0 < times.blocked < times.seconds
        restored = checkpoints.restore(bench.program, report=print)
    assert int(jax.device_get(restored.state.step)) == made + SAVED_AFTER
    # Afterwards training has gone on to the end of the block.
    assert steps_made(bench) == made + 3


@pytest.mark.slow
def test_saving_is_measured_as_often_as_asked(bench):
    costs = checkpoint_costs.measure_saving(bench, steps=3, rounds=2)
    assert costs.steps == 3
    kept = bench.config.checkpoint.keep
    for kind in ("asynchronous", "synchronous"):
        names = sorted(path.name for path in (bench.folder / kind).iterdir())
        # One before the rounds, and two; the latest are kept.
        assert names == ["1", "2", "3"][-kept:]
    for value in (costs.blocked, costs.background, costs.blocked_synchronous):
        assert 0 < value.low <= value.median <= value.high
    times = checkpoint_costs.measure_restoring(bench, rounds=2)
    assert times.verification.low > 0
    assert times.reading.low > 0


@pytest.mark.slow
def test_a_block_outlasts_a_save(bench, monkeypatch):
    saves = checkpoint_costs.Saves(bench, asynchronous=True)
    monkeypatch.setattr(saves, "block", lambda steps: saves.background.append(0.6))
    monkeypatch.setattr(bench, "loop", lambda steps: argparse.Namespace(seconds=steps * 0.1))
    assert checkpoint_costs._steps_for(bench, saves) == SAVED_AFTER + 9


@pytest.mark.slow
def test_the_report_is_written_in_a_section(config, tmp_path, monkeypatch, capsys, devices8):
    def run(config, workdir, *, num_steps, **_):
        workdir.mkdir(exist_ok=True)
        return 2.0 + num_steps

    monkeypatch.setattr(checkpoint_costs, "_run_process", run)
    output = tmp_path / "report.md"
    output.write_text("# Benchmarks\n\n## Others\n\ntext\n")
    argv = ["--config", str(config), "--steps=2", "--rounds=1", "--processes=1"]
    training_loop.main([*argv, f"--output={output}"])
    text = output.read_text(encoding="utf-8")
    assert text.startswith("# Benchmarks\n\n## Others\n\ntext\n\n## What training takes")
    assert capsys.readouterr().out.strip() in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 4 * 2 + 7 + 3 + 2 + 5
    assert {row.count("|") for row in rows} == {3, 5, 6}
    assert re.search(r"\| loop, the data pipeline \| [\d.]+ \| [\d.]+ \(.*\) \| [\d.]+ \(", text)
    assert "| the resumed one longer by | +1.00 (+1.00 to +1.00) |" in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps=1"], "--steps is 1, expected at least 2, or 0"),
        (["--rounds=0"], "--rounds is 0, expected at least 1"),
        (["--config", "nothing.py", "--rounds=1"], "there is no such file"),
    ],
)
def test_a_mistake_is_a_sentence(argv, message, capsys):
    with pytest.raises(SystemExit):
        training_loop.main(argv)
    assert message in capsys.readouterr().err


def test_a_process_that_ends_before_its_first_step_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_costs.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended before its first step"):
        checkpoint_costs._run_process(Path("x.py"), tmp_path / "run", num_steps=1, devices=None)


def test_the_first_report_is_recognised():
    line = "step 1/1  train  loss 0.1"
    assert checkpoint_costs.FIRST_REPORT.search(line)
    assert not checkpoint_costs.FIRST_REPORT.search("step 0/1  eval   loss 0.1")


def test_a_table():
    assert table(["", "n"], [["a", "1"]]) == ["|  | n |", "| --- | ---: |", "| a | 1 |"]


@pytest.mark.slow
def test_processes_that_begin_and_that_go_on(config, tmp_path):
    seconds = checkpoint_costs.measure_processes(config, tmp_path / "runs", rounds=1, devices=8)
    assert set(seconds) == {"fresh", "resumed"}
    assert all(value > 0 for values in seconds.values() for value in values)
