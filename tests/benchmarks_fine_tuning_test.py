"""What the benchmark of ways to fine-tune counts."""

import pytest

from benchmarks.fine_tuning import HEADER, measure

SIZES = {"hidden_size": 32, "layers": 2}


@pytest.mark.slow
def test_what_is_frozen_costs_less(devices8):
    del devices8
    rows = ("all parameters", "head and last norm", "head and last norm, the rest in bfloat16")
    every, last, narrow = (measure(row, compile=False, **SIZES) for row in rows)
    assert every.trained[0] == every.trained[1] == last.trained[1]
    assert last.trained[0] == 2048 * 32 + 32
    assert last.optimizer < 0.6 * every.optimizer
    assert last.gradients_sent < 0.6 * every.gradients_sent
    assert last.collectives < every.collectives
    assert last.flops < every.flops
    assert (narrow.optimizer, narrow.gradients_sent) == (last.optimizer, last.gradients_sent)
    assert narrow.parameters < last.parameters
    assert narrow.gathers_sent < last.gathers_sent
    assert len(every.cells()) == len(HEADER)


@pytest.mark.slow
def test_adapters_that_are_whole_need_fewer_collectives_than_all_parameters(devices8):
    del devices8
    rows = ("all parameters", "LoRA of rank 8", "LoRA of rank 8, adapters whole")
    # Large enough that kernels are sharded by default.
    every, sharded, whole = (measure(row, compile=False, hidden_size=256, layers=4) for row in rows)
    assert whole.collectives < every.collectives < sharded.collectives
    assert whole.gradients_sent == 2 * sharded.gradients_sent
    assert whole.gathers_sent < sharded.gathers_sent
