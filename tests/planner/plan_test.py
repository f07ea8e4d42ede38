"""A plan's own arithmetic and its plain values."""

import dataclasses
import json

import pytest

from manualpar.inspect.throughput import Throughput
from manualpar.planner.plan import PlannedCollective, StepEstimate

COLLECTIVE = PlannedCollective(
    "all_gather", ("data",), "gather_params", "forward", 3, 30.0, 0.5, 0.4
)
PLAN = StepEstimate(
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
    plan = dataclasses.replace(PLAN, step_seconds=2.0)
    throughput = Throughput(16, 10, 5.0, num_devices=4, peak=20.0)
    rates = plan.with_rates(throughput)
    assert (rates.examples_per_second, rates.tokens_per_second) == (8, 80)
    assert rates.mfu == pytest.approx(0.5)
    assert plan.with_rates(dataclasses.replace(throughput, peak=None)).mfu is None
    tokenless = dataclasses.replace(throughput, tokens_per_example=None)
    assert plan.with_rates(tokenless).tokens_per_second is None
    assert PLAN.with_rates(throughput) == PLAN  # It has no step time.
