"""A transformer whose sequences are split over a mesh axis is the one-device model, every leaf."""

import jax
import numpy as np
import pytest

from manualpar import Batch, assert_same_as_one_device
from manualpar.models.flat_fields import with_fields
from tests.models import split_layers
from tests.models.split_layers import BOS, EXPERTS
from tests.models.transformer_families import GEMMA, LLAMA4, QWEN
from tests.models.transformer_on_one_device import assert_same_as_plain_flax

SMALL = with_fields(split_layers.SMALL, split_axis="", context_axis="context")


def _batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, BOS, (8, 17)).astype(np.int32)
    tokens[:, [2, 6, 11]] = BOS
    mask = (rng.random((8, 16)) < 0.7).astype(np.float32)
    mask[0] = 0
    mask[1:4, 4:] = 0  # Some devices have a sequence of padding.
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=mask)


def _build(build, model, mesh, **options):
    options = {"batch": _batch(), "context_axis": "context", **options}
    return split_layers.build_program(build, model, mesh, **options)


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
        yield "fsdp", "2x4", LLAMA4 | {"attention_chunk": 6, "context_attention": how}, {}
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
    model = with_fields(SMALL, **fields)
    program = _build(build, model, MESHES[mesh], **options)
    assert_same_as_plain_flax(program, model, _batch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("build", "mesh", "fields"),
    [
        ("fsdp", "2x4", {"num_kv_heads": 4, "attention_sinks": True}),
        ("fsdp", "4x2", {"remat": "full"}),
        ("dp", "1x8", {"num_kv_heads": 1, "scan_layers": False}),
        ("hsdp", "replicas", {}),
        ("fsdp", "2x4", LLAMA4 | {"num_kv_heads": 4}),
    ],
)
def test_sequences_of_global_arrays_are_split(mode, build, mesh, fields, devices8):
    """Each device attends for some heads, or for all if the axis does not divide the key heads."""
    del devices8
    model = with_fields(SMALL, **fields)
    program = _build(build, model, MESHES[mesh], mode=mode)
    assert_same_as_plain_flax(program, model, _batch)


@pytest.mark.slow
def test_where_xla_divides_work_sequences_divide_no_examples(devices8):
    """Two devices along the batch have three examples each, and four share each sequence."""
    batch = jax.tree.map(lambda x: x[2:], _batch())
    model = SMALL.clone(num_layers=1, scan_layers=False)
    options = {"batch": batch, "mode": "auto", "num_minibatches": 3, "use_scan": True}
    program = _build("fsdp", model, MESHES["2x4"], **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))
