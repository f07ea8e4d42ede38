"""What the benchmark of split layers counts and calculates."""

import pytest

from benchmarks.tensor_parallel_bytes import measure, of_peer

SIZES = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("name", "shares"),
    [("Megatron-LM", 8), ("Megatron-LM, sequence", 10), ("torchtitan, sequence", 8)],
)
def test_peers_send_what_they_publish(name, shares):
    row = of_peer(name, sizes=SIZES, hidden_size=16)
    assert row.shares == shares
    assert row.bytes_a_token == shares * 4 * 16 * 3 / 4


@pytest.mark.parametrize(
    ("name", "kinds", "shares"),
    [
        pytest.param("ours", {"all_reduce": 4}, 8, marks=pytest.mark.slow),
        pytest.param(
            "ours, sequence",
            {"all_reduce": 2, "all_gather": 4, "reduce_scatter": 4},
            # The scales of two norms, for all 8 x 32 tokens of a device.
            8 + 4 / 256,
            marks=pytest.mark.slow,
        ),
        # XLA sums the gradients of the inputs of each of the seven products by itself.
        pytest.param("auto", {"all_reduce": 4}, 14, marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_ours(devices8, name, kinds, shares):
    row = measure(name, sizes=SIZES, hidden_size=16)
    assert {kind: number for kind, number in row.counts.items() if number} == kinds
    assert row.shares == shares
    assert row.cells()[0] == name
