"""Runs survive what happens to their processes: a sample of `benchmarks.process_faults`."""

from dataclasses import replace

import pytest

from benchmarks.process_fault_cases import faults
from benchmarks.process_faults import try_fault

FAULTS = {f"{fault.kind}: {fault.name}": fault for fault in faults()}
SAMPLE = (
    "kill: between two steps (process 1)",
    "raise: reading a batch (process 0)",
    "differ: another seed",
    "stranger: HTTP",
    "signal: SIGTERM to the launcher",
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_survived(name):
    outcome = try_fault(FAULTS[name], keep=None)
    assert not outcome.complaints, outcome


@pytest.mark.slow
@pytest.mark.long
def test_what_is_not_survived_is_seen():
    """A run in which nothing is wrong is not lost, and does not say that it was."""
    fault = FAULTS["kill: between two steps (process 1)"]
    outcome = try_fault(replace(fault, faults={}, steps=5), keep=None)
    assert len(outcome.complaints) == 2, outcome
