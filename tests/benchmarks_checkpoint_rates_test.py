"""The line through what saves of several sizes took, and a save that is measured."""

import pytest

from benchmarks.checkpoint_rates import PARTS, build, fit, measure, restart


def test_the_line_through_points_that_lie_on_one():
    assert fit([100, 200, 400], [2.5, 3.0, 4.0]) == pytest.approx((2.0, 200.0))
    assert fit([100, 200], [1.0, 3.0])[0] == 0.0  # No save takes less than nothing.


@pytest.mark.slow
def test_a_save_is_measured_in_its_parts(tmp_path):
    size, seconds = measure(build(1), tmp_path, rounds=2)
    assert size == pytest.approx(3 * 4 * 1024**2, rel=0.01)
    assert set(seconds) == set(PARTS)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())


@pytest.mark.slow
def test_a_new_process_compiles_the_step():
    assert restart(layers=1) > 0  # It raises if the process fails.
