"""The benchmark of growth builds every model in every way, and its exponents fit the times."""

import pytest

from benchmarks import growth


def test_an_exponent_is_that_of_the_two_largest_sizes():
    assert growth.growth([1, 100, 10], [50.0, 1e4, 1e2]) == pytest.approx(2)


def test_a_table_shows_medians_of_ratios():
    seconds = {("plain", 10): [1.0, 2.0, 4.0], ("fsdp", 10): [2.0, 4.0, 4.0]}
    assert growth.rows(seconds)[3] == "| fsdp | 4.00 (2.00) | - |"


@pytest.mark.slow
def test_it_measures_in_processes_of_their_own(capsys):
    growth.main(
        ["--params", "4", "8", "--layers", "--ways", "nnx", "--rounds", "1", "--no_compile"]
    )
    (_, _, _, _, _, plain, nnx) = capsys.readouterr().out.splitlines()
    assert (plain.split()[1], nnx.split()[1]) == ("plain", "nnx")


@pytest.mark.slow
@pytest.mark.parametrize("model", growth.MODELS)
@pytest.mark.parametrize("way", growth.WAYS)
def test_every_model_is_built_in_every_way(devices8, model, way):
    if growth.has_way(model, way):
        assert growth.measure(model, way, 2, compiles=False) > 0
