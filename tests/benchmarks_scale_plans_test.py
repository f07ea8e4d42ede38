"""The committed plans of large models are those that the planner makes, and tables show them."""

import io

import pytest
import rich.console

from benchmarks.scale_plans import (
    MODELS,
    TOPOLOGIES,
    load_model,
    print_best,
    read_results,
)
from manualpar.planner.closed_form.layout import Layout
from manualpar.planner.closed_form.layout_estimate import estimate_layout
from manualpar.planner.topology import parse_topology


def _shown(print_it, results) -> str:
    console = rich.console.Console(file=io.StringIO(), width=160)
    print_it(console, results)
    return console.file.getvalue()


def test_the_results_are_of_every_model_and_topology():
    results = read_results()
    found = [(each["model"], each["topology"]) for each in results["best"]]
    assert found == [(model, topology) for model in MODELS for topology in TOPOLOGIES]


@pytest.mark.parametrize("name", ["llama3_405b", pytest.param("all", marks=pytest.mark.slow)])
def test_the_results_are_what_the_planner_says_today(name):
    results = read_results()
    models = {model: load_model(model) for model in (MODELS if name == "all" else [name])}
    for result in results["best"]:
        for plan in result["plans"] if result["model"] in models else []:
            model, examples, positions = models[result["model"]]
            layout = Layout(**plan["layout"])
            topology = parse_topology(result["topology"])
            sizes = {"examples": examples, "positions": positions}
            again = estimate_layout(model, layout, topology, **sizes)
            assert again.seconds == pytest.approx(plan["seconds"], rel=1e-3)
            assert again.fits


def test_the_table_shows_models_and_meshes():
    results = read_results()
    text = _shown(print_best, results["best"][:1])
    assert results["best"][0]["model"] in text
    assert Layout(**results["best"][0]["plans"][0]["layout"]).name.split()[0] in text
