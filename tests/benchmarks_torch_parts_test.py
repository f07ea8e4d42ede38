"""The benchmark of a step's parts: its table, and that our parts run."""

import pytest

from benchmarks import torch_parts
from benchmarks.torch_parts_worker import manualpar_parts
from benchmarks.workloads import make_workload


def test_the_table_has_ratios_of_rounds_and_the_kernels_share():
    found = {
        torch_parts.TORCH: {"seconds": [0.001, 0.002, 0.004], "system": 0.0},
        torch_parts.OURS: {"seconds": [0.002, 0.002, 0.004], "system": 0.0005},
        torch_parts.KEEPS: {"seconds": [0.001, 0.001, 0.002], "system": 0.0},
    }
    *_, row = torch_parts.report_parts({"mlp": found})
    assert row == (
        "| MLP | 3 | 2.00 | 2.00 | 1.00 (1.00 to 2.00) | 1.00 | 0.50 (0.50 to 1.00) "
        "| 0.0 / 0.5 / 0.0 |"
    )


@pytest.mark.slow
def test_all_parts_run():
    parts = manualpar_parts(make_workload("lm", is_tiny=True))
    assert parts.keys() == torch_parts.PARTS.keys()
    for part in parts.values():
        part()
