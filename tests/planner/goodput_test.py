"""The interval between saves that loses least, and where the time of a run goes."""

import numpy as np
import pytest

from manualpar.planner.goodput import (
    CheckpointCosts,
    best_interval,
    daly_interval,
    expected_seconds,
    goodput,
    longest_recovery,
    mean_time_between_failures,
    scaled_costs,
    young_interval,
)

HOUR, MINUTE = 3600.0, 60.0
CASES = [
    (save, mtbf)
    for mtbf in (15 * MINUTE, 3 * HOUR, 30 * HOUR)
    for save in (0.01, 1.0, 30.0, 5 * MINUTE)
]


@pytest.mark.parametrize(
    ("mtbf", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)]
)
def test_dalys_own_examples(mtbf, minutes):
    """Of his figures 3 to 5, in which a save takes five minutes."""
    assert daly_interval(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, rel=0.01)


@pytest.mark.parametrize(("save", "mtbf"), CASES)
def test_the_best_interval_is_the_least_of_all_that_one_can_try(save, mtbf):
    costs = CheckpointCosts(save, 0.0, restore=20.0, restart=100.0)
    tried = np.geomspace(save / 100, 3 * mtbf, 40_001)
    lost = [expected_seconds(interval, costs, mtbf) / interval for interval in tried]
    best = best_interval(save, mtbf)
    assert best == pytest.approx(tried[int(np.argmin(lost))], rel=2e-3)
    assert expected_seconds(best, costs, mtbf) / best <= min(lost) * (1 + 1e-12)


@pytest.mark.parametrize(("save", "mtbf"), CASES)
def test_dalys_estimate_loses_no_more_than_youngs_and_hardly_more_than_the_best(save, mtbf):
    costs = CheckpointCosts(save, 0.0, restore=20.0, restart=100.0)
    least, daly, young = (
        expected_seconds(find(save, mtbf), costs, mtbf) / find(save, mtbf)
        for find in (best_interval, daly_interval, young_interval)
    )
    assert least <= daly * (1 + 1e-9) <= young * (1 + 2e-9)
    assert daly == pytest.approx(least, rel=1e-4)


def test_expected_seconds_are_those_of_a_simulation():
    mtbf, interval = 1000.0, 150.0
    costs = CheckpointCosts(30.0, background=0.0, restore=50.0, restart=100.0)
    rng = np.random.default_rng(0)
    seconds, segments = 0.0, 20_000
    for _ in range(segments):
        needed = interval + costs.blocked
        while (failure := rng.exponential(mtbf)) < needed:
            seconds += failure
            needed = interval + costs.blocked + costs.recovery
        seconds += needed
    assert seconds / segments == pytest.approx(expected_seconds(interval, costs, mtbf), rel=0.01)


def test_shares_add_up_and_a_longer_restart_costs_training():
    mtbf = mean_time_between_failures(50_000 * HOUR, 16_384)
    short, long = (
        goodput(best_interval(1.0, mtbf), CheckpointCosts(1.0, 10.0, 20.0, restart), mtbf)
        for restart in (60.0, 600.0)
    )
    for shares in (short, long):
        parts = (shares.training, shares.saving, shares.repeating, shares.recovering)
        assert sum(parts) == pytest.approx(1)
        assert min(parts) > 0
    assert long.training < short.training
    assert long.recovering > 5 * short.recovering


def test_the_longest_recovery_leaves_the_share_that_was_asked_for():
    mtbf = 3 * HOUR
    recovery = longest_recovery(0.9, blocked=1.0, mtbf=mtbf)
    costs = CheckpointCosts(1.0, 0.0, 0.0, recovery)
    assert goodput(best_interval(1.0, mtbf), costs, mtbf).training == pytest.approx(0.9)


def test_many_processes_save_faster_until_the_file_system_is_full():
    size = {"state_bytes": 5e12, "held_bytes": 5e12 / 2048, "restart_seconds": 0.0}
    few = scaled_costs(**size | {"held_bytes": 5e12 / 64}, num_processes=64)
    many = scaled_costs(**size, num_processes=2048)
    full = scaled_costs(**size, num_processes=2048, storage_bandwidth=1e11)
    assert few.blocked > 20 * many.blocked
    assert many.blocked == full.blocked
    assert full.background == pytest.approx(50, rel=0.01)
    assert full.restore == pytest.approx(50, rel=0.01)
