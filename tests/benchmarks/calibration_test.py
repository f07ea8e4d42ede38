"""The fit to published speeds: its rows, its halves, and that the committed shares are its own."""

import dataclasses
import io

import pytest
import rich.console

from benchmarks.calibration import (
    estimate_figure,
    fit,
    fitted_shares,
    print_calibration,
    ratio,
    read_results,
    shares_of,
    split,
)
from benchmarks.published_figures import SHAPES
from benchmarks.published_rows import FIGURES
from manualpar.models.transformer import flops_per_token
from manualpar.planner.hardware import CHIPS
from manualpar.training.config import load_config
from manualpar.training.task import make_task
from tests.paths import ROOT

PLANS = ROOT / "configs" / "plan"
MODELS = ("llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x22b", "deepseek_v3")


@pytest.mark.slow
def test_the_committed_shares_are_what_the_fit_gives():
    found = fit(split(FIGURES)[0])
    assert found == pytest.approx(fitted_shares(), abs=6e-4)
    for chip in CHIPS:  # And those are what chips have.
        named = f"products {chip.name}"
        if named in found:
            assert chip.flops_efficiency == pytest.approx(found[named], abs=6e-4)
            assert f"published speeds of {chip.name}" in chip.calibration
        assert chip.attention_efficiency == pytest.approx(
            found[f"attention {chip.network.kind}"], abs=6e-4
        )


def test_halves_are_split_by_series_in_alphabetical_order_on_each_chip():
    fitted, tested = split(FIGURES)
    assert sum(figure in fitted for figure in FIGURES) == 28
    assert sum(figure in tested for figure in FIGURES) == 27
    neither = [each for each in FIGURES if each not in fitted and each not in tested]
    assert {each.dtype for each in neither} == {"float8"}
    places: dict[str, dict[tuple[str, str], set[bool]]] = {}
    for figure in (*fitted, *tested):
        series = places.setdefault(shares_of(figure)[0], {})
        series.setdefault((figure.whose, figure.model), set()).add(figure in fitted)
    assert len(places) == 6
    for series in places.values():
        if len(series) == 1:
            assert list(series.values()) == [{True, False}]
        else:
            halves = [series[name] for name in sorted(series)]
            assert halves == [{i % 2 == 0} for i in range(len(halves))]
    # The order in which rows are written down does not matter.
    again, _ = split([*reversed([each for each in FIGURES if "500w" not in each.topology])])
    assert {id(each) for each in again} == {
        id(each) for each in fitted if "500w" not in each.topology
    }


def test_a_fit_recovers_the_shares_that_made_up_the_speeds():
    shares = {"products v6e": 0.55, "products h100": 0.66, "attention torus": 0.3}
    shares["attention nodes"] = 0.8
    rows = [each for each in FIGURES if shares_of(each)[0] in shares and each.layout.stage == 1]
    made_up = [
        dataclasses.replace(row, tokens_per_second=row.speed * ratio(row, shares)) for row in rows
    ]
    assert len(made_up) > 10
    assert fit(made_up) == pytest.approx(shares, abs=1e-3)


def test_half_of_attention_is_not_taken_for_a_slow_chip():
    [row] = [each for each in FIGURES if each.whose == "Meta" and each.positions == 131_072]
    whole = flops_per_token(row.transformer, row.positions)
    weights = flops_per_token(row.transformer, 0)
    halved = dataclasses.replace(row, attention="half")
    assert halved.speed / row.speed == pytest.approx(2 * whole / (whole + weights))
    assert estimate_figure(halved, fitted_shares()) == estimate_figure(row, fitted_shares())


@pytest.mark.parametrize(
    ("model", "positions", "teraflops", "tokens"),
    [
        ("llama3_8b", 8192, 449.171, 7755.989),
        ("llama3_70b", 8192, 462.297, 960.248),
        ("llama2_70b", 4096, 419.193, 943.086),
        ("mistral_7b", 8192, 431.981, 7776.813),
        ("mixtral_8x7b", 4096, 302.311, 3645.203),
    ],
)
def test_maxtext_counted_attention_whole(model, positions, teraflops, tokens):
    """Rows with both figures say what a token costs, and that is what this package counts."""
    [transformer] = {each.transformer for each in FIGURES if each.model == model}
    assert teraflops * 1e12 / tokens == pytest.approx(
        flops_per_token(transformer, positions), rel=2e-3
    )


def test_rows_are_cited_and_their_devices_are_those_of_their_layouts():
    assert len({(each.name, each.layout, each.speed) for each in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        assert "https://" in figure.source
        assert figure.layout.num_devices == figure.devices.num_devices
        assert (figure.mfu is None) != (figure.tokens_per_second is None)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama3_8b")) for name in MODELS],
)
def test_shapes_are_those_of_the_configs(name):
    config = load_config(PLANS / f"{name}.py")
    model, positions = make_task(config).model, config.data.sequence_length
    shape = dict(SHAPES[name])
    same = next(each for each in FIGURES if each.model == name).transformer
    assert flops_per_token(model, positions) == flops_per_token(same, positions)
    for field in ("num_layers", "hidden_size", "mlp_size", "num_heads", "num_kv_heads"):
        assert getattr(model, field) == shape[field]


def test_the_results_are_what_the_planner_says_today():
    results = read_results()
    assert [row["name"] for row in results["rows"]] == [figure.name for figure in FIGURES]
    for figure, row in zip(FIGURES, results["rows"], strict=True):
        assert ratio(figure, fitted_shares()) == pytest.approx(row["ratio"], abs=2e-3)
    console = rich.console.Console(file=io.StringIO(), width=160)
    print_calibration(console, results)
    text = console.file.getvalue()
    assert "calibrated, the tested half: 25 of 27 within 15%" in text
    assert "MaxText, llama2_70b, v5p:4x4x4" in text
