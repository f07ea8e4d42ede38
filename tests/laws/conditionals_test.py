"""Layers in branches and loops that devices take or skip by their own data, on every platform."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.parameters import placement as shard_rules

WIDTH, LAYERS = 8, 3


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, WIDTH)).astype(np.float32)
    return Batch(x, rng.normal(size=(16, WIDTH)).astype(np.float32))


def is_taken(x):
    """A condition that some devices meet, and others do not."""
    return (x[0] > 0).sum() > WIDTH // 2


class Dropped(nn.Module):
    """Skips its layer if the data says so, in a way that flax or JAX offers."""

    how: str

    @nn.compact
    def __call__(self, x, _):
        layer = nn.Dense(WIDTH, name="layer")
        if self.is_initializing():
            return layer(x), None
        if self.how == "switch":
            index = is_taken(x).astype(int)
            branches = [lambda _, x: x, lambda layer, x: x + nn.tanh(layer(layer(x)))]
            return nn.switch(index, branches, layer, x), None
        if self.how == "nested":
            inner = lambda layer, x: nn.cond(x[0, 0] > 0, nn.Dense.__call__, skip, layer, x)  # noqa: E731
            return nn.cond(is_taken(x), inner, skip, layer, x), None
        return nn.cond(is_taken(x), lambda layer, x: x + nn.tanh(layer(x)), skip, layer, x), None


def skip(_, x):
    return x


def layers(how, body=Dropped):
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    return nn.scan(body, length=LAYERS, **axes)(how, name="layers")


class Stack(nn.Module):
    """A loop over layers that are skipped; or a loop that is skipped."""

    how: str

    @nn.compact
    def __call__(self, x):
        if self.how == "loop" and not self.is_initializing():
            run = lambda loop, x: loop(x, None)[0]  # noqa: E731
            x = nn.cond(is_taken(x), run, skip, layers("never", Plain), x)
        else:
            body = Plain if self.how == "loop" else Dropped
            x = layers(self.how, nn.remat(body) if self.how == "remat" else body)(x, None)[0]
        return nn.Dense(WIDTH, name="head")(x)


class Plain(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(WIDTH, name="layer")(x)), None


class Module(nnx.Module):
    """Skips layers of a loop, in a branch that has the layer in its closure."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers, self.head = make(rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jax.lax.cond(is_taken(x), lambda: x + nnx.tanh(layer(x)), lambda: x)

        return self.head(run(x, self.layers))


def square_loss(params, apply_fn, batch, rng):
    del rng
    losses = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


def expected_step(apply_fn, params, batch, devices):
    """Takes a step of SGD on one device: the mean of the losses of the devices' parts."""

    def loss(params):
        pairs = zip(np.split(batch.inputs, devices), np.split(batch.labels, devices), strict=True)
        parts = [Batch(*pair) for pair in pairs]
        return jnp.stack([square_loss(params, apply_fn, part, None)[0] for part in parts]).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def check(model, builder, shape, options, apply_fn):
    batch, devices = make_batch(), int(np.prod(list(shape.values())))
    if builder is not data_parallel:
        options = {"min_weight_size": 1, **options}
    mesh = make_mesh(shape, jax.devices()[:devices])
    program = builder(model, optax.sgd(0.1), square_loss, mesh=mesh, batch=batch, **options)
    state = program.init(jax.random.key(0))
    params = jax.device_get(program.whole(state)["params"])
    value, expected = expected_step(apply_fn, params, batch, devices)
    state, metrics = program.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], value, rtol=1e-5)
    found = jax.device_get(program.whole(state)["params"])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    return program


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def is_gpu(request, monkeypatch):
    """Whether layers are averaged in a loop, as on GPUs."""
    if request.param:
        monkeypatch.setattr(shard_rules, "OVERLAPS_MEANS", {"cpu"})
        monkeypatch.setattr(shard_rules, "MIN_MEAN_SIZE", 0)
    return request.param


STRATEGIES = {
    "dp": (data_parallel, {"data": 4}, {}),
    "fsdp": (fsdp, {"data": 4}, {}),
    "fsdp, padded": (fsdp, {"data": 8}, {"pad": True}),
    "fsdp, kept": (fsdp, {"data": 4}, {"keep_gathered": ("layers",)}),
    "zero1": (zero, {"data": 8}, {"stage": 1}),
    "zero2": (zero, {"data": 4}, {"stage": 2}),
    "hsdp": (hsdp, {"replica": 2, "data": 2}, {}),
    "hsdp, backward": (hsdp, {"replica": 2, "data": 4}, {"replica_mean": "backward"}),
}
FAST = {
    ("cond", "dp"),
    ("cond", "fsdp"),
    ("switch", "zero2"),
    ("nested", "fsdp"),
    ("loop", "dp"),
    ("loop", "fsdp, kept"),
}


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        pytest.param(how, strategy, marks=() if (how, strategy) in FAST else pytest.mark.slow)
        for how in ("cond", "switch", "nested", "remat", "loop")
        for strategy in STRATEGIES
        if how != "loop" or strategy.startswith(("dp", "zero", "fsdp, kept"))
    ],
)
def test_a_layer_that_some_devices_skip_trains_as_on_one_device(devices8, is_gpu, how, strategy):
    builder, shape, options = STRATEGIES[strategy]
    check(Stack(how), builder, shape, options, Stack(how).apply)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(WIDTH, name="layer")(x))


class DroppedAtRandom(nn.Module):
    """Skips a layer with dropout at random."""

    @nn.compact
    def __call__(self, x, train=False):
        layer = Noisy(name="noisy")
        if not train:
            return layer(x, train)
        is_kept = jax.random.bernoulli(self.make_rng("dropout"), 0.5)
        x = nn.cond(is_kept, lambda layer, x: x + layer(x, train), skip, layer, x)
        return layer(x, train)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_layer_that_is_skipped_at_random_draws_the_masks_of_one_device(devices8, strategy):
    def loss_fn(params, apply_fn, batch, rng):
        def with_masks(variables, x):
            return apply_fn(variables, x, train=True, rngs={"dropout": rng})

        return square_loss(params, with_masks, batch, rng)

    builder, shape, options = STRATEGIES[strategy]
    options = options if strategy == "dp" else {"min_weight_size": 1}
    mesh, batch, model = make_mesh(shape, devices8[:4]), make_batch(), DroppedAtRandom()
    program = builder(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=batch, **options)
    state = program.init(jax.random.key(0))
    params, key = jax.device_get(program.whole(state)["params"]), jax.random.split(state.rng)[1]
    keys = [jax.random.split(jax.random.fold_in(key, device), 1)[0] for device in range(4)]
    shares = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(4)]
    losses = [loss_fn(params, model.apply, *pair)[0] for pair in zip(shares, keys, strict=True)]
    _, metrics = program.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"][0] / 16, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [x if x in ("dp", "fsdp") else pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES],
)
def test_a_layer_of_an_nnx_model_that_some_devices_skip_trains(devices8, is_gpu, strategy):
    builder, shape, options = STRATEGIES[strategy]

    def apply_fn(variables, x):
        model = Module(nnx.Rngs(0))
        nnx.update(model, variables["params"])
        return model(x)

    check(Module, builder, shape, options, apply_fn)
