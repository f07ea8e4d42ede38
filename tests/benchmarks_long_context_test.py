"""What the benchmark of split sequences counts, and its closed form."""

import pytest

from benchmarks.long_context import measure, ring_permutes


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["", ", its result saved by name", ", nothing saved"])
def test_permutes_are_those_of_the_closed_form_unless_a_checkpoint_saves_nothing(devices8, saved):
    del devices8
    row = measure("ring", 4, 32, saved)
    again = 3 if "nothing" in saved else 0
    assert row.counts["permute"] == ring_permutes(4) + again
    assert row.cells()[:3] == [f"ring{saved}", "4", "32"]
