"""The values that a config field allows."""

import math

import pytest

from manualpar.strategies import Field


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, True, "1", None])
def test_only_finite_numbers_are_numbers(value):
    assert not Field(float).allows(value)
    assert not Field(float, below=1.0).allows(value)


@pytest.mark.parametrize("value", [0, -1e300, 2.5])
def test_a_number_without_limits_may_be_any_finite_one(value):
    assert Field(float).allows(value)


def test_fields_that_differ_in_their_meaning_are_the_same_field():
    assert Field(int, 1, meaning="One.") == Field(int, 1, meaning="Another.")
