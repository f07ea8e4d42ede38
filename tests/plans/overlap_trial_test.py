"""A step that nearly fills the memory is compiled with and without the options of `overlap`."""

import dataclasses

import pytest
from ml_collections import ConfigDict

from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import parse_topology
from manualpar.plans.overlap_trial import compile_both

GIB = 2**30
PLAN = StepEstimate(
    name="fsdp manual",
    topology="v5e:2x4",
    num_devices=8,
    mesh={"data": 8},
    is_model=False,
    source="XLA",
    hbm_bytes=16 * GIB,
    memory={},
    peak_bytes=int(15.5 * GIB),
    fits=True,
    step_seconds=1.4,
    step_seconds_by_links=1.5,
)
FASTER = dataclasses.replace(PLAN, step_seconds=1.2, step_seconds_by_links=1.3)
TOO_LARGE = dataclasses.replace(PLAN, peak_bytes=17 * GIB, fits=False, step_seconds=None)
SMALL = dataclasses.replace(PLAN, peak_bytes=8 * GIB)


def compiled(plans: dict[str, StepEstimate], overlap: str = "auto") -> list[StepEstimate]:
    """Calls `compile_both` with a compiler that gives the plan of the config's `overlap`."""

    def compile_for(config, topology, *, vocab_size):
        assert vocab_size == 300
        return plans[config.parallel.overlap]

    config = ConfigDict({"parallel": {"overlap": overlap}}).lock()
    return compile_both(compile_for, config, parse_topology("v5e:2x4"), vocab_size=300)


def test_the_faster_one_is_taken_and_says_why() -> None:
    first, second = compiled({"auto": PLAN, "none": FASTER})
    assert (first.step_seconds, second) == (1.2, PLAN)
    assert first.source == "XLA, parallel.overlap=none"
    [note] = first.notes
    assert "memory is 97% full" in note
    assert "With them: 1,500 ms. Without them: 1,300 ms." in note
    assert note.endswith("a run leaves them out with --parallel.overlap=none.")


def test_the_options_stay_where_they_are_faster() -> None:
    first, second = compiled({"auto": FASTER, "none": PLAN})
    assert (first.step_seconds, second.step_seconds) == (1.2, 1.4)
    assert first.notes[0].endswith("Without them: 1,500 ms. This plan is with them.")


@pytest.mark.parametrize("slow", [{"step_seconds": 1.6}, {"step_seconds_by_links": 1.6}])
def test_it_counts_the_slower_of_both_estimates(slow: dict[str, float]) -> None:
    first, _ = compiled({"auto": PLAN, "none": dataclasses.replace(FASTER, **slow)})
    assert first.step_seconds == PLAN.step_seconds


def test_what_fits_is_taken() -> None:
    first, _ = compiled({"auto": TOO_LARGE, "none": PLAN})
    assert first.fits
    assert "the step does not fit, so" in first.notes[0]
    first, _ = compiled({"auto": PLAN, "none": TOO_LARGE})
    assert first.fits
    assert "Without them: it does not fit." in first.notes[0]


@pytest.mark.parametrize("plan", [PLAN, TOO_LARGE])
def test_options_that_change_nothing_are_not_mentioned(plan: StepEstimate) -> None:
    assert compiled({"auto": plan, "none": plan}) == [plan]


def test_one_compilation_is_enough_otherwise() -> None:
    assert compiled({"auto": SMALL}) == [SMALL]
    assert compiled({"none": PLAN}, "none") == [PLAN]
