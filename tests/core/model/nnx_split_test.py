"""NNX modules whose parameters are split by `nnx.with_partitioning(init, names, split=True)`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manualpar import assert_same_as_one_device, fsdp, hsdp, zero
from manualpar.layers import enter, leave, split_lookup
from tests.core.parameters.split_models import (
    BATCH,
    NORMAL,
    WIDTH,
    build,
    gradients_of,
    worst_difference,
)
from tests.one_device import slow_unless
from tests.tiny import masked_square_loss

HIDDEN, TOKENS = 8, 16


def marked(*names, std=0.3, **metadata):
    return nnx.with_partitioning(NORMAL(std), names, split=True, **metadata)


class Layer(nnx.Module):
    """A split product with a shared factor, and a product with a gathered kernel."""

    def __init__(self, rngs):
        init, shared = NORMAL(0.3), {"split": True, "shared": True, "eager_sharding": False}
        self.norm = nnx.LayerNorm(WIDTH, scale_init=NORMAL(1.0), bias_init=NORMAL(1.0), rngs=rngs)
        bias_init = marked("model")
        self.up = nnx.Linear(
            WIDTH, HIDDEN, kernel_init=marked(None, "model"), bias_init=bias_init, rngs=rngs
        )
        self.factor = nnx.Param(
            init(rngs.params(), (WIDTH, 2)), out_sharding=(None, "model"), **shared
        )
        self.down = nnx.Linear(
            HIDDEN, WIDTH, use_bias=False, kernel_init=marked("model", None), rngs=rngs
        )
        self.bias = nnx.Param(init(rngs.params(), (WIDTH,)))
        stored = nnx.with_partitioning(init, (None, "model"))
        self.stored = nnx.Linear(WIDTH, WIDTH, kernel_init=stored, bias_init=init, rngs=rngs)

    def __call__(self, x):
        h = enter(self.norm(x), "model")
        up, factor = jnp.sin(self.up(h)), h @ self.factor[...]
        product = up * jnp.repeat(factor, up.shape[-1] // factor.shape[-1], -1)
        x = x + leave(self.down(product), "model") + self.bias[None, None]
        return x + jnp.tanh(self.stored(x)) / 2


class Model(nnx.Module):
    """Layers, one by one or stacked, on top of a table that is split over its rows."""

    def __init__(self, rngs, stacked=True):
        self.table = nnx.Embed(TOKENS, WIDTH, embedding_init=marked("model", None), rngs=rngs)
        if stacked:
            make = nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: None})
            self.layers = nnx.split_rngs(splits=2)(make)(rngs)
        else:
            self.layers = nnx.List([Layer(rngs), Layer(rngs)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs, bias_init=NORMAL(1.0))

    def __call__(self, x):
        tokens = (jnp.abs(x[..., 0]) * 8).astype(jnp.int32) % TOKENS
        x = x + split_lookup(self.table.embedding[...], tokens, "model")
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = layer(x)
        else:
            x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)
        return self.head(x)


@functools.cache
def on_one_device(make):
    """The parameters of a model and their gradient by plain NNX, as nested dicts."""
    key, _ = jax.random.split(jax.random.key(0))
    with nnx.use_eager_sharding(False):
        model = nnx.jit(lambda key: make(rngs=nnx.Rngs(key)))(key)
    graph, params = nnx.split(model)

    @jax.jit
    def gradient(params):
        def loss(params):
            return masked_square_loss(None, lambda _, x: nnx.merge(graph, params)(x), BATCH, None)[
                0
            ]

        return jax.grad(loss)(params)

    # Lists have numbers for keys, and a program's tree has strings.
    def named(tree):
        if isinstance(tree, dict):
            return {str(name): named(part) for name, part in tree.items()}
        return np.asarray(tree)

    return tuple(named(nnx.to_pure_dict(each)) for each in (params, gradient(params)))


LISTED = functools.partial(Model, stacked=False)
# A device's part of `down` is as large as the stack.
FAST = (Model, {"data": 2, "model": 4}, fsdp, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axes", "builder", "options"),
    [
        slow_unless([FAST], *case)
        for case in (
            FAST,
            (LISTED, {"data": 2, "model": 4}, fsdp, {"num_minibatches": 2, "use_scan": True}),
            (Model, {"data": 1, "model": 8}, fsdp, {"reshard_after_forward": False}),
            (LISTED, {"replica": 2, "data": 2, "model": 2}, hsdp, {"communicate_every": "step"}),
            (Model, {"data": 4, "model": 2}, zero, {"stage": 2, "num_minibatches": 2}),
            (Model, {"data": 2, "model": 4}, fsdp, {"mode": "auto"}),
            (Model, {"data": 8, "model": 1}, fsdp, {}),
        )
    ],
)
def test_every_gradient_is_that_of_one_device(devices8, make, axes, builder, options):
    program = build(make, axes, builder, **options)
    before, grads = gradients_of(program)
    expected_before, expected = on_one_device(make)
    jax.tree.map(np.testing.assert_array_equal, before, expected_before)
    difference, leaf = worst_difference(grads, expected)
    assert difference < 2e-5, leaf
    if options.get("mode") is None:
        split = {info.path for info, _ in program.parameters if info.split_axes}
        names = {"down/kernel", "up/kernel", "up/bias"}
        names |= {"factor"} if axes["model"] <= 2 else set()
        assert {path.removeprefix("layers/").lstrip("01/") for path in split} == {
            "table/embedding",
            *names,
        }


@pytest.mark.slow
def test_it_is_compared_with_one_device(devices8):
    program = build(Model, {"data": 2, "model": 4})
    assert_same_as_one_device(program, BATCH, jax.random.key(0))
