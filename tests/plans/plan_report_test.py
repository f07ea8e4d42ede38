"""Plans side by side, and a sweep with what does not run."""

import dataclasses
import io
import shlex

import pytest
import rich.console

from manualpar.planner.hardware import chip_named
from manualpar.planner.plan import PlannedCollective, StepEstimate
from manualpar.plans.layouts.layout import Layout
from manualpar.plans.plan_report import (
    print_formula,
    print_plans,
    print_search,
    print_sources,
    print_traced,
)
from manualpar.plans.sweep import Candidate, Outcome

PLAN = StepEstimate(
    name="fsdp manual",
    topology="v5e:2x4",
    num_devices=8,
    mesh={"data": 8},
    is_model=True,
    source="roofline",
    hbm_bytes=2**30,
    memory={"parameters": 2**20, "batch": 0},
    peak_bytes=3 * 2**29,
    fits=False,
    collectives=(
        PlannedCollective("all_gather", ("data",), "gather_params", "forward", 3, 2048.0, 2e-3),
    ),
    step_seconds=0.5,
    tokens_per_second=8000.0,
    examples_per_second=80.0,
    mfu=0.125,
    assumptions=("Nothing overlaps.",),
    notes=("Mind the memory.",),
)
OTHER = dataclasses.replace(
    PLAN,
    collectives=(dataclasses.replace(PLAN.collectives[0], is_async=False),),
    is_model=False,
    source="XLA",
    fits=True,
    peak_bytes=2**29,
    step_seconds_by_links=0.4,
    mfu=None,
)


def _shown(print_it) -> list[list[str]]:
    """The lines that are printed, as cells."""
    console = rich.console.Console(file=io.StringIO(), width=120)
    print_it(console)
    lines = console.file.getvalue().splitlines()
    return [[cell for cell in map(str.strip, line.split("  ")) if cell] for line in lines if line]


def test_plans_stand_side_by_side_with_what_each_rests_on():
    lines = _shown(lambda console: print_plans(console, [OTHER, PLAN]))
    assert lines[:2] == [
        ["fsdp manual on v5e:2x4 (8 devices, data=8)"],
        ["XLA", "roofline, a model"],
    ]
    rows = {line[0]: line[1:] for line in lines if len(line) == 3}
    assert rows == {
        "fits": ["yes, 512 MiB spare", "NO, 512 MiB too much"],
        "parameters": ["1 MiB", "1 MiB"],
        "all, at the peak": ["512 MiB", "1.5 GiB"],
        "of": ["1 GiB", "1 GiB"],
        "step, estimated": ["500 ms", "500 ms"],
        "with each link by itself": ["400 ms", "-"],
        "computing": ["-", "-"],
        "of it waiting for memory": ["-", "-"],
        "sending, exposed": ["-", "-"],
        "sending, overlapped": ["-", "-"],
        "bytes sent a device": ["2 KiB", "2 KiB"],
        "tokens/s": ["8,000", "8,000"],
        "a device": ["1,000", "1,000"],
        "MFU": ["-", "12.5%"],
    }
    collective = ["all_gather", "gather_params", "forward", "data", "3", "2 KiB", "2 ms", "0.0%"]
    assert collective in lines
    assert [*collective[:-1], "synchronous"] in lines
    ends = [["! Mind the memory."], ["The model assumes:"], ["- Nothing overlaps."]]
    assert lines[-3:] == ends
    assert ["The estimate assumes:"] in lines


def test_what_has_no_tokens_is_counted_in_examples():
    plan = dataclasses.replace(PLAN, tokens_per_second=None)
    lines = _shown(lambda console: print_plans(console, [plan]))
    assert ["examples/s", "80"] in lines
    assert not [line for line in lines if line[0] in ("tokens/s", "a device")]
    assert not [line for line in lines if line[0] == "with each link by itself"]


def test_a_search_shows_what_fits_and_the_nearest_of_what_does_not():
    dots = Candidate("fsdp", {"data": 8}, 2, "dots", "")
    full = dataclasses.replace(dots, remat="full", gather_dtype="bfloat16")
    nearer = dataclasses.replace(PLAN, peak_bytes=2**30 + 1)
    outcomes = [
        Outcome(dots, OTHER, "", is_traced=False),
        Outcome(full, OTHER, "", is_traced=True),
        Outcome(dots, PLAN, "0.5 GiB too much", is_traced=True),
        Outcome(full, nearer, "1 B too much", is_traced=True),
    ]
    lines = _shown(lambda console: print_search(console, outcomes))
    assert lines[0] == ["2 of 4 fit; the fastest, by a model"]
    rest = ["500 ms", "-", "-", "-"]
    assert ["fsdp, data=8", "2 minibatches, remat dots", *rest, "~512 MiB"] in lines
    how = "2 minibatches, remat full, gather bfloat16"
    assert ["fsdp, data=8", how, *rest, "512 MiB"] in lines
    assert ["~: scaled from another candidate's, not traced."] in lines
    assert ["2 do not run"] in lines
    assert ["fsdp, data=8", "2", f"{how}: 1 B too much"] in lines
    lines = _shown(lambda console: print_search(console, outcomes[1:2]))
    assert lines[0] == ["1 of 1 fit; the fastest, by a model"]
    assert "do not run" not in str(lines)


def test_a_search_of_layouts_has_the_wait_for_stages_and_its_assumptions():
    layout = Layout(stage=2, data=4, num_minibatches=8, chunks=3, communicate="step")
    plan = dataclasses.replace(OTHER, compute_seconds=0.2, exposed_seconds=0.1, bubble_seconds=0.2)
    outcomes = [Outcome(layout, plan, "", is_traced=False)]
    lines = _shown(lambda console: print_search(console, outcomes, title="3 layouts fit"))
    assert lines[0] == ["3 layouts fit"]
    times = ["500 ms", "200 ms", "100 ms", "200 ms", "-", "512 MiB"]
    assert ["stage=2 x data=4", "8 minibatches, 3 chunks, remat full, by step", *times] in lines
    assert not [line for line in lines if line[0].startswith("~")]
    words = str(_shown(lambda c: print_formula(c, gather_code="int8", reduce_code="int4")))
    assert (
        "Sent quantized: gathered parameters as codes of int8, gradients as codes of int4" in words
    )
    words = str(_shown(lambda c: print_formula(c, gather_code="", reduce_code="")))
    assert "quantized" not in words


def test_flags_are_as_a_shell_takes_them():
    outcome = Outcome(Layout(stage=2, data=4), OTHER, "", is_traced=False)
    flags = ["--config.parallel.mesh={'stage': 2, 'data': 4}", "--config.model.remat=none"]
    console = rich.console.Console(file=io.StringIO(), width=120)
    print_traced(console, outcome, "the builder says no.", flags)
    text = " ".join(console.file.getvalue().split())
    assert "stage=2 x data=4: 500 ms by formula, no program: the builder says no." in text
    assert shlex.split(text)[-2:] == flags


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5p", "calibrated: products on published speeds of v5p, attention on"),
        ("h200", "calibrated: products on products that were timed on h200, attention on"),
        ("tpu7x", "calibrated: attention on published speeds of chips of its kind, products on no"),
    ],
)
def test_the_source_of_a_chip_says_what_was_calibrated(name, words):
    console = rich.console.Console(file=io.StringIO(), width=1000)
    print_sources(console, chip_named(name))
    assert words in console.file.getvalue()
    console = rich.console.Console(file=io.StringIO(), width=1000)
    print_sources(console, dataclasses.replace(chip_named(name), calibration=""))
    assert console.file.getvalue().strip().endswith("not calibrated")
