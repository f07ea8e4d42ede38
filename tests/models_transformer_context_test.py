"""A transformer whose sequences are split over a mesh axis is the one-device model, every leaf."""

import functools

import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.models import Transformer
from manualpar.training.cross_entropy import language_model_loss
from tests.transformer_families import GEMMA, QWEN
from tests.transformer_on_one_device import assert_same_as_plain_flax, loss_of

BOS = 28
SMALL = Transformer(
    vocab_size=29,
    vocab_multiple=8,
    num_layers=2,
    hidden_size=16,
    num_heads=8,
    num_kv_heads=2,
    mlp_size=32,
    bos_token=BOS,
    context_axis="context",
)
BUILDERS = {
    "fsdp": functools.partial(fsdp, min_weight_size=16),
    "hsdp": functools.partial(hsdp, min_weight_size=16),
    "zero2": functools.partial(zero, stage=2, min_weight_size=16),
    "dp": data_parallel,
}


def _batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, BOS, (8, 17)).astype(np.int32)
    tokens[:, [2, 6, 11]] = BOS
    mask = (rng.random((8, 16)) < 0.7).astype(np.float32)
    mask[0] = 0
    mask[1:4, 4:] = 0  # Some devices have a sequence of padding.
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


def _build(build, model, mesh, **options):
    axes = tuple(axis for axis in ("data", "expert") if axis in mesh)
    return BUILDERS[build](
        model,
        optax.sgd(1.0),
        loss_of(model),
        mesh=make_mesh(mesh),
        axis_name=axes if len(axes) > 1 else axes[0],
        context_axis="context",
        batch=_batch(),
        **options,
    )


EXPERTS = {"num_experts": 4, "mlp_size": 8, "capacity_factor": 0.75, "expert_axis": "expert"}
SPLIT = {"split_axis": "model", "sequence_parallel": True, "tied_head": True, "num_kv_heads": 4}
MESHES = {
    "1x8": {"data": 1, "context": 8},
    "2x4": {"data": 2, "context": 4},
    "4x2": {"data": 4, "context": 2},
    "model": {"data": 2, "context": 2, "model": 2},
    "replicas": {"replica": 2, "data": 2, "context": 2},
    "experts": {"data": 2, "context": 2, "expert": 2},
    "experts of a model": {"data": 1, "context": 2, "expert": 2, "model": 2},
}


def _cases():
    yield "dp", "4x2", {"remat": "full"}, {}
    for how in ("ring", "ulysses", "gather"):
        yield "fsdp", "2x4", GEMMA | QWEN | {"context_attention": how}, {}
    yield "dp", "model", SPLIT | GEMMA | QWEN | {"overlap": "ring", "remat": "full"}, {}
    for mesh in ("1x8", "2x4", "4x2"):
        yield "fsdp", mesh, {}, {}
    yield "fsdp", "1x8", {"context_attention": "ulysses"}, {}
    yield "fsdp", "2x4", {"context_attention": "gather", "tied_head": True}, {}
    for how in ("ring", "ulysses"):
        yield "fsdp", "model", SPLIT | {"context_attention": how}, {}
    yield "fsdp", "2x4", {"remat": "dots", "scan_layers": False}, {"num_minibatches": 2}
    yield "fsdp", "4x2", {"num_kv_heads": 1}, {"communicate_every": "step", "num_minibatches": 2}
    yield "fsdp", "model", SPLIT | {"overlap": "ring", "remat": "dots"}, {"num_minibatches": 2}
    yield "hsdp", "replicas", {"bos_token": -1}, {"reshard_after_forward": False}
    yield "zero2", "2x4", {"remat": "full"}, {"num_minibatches": 2}
    yield "fsdp", "experts", EXPERTS | {"remat": "full"}, {"num_minibatches": 2}
    dropless = EXPERTS | {"capacity_factor": 0.0}
    yield "fsdp", "experts of a model", SPLIT | dropless | {"context_attention": "gather"}, {}
    yield "fsdp", "2x4", EXPERTS | {"expert_axis": "context"}, {}


@pytest.mark.slow
@pytest.mark.parametrize(("build", "mesh", "fields", "options"), list(_cases()))
def test_a_split_sequence_is_the_same_as_one_device(build, mesh, fields, options, devices8):
    del devices8
    model = SMALL.clone(**fields)
    program = _build(build, model, MESHES[mesh], **options)
    assert_same_as_plain_flax(program, model, _batch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split_axis": "context"}, "context_axis is 'context', expected another axis than split_"),
        (
            {"attention": "cudnn"},
            "attention is 'cudnn', expected '' or 'blockwise' with context_a",
        ),
        ({"context_attention": "all"}, "context_attention is 'all', expected one of 'ring', 'uly"),
        ({"context_attention": "ulysses", "num_heads": 4}, "4 query heads and 2 key heads do not"),
    ],
)
def test_what_cannot_be_split_is_refused(fields, message, devices8):
    del devices8
    with pytest.raises(ValueError, match=message):
        _build("fsdp", SMALL.clone(**fields), MESHES["1x8"])


def test_sequences_that_nobody_splits_are_refused(devices8):
    mesh = make_mesh({"data": 2, "context": 4}, devices8)
    loss = language_model_loss
    with pytest.raises(ValueError, match="Build the program with context_axis='context'"):
        fsdp(SMALL, optax.sgd(1.0), loss, mesh=mesh, batch=_batch(), min_weight_size=16)
