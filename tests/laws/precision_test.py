"""Parameters may be gathered, and gradients reduced, in a narrower dtype than the stored one."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.inspect import trace_collectives

WIDTH = 32
BUILDERS = {
    "dp": (data_parallel, {}),
    "zero1": (zero, {"min_weight_size": 1}),
    "zero2": (zero, {"min_weight_size": 1, "stage": 2}),
    "fsdp": (fsdp, {"min_weight_size": 1}),
    "fsdp, step": (fsdp, {"min_weight_size": 1, "communicate_every": "step"}),
    "hsdp": (hsdp, {"min_weight_size": 1}),
}


class Mlp(nn.Module):
    """A model that computes in the dtype of its parameters, because its inputs are in bfloat16."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(WIDTH, use_bias=False, name="first")(x))
        return nn.Dense(WIDTH, use_bias=False, name="second")(x)


def loss_fn(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs.astype(jnp.bfloat16)).astype(jnp.float32)
    loss = jnp.square(out - batch.labels).mean(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, WIDTH)).astype(np.float32)
    return Batch(inputs=x, labels=np.roll(x, 1, axis=1))


def build(name, devices, tx=None, **kwargs):
    builder, options = BUILDERS[name]
    mesh = make_mesh({"replica": 2, "data": -1} if builder is hsdp else {"data": -1}, devices)
    tx = tx or optax.sgd(1.0)
    return builder(Mlp(), tx, loss_fn, mesh=mesh, batch=make_batch(), **options, **kwargs)


def bytes_by_scope(program):
    """Returns the bytes of the traced step by kind of collective, without metrics and counts."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    found = {}
    for collective in trace_collectives(traced):
        if "sync_metrics" not in collective.scope and "count_examples" not in collective.scope:
            key = collective.kind
            found[key] = found.get(key, 0) + collective.bytes_sent
    return found


@pytest.mark.parametrize("name", BUILDERS)
def test_bytes_halve_on_the_wire(devices8, name):
    wide = bytes_by_scope(build(name, devices8))
    narrow = bytes_by_scope(build(name, devices8, gather_dtype="bfloat16"))
    mixed = bytes_by_scope(build(name, devices8, gather_dtype="bfloat16", reduce_dtype="float32"))
    assert wide.keys() == narrow.keys() == mixed.keys()
    for kind in wide:
        # ZeRO gathers the new parameters after the update, in their stored dtype, float32.
        is_parameter = kind == "all_gather" and name.startswith("zero")
        assert narrow[kind] * (1 if is_parameter else 2) == wide[kind], kind
        gathers = kind == "all_gather" and not is_parameter
        assert mixed[kind] * (2 if gathers else 1) == wide[kind], kind


def test_stablehlo_has_bfloat16_collectives(devices8):
    program = build("fsdp", devices8, gather_dtype="bfloat16")
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    gathers = re.findall(r'"stablehlo.all_gather".*?-> tensor<([^>]*)>', text)
    assert gathers.count(f"{WIDTH}x{WIDTH}xbf16") == len(gathers) == 3
    scatters = re.findall(r'"stablehlo.reduce_scatter".*?\) -> tensor<([^>]*)>', text, re.DOTALL)
    assert scatters == [f"{WIDTH // 8}x{WIDTH}xbf16"] * 2
    program = build("fsdp", devices8, gather_dtype="bfloat16", reduce_dtype="float32")
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
    scatters = re.findall(r'"stablehlo.reduce_scatter".*?\) -> tensor<([^>]*)>', text, re.DOTALL)
    assert scatters == [f"{WIDTH // 8}x{WIDTH}xf32"] * 2


@pytest.mark.parametrize("name", ["dp", "zero2", "fsdp"])
def test_modules_see_the_gather_dtype_also_in_evaluation(devices8, name):
    seen = []

    class Watching(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (WIDTH, WIDTH))
            bias = self.param("bias", nn.initializers.zeros, (3,))  # Too small to shard.
            seen.append((kernel.dtype, bias.dtype))
            return x @ kernel + bias.sum()

    builder, options = BUILDERS[name]
    mesh = make_mesh({"data": -1}, devices8)
    options = {**options, "min_weight_size": 4} if options else {}
    builder(
        Watching(),
        optax.sgd(1.0),
        loss_fn,
        mesh=mesh,
        batch=make_batch(),
        gather_dtype="bfloat16",
        **options,
    )
    assert seen[-1] == (jnp.bfloat16, jnp.bfloat16)  # The evaluation is traced last.
    assert seen[0] == (jnp.float32, jnp.float32)  # The initialisation is traced first.


def test_parameters_may_be_stored_in_another_dtype(devices8):
    program = build("fsdp", devices8, optax.adam(1e-2), param_dtype="bfloat16")
    state = program.init(jax.random.key(0))
    dtypes = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state[0].mu))}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}
    key = jax.random.split(jax.random.key(0))[0]
    whole = Mlp().init({"params": key}, make_batch().inputs)["params"]
    kernel = whole["first"]["kernel"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(state.params["first"]["kernel"], kernel)
    state, _ = program.train_step(state, make_batch())
    assert state.params["first"]["kernel"].dtype == jnp.bfloat16


class AddsFloat32(nn.Module):
    """A loop over a layer that adds a float32 table to its input."""

    @nn.compact
    def __call__(self, x):
        def layer(dense, x, _):
            return dense(x) + np.ones((1, WIDTH), np.float32), None

        loop = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return loop(nn.Dense(WIDTH), nn.Dense(WIDTH)(x), None)[0]


@pytest.mark.parametrize("option", ["gather_dtype", "param_dtype", "frozen_dtype"])
def test_an_option_that_makes_a_loop_carry_two_dtypes_is_named(devices8, option):
    options = {option: "bfloat16", "trainable": ("Dense_0/*",)}
    with pytest.raises(TypeError, match=f"fsdp: with {option}='bfloat16' the model .* a dtype, or"):
        fsdp(
            AddsFloat32(),
            optax.sgd(1.0),
            loss_fn,
            mesh=make_mesh({"data": -1}, devices8),
            batch=make_batch(),
            **options,
        )
