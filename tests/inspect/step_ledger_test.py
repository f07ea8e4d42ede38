import functools
import json
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, data_parallel, fsdp, make_mesh
from manualpar.core.mesh.axes import is_axis_bound
from manualpar.core.tracing.scopes import CAST_SCOPE, TENSOR_SCOPE
from manualpar.inspect import (
    ledger,
    parameter_collectives,
    step_bytes,
    step_memory,
    total_bytes,
    trace_collectives,
    trace_step,
)
from manualpar.inspect.communication import as_number
from tests.core.tracing.scoped_program import make, trace
from tests.tiny import Linear, build

X = jax.ShapeDtypeStruct((64, 16), jnp.float32)


# Programs.


def test_a_program(devices8):
    program = make("fsdp", devices8, num_minibatches=2, use_scan=True)
    found = ledger(program)
    assert (found.name, found.mesh) == ("fsdp manual", {"data": 8})
    written = trace_collectives(trace(program))
    assert found.total_bytes == total_bytes(written) > 0
    assert [(c.kind, c.scope) for c in found.collectives] == [(c.kind, c.scope) for c in written]
    assert found.predicted == step_bytes(program)
    assert found.memory == step_memory(program)
    for split in (found.bytes_by_axis(), found.bytes_by_purpose(), found.bytes_by_module()):
        assert sum(split.values()) == found.total_bytes
    modules = {"first", "BatchNorm_0", "layers/Dense_0", "last", "last/bias", ""}
    assert set(found.bytes_by_module()) == modules
    assert sum(found.flops_by_phase().values()) == found.total_flops > 0
    assert sum(found.flops_by_module().values()) == found.total_flops
    assert (found.compiled, found.changes, found.notes) == (None, (), ())


def test_the_formula_is_what_is_written(devices8):
    found = ledger(build("dp", devices8, model=Linear(64)))
    purposes = found.bytes_by_purpose()
    assert found.predicted == {("data",): purposes["sync_gradients"]}
    assert purposes["sync_gradients"] == Fraction(7, 4) * 4 * 12 * 64


@pytest.mark.parametrize("mode", ["auto", "auto-unconstrained"])
def test_what_the_compiler_writes_is_said_to_be_there(devices8, mode):
    program = build("fsdp", devices8, model=Linear(64), mode=mode)
    found = ledger(program)
    assert found.collectives == ()
    assert any(f"mode={mode!r}: the compiler writes" in note for note in found.notes)
    is_free = mode == "auto-unconstrained"
    assert (found.predicted is None) == (found.memory is None) == is_free
    assert any("no bytes by formula: step_bytes: " in note for note in found.notes) == is_free
    assert any("no memory: step_memory: " in note for note in found.notes) == is_free
    compiled = ledger(program, compile=True)
    assert total_bytes(compiled.compiled.collectives) > 0
    assert {change.kind for change in compiled.changes} == {"added"}


def test_a_program_for_devices_that_nobody_has():
    batch = Batch(jnp.ones((512, 64)), jnp.ones(512))
    program = fsdp(
        Linear(1024), optax.sgd(0.1), mean_loss, mesh=abstract_mesh({"data": -1}, 512), batch=batch
    )
    found = ledger(program)
    assert found.mesh == {"data": 512}
    assert found.predicted == {("data",): found.total_bytes - 2 * Fraction(511, 512) * 4 * 4}


def mean_loss(params, apply_fn, batch, rng):
    del rng
    loss = apply_fn({"params": params}, batch.inputs, train=True).sum(-1)
    return loss.mean(), {"loss": (loss.sum(), loss.size)}


class RowParallel(nn.Module):
    """A layer that sums over the devices along `model`, which all hold the same here."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, name="dense")(x)
        if is_axis_bound("model"):
            part = jax.lax.pcast(x, "model", to="varying") / jax.lax.axis_size("model")
            x = jax.lax.psum(part, "model")
        return x


def test_what_goes_over_no_data_axis_is_tensor_parallel(mesh42):
    batch = Batch(jnp.ones((16, 8)), jnp.ones(16))
    program = data_parallel(RowParallel(), optax.sgd(0.1), mean_loss, mesh=mesh42, batch=batch)
    found = ledger(program)
    parallel = [c for c in found.collectives if c.axes == ("model",)]
    assert {c.module for c in parallel} == {"RowParallel"}
    # [4, 16] float32 on a device; the transpose of the cast is a sum too.
    sent = found.bytes_by_purpose()
    assert (sent[TENSOR_SCOPE], sent[CAST_SCOPE]) == (4 * 16 * 4, 4 * 16 * 4)
    assert {(c.purpose, c.phase) for c in parallel} == {
        (TENSOR_SCOPE, "forward"),
        (CAST_SCOPE, "backward"),
    }
    assert not parameter_collectives(parallel)


# Functions.


def gather(x):
    with jax.named_scope("layer"):
        x = jax.lax.all_gather(x, "data", tiled=True)
    return jax.lax.psum(x @ x.T, "data") + jnp.zeros(4)[0]


def test_anybodys_function(mesh42):
    mapped = jax.shard_map(gather, mesh=mesh42, in_specs=P("data"), out_specs=P(), check_vma=False)
    for function, name in ((mapped, "gather"), (jax.jit(mapped), "gather")):
        found = ledger(function, X)
        assert (found.name, found.mesh) == (name, {"data": 4, "model": 2})
        assert found.counts() == {"all_gather": 1, "all_reduce": 1}
        assert found.bytes_by_module() == {
            "layer": 3 * 16 * 16 * 4,
            "": Fraction(2 * 3, 4) * 64 * 64 * 4,
        }
        assert found.bytes_by_purpose() == {"other": found.total_bytes}
        assert found.total_flops == 2 * 64 * 64 * 16
        assert (found.predicted, found.memory, found.notes) == (None, None, ())
    assert ledger(jax.jit(mapped).trace(X)).counts() == found.counts()
    assert ledger(functools.partial(mapped), X).counts() == found.counts()


def test_the_mesh_of_a_plain_jit(mesh42):
    def product(x, y, transpose=False):
        return (x.T if transpose else x) @ y

    rows = NamedSharding(mesh42, P("data"))
    y = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    whole = 2 * 64 * 16 * 8
    assert ledger(product, X, y).total_flops == whole
    by_jit = jax.jit(product, in_shardings=(rows, None), static_argnums=2)
    by_argument = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)

    def by_constraint(x, y):
        return jax.lax.with_sharding_constraint(product(x, y), rows)

    for function, args in (
        (by_jit, (X, y, False)),
        (product, (by_argument, y)),
        (by_constraint, (X, y)),
    ):
        found = ledger(function, *args)
        assert (found.mesh, found.total_flops) == ({"data": 4, "model": 2}, whole // 8)
        assert len(found.notes) == 1
    found = ledger(by_jit, X, y, False, compile=True)
    assert found.compiled.collectives == found.changes == ()
    assert found.compiled.arguments == 16 * 16 * 4 + 16 * 8 * 4
    assert found.compiled.outputs == 16 * 8 * 4
    assert found.compiled.peak >= found.compiled.arguments + found.compiled.outputs


def test_arguments_may_be_trees_and_numbers(mesh42):
    def function(tree, scale):
        return jax.lax.with_sharding_constraint(
            tree["a"] @ tree["b"] * scale, NamedSharding(mesh42, P())
        )

    tree = {"a": X, "b": np.ones((16, 4), np.float32)}
    assert ledger(function, tree, 2.0).total_flops == 2 * 64 * 16 * 4 // 8


# Bad input.


def test_errors_of_a_function_stay_its_own():
    with pytest.raises(NameError, match="undefined_name"):
        ledger(lambda x: undefined_name, X)  # noqa: F821


# JSON.

# What others read: experiments.inspect, budgets.
KEYS = [
    "name",
    "mesh",
    "stage",
    "bytes",
    "counts",
    "collectives",
    "flops",
    "predicted_bytes",
    "memory",
    "compiled",
    "changes",
    "notes",
]


def test_json(devices8):
    program = make("hsdp", devices8)
    found = ledger(program, compile=True)
    written = json.loads(json.dumps(found.to_json()))
    assert list(written) == KEYS
    assert written["name"] == "hsdp manual"
    assert written["mesh"] == {"replica": 2, "data": 4}
    assert written["bytes"]["total"] == float(found.total_bytes)
    assert set(written["bytes"]["by_axes"]) == {"data", "replica", "replica,data", "data,replica"}
    for split in ("by_axes", "by_purpose", "by_module"):
        assert sum(written["bytes"][split].values()) == written["bytes"]["total"]
    assert sum(one["bytes"] for one in written["collectives"]) == written["bytes"]["total"]
    assert sum(one["times"] for one in written["collectives"]) == sum(written["counts"].values())
    assert {"kind", "axes", "shape", "dtype", "purpose", "module", "phase"} < set(
        written["collectives"][0]
    )
    assert sum(written["flops"]["by_phase"].values()) == written["flops"]["total"]
    assert written["predicted_bytes"]["total"] == float(sum(found.predicted.values()))
    assert written["memory"]["parameters"] == found.memory.parameters
    assert written["compiled"]["bytes"] == float(total_bytes(found.compiled.collectives))
    assert written["compiled"]["temporaries"] == found.compiled.temporaries > 0
    difference = sum(c["bytes_after"] - c["bytes_before"] for c in written["changes"])
    assert written["bytes"]["total"] + difference == written["compiled"]["bytes"]


def test_numbers_are_whole_where_they_are():
    assert repr(as_number(Fraction(14, 2))) == "7"
    assert repr(as_number(Fraction(7, 2))) == "3.5"


class OtherJit:
    """A jit as Equinox's `filter_jit`, which traces arrays only, and has no `trace`."""

    def __init__(self, function):
        self.__wrapped__, self.__name__ = function, function.__name__

    def __call__(self, *args):
        return self.__wrapped__(*args)

    def lower(self, *args):
        raise NotImplementedError


def test_the_jit_of_another_library_keeps_the_leaves_that_are_no_arrays(devices8):
    mesh = make_mesh({"data": 8}, devices8)

    def step(model, x):
        y = model["activation"](x @ model["kernel"])
        total = jax.shard_map(
            lambda y: jax.lax.psum(y.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )(y)
        return model, total

    model = {"activation": jax.nn.relu, "kernel": jax.ShapeDtypeStruct((4, 16), "float32")}
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, P("data")))
    found = ledger(OtherJit(step), model, x)
    assert found.name == "step"
    assert dict(found.mesh) == {"data": 8}
    assert found.counts()["all_reduce"] == 1
    assert found.total_flops > 0
    traced = trace_step(OtherJit(step), model, x)
    assert [leaf.shape for leaf in jax.tree.leaves(traced.out_info)] == [(4, 16), ()]
    # A function that nothing has jitted, or JAX has, takes arrays only.
    with pytest.raises(TypeError, match=r"args\[0\]\['activation'\]=.*expected an array"):
        ledger(step, model, x)
