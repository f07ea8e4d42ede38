"""The benchmark of Muon knows the least work and bytes, and its growth is the formula."""

import pytest

from benchmarks import matrix_optimizers


def test_the_least_work_and_bytes_of_the_model():
    assert matrix_optimizers.least_flops(8) == pytest.approx(52.34e9, rel=1e-3)
    assert matrix_optimizers.fewest_bytes(8) == 28 * 2**20


def test_the_traced_bytes_grow_as_the_formula():
    *_, row = matrix_optimizers.growth_rows([8])
    _, traced, closed, _, fewest, _ = row.strip("| ").split(" | ")
    assert traced == closed == fewest == "28.00"
