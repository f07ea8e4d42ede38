"""Constants that meet data in loops and conditionals, by their types and against one device."""

from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, make_mesh
from manualpar.core.model.loops import varying_loops
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.tracing.jaxprs import all_equations

DATA = frozenset({"data"})
NONE = frozenset()


def sums(c, x):
    return c + x, c


# Functions of an array [4, 3] that varies over `data`, and the axes that their results vary over.
TYPES = {
    "scan": (lambda x: jax.lax.scan(sums, jnp.zeros(3), x), [DATA, DATA]),
    "no steps": (lambda x: jax.lax.scan(sums, jnp.zeros(3), x[:0])[0], [DATA]),
    "a number": (lambda x: jax.lax.scan(sums, 0.0, x[0])[0], [DATA]),
    "a counter": (
        lambda x: jax.lax.scan(lambda c, x: ((c[0] + 1, c[1] + x), None), (0, 0.0), x[0])[0],
        [NONE, DATA],
    ),
    "in turn": (
        lambda x: jax.lax.scan(lambda c, x: ((c[1], c[2], x), None), (0.0, 0.0, 0.0), x[0])[0],
        [DATA, DATA, DATA],
    ),
    "nested": (
        lambda x: jax.lax.scan(lambda c, x: (jax.lax.scan(sums, c, x)[0], None), 0.0, x)[0],
        [DATA],
    ),
    "a sum over devices": (
        lambda x: jax.lax.scan(lambda c, x: (c + jax.lax.psum(x, "data"), None), 0.0, x[0])[0],
        [NONE],
    ),
    "the same at the end": (
        lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data"), None), x, None, length=2)[0],
        [DATA],
    ),
    "keys": (
        lambda x: jax.lax.scan(
            lambda c, key: (c + jax.random.uniform(key), None),
            0.0,
            jax.random.split(jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))),
        )[0],
        [DATA],
    ),
    "while": (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, jnp.zeros(x.shape))
        ),
        [NONE, DATA],
    ),
    "while, until data": (
        lambda x: jax.lax.while_loop(lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, 2.0), (0, 1.0)),
        [DATA, DATA],
    ),
    "fori": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + i * x, jnp.zeros((4, 3))), [DATA]),
    "fori, up to data": (
        lambda x: jax.lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: c + i, 0),
        [DATA],
    ),
    "cond": (
        lambda x: jax.lax.cond(x.size > 3, lambda: (x, 1), lambda: (jnp.ones((4, 3)), 2)),
        [DATA, NONE],
    ),
    "cond of an operand": (
        lambda x: jax.lax.cond(x.size > 3, jnp.sin, jnp.ones_like, operand=x),
        [DATA],
    ),
    "cond by data": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 0.0), [DATA]),
    "switch by data": (
        lambda x: jax.lax.switch(x[0, 0].astype(int), [lambda y: y, lambda y: y + 1], 0.0),
        [DATA],
    ),
    "switch": (
        lambda x: jax.lax.switch(jnp.int32(1), [jnp.sin, lambda x: jnp.zeros((4, 3))], x),
        [DATA],
    ),
}


def on_devices(function):
    """Traces a function of each device's part of an array, with loops that cast."""

    def on_device(x):
        with varying_loops():
            function(x)
        return x

    spec = PartitionSpec("data")
    run = jax.shard_map(on_device, mesh=make_mesh({"data": 8}), in_specs=spec, out_specs=spec)
    jax.eval_shape(run, jax.ShapeDtypeStruct((32, 3), jnp.float32))


@pytest.mark.parametrize("name", TYPES)
def test_results_vary_where_data_went_in(devices8, name):
    function, axes = TYPES[name]

    def check(x):
        assert [varying_axes(y) for y in jax.tree.leaves(function(x))] == axes

    on_devices(check)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: jax.lax.scan(lambda c, x: ((c, x), None), 0.0, x), "pytree structure"),
        (lambda x: jax.lax.scan(lambda c, x: (x.astype(int), None), jnp.zeros(3), x), "dtypes"),
        (lambda x: jax.lax.cond(x.size > 3, lambda: x, lambda: (x, x)), "structure"),
        (lambda x: jax.lax.cond(x[0, 0] > 3, lambda: 1, lambda: (1, 2)), "structure"),
    ],
)
def test_other_mistakes_are_jaxs_to_explain(devices8, function, message):
    with pytest.raises(TypeError, match=message):
        on_devices(function)


def test_devices_that_choose_different_branches_send_nothing_in_them(devices8):
    """The gradient of what all devices have alike is summed over them outside of the branches."""

    def chosen(x):
        is_first = jax.lax.axis_index("data") == 0
        with varying_loops():
            y = jax.lax.cond(is_first, lambda x: 2 * x, lambda x: 3 * x, x)
        return jax.lax.psum(y, "data")

    mesh, whole = make_mesh({"data": 8}), PartitionSpec()
    run = jax.shard_map(jax.grad(chosen), mesh=mesh, in_specs=whole, out_specs=whole)
    conds = [x for x in all_equations(jax.make_jaxpr(run)(1.0).jaxpr) if x.primitive.name == "cond"]
    assert conds
    assert not any("psum" in str(x.params["branches"]) for x in conds)
    assert jax.jit(run)(1.0) == 2 + 7 * 3


def test_other_threads_and_later_calls_have_jaxs_own(devices8):
    before = jax.lax.scan

    def elsewhere():
        return float(jax.lax.scan(sums, 0.0, jnp.ones(3))[0])

    def call(x):
        assert jax.lax.scan is not before
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(elsewhere).result() == 3
        raise KeyError

    with pytest.raises(KeyError):
        on_devices(call)
    assert jax.lax.scan is before


# Losses and models against one device.


def squares(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs).mean(1) - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def ctc(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch.inputs)
    labels = jnp.ones((len(logits), 2), int)
    losses = optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def ratio_in_a_loop(params, apply_fn, batch, rng):
    """A ratio of sums over all devices, which a loop adds up; and a count that devices choose."""
    y = apply_fn({"params": params}, batch.inputs).mean(1)

    def add(carry, row):
        total, count, largest = carry
        some = jnp.abs(row).sum(), (row > 0).sum()
        total, count = (
            x + jax.lax.psum(y, "data") for x, y in zip((total, count), some, strict=True)
        )
        return (total, count, jnp.maximum(largest, row.max())), None

    (total, count, _), _ = jax.lax.scan(add, (0.0, 0, 0.0), y)
    loss = total / count
    positive = [jax.lax.cond(row[0] > 0, lambda: 1, lambda: 0) for row in y]
    metrics = {"loss": (loss * len(y), len(y)), "positive": (sum(positive), len(y))}
    return loss, metrics


class Loops(nn.Module):
    """A recurrence from zeros, a loop that ends by data, and a branch that is a constant."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        h = jax.lax.scan(
            lambda h, x: (jnp.tanh(h + x), h), jnp.zeros((len(x), 4)), x.swapaxes(0, 1)
        )[0]
        factor = jax.lax.while_loop(lambda c: c < jnp.abs(x).max(), lambda c: 2 * c, 0.5)
        x += h[:, None] + 0 * factor
        return jax.lax.cond(x.shape[1] > 2, lambda: 2 * x, lambda: jnp.ones(x.shape))


class NNXLoops(nnx.Module):
    """A module in a scan and a loop from zeros; without FSDP also in a branch that data chooses."""

    def __init__(self, rngs, branch=False):
        self.up, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.branch = branch

    def __call__(self, x):
        over_time = nnx.scan(
            lambda m, h, x: nnx.tanh(h + m.up(x)), in_axes=(None, nnx.Carry, 1), out_axes=nnx.Carry
        )
        h = over_time(self, jnp.zeros((len(x), 8)), x)
        rounds = nnx.fori_loop(
            0, 2, lambda _, c: (c[0], c[1] + c[0].up(x)), (self, jnp.zeros(x.shape))
        )
        x = rounds[1] + h[:, None]
        if self.branch:
            x = nnx.cond(
                jnp.abs(x).max() >= 0, lambda m, x: m.up(x), lambda m, x: jnp.ones(x.shape), self, x
            )
        return self.head(x)


@pytest.mark.parametrize(
    ("model", "loss", "build"),
    [
        (nn.Dense(4), ctc, fsdp),
        pytest.param(NNXLoops, squares, fsdp, marks=pytest.mark.slow),
        pytest.param(
            lambda rngs: NNXLoops(rngs, branch=True), squares, data_parallel, marks=pytest.mark.slow
        ),
        pytest.param(nn.Dense(4), ratio_in_a_loop, fsdp, marks=pytest.mark.slow),
        pytest.param(Loops(), squares, fsdp, marks=pytest.mark.slow),
        pytest.param(Loops(), squares, data_parallel, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_one_device(devices8, model, loss, build):
    inputs, labels = jax.random.normal(jax.random.key(1), (2, 16, 5, 8))
    batch = Batch(inputs, labels[:, 0, :4])
    options = {"min_weight_size": 4} if build is fsdp else {}
    program = build(
        model, optax.sgd(1.0), loss, mesh=make_mesh({"data": 8}), batch=batch, **options
    )
    assert_same_as_one_device(program, batch, jax.random.key(0))
