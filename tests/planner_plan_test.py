"""A plan's own arithmetic and its plain values."""

import json

import pytest

from manualpar.planner.plan import Plan, PlannedCollective, rates

COLLECTIVE = PlannedCollective(
    "all_gather", ("data",), "gather_params", "forward", 3, 30.0, 0.5, 0.4
)
PLAN = Plan(
    name="fsdp manual",
    topology="v5e:2x4",
    num_devices=8,
    mesh={"data": 8},
    is_model=True,
    source="roofline",
    hbm_bytes=100,
    memory={"parameters": 120},
    peak_bytes=120,
    fits=False,
    collectives=(COLLECTIVE, COLLECTIVE),
    notes=("a note",),
)


def test_what_follows_from_a_plan():
    assert PLAN.spare_bytes == -20
    assert PLAN.bytes_sent == 60


def test_plain_values_survive_json():
    plain = PLAN.to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["collectives"][0]["axes"] == ["data"]
    assert (plain["spare_bytes"], plain["bytes_sent"]) == (-20, 60)
    assert plain["step_seconds"] is None


def test_rates_of_a_step_time():
    task = {"examples_per_step": 16, "tokens_per_example": 10, "flops_per_example": 5.0}
    found = rates(2.0, **task, num_devices=4, peak=20.0)
    assert found == {"examples_per_second": 8, "tokens_per_second": 80, "mfu": pytest.approx(0.5)}
    assert rates(2.0, **task, num_devices=4, peak=None)["mfu"] is None
    assert (
        rates(2.0, **task | {"tokens_per_example": 0}, num_devices=4, peak=1.0)["tokens_per_second"]
        is None
    )
    assert set(rates(None, **task, num_devices=4, peak=1.0).values()) == {None}
