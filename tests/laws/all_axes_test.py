"""Programs with several kinds of mesh axes train as on one device."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import (
    Pipeline,
    assert_same_as_one_device,
    zero,
)
from manualpar.models import transformer_layer
from tests.laws.all_axes import BATCH, build
from tests.models.transformer_families import GEMMA, QWEN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ({"data": 2, "model": 2, "stage": 2}, {}),
        ({"data": 1, "model": 2, "context": 2, "stage": 2}, {}),
        ({"expert": 2, "context": 2, "stage": 2}, {}),
        # Five layers: two groups of two, and one layer that is left over.
        ({"data": 1, "model": 2, "context": 2, "stage": 2}, GEMMA | QWEN | {"num_layers": 5}),
    ],
    ids=str,
)
def test_three_kinds_of_axes_are_as_one_device(devices8, sizes, fields):
    program = build(sizes, devices=devices8, fields=fields)
    assert_same_as_one_device(program, BATCH, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 4, "model": 2},
        {"data": 2, "model": 2, "context": 2},
        {"expert": 2, "context": 2, "stage": 2},
    ],
    ids=str,
)
def test_layers_behind_a_barrier_are_as_one_device(devices8, monkeypatch, sizes):
    """As some TPUs trace them, on CPUs."""

    def trace():
        program = build(sizes, devices=devices8, fields={"num_layers": 2})
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        return program, str(traced.jaxpr).count("optimization_barrier")

    _, barriers = trace()
    monkeypatch.setattr(transformer_layer, "APART", {devices8[0].device_kind})
    program, more = trace()
    assert more > barriers
    assert_same_as_one_device(program, BATCH, jax.random.key(0))


@pytest.mark.slow
def test_what_layers_return_besides_may_be_a_constant():
    # With `capacity_factor=0` experts drop no token, so the share of dropped tokens is a constant.
    # Its gradient would be summed over the stages within a condition that differs between the
    # stages, and some stages would wait for ever.
    fields = {"num_experts": 4, "capacity_factor": 0}
    program = build({"data": 4, "stage": 2}, fields=fields)
    assert program.layout.params["layers"]["experts"]["up"][0] == "stage"


@pytest.mark.slow
def test_layers_are_stored_where_they_run():
    program = build({"data": 2, "model": 2, "stage": 2}, fields={"num_kv_heads": 2})
    specs = program.layout.params
    assert specs["layers"]["attention"]["query"]["kernel"] == P("stage", "data", "model", None)
    assert specs["layers"]["mlp_norm"]["scale"] == P("stage", "data")
    assert "stage" not in jax.tree.leaves(tuple(specs["embedding"]))
    placements = {info.path: place for info, place in program.parameters}
    assert placements["embedding"].sum_axes == ("stage",)
    assert placements["layers/mlp/up/kernel"].sum_axes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "auto"}, "pipeline= with mode='auto', expected 'manual'"),
        ({"use_scan": True}, "pipeline= with use_scan=True, expected False"),
        ({"communicate_every": "gather-step"}, "reduced once a step"),
        ({"builder": zero, "stage": 2}, "Use zero with stage=1"),
        ({"fields": {"scan_layers": False}}, "pipeline"),
        (
            {"pipeline": Pipeline(chunks=3)},
            "4 layers, expected .* 2 stages times chunks=3",
        ),
        ({"fields": GEMMA}, "1 layers, expected .* 2 stages.* A group of layers in one iteration"),
        ({"pipeline": "1f1b"}, "pipeline='1f1b', expected a manualpar.Pipeline"),
        ({"pipeline": Pipeline(axis="stages")}, "'stages'"),
        ({"pipeline": Pipeline(axis="data")}, "data"),
        ({"num_minibatches": 3}, "num_minibatches=3 does not divide"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_a_pipeline_does_not_go_with_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build({"data": 4, "stage": 2}, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag', expected one of"),
        ({"chunks": 0}, "chunks=0, expected a positive integer"),
        ({"chunks": True}, "chunks=True, expected a positive integer"),
        ({"keep": "all"}, "keep='all', expected one of"),
        ({"axis": ("a", "b")}, "expected the name of a mesh axis"),
    ],
    ids=str,
)
def test_a_pipeline_that_is_none_is_refused(fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Pipeline(**fields)


@pytest.mark.parametrize("axis", [("context", "x"), 1, "contexts", "data"], ids=str)
def test_a_context_axis_that_is_none_is_refused(axis):
    with pytest.raises((ValueError, TypeError), match=r"context_axis|contexts|an axis twice"):
        build({"data": 4, "context": 2}, context_axis=axis)
