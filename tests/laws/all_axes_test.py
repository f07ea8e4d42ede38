"""Several kinds of mesh axes in one program. The largest errors of all are in the benchmarks."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    Pipeline,
    abstract_mesh,
    assert_same_as_one_device,
    fsdp,
    make_mesh,
    zero,
)
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss, mixture_of_experts_loss
from tests.models.transformer_families import GEMMA, QWEN

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 17), dtype=np.int32)
MASK = (np.arange(16)[None] < np.arange(1, 16, 2)[:, None]).astype(np.float32)
BATCH = Batch(TOKENS[:, :-1], TOKENS[:, 1:], MASK)
MODEL = functools.partial(
    Transformer,
    vocab_size=32,
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    mlp_size=16,
    scan_layers=True,
    split_axis="model",
    context_axis="context",
)


def build(sizes, *, devices=None, builder=fsdp, fields=(), **options):
    fields = dict(fields)
    mesh = make_mesh(sizes, devices) if devices else abstract_mesh(sizes, 8)
    axes = tuple(axis for axis in ("data", "expert") if axis in sizes) or ("data",)
    if "expert" in sizes:
        fields |= {"num_experts": 4, "capacity_factor": 1.0, "expert_axis": "expert"}
    if "context" in sizes:
        options.setdefault("context_axis", "context")
    if "stage" in sizes:
        options.setdefault("pipeline", Pipeline())
    return builder(
        MODEL(**fields),
        optax.sgd(1.0),
        mixture_of_experts_loss if "num_experts" in fields else language_model_loss,
        mesh=mesh,
        batch=BATCH,
        axis_name=axes,
        **({"num_minibatches": 2, "min_weight_size": 1} | options),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ({"data": 2, "model": 2, "stage": 2}, {}),
        ({"data": 1, "model": 2, "context": 2, "stage": 2}, {}),
        ({"expert": 2, "context": 2, "stage": 2}, {}),
        # Two groups of layers, and one that is left over.
        ({"data": 1, "model": 2, "context": 2, "stage": 2}, GEMMA | QWEN | {"num_layers": 5}),
    ],
    ids=str,
)
def test_three_kinds_of_axes_are_as_one_device(devices8, sizes, fields):
    program = build(sizes, devices=devices8, fields=fields)
    assert_same_as_one_device(program, BATCH, jax.random.key(0))


@pytest.mark.slow
def test_what_layers_return_besides_may_be_a_constant():
    # No token is dropped where experts have room for all: the share of them is a constant, whose
    # gradient would be summed over stages, where a condition lets some of them wait for ever.
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
        ({"fields": GEMMA}, "1 layers, expected .* 2 stages.* a group of layers that the scan ru"),
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
