import dataclasses

import pytest

from benchmarks.compiled_for_chips import (
    ALL_OPTIONS,
    HEADER,
    LAYOUTS,
    PROGRAMS,
    Row,
    Shape,
    grown,
    make_config,
)
from manualpar.planner.plan import PlannedCollective, StepEstimate
from manualpar.plans.planned_experiment import prepare_planned

GATHER = PlannedCollective("all_gather", ("data",), "gather_params", "forward", 3, 3 * 2**20)
PLAN = StepEstimate(
    name="fsdp manual",
    topology="v5e:4x4",
    num_devices=16,
    mesh={"data": 16},
    is_model=False,
    source="test",
    hbm_bytes=2**34,
    memory={"temporaries": 2**21},
    peak_bytes=2**31,
    fits=True,
    collectives=(GATHER,),
    compute_seconds=0.5,
    exposed_seconds=0.25,
    overlapped_seconds=0.125,
    step_seconds=0.75,
    step_seconds_by_links=0.625,
    mfu=0.4,
)
ROW = Row("7b", "v5e:4x4", "fsdp", "manual", PLAN)
TINY = Shape(layers=1, hidden_size=256, mlp_size=512, heads=4, sequence_length=64)


def test_row_has_a_cell_for_each_heading() -> None:
    cells = dict(zip(HEADER, ROW.cells(), strict=True))
    assert cells["HBM GiB"] == "2.00"
    assert cells["all-gathers MiB (asynchronous)"] == "3 (0%)"
    assert cells["all-reduces MiB (asynchronous)"] == "0"
    assert cells["by links ms"] == "625.0"
    assert (cells["compute ms"], cells["exposed ms"], cells["step ms"]) == (
        "500.0",
        "250.0",
        "750.0",
    )
    failed = Row("7b", "v5e:4x4", "fsdp", "manual", None, "it would not | compile")
    assert len(failed.cells()) == len(HEADER)
    assert not any("|" in cell for cell in failed.cells())


def test_row_compares_its_step_with_the_references() -> None:
    others = dataclasses.replace(PLAN, step_seconds=1.5, step_seconds_by_links=1.0)
    assert ROW.plan is not None
    by_links = ROW.plan.step_seconds_by_links
    assert by_links is not None
    compared = ROW.cells(dataclasses.replace(ROW, plan=others))[-1]
    assert compared == f"0.500 / {by_links:.3f}"
    assert ROW.cells()[-1] == ""


@pytest.mark.parametrize(("factor", "is_growth"), [(0.5, False), (1.005, False), (1.02, True)])
def test_what_has_grown_is_named(factor: float, is_growth: bool) -> None:
    figures = {name: value / factor for name, value in ROW.figures().items()}
    before = {
        "rows": [
            {
                "shape": "7b",
                "topology": "v5e:4x4",
                "layout": "fsdp",
                "program": "manual",
                "figures": figures,
            }
        ]
    }
    sentences = grown([ROW], before)
    assert bool(sentences) == is_growth
    assert len(sentences) == (6 if is_growth else 0)
    assert not grown(
        [Row("7b", "v6e:4x4", "fsdp", "manual", PLAN)], before
    )  # Nothing to compare with.


def test_what_an_earlier_run_did_not_know_has_not_grown() -> None:
    before = {
        "rows": [
            {
                "shape": "7b",
                "topology": "v5e:4x4",
                "layout": "fsdp",
                "program": "manual",
                "figures": {"old": 1},
            }
        ]
    }
    assert not grown([ROW], before)


def test_mode_auto_is_given_the_options_of_one_host() -> None:
    names = " ".join(ALL_OPTIONS)
    assert all(word in names for word in ("pipelined_all_gather", "double_buffering", "threshold"))


def test_what_no_longer_compiles_has_grown() -> None:
    before = {
        "rows": [
            {
                "shape": "7b",
                "topology": "v5e:4x4",
                "layout": "fsdp",
                "program": "manual",
                "figures": ROW.figures(),
            }
        ]
    }
    assert grown([Row("7b", "v5e:4x4", "fsdp", "manual", None, "no")], before) == [
        "7b, v5e:4x4, fsdp, manual: it no longer compiles: no"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("auto", "fsdp"), *(("manual", layout) for layout in LAYOUTS)]
)
def test_programs_can_be_built(name: str, layout: str) -> None:
    config = make_config(TINY, "v5e:4x4", LAYOUTS[layout], PROGRAMS[name])
    program = prepare_planned(config, devices=16, vocab_size=512).program
    assert program.mode == config.parallel.mode
    assert program.mesh.size == 16
