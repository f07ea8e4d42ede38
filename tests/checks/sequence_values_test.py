"""Which results a step may put together from devices with other positions."""

import pytest

from manualpar.checks.context_check import SplitValue, is_mean, power_of_sum

SIZE = SplitValue("same", -1)  # How many positions a device has.
EXAMPLES = SplitValue("same")  # How many sequences.
VALID = SplitValue("sum")  # How many positions are valid; its number is 7.
TOTAL = SplitValue("sum")
EQUAL_MEAN = SplitValue("sum", 1)
VALID_MEAN = SplitValue("sum", count=7)


@pytest.mark.parametrize("count", [SIZE, EXAMPLES, VALID, SplitValue("zero")])
def test_what_is_the_same_everywhere_is_its_own_mean(count: SplitValue) -> None:
    assert is_mean(SplitValue("same"), count, 7)
    assert is_mean(SplitValue("zero"), count, 7)
    assert not is_mean(SIZE, count, 7)
    assert not is_mean(TOTAL, count, 7)
    assert not is_mean(SplitValue("device"), count, 7)


def test_a_mean_over_equally_many_positions_needs_equal_counts() -> None:
    assert is_mean(EQUAL_MEAN, SIZE, 7)
    assert is_mean(EQUAL_MEAN, EXAMPLES, 7)
    assert not is_mean(EQUAL_MEAN, VALID, 7)


def test_a_mean_over_valid_positions_needs_its_own_count() -> None:
    assert is_mean(VALID_MEAN, VALID, 7)
    assert not is_mean(VALID_MEAN, VALID, 8)
    assert not is_mean(SplitValue("sum", 1, count=7), VALID, 7)
    assert not is_mean(SplitValue("same", count=7), VALID, 7)


def test_a_metric_and_its_count_are_added_up_alike() -> None:
    assert power_of_sum(TOTAL) == power_of_sum(VALID) == power_of_sum(SIZE) == 0
    assert power_of_sum(EQUAL_MEAN) == power_of_sum(EXAMPLES) == 1
    assert power_of_sum(VALID_MEAN) is None
    assert power_of_sum(SplitValue("device")) is None
