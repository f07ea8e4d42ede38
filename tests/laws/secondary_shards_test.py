"""With `regather_axes`, the backward pass gathers weights only over the fast axes.

The forward pass keeps the part of the weights that it gathered over the slow axes.
"""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from benchmarks.memory_and_collectives import ScannedClassifier
from manualpar import Batch, fsdp, hsdp, make_mesh
from manualpar.inspect import (
    bytes_by_axes,
    ledger,
    parameter_collectives,
    step_bytes,
    total_bytes,
    trace_collectives,
)
from manualpar.models import Transformer
from manualpar.models.cross_entropy import classification_loss, language_model_loss
from tests.one_device import slow_unless
from tests.tiny import BATCHES, Classifier, loss_fn

TWO = ("data", "node")
SECONDARY = {"axis_name": TWO, "regather_axes": ("data",), "min_weight_size": 16}
TOKENS = np.random.default_rng(0).integers(0, 32, (16, 16))
MESHES = [{"data": 4, "node": 2}, {"data": 2, "node": 4}, {"data": 8, "node": 1}]
MESHES += [{"data": 1, "node": 8}, {"data": 2, "node": 2, "model": 2}]


class Bare(nn.Module):
    """A model without biases, whose backward pass needs every kernel but the first."""

    @nn.compact
    def __call__(self, x, train):
        for features in (32, 64, 16):
            x = nn.silu(nn.Dense(features, use_bias=False)(x))
        return nn.Dense(5, use_bias=False)(x)


def build(mesh, devices, *, model=None, builder=fsdp, **options):
    tx = optax.sgd(1.0)
    options = {"batch": BATCHES[0], "mesh": make_mesh(mesh, devices), **SECONDARY, **options}
    return builder(model or Classifier(), tx, loss_fn, **options)


def counted_collectives(program):
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return parameter_collectives(trace_collectives(traced))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("code", [{}, {"gather_code": "int8"}], ids=str)
@pytest.mark.parametrize(
    ("trainable", "remat"),
    [(None, "none"), (("*/attention/*",), "none"), (None, "full"), (None, "dots")],
)
def test_layers_of_a_transformer_gather_again_within_the_group(
    devices8, scan, code, trainable, remat
):
    sizes = {"num_layers": 3, "hidden_size": 32, "mlp_size": 48, "num_heads": 2, "num_kv_heads": 1}
    model = Transformer(vocab_size=32, scan_layers=scan, remat=remat, **sizes)

    def train(**options):
        program = fsdp(
            model,
            optax.sgd(1.0),
            language_model_loss,
            batch=Batch(TOKENS, TOKENS),
            **{"trainable": trainable, **SECONDARY, "min_weight_size": 256, **options, **code},
        )
        state, _ = program.train_step(program.init(jax.random.key(0)), Batch(TOKENS, TOKENS))
        return program, jax.device_get(state.params)

    mesh = make_mesh(MESHES[0], devices8)
    program, params = train(mesh=mesh)
    _, expected = train(mesh=mesh, regather_axes=(), axis_by_axis=True)
    chex.assert_trees_all_equal(params, expected)
    found = counted_collectives(program)
    again = [one for one in found if one.purpose == "regather_params"]
    assert again
    assert {one.axes for one in again} == {("data",)}
    if code:  # The kept weights are quantized too.
        assert {str(one.dtype) for one in again} == {"uint8"}
    sent, closed = bytes_by_axes(found), step_bytes(program)
    assert sent["node",] == closed["node",]
    assert sent["data",] <= closed["data",]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_minibatches": 2},
        {"keep_gathered": ("Dense_2",)},
        {"gather_code": "int8", "reduce_code": "int4", "gather_dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [slow_unless([(MESHES[0],)], mesh) for mesh in MESHES], ids=str)
def test_slow_links_carry_a_gather_and_a_gradient(devices8, mesh, options):
    program = build(mesh, devices8, model=Bare(), **options)
    sent, closed = bytes_by_axes(counted_collectives(program)), step_bytes(program)
    # The first kernel is not gathered again, because the gradient of the inputs is not needed.
    first = build(mesh, devices8, model=Bare(), keep_gathered=("Dense_0",))
    assert sent.get(("node",), 0) == closed.get(("node",), 0)
    assert sent.get(("data",), 0) <= closed.get(("data",), 0)
    assert bytes_by_axes(counted_collectives(first)) == step_bytes(first)
    if not options and mesh["node"] > 1:
        kept = build(mesh, devices8, model=Bare(), regather_axes=(), axis_by_axis=True)
        bytes_of_kept = step_bytes(kept)
        assert closed["node",] * 3 == bytes_of_kept["node",] * 2
        assert closed.get(("data",)) == bytes_of_kept.get(("data",))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("codes", [{}, {"gather_code": "int8", "reduce_code": "int4"}], ids=str)
def test_the_compiler_sends_as_much(devices8, codes):
    program = fsdp(
        ScannedClassifier(num_layers=2, width=512),
        optax.adamw(1e-3),
        classification_loss,
        mesh=make_mesh(MESHES[0], devices8),
        batch=Batch(np.zeros((64, 784), np.float32), np.zeros(64, np.int32)),
        **{**SECONDARY, "min_weight_size": 2**18},
        **codes,
    )
    found = ledger(program, compile=True)
    assert any(one.purpose == "regather_params" for one in found.collectives)
    assert total_bytes(found.compiled.collectives) == found.total_bytes


def test_groups_may_be_replicated_too(devices8):
    mesh = {"replica": 2, "data": 2, "node": 2}
    program = build(mesh, devices8, builder=hsdp)
    assert {c.axes for c in counted_collectives(program) if c.purpose == "regather_params"} == {
        ("data",)
    }
