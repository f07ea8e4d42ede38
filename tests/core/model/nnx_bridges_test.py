"""Flax's bridges in both directions: layers of Linen in an NNX model, of NNX in a Linen model."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import data_parallel, fsdp, hsdp, make_mesh, zero
from tests.one_device import train_program
from tests.tiny import make_batch, square_loss

STRATEGIES = {
    "dp": (data_parallel, {"data": 8}, {}),
    "fsdp": (fsdp, {"data": 4}, {"min_weight_size": 1}),
    "zero": (zero, {"data": 8}, {"min_weight_size": 1, "stage": 2}),
    "hsdp": (hsdp, {"replica": 2, "data": 4}, {"min_weight_size": 1}),
    "auto": (fsdp, {"data": 8}, {"min_weight_size": 1, "mode": "auto"}),
}


def batches():
    rng = np.random.default_rng(0)
    made = [make_batch(seed, 16) for seed in range(2)]
    labels = rng.normal(size=(16, 5)).astype(np.float32)
    return [batch.replace(labels=labels, mask=None) for batch in made]


def train(model, strategy, loss_fn=square_loss, **options):
    builder, shape, placing = STRATEGIES[strategy]
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
    program = builder(
        model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=batches()[0], **placing, **options
    )
    state, losses = train_program(program, batches())
    return program, state, losses


class Layers(nn.Module):
    """Layers of Linen, one of them annotated, with running statistics and a dropout."""

    @nn.compact
    def __call__(self, x, train=True):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data"))
        x = nn.Dense(8, kernel_init=init)(x)
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x = nn.Dropout(0.5, deterministic=not train)(scan(name="layers")(x, None)[0])
        # Statistics that do not depend on the examples, so that all devices have the same.
        seen = self.variable("seen", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            seen.value += 1
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(8)(x)), None


class Mixed(nnx.Module):
    """An NNX model with Linen's layers in it."""

    def __init__(self, rngs, width):
        bridge = nnx.bridge.ToNNX(Layers(), rngs=rngs)
        self.inner = bridge.lazy_init(jnp.ones((1, width)), train=False)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x, train=False):
        return self.head(self.inner(x, train=train, mutable=["seen"]))


@pytest.mark.parametrize("as_class", [True, False], ids=["class", "instance"])
@pytest.mark.parametrize(
    "strategy",
    [x if x == "fsdp" else pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES],
)
def test_layers_of_linen_in_an_nnx_model_train_as_in_plain_flax(devices8, strategy, as_class):
    width = batches()[0].inputs.shape[1]
    init_rng, _ = jax.random.split(jax.random.key(0))
    with nnx.use_eager_sharding(False):
        model, other = (Mixed(nnx.Rngs(init_rng), width) for _ in range(2))
    expected = []

    def loss_of(model, batch):
        return jnp.square(model(batch.inputs) - batch.labels).mean()

    given = (lambda rngs: Mixed(rngs, width)) if as_class else other
    grad_of = nnx.jit(nnx.value_and_grad(loss_of))
    for batch in batches():
        value, grads = grad_of(model, batch)
        expected.append(value)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)
    program, state, losses = train(given, strategy)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = jax.device_get(program.whole(state))
    chex.assert_trees_all_close(
        found["params"], nnx.to_pure_dict(nnx.state(model, nnx.Param)), rtol=1e-4, atol=1e-6
    )
    assert found["seen"]["inner"]["calls"] == 2


def test_dropout_of_linen_in_an_nnx_model_has_the_loss_s_key_and_is_off_in_evaluation(devices8):
    def loss_fn(params, apply_fn, batch, rng):
        rngs = {"dropout": rng} if has_key else None
        out = apply_fn({"params": params}, batch.inputs, train=True, rngs=rngs)
        losses = jnp.square(out - batch.labels).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    has_key, width = True, batches()[0].inputs.shape[1]
    program, state, losses = train(lambda rngs: Mixed(rngs, width), "fsdp", loss_fn)
    assert abs(losses[0] - train(lambda rngs: Mixed(rngs, width), "fsdp")[2][0]) > 1e-3
    first, again = (program.eval_step(state, batches()[0])["loss"][0] for _ in range(2))
    assert first == again
    plain = program.eval_step(state.replace(rng=jax.random.key(7)), batches()[0])["loss"][0]
    assert first == plain


class Annotated(nnx.Module):
    """A layer of NNX whose kernel is annotated, and that keeps a count."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
        self.dense = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()), note="a variable with metadata")
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, train=False):
        self.calls[...] += 1
        x = nnx.tanh(self.dense(x))
        return self.dropout(x) if train else x


class Bridged(nn.Module):
    """A Linen model with layers of NNX in it."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = nnx.bridge.to_linen(nnx.Linear, x.shape[-1], 8, name="up")(x)
        x = nnx.bridge.to_linen(Annotated, name="annotated")(x, self.train)
        return nn.Dense(5, name="head")(x)


@pytest.mark.parametrize(
    "strategy",
    [x if x == "fsdp" else pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES],
)
def test_layers_of_nnx_in_a_linen_model_train_as_in_plain_flax(devices8, strategy):
    program, state, losses = train(Bridged(), strategy)
    params = jax.device_get(program.whole(program.init(jax.random.key(0)))["params"])
    calls, expected = jnp.zeros(()), []

    def loss_of(params, batch):
        variables = {"params": params, "batch_stats": {"annotated": {"calls": calls}}}
        with nnx.use_eager_sharding(False):
            out, _ = Bridged().apply(variables, batch.inputs, mutable=["batch_stats"])
        return jnp.square(out - batch.labels).mean()

    for batch in batches():
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        expected.append(value)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = jax.device_get(program.whole(state))
    chex.assert_trees_all_close(found["params"], params, rtol=1e-4, atol=1e-6)
    assert found["batch_stats"]["annotated"]["calls"] == 2
    if strategy == "dp":  # An annotation holds under every strategy.
        placed = {info.path: place.names for info, place in program.parameters}
        assert placed["annotated/dense/kernel"] == (None, "data")


def test_dropout_of_nnx_in_a_linen_model_is_off_in_evaluation(devices8):
    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
        losses = jnp.square(out - batch.labels).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    program, state, losses = train(Bridged(train=True), "fsdp", loss_fn)
    assert abs(losses[0] - train(Bridged(), "fsdp")[2][0]) > 1e-3
    found = program.eval_step(state, batches()[0])["loss"][0]
    assert found == program.eval_step(state.replace(rng=jax.random.key(7)), batches()[0])["loss"][0]


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return nn.Dense(5)(nn.tanh(x))


class NormedInNNX(nnx.Module):
    def __init__(self, rngs, width):
        bridge = nnx.bridge.ToNNX(Normed("data"), rngs=rngs)
        self.inner = bridge.lazy_init(jnp.ones((1, width)))

    def __call__(self, x, train=False):
        return self.inner(x, train=train, mutable=["batch_stats"])


class BridgedNorm(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        norm = nnx.bridge.to_linen(nnx.BatchNorm, 8, axis_name=self.axis_name, name="norm")
        return nn.Dense(5)(nn.tanh(norm(nn.Dense(8)(x), use_running_average=not train)))


@pytest.mark.parametrize(
    "direction", [pytest.param("Linen in NNX", marks=pytest.mark.slow), "NNX in Linen"]
)
def test_batch_norm_over_all_devices_in_a_bridge_is_that_of_one_device(devices8, direction):
    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch.inputs, train=True)
        losses = jnp.square(out - batch.labels).mean(-1)
        return losses.mean(), {"loss": (losses.sum(), losses.size)}

    is_nnx, width = direction == "Linen in NNX", batches()[0].inputs.shape[1]
    given = (lambda rngs: NormedInNNX(rngs, width)) if is_nnx else BridgedNorm("data")
    program, state, _ = train(given, "fsdp", loss_fn)
    variables = jax.device_get(program.whole(program.init(jax.random.key(0))))
    model = Normed() if is_nnx else BridgedNorm()
    variables = {name: tree["inner"] for name, tree in variables.items()} if is_nnx else variables
    for batch in batches():

        def loss_of(params, batch=batch, variables=variables):
            given = {**variables, "params": params}
            out, new = model.apply(given, batch.inputs, train=True, mutable=["batch_stats"])
            return jnp.square(out - batch.labels).mean(), new

        grads, new = jax.grad(loss_of, has_aux=True)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        arrays = jax.tree.map(
            lambda x: getattr(x, "value", x), new, is_leaf=lambda x: hasattr(x, "value")
        )
        variables = {**arrays, "params": params}
    found = jax.device_get(program.whole(state))
    found = {name: tree["inner"] for name, tree in found.items()} if is_nnx else found
    chex.assert_trees_all_close(found, jax.device_get(variables), rtol=1e-4, atol=1e-6)


class Stack(nnx.Module):
    """Layers of NNX in a scan."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))
        self.layers = nnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(lambda x, layer: nnx.tanh(layer(x)))(x, self.layers)


class BridgedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nnx.bridge.to_linen(nnx.Linear, 8, 8, name="only")(x)), None


class Loops(nn.Module):
    """Bridges of loops, in loops and in a checkpoint; one is called twice."""

    @nn.compact
    def __call__(self, x):
        x = nnx.bridge.to_linen(Stack, name="stack")(nn.Dense(8)(x))
        scan = nn.scan(
            nn.remat(BridgedLayer),
            variable_axes={"params": 0, "nnx": 0},
            split_rngs={"params": True},
            length=2,
        )
        x = scan(name="layers")(x, None)[0]
        twice = nnx.bridge.to_linen(nnx.Linear, 8, 8, name="twice")
        return nn.Dense(5)(twice(nn.tanh(twice(x))))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_bridges_in_loops_and_minibatches_are_those_of_one_device(devices8, number):
    options = {"num_minibatches": number, "use_scan": True}
    program, state, _ = train(Loops(), "fsdp", **options)
    variables = jax.device_get(program.whole(program.init(jax.random.key(0))))
    for batch in batches():

        def loss_of(params, batch=batch, variables=variables):
            out = Loops().apply({**variables, "params": params}, batch.inputs)
            return jnp.square(out - batch.labels).mean()

        grads = jax.grad(loss_of)(variables["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads)
        variables = {**variables, "params": params}
    found = jax.device_get(program.whole(state)["params"])
    chex.assert_trees_all_close(found, variables["params"], rtol=1e-4, atol=1e-6)
