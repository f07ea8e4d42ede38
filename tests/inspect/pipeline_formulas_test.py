"""What each stage of a pipeline sends, predicted, against the traced step: exactly."""

from fractions import Fraction
from typing import Any

import pytest

from manualpar import Program
from manualpar.core.tracing.scopes import PIPELINE_SCOPE
from manualpar.inspect import (
    bytes_by_axes,
    ledger,
    parameter_collectives,
    step_bytes,
    total_bytes,
    total_step_bytes,
)
from manualpar.inspect.communication import summed
from manualpar.inspect.expected_bytes import pipeline_collectives
from tests.inspect.counted_pipeline import build


def check(program: Program, stage: int) -> Any:
    found = ledger(program, stage=stage)
    parameters = parameter_collectives(found.collectives)
    assert found.predicted == step_bytes(program, stage=stage)
    assert _without_zeros(bytes_by_axes(parameters)) == _without_zeros(found.predicted)
    between = [one for one in found.collectives if one.purpose == PIPELINE_SCOPE]

    def amounts(collectives: Any) -> Any:
        return summed(((x.kind, x.axes, x.shape, str(x.dtype)), x.times) for x in collectives)

    assert amounts(between) == amounts(pipeline_collectives(program))
    return found


def _without_zeros(sent: Any) -> Any:
    return {axes: x for axes, x in sent.items() if x}


MESHES = [{"data": 2, "stage": 4}, {"data": 4, "stage": 2}]
INTERLEAVED = {"chunks": 2}
SLOW = [
    *((name, mesh, {}) for name in ("dp", "zero1", "keep", "step") for mesh in MESHES),
    ("reshard", {"data": 1, "stage": 4}, {}),
    *(
        (name, {"data": 4, "stage": 2}, {"chunks": 2, "keep": keep, "schedule": "gpipe"})
        for name in ("dp", "zero1", "keep", "reshard", "step")
        for keep in ("residuals", "inputs")
    ),
    ("hsdp", {"replica": 2, "data": 2, "stage": 2}, INTERLEAVED),
    ("hsdp", {"replica": 2, "data": 1, "stage": 4}, {"keep": "inputs", "microbatches": 3}),
]


@pytest.mark.parametrize(
    ("name", "mesh", "fields"),
    [
        ("step", {"data": 4, "stage": 2}, INTERLEAVED | {"gather_dtype": "bfloat16"}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_every_stage_sends_what_the_formula_says(devices8, name, mesh, fields):
    program = build(name, mesh, **fields)
    for stage in range(mesh["stage"]):
        check(program, stage)


@pytest.mark.slow
def test_the_stage_that_sends_the_most_is_predicted(devices8):
    program = build("reshard", {"data": 2, "stage": 4})
    for stage in range(4):
        check(program, stage)
    found = ledger(program)
    assert found.stage == 3  # That of the head, which another kernel belongs to.
    sent = [total_step_bytes(program, stage=stage) for stage in range(4)]
    assert total_step_bytes(program) == max(sent) == sum(found.predicted.values())
    assert sent[3] > sent[0] > sent[1] == sent[2] > 0
    with pytest.raises(ValueError, match=r"step_bytes: stage=4, expected one of \[0, 1, 2, 3\]"):
        step_bytes(program, stage=4)
    assert "the numbers are of stage 3 of 4, the one that sends the most" in found.notes


@pytest.mark.slow
def test_a_microbatch_more_is_a_tick_and_uses_more(devices8):
    """As often as the tables say: from which everything but reductions once a step follows."""
    few, many = (build("keep", {"data": 2, "stage": 2}, microbatches=m) for m in (4, 8))
    for stage in (0, 1):
        # Activations are half as large, and metrics are summed once.
        hops = [
            total_bytes(one for one in pipeline_collectives(each) if one.kind == "permute")
            for each in (few, many)
        ]
        assert hops[1] / hops[0] == Fraction(8 + 2, 2 * (4 + 2))
        once, twice = (step_bytes(each, stage=stage) for each in (few, many))
        assert once[("stage",)] == twice[("stage",)]
        assert twice[("data",)] == 2 * once[("data",)]


@pytest.mark.slow
def test_what_is_compiled_counts_as_often(devices8):
    found = ledger(build("keep", {"data": 2, "stage": 2}), compile=True)
    assert found.stage is not None
    changed = sum(change.bytes_after - change.bytes_before for change in found.changes)
    assert total_bytes(found.compiled.collectives) == found.total_bytes + changed
    # XLA leaves out what nobody needs, and puts together what it can.
    assert {change.kind for change in found.changes} <= {"merged", "removed"}
