"""The planner's times of kernels on GPUs are those that half of the measured rows give."""

import json

import pytest

from benchmarks.measured_kernels import (
    MEASURED,
    of_blocks,
    of_changes,
    of_cudnn,
    of_products,
    step_seconds,
)
from manualpar.planner.hardware import (
    BLOCK_PASSES,
    CUDNN,
    FLOAT8_GAIN,
    MEASURED_PRODUCTS,
    ROUNDED_PASSES,
    TRANSPOSED,
)

ROWS = json.loads(MEASURED.read_text(encoding="utf-8"))


def test_products_take_the_time_that_the_other_half_took():
    plain, float8 = of_products(ROWS["products"])
    assert MEASURED_PRODUCTS["h200"] == pytest.approx(plain.numbers["share"], rel=2e-3)
    gain = 2 * float8.numbers["share"] / plain.numbers["share"]
    assert pytest.approx(gain, rel=2e-3) == FLOAT8_GAIN
    assert plain.largest(tested=True) < 0.02 < 0.07 < plain.largest(tested=True, before=True)
    assert float8.largest(tested=True) < 0.05 < 0.9 < float8.largest(tested=True, before=True)


def test_what_makes_float8_operands_takes_the_time_that_the_other_half_took():
    rounding, transposed = of_changes(ROWS["products"])
    assert rounding.numbers["passes"] == pytest.approx(ROUNDED_PASSES, rel=2e-3)
    assert rounding.largest(tested=True) < 0.12 < 0.75 < rounding.largest(tested=True, before=True)
    assert transposed.numbers["bytes per second"] == pytest.approx(TRANSPOSED, rel=2e-3)
    assert (
        transposed.largest(tested=True) < 0.07 < 0.3 < transposed.largest(tested=True, before=True)
    )


def test_attention_of_nvidia_takes_the_time_that_the_other_half_took():
    found = of_cudnn(ROWS["attention"])
    assert tuple(CUDNN) == pytest.approx(tuple(found.numbers.values()), rel=5e-3)
    assert found.largest(tested=True) < 0.16 < 0.8 < found.largest(tested=True, before=True)


@pytest.mark.slow
def test_attention_in_blocks_takes_the_time_that_the_other_half_took():
    found = of_blocks(ROWS["attention"])
    assert found.numbers["passes"] == pytest.approx(BLOCK_PASSES, rel=5e-3)
    long = [i for i, row in enumerate(ROWS["attention"]) if row["positions"] > 1024]
    assert max(abs(found.errors[i]) for i in long) < 0.05
    assert found.largest(tested=True) < 0.25 < 0.4 < found.largest(tested=True, before=True)


def named(row):
    """A row of a step; tracing 24 layers that are written out takes more than a minute."""
    name = f"{row['attention']} {'loop' if row['scan_layers'] else 'unrolled'} {row['remat']}"
    return pytest.param(row, id=name, marks=[] if row["scan_layers"] else pytest.mark.long)


@pytest.mark.slow
@pytest.mark.parametrize("row", [named(row) for row in ROWS["steps"]["rows"]])
def test_a_step_takes_what_the_compiled_plan_says_and_what_was_measured(row):
    """In loops and unrolled, with each policy of remat, and with attention in blocks."""
    estimated = 1e3 * step_seconds(row)
    for known in ("compiled ms", "measured ms"):
        assert estimated == pytest.approx(row.get(known, estimated), rel=0.1)
