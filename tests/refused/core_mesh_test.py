"""Mistakes in meshes and mesh axes, and in models that constrain shardings themselves."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, data_parallel, fold_rng_over_axis, fsdp, make_mesh
from manualpar.core.mesh.axes import check_mesh_has
from manualpar.core.mesh.compiler_options import choose_options
from tests.refused.table import build, check_refused, rows
from tests.tiny import square_loss

AXES = (
    ({}, "axes is empty"),
    ({"data": 0}, "axis 'data' has size 0, expected a positive size or -1"),
    ({"data": -2}, "size -2"),
    ({"a": -1, "b": -1}, "more than one -1"),
    ({"data": 16}, "needs 16 devices, got 8"),
    ({"replica": 3, "data": -1}, "expected a divisor of the number of devices, 8"),
    ({"data": 2.0}, TypeError, "expected a name with an integer size"),
    ({"data": True}, TypeError, "expected a name with an integer size"),
    ({1: 8}, TypeError, "expected a name with an integer size"),
)
MISSING = r"names \['replica', 'data'\].*make_mesh\({'replica': 1, 'data': 1, 'model': 8}\)"


class Says(nn.Module):
    """Two dense layers; between them the model calls `say`, for example to constrain a sharding."""

    say: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="down")(self.say(nn.relu(nn.Dense(16, name="up")(x))))


class NNXSays(nnx.Module):
    def __init__(self, say, rngs):
        self.up, self.down = (nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
        self.say = say

    def __call__(self, x):
        return self.down(self.say(nnx.relu(self.up(x))))


BATCH = Batch(*(np.ones((8, 16), np.float32) for _ in "xy"))
constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=P("data", "model"))


def say(what, *, axes=None, builder=data_parallel, model=Says):
    """Builds a program whose model calls a function; `what` is (function, mode)."""
    function, mode = what
    mesh = make_mesh(axes or {"data": 2, "model": 4})
    if function in (named, mapped):
        function = function(mesh)
    model = functools.partial(NNXSays, function) if model is NNXSays else Says(function)
    build(model, builder, loss=square_loss, mesh=mesh, batch=BATCH, mode=mode)


def named(mesh):
    return lambda h: jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None)))


def mapped(mesh):
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


def along_data(spec):
    row = functools.partial(jax.lax.with_sharding_constraint, shardings=spec)
    return lambda h: jax.vmap(row, spmd_axis_name="data")(h)


def put(h):
    return jax.device_put(h, P("data", None))


def product(h):
    return jnp.dot(h, jnp.ones((16, 16)), out_sharding=P("data", None))


def reshard(h):
    return jax.sharding.reshard(h, P("data", None))


def draw(h):
    return h + jax.random.normal(jax.random.key(0), (16,), out_sharding=P("model"))


def back_to_auto(h):
    return jax.sharding.auto_axes(jnp.sin, out_sharding=P("data", None))(h)


OF_ANOTHER_MODE = [
    ((function, mode), rf"data_parallel: .* uses {name}.* with mode='{mode}'.* Use mode='{mend}'")
    for function, mode, name, mend in (
        (constrain, "manual", "jax.lax.with_sharding_constraint", "auto"),
        (named, "manual", "a NamedSharding of the whole mesh", "auto"),
        (constrain, "explicit", "jax.lax.with_sharding_constraint", "auto"),
        (constrain, "auto-unconstrained", "jax.lax.with_sharding_constraint", "auto"),
        (along_data(P("model")), "manual", "jax.lax.with_sharding_constraint", "auto"),
        (mapped, "manual", "jax.shard_map over a mesh", "auto"),
        (put, "manual", "jax.device_put to a PartitionSpec", "auto"),
        (product, "manual", "(a sharding in dot|a PartitionSpec)", "explicit"),
        (product, "auto", "a sharding in dot", "explicit"),
        (reshard, "manual", "(a sharding in reshard|a PartitionSpec)", "explicit"),
        (draw, "manual", "(a sharding in normal|a PartitionSpec)", "explicit"),
        (back_to_auto, "manual", "jax.sharding.auto_axes or explicit_axes", "explicit"),
    )
]

REFUSED = [
    *rows("make_mesh", make_mesh, *AXES),
    *rows("abstract_mesh", lambda axes: abstract_mesh(axes, 8), *AXES),
    *rows(
        "make_mesh",
        make_mesh,
        ({"data": 1024}, r"needs 1024 devices, got \d+\. JAX has started with"),
    ),
    *rows(
        "order",
        lambda order: make_mesh({"model": 4, "data": 2}, order=order),
        (("data", "stage"), r"names \['stage'\], which the mesh lacks; expected each of .* axes"),
        (("data",), r"lacks \['model'\]; expected .* such as \('data', 'model'\), which is the de"),
        (("data", "model", "data"), "names an axis twice"),
        ("data", "make_mesh: order is 'data' and names"),
    ),
    *rows(
        "a mesh without an axis",
        lambda axes: check_mesh_has("hsdp", abstract_mesh({"model": 8}, 8), axes),
        (("data",), r"Build the mesh with make_mesh\({'data': 1, 'model': 8}\)"),
        (("replica", "data"), MISSING),
    ),
    *rows(
        "fold_rng_over_axis",
        lambda axis: jax.eval_shape(lambda: fold_rng_over_axis(jax.random.key(0), axis)),
        ("data", r"fold_rng_over_axis: axis_name names \['data'\].*binds \[\]"),
        ((), "no axis"),
    ),
    *rows(
        "overlap",
        lambda overlap: choose_options("TPU v5 lite", [8], overlap=overlap),
        ("default", "overlap is 'default', expected one of 'auto', 'none'"),
        ("asynchronous", "overlap is 'asynchronous', expected one of 'auto', 'none'"),
        (True, "overlap is True, expected one of 'auto', 'none'"),
    ),
    *rows(
        "compiler_options",
        lambda options: build(compiler_options=options),
        ("fast", TypeError, "compiler_options='fast', expected a dict of names and"),
    ),
    *rows("linen", say, *OF_ANOTHER_MODE),
    *rows("nnx", functools.partial(say, model=NNXSays), *OF_ANOTHER_MODE),
    *rows(
        "a constraint, before it is lowered",
        functools.partial(say, builder=fsdp, model=NNXSays),
        (
            (along_data(P()), "manual"),
            r"fsdp: .* constrains an array to P\('data',\) with mode='manual'.*mode='auto'",
        ),
    ),
    *rows(
        "a constraint to an axis that the mesh lacks",
        functools.partial(say, axes={"data": 8}, builder=fsdp),
        ((constrain, "auto"), r"fsdp: .* has the axes \('data',\), and 'model' is none"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
