import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.sharding import PartitionSpec as P

from manualpar import Batch, assert_same_as_one_device, data_parallel, fsdp, hsdp, make_mesh
from manualpar.core.model.interface import interface_of
from manualpar.core.model.loops import varying_loops
from manualpar.core.parameters.collectives import varying_axes
from manualpar.core.parameters.placement import strip_boxes
from manualpar.core.tracing.jaxprs import all_equations
from tests.one_device import slow_unless
from tests.tiny import mean_loss, square_loss

BATCH = Batch(
    inputs=jax.ShapeDtypeStruct((16, 8), jnp.float32), labels=jax.ShapeDtypeStruct((16,), jnp.int32)
)


def build(model, loss_fn=mean_loss, axes=("data",), builder=fsdp, **kwargs):
    if builder is fsdp:
        kwargs.setdefault("min_weight_size", 0)
    mesh = make_mesh({"data": 4, "model": 2})
    return builder(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCH, axis_name=axes, **kwargs)


def parameters(model, **kwargs):
    return {info.path: (info, placement) for info, placement in build(model, **kwargs).parameters}


def block(dense):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(dense(8, name="dense")(x)), None

    return Block


@pytest.mark.parametrize("metadata_params", [{}, {nn.PARTITION_NAME: "layers"}])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_dims_that_scan_runs_over_are_found(devices8, axis, metadata_params):
    stack = nn.scan(
        block(nn.Dense),
        variable_axes={"params": axis},
        split_rngs={"params": True},
        length=16,
        metadata_params=metadata_params,
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(stack(name="stack")(x, None)[0])

    found = parameters(Model())
    kernel, placement = found["stack/dense/kernel"]
    assert kernel.shape[axis] == 16
    assert kernel.loop_dims == {axis % 3}
    assert found["stack/dense/bias"][0].loop_dims == {axis % 2}
    assert found["head/kernel"][0].loop_dims == frozenset()
    # 16 layers of 8 x 8: the layers would be the largest dim, but no device may miss one.
    assert placement.names[axis] is None
    assert "data" in placement.names


def test_the_dims_of_nested_loops_are_found(devices8):
    inner = nn.scan(
        block(nn.Dense), variable_axes={"params": 0}, split_rngs={"params": True}, length=16
    )

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return inner(name="inner")(x, None)[0]

    model = nn.vmap(
        Outer, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=None, axis_size=32
    )()
    kernel, _ = parameters(model)["inner/dense/kernel"]
    assert kernel.shape == (16, 32, 8, 8)
    assert kernel.loop_dims == {0, 1}


def test_annotations_in_a_scan(devices8):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, ("data", "model")))
    stack = nn.scan(
        block(lambda *args, **kwargs: nn.Dense(*args, kernel_init=init, **kwargs)),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=4,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return stack(name="stack")(x, None)[0]

    for builder in (fsdp, data_parallel):
        kernel, placement = parameters(Model(), axes=("data", "model"), builder=builder)[
            "stack/dense/kernel"
        ]
        assert kernel.loop_dims == {0}
        assert placement.spec == P(None, None, ("data", "model"))


# Reading shards for parameters.


@pytest.mark.parametrize(
    "penalty",
    [
        lambda params: sum(jnp.sum(p**2) for p in jax.tree.leaves(params)),
        optax.tree.norm,
        lambda params: jnp.abs(strip_boxes(params)["kernel"]).sum(),
        lambda params: jax.tree.map(jnp.mean, params)["kernel"],
    ],
    ids=["squares", "norm", "value", "map"],
)
def test_a_penalty_on_shards_is_refused(devices8, penalty):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + penalty(params), metrics

    message = r"fsdp: .* in .* at \w+.py:\d+ .*nn.unbox\(params\) for penalties"
    with pytest.raises(ValueError, match=message) as caught:
        build(nn.Dense(8), penalised)
    for leak in ("_Probe", "key<", "Key", "float0"):
        assert leak not in str(caught.value)
    if penalty.__name__ == "tree_norm":
        build(nn.Dense(8), penalised, builder=data_parallel)


def test_a_penalty_on_whole_parameters_is_accepted(devices8):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + optax.tree.norm(nn.unbox(params)), metrics

    build(nn.Dense(8), penalised)


def test_a_penalty_on_one_parameter_as_an_array_is_accepted(devices8):
    def penalised(params, apply_fn, batch, rng):
        loss, metrics = mean_loss(params, apply_fn, batch, rng)
        return loss + jnp.sum(params["kernel"] ** 2), metrics

    build(nn.Dense(8), penalised)


class Differentiated(nn.Module):
    """Adds its own gradient with respect to its input."""

    vjp_variables: Any = "params"
    normalise: bool = False

    @nn.compact
    def __call__(self, x):
        def call(dense, x):
            return dense(x)

        y, pullback = nn.vjp(call, nn.Dense(8), x, vjp_variables=self.vjp_variables)
        dense = nn.Dense(8, name="head")
        y = y + pullback(jnp.ones_like(y))[1]
        return nn.SpectralNorm(dense)(y, update_stats=False) if self.normalise else dense(y)


def pulled_back(params, apply_fn, batch, rng):
    """A loss with a derivative of the parameters in it."""
    out, _ = jax.vjp(lambda p: apply_fn({"params": p}, batch.inputs), params)
    return out.mean(), {"loss": (out.sum(), out.size)}


def stepped(params, apply_fn, batch, rng):
    """A loss after a step of gradient descent of its own, as in MAML."""
    grads = jax.grad(lambda p: mean_loss(p, apply_fn, batch, rng)[0])(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return mean_loss(params, apply_fn, batch, rng)


@pytest.mark.slow
def test_a_derivative_of_shards_is_refused(devices8):
    why = (
        "model: .* is differentiated within .* with nn.vjp, .*If you need only .* inputs, .*=False"
    )
    here = r"at loops_test.py:\d+"
    message = rf"of 'Dense_0' .*, in call {here} \(return dense\(x\)\): {why}"
    with pytest.raises(ValueError, match=message):
        build(Differentiated())
    with pytest.raises(ValueError, match=rf", in <lambda> {here} .*: {why}"):
        build(nn.Dense(8), pulled_back)
    with pytest.raises(ValueError, match=r"in stepped at .* steps such as p - lr \* g"):
        build(nn.Dense(8), stepped)
    # In training it is whole, but evaluation gathers it where it is used.
    with pytest.raises(ValueError, match=r"is differentiated within .* use replicate="):
        build(Differentiated(), communicate_every="step")


def test_a_derivative_of_whole_parameters_is_accepted(devices8):
    build(Differentiated(), builder=data_parallel)
    build(Differentiated(), mode="auto")
    build(Differentiated(), replicate=("Dense_0",))
    for loss in (pulled_back, stepped):
        build(nn.Dense(8), lambda params, *args, loss=loss: loss(nn.unbox(params), *args))


@pytest.mark.slow
def test_what_the_refusals_advise_trains_as_on_one_device(devices8):
    model = Differentiated(vjp_variables=False, normalise=True)
    with pytest.raises(ValueError, match=r"of 'head' .*SpectralNorm .* replicate=\('head',\)"):
        build(model)
    program = build(model, replicate=("head",))
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    state = program.init(jax.random.key(0))
    params, others = jax.device_get((state.params, state.collections))
    grads = jax.grad(lambda p: model.apply({"params": p, **others}, x).mean())(params)
    state, _ = program.train_step(state, Batch(x, np.zeros(16, np.int32)))
    jax.tree.map(
        lambda p, g, new: np.testing.assert_allclose(new, p - 0.1 * g, rtol=1e-5, atol=1e-7),
        params,
        grads,
        jax.device_get(state.params),
    )


class Critic(nn.Module):
    dense: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        return self.dense(8)(jnp.tanh(self.dense(8)(x)))


@pytest.mark.parametrize(
    "dense", [pytest.param(nn.Dense, marks=pytest.mark.slow), nn.remat(nn.Dense)], ids=["", "remat"]
)
def test_a_penalty_on_the_gradient_of_the_inputs_is_that_of_one_device(devices8, dense):
    def penalised(params, apply_fn, batch, rng):
        def total(x):
            return (apply_fn({"params": params}, x) ** 2).sum()

        slopes = jax.grad(total)(batch.inputs)
        losses = (jnp.sqrt((slopes**2).sum(-1)) - 1) ** 2
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    batch = Batch(x, np.zeros(16, np.int32))
    assert_same_as_one_device(build(Critic(dense), penalised), batch, jax.random.key(0))


class Normalised(nn.Module):
    """Changes its parameters behind the module's back."""

    @nn.compact
    def __call__(self, x):
        def normalise(params):
            return jax.tree.map(lambda p: p / (1 + jnp.abs(p).max()), params)

        wrapped = nn.map_variables(
            nn.Dense, "params", trans_in_fn=normalise, init=self.is_initializing()
        )
        return wrapped(8)(x)


class Raw(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8, name="dense")(x)
        return y + sum(map(jnp.mean, jax.tree.leaves(self.variables["params"]["dense"])))


class Weight(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(8))(x)


@pytest.mark.parametrize("model", [Normalised(), Raw(), Weight()], ids=["map", "raw", "WeightNorm"])
def test_a_model_that_reads_shards_is_refused_and_runs_replicated(devices8, model):
    with pytest.raises(ValueError, match=r"nn.map_variables .* not be sharded: use replicate=\('"):
        build(model)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    batch = Batch(x, np.zeros(16, np.int32))
    for program in (build(model, builder=data_parallel), build(model, min_weight_size=10**6)):
        state = program.init(jax.random.key(0))
        params = jax.device_get(state.params)
        _, metrics = program.train_step(state, batch)
        expected = model.apply({"params": params}, x).mean()
        np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], expected, rtol=1e-4)


def test_errors_of_the_users_own_stay_their_own(devices8):
    def broken(params, apply_fn, batch, rng):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine"):
        build(nn.Dense(8), broken)


# Collections.


def test_what_is_sown_is_not_carried(devices8):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            self.sow("growing", "norm", jnp.sum(x**2))
            self.sow("intermediates", "x", x)
            total = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())}
            self.sow("losses", "total", jnp.sum(x), **total)
            return x

    def training_loss(params, apply_fn, batch, rng):
        return mean_loss(params, lambda *args: apply_fn(*args, train=True), batch, rng)

    init = functools.partial(Model().init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), BATCH.inputs)
    assert {"growing", "losses"} <= set(variables)
    carried = build(Model(), training_loss).abstract_state.collections
    assert set(carried) == {"batch_stats"}
    assert set(carried["batch_stats"]["BatchNorm_0"]) == {"mean", "var"}


# -------------------------------------------------------------------------------------------------
# Constants that meet data in loops and conditionals, by their types and against one device.


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


# Functions of an array [8, 4] whose type is sharded over (`data`, `model`), and the axes that shard
# their results.
BOTH, ROWS = PartitionSpec("data", "model"), PartitionSpec("data", None)
SHARDED = {
    "scan": (lambda x: jax.lax.scan(lambda c, _: (c + x, c), jnp.zeros((8, 4)), None, 2)[0], BOTH),
    "scan over an axis": (
        lambda x: jax.lax.scan(
            lambda c, x: (c + x.sum(1), None), jnp.zeros(8), jnp.stack([x, x], 0)
        )[0],
        PartitionSpec("data"),
    ),
    "no steps": (
        lambda x: jax.lax.scan(
            lambda c, x: (c + x, None), jnp.zeros((8, 4)), jnp.zeros((0, 8, 4), out_sharding=OVER)
        )[0],
        ROWS,
    ),
    "a dim at a time": (
        lambda x: jax.lax.fori_loop(
            0,
            2,
            lambda i, c: (c[1], jax.sharding.reshard(c[1] + x, ROWS)),
            (jnp.zeros((8, 4)), jnp.zeros((8, 4))),
        )[0],
        ROWS,
    ),
    "while": (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, jnp.zeros((8, 4)))
        )[1],
        BOTH,
    ),
    "cond": (lambda x: jax.lax.cond(x.size > 3, lambda: x, lambda: jnp.ones((8, 4))), BOTH),
    "switch": (
        lambda x: jax.lax.switch(
            jnp.int32(1), [lambda: jnp.ones((8, 4)), lambda: jax.sharding.reshard(x, ROWS)]
        ),
        ROWS,
    ),
}
OVER = PartitionSpec(None, "data", None)


def on_explicit_axes(function):
    """Traces a function of an array [8, 4] with an explicit sharding, with loops that cast."""

    def run(x):
        with varying_loops():
            return function(jax.sharding.reshard(x, BOTH))

    mesh = make_mesh({"data": 4, "model": 2})
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        return jax.eval_shape(run, jax.ShapeDtypeStruct((8, 4), jnp.float32))


@pytest.mark.parametrize("name", SHARDED)
def test_results_are_sharded_as_the_data_that_went_in(devices8, name):
    function, spec = SHARDED[name]
    assert on_explicit_axes(function).sharding.spec == spec


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.cond(x.size > 3, lambda: x, lambda: x.swapaxes(0, 1)),
        lambda x: jax.lax.cond(
            x.size > 3, lambda: x, lambda: jax.sharding.reshard(x, PartitionSpec("model", "data"))
        ),
        lambda x: jax.lax.scan(lambda c, _: (x.astype(int), c), jnp.zeros((8, 4)), None, 2),
    ],
)
def test_other_shardings_and_shapes_are_jaxs_to_refuse(devices8, function):
    with pytest.raises(TypeError, match="must have equal"):
        on_explicit_axes(function)


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


# Scans of a user's own that start from flax's `initialize_carry`, against one device.

WIDTH = 8
OVER_TIME = {
    "variable_broadcast": "params",
    "split_rngs": {"params": False},
    "in_axes": 1,
    "out_axes": 1,
}


class Lifted(nn.Module):
    """A cell's class in a scan."""

    @nn.compact
    def __call__(self, x):
        cell = nn.scan(nn.OptimizedLSTMCell, **OVER_TIME)(WIDTH)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return nn.Dense(4)(cell(carry, x)[1].mean(1))


class OneWay(nn.Module):
    """A method in a scan, and a carry made by a cell that belongs to no module."""

    @functools.partial(nn.transforms.scan, **OVER_TIME)
    @nn.compact
    def __call__(self, carry, x):
        return nn.LSTMCell(WIDTH)(carry, x)

    def initial(self, shape):
        return nn.LSTMCell(WIDTH, parent=None).initialize_carry(jax.random.key(0), shape)


class BothWays(nn.Module):
    @nn.compact
    def __call__(self, x):
        forward, backward = OneWay(), OneWay()
        carry = forward.initial(x[:, 0].shape)
        ys = forward(carry, x)[1] + backward(carry, jnp.flip(x, 1))[1]
        return nn.Dense(4)(ys.mean(1))


class Function(nn.Module):
    """A function of a cell in a scan; what it ends with is used."""

    @nn.compact
    def __call__(self, x):
        cell = nn.GRUCell(WIDTH)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        over_time = nn.scan(lambda cell, carry, x: cell(carry, x), **OVER_TIME)
        return nn.Dense(4)(over_time(cell, carry, x)[0])


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x[..., None]
        cell = nn.scan(nn.ConvLSTMCell, **OVER_TIME)(4, kernel_size=(3,))
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return nn.Dense(4)(cell(carry, x)[1].mean((1, 2)))


class OwnNNX(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(8, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        carry = self.cell.initialize_carry(x[:, 0].shape, nnx.Rngs(0))
        axes = {"in_axes": (None, nnx.Carry, 1), "out_axes": (nnx.Carry, 1)}
        over_time = nnx.scan(lambda cell, carry, x: cell(carry, x), **axes)
        return self.head(over_time(self.cell, carry, x)[1].mean(1))


MODELS = {
    "lifted class": Lifted(),
    "both ways": BothWays(),
    "function": Function(),
    "convolution": Convolution(),
    "nnx": OwnNNX,
}
INPUTS, LABELS = jax.random.normal(jax.random.key(1), (2, 32, 3, 8))
BATCH_OF_VARYING_LOOPS = Batch(INPUTS, LABELS[:, 0, :4])
PROGRAMS = {
    "minibatches": (fsdp, {"data": 8}, {"num_minibatches": 2, "use_scan": True}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {}),
    "data parallel": (data_parallel, {"data": 4, "model": 2}, {}),
    "auto": (fsdp, {"data": 8}, {"mode": "auto"}),
    "explicit": (fsdp, {"data": 8}, {"mode": "explicit"}),
}
FAST = {("nnx", "minibatches")}


def cases():
    for model in MODELS:
        for program in PROGRAMS:
            yield slow_unless(FAST, model, program)


@functools.cache
def on_one_device(name):
    """The parameters after a step of SGD with plain flax."""
    model = interface_of(MODELS[name])
    init_rng, rng = jax.random.split(jax.random.key(0))
    params = model.init({"params": init_rng}, INPUTS)["params"]
    grads = jax.jit(
        jax.grad(lambda p: square_loss(p, model.apply, BATCH_OF_VARYING_LOOPS, rng)[0])
    )(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "program"), list(cases()))
def test_a_scan_from_flaxs_own_carry_trains_as_on_one_device(devices8, name, program):
    builder, axes, options = PROGRAMS[program]
    if builder is not data_parallel:
        options = {"min_weight_size": 0, **options}
    program = builder(
        MODELS[name],
        optax.sgd(0.5),
        square_loss,
        mesh=make_mesh(axes),
        batch=BATCH_OF_VARYING_LOOPS,
        **options,
    )
    state, _ = program.train_step(program.init(jax.random.key(0)), BATCH_OF_VARYING_LOOPS)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6),
        jax.device_get(state.params),
        on_one_device(name),
    )
