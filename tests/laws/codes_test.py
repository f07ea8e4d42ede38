"""Quantized gathers and reductions: results differ only by the quantization error."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.memory_and_collectives import ScannedClassifier
from manualpar import Batch, Pipeline, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.inspect import (
    bytes_by_axes,
    parameter_collectives,
    step_bytes,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import compiled_collectives
from manualpar.models import Transformer
from manualpar.models.cross_entropy import classification_loss, language_model_loss
from manualpar.quantization.quantized_collectives import LARGEST_CODE, pack_codes, unpack_codes
from manualpar.training.replicas import ReplicaSentinel
from tests.one_device import slow_unless
from tests.tiny import Classifier, loss_fn, make_batch, own_shapes

MASK = np.r_[np.ones(11), np.zeros(21), np.ones(28), np.zeros(4)].astype(np.float32)
BATCH = make_batch(mask=MASK)
BUILDERS = {
    "dp": (data_parallel, {}),
    "zero1": (zero, {"stage": 1, "min_weight_size": 16}),
    "zero2": (zero, {"stage": 2, "min_weight_size": 16}),
    "fsdp": (fsdp, {"min_weight_size": 16}),
    "fsdp, keep": (fsdp, {"min_weight_size": 16, "reshard_after_forward": False}),
    "fsdp, step": (fsdp, {"min_weight_size": 16, "communicate_every": "step"}),
    "fsdp, pad": (fsdp, {"min_weight_size": 1, "pad": True}),
    "hsdp": (hsdp, {"min_weight_size": 16}),
}
TWO = ("data", "node")
MESHES = {
    "8": ({"data": 8}, {}),
    "4 2": ({"data": 4, "node": 2}, {"axis_name": TWO}),
    "2 4": ({"data": 2, "node": 4}, {"axis_name": TWO, "axis_by_axis": True}),
    "of 8": ({"data": 4, "model": 2}, {}),
    "1": ({"data": 1, "model": 8}, {}),
}
REPLICATED = {
    "2 4": ({"replica": 2, "data": 4}, {}),
    "4 2": ({"replica": 4, "data": 2}, {}),
    "8 1": ({"replica": 8, "data": 1}, {}),
    "1 8": ({"replica": 1, "data": 8}, {}),
}
CODES = {
    "weights": {"gather_code": "int8"},
    "gradients": {"reduce_code": "int8"},
    "both": {"gather_code": "int8", "reduce_code": "int4", "gather_dtype": "bfloat16"},
    "numbers": {"reduce_code": "bfloat16", "gather_dtype": "bfloat16"},
}
# Code -> the largest code, or the precision of a bfloat16.
PRECISION = {**LARGEST_CODE, "bfloat16": 256}


def cases(fast, *more):
    pairs = [(name, mesh) for name in BUILDERS if name != "hsdp" for mesh in MESHES]
    pairs += [("hsdp", mesh) for mesh in REPLICATED]
    return [
        slow_unless(fast, *pair, *one) for pair in pairs for one in ([(x,) for x in more] or [()])
    ]


def build(name, mesh, devices, **options):
    builder, own = BUILDERS[name]
    shape, more = (REPLICATED if name == "hsdp" else MESHES)[mesh]
    return builder(
        Classifier(),
        optax.sgd(1.0),
        loss_fn,
        mesh=make_mesh(shape, devices),
        batch=BATCH,
        num_minibatches=2,
        **own,
        **more,
        **options,
    )


def gradient(program):
    """Returns the parameters, the gradient (by a step of SGD with rate 1), and the metrics."""
    state = program.init(jax.random.key(0))
    before = own_shapes(program, state.params)
    state, metrics = program.train_step(state, BATCH)
    ReplicaSentinel(program.mesh, program.layout).check(state)
    return before, jax.tree.map(np.subtract, before, own_shapes(program, state.params)), metrics


@functools.cache
def of_one_device():
    """Returns a function `(params, batch) -> gradient` that runs on one device."""

    def loss(params, batch):
        return loss_fn(params, Classifier().apply, batch, jax.random.key(0))[0]

    return jax.jit(jax.grad(loss))


@jax.jit
def as_decoded(row):
    return unpack_codes(pack_codes(row, "int8"), row.size, "int8")


def as_gathered(program, params):
    """Returns the parameters after each shard is quantized and dequantized."""

    def decode(x, info, place):
        for dim, axes in enumerate(map(axis_tuple, place.names)):
            size = axes_size(program.mesh, axes)
            if size > 1:
                padding = [(0, width) for width in place.parameter_padding or [0] * x.ndim]
                shards = np.split(np.pad(x, padding), size, dim)
                rows = [as_decoded(part.ravel()) for part in shards]
                parts = [np.reshape(row, shards[0].shape) for row in rows]
                x = np.concatenate(parts, dim)[tuple(map(slice, info.shape))]
        return x

    placed = iter(program.parameters)
    return jax.tree.map(lambda x: decode(x, *next(placed)), params)


FEW = {("fsdp", "4 2")}


@pytest.mark.parametrize(("name", "mesh"), cases(FEW))
def test_a_step_is_that_of_the_parameters_that_the_codes_say(devices8, name, mesh):
    program = build(name, mesh, devices8, gather_code="int8")
    params, found, metrics = gradient(program)
    expected = as_gathered(program, params)
    chex.assert_trees_all_close(found, of_one_device()(expected, BATCH), rtol=2e-4, atol=1e-6)
    value, counts = loss_fn(expected, Classifier().apply, BATCH, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], value, rtol=1e-4)
    assert metrics["loss"][1] == counts["loss"][1] == 39


@pytest.mark.parametrize(
    ("name", "mesh", "code"), cases({("fsdp", "8", "int8"), ("dp", "4 2", "int4")}, *PRECISION)
)
def test_a_gradient_is_off_by_what_the_codes_leave_out(devices8, name, mesh, code):
    program = build(name, mesh, devices8, reduce_code=code)
    params, found, _ = gradient(program)
    expected = of_one_device()(params, BATCH)
    sharding = program.abstract_batch.inputs.sharding
    parts = {str(index): index[0] for index in sharding.devices_indices_map((64, 12)).values()}
    each = []  # The gradients that devices quantize, by device and minibatch.
    for rows in parts.values():
        for part in np.split(np.arange(64)[rows], 2):
            batch = jax.tree.map(lambda x, part=part: x[part], BATCH)
            weight = len(parts) * batch.mask.sum() / MASK.sum()
            each.append(jax.tree.map(lambda g, w=weight: g * w, of_one_device()(params, batch)))
    reductions = 2 if len(parts) > 1 else 0  # The most quantizations of a gradient.

    def check(g, exact, *parts):
        largest = max(np.abs(part).max() for part in parts) * 2
        bound = 2 * reductions * largest / PRECISION[code] / 2 * (1 + 2**-6) + 1e-6
        assert np.abs(g - exact).max() <= bound

    jax.tree.map(check, found, expected, *each)


@pytest.mark.parametrize(
    ("name", "mesh", "code"), cases({("fsdp", "2 4", "both"), ("dp", "8", "numbers")}, *CODES)
)
def test_a_step_sends_the_bytes_of_the_formula(devices8, name, mesh, code):
    program = build(name, mesh, devices8, **CODES[code])
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    sent = bytes_by_axes(parameter_collectives(trace_collectives(traced)))
    closed = step_bytes(program)
    exact = step_bytes(build(name, mesh, devices8))
    if program.strategy.reshard_after_forward:  # Biases are not gathered again.
        assert all(sent[axes] <= closed[axes] for axes in closed)
    else:
        assert sent == closed
    assert sent.keys() <= closed.keys()
    codes = [one for one in trace_collectives(traced) if one.dtype == np.uint8]
    if code == "numbers":
        of_gradients = parameter_collectives(trace_collectives(traced))
        assert {x.dtype for x in of_gradients if x.kind == "all_to_all"} <= {jnp.dtype("bfloat16")}
    if codes:
        assert sum(sent.values()) < sum(exact.values())
    compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    compiled_codes = [one for one in compiled_collectives(compiled) if {*one.dtypes} == {"u8"}]
    if name in ("dp", "zero1", "zero2", "fsdp, step"):
        assert total_bytes(compiled_codes) == total_bytes(codes)
    else:  # XLA merges gathers of the two minibatches if it can.
        assert total_bytes(codes) / 4 <= total_bytes(compiled_codes) <= total_bytes(codes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
def test_a_step_with_codes_holds_no_more_than_one_without(devices8, name):
    builder, own = BUILDERS[name]
    own = {**own, "num_minibatches": 2} if name == "zero2" else own
    batch = Batch(np.zeros((16, 64), np.float32), np.zeros(16, np.int32))

    def temporaries(**codes):
        program = builder(
            ScannedClassifier(num_layers=6, width=256),
            optax.adamw(1e-3),
            classification_loss,
            mesh=make_mesh({"data": 8}, devices8),
            batch=batch,
            **own,
            **codes,
        )
        step = program.train_step.lower(program.abstract_state, program.abstract_batch)
        return step.compile().memory_analysis().temp_size_in_bytes

    # Quantized biases may need a few small buffers more. ZeRO scatters in the loop over layers,
    # where a device has the codes of one layer that it sends, and those that it receives.
    most = 1.005 * temporaries() + (2 * 256 * 256 if "zero" in name else 0)
    weights = {"gather_code": "int8"} if name == "fsdp" else {}
    for code in LARGEST_CODE:
        assert temporaries(reduce_code=code, **weights) <= most
    assert temporaries(reduce_code="int4", stochastic_rounding=True, **weights) <= most


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["residuals", "inputs"])
@pytest.mark.parametrize("name", ["fsdp", "fsdp, step", "zero1"])
def test_stages_send_codes_too(devices8, name, keep):
    builder, own = BUILDERS[name]
    sizes = {"num_layers": 4, "hidden_size": 32, "mlp_size": 64, "num_heads": 2, "num_kv_heads": 1}
    tokens = np.random.default_rng(0).integers(0, 32, (16, 16))

    def train(**codes):
        program = builder(
            Transformer(vocab_size=32, scan_layers=True, **sizes),
            optax.sgd(1.0),
            language_model_loss,
            mesh=make_mesh({"data": 4, "stage": 2}, devices8),
            batch=Batch(tokens, tokens),
            num_minibatches=4,
            pipeline=Pipeline("stage", keep=keep),
            **{**own, "min_weight_size": 256},
            **codes,
        )
        traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
        sent, closed = (
            bytes_by_axes(parameter_collectives(trace_collectives(traced))),
            step_bytes(program),
        )
        assert all(sent[axes] <= closed[axes] for axes in closed)
        assert name == "fsdp" or sent == closed
        state = program.init(jax.random.key(0))
        before = jax.device_get(state.params)
        state, _ = program.train_step(state, Batch(tokens, tokens))
        return sent, jax.tree.map(np.subtract, before, jax.device_get(state.params))

    sent, exact = train()
    fewer, coded = train(gather_code="int8", reduce_code="int8")
    assert fewer["data",] < sent["data",]

    def check(g, expected):
        np.testing.assert_allclose(g, expected, atol=0.03 * np.abs(expected).max() + 1e-6)

    jax.tree.map(check, coded, exact)
