"""What the benchmark of the planner's accuracy measures, and what it makes of it."""

import jax
import numpy as np
import pytest

from benchmarks.planner_accuracy import (
    CASES,
    Case,
    build,
    calibrate,
    compare_steps,
    spearman,
    stepping,
)


def test_ranks_alone_count():
    values = [3.0, 1.0, 4.0, 1.5]
    assert spearman(values, np.exp(values)) == pytest.approx(1)
    assert spearman(values, [-x for x in values]) == pytest.approx(-1)
    # 1 - 6 sum d^2 / (n (n^2 - 1)), with the last two of four exchanged.
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(1 - 6 * 2 / (4 * 15))


def test_there_are_enough_programs_and_they_differ():
    assert len(set(CASES)) == len(CASES) >= 12
    for field in ("workload", "strategy", "batch_size", "num_minibatches"):
        assert len({getattr(case, field) for case in CASES}) >= 2


def test_a_device_is_described_by_what_was_measured(devices8):
    chip = calibrate(size=32, repetitions=1)
    assert chip.peak("float32") > 0
    assert chip.hbm_bandwidth > 0
    assert chip.network.bandwidth > 0
    assert (chip.flops_efficiency, chip.hbm_efficiency, chip.network.efficiency) == (1, 1, 1)


@pytest.mark.slow
def test_a_block_takes_as_many_steps_as_it_is_asked_for(devices8):
    program, batch = build(Case("mlp", "hsdp", 32, 2), is_tiny=True)
    assert program.mesh.shape == {"replica": 2, "data": 4}
    assert program.num_minibatches == 2
    seen = []
    counted = jax.tree_util.Partial(lambda *args: seen.append(1) or program.train_step(*args))
    block = stepping(program.__class__(**{**vars(program), "train_step": counted}), batch)
    assert block(3) > 0
    assert len(seen) == 3


@pytest.mark.slow
def test_estimates_stand_beside_what_was_measured(devices8):
    cases = [Case("mlp", "dp", 32, 1), Case("mlp", "fsdp", 64, 1)]
    lines, data = compare_steps(cases, rounds=1, steps=1, is_tiny=True)
    assert [each["workload"] for each in data["cases"]] == ["mlp", "mlp"]
    for each in data["cases"]:
        assert each["estimate_seconds"] > 0
        assert each["measured_seconds"]["median"] > 0
    assert abs(data["spearman"]) == pytest.approx(1)
    assert any(line.startswith("Spearman's rank correlation over 2 programs") for line in lines)
