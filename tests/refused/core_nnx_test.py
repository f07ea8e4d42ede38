"""Mistakes in NNX models."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manualpar import Batch, data_parallel
from manualpar.core.model.interface import interface_of
from tests.refused.table import build, check_refused, rows
from tests.tiny import BATCHES, mean_loss, square_loss

ROWS = Batch(*(np.ones((8, 16), np.float32) for _ in "xy"))
TWO_BY_FOUR = {"data": 2, "model": 4}
LECUN = nnx.initializers.lecun_normal()


# Wrong models; their names say what is wrong.


class Lazy(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((12, 12)))

    def __call__(self, x):
        self.seen = nnx.BatchStat(x.mean(0))
        return x @ self.scale


class Setting(Lazy):
    def __call__(self, x):
        self.scale[...] = self.scale * 2
        return x @ self.scale


class Peeking(Lazy):
    def __call__(self, x):
        return x @ self.scale.get_raw_value()


class Reshaping(Lazy):
    def __call__(self, x):
        self.scale.set_raw_value(self.scale.get_raw_value().reshape(-1))
        return x @ self.scale[...].reshape(12, 12)


class Drawing(Lazy):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.noise = rngs.fork()

    def __call__(self, x):
        return x @ self.scale + jax.random.normal(self.noise.noise(), x.shape)


class NoRngs(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones((12,)))


class Bare(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(12, 12, rngs=rngs)
        self.inner.scale = jnp.ones((12,))

    def __call__(self, x):
        return self.inner(x) * self.inner.scale


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.scales = nnx.Param({"a": jnp.ones((12,))})


class Constant(nnx.Module):
    def __init__(self, rngs):
        self.scale = np.ones((12,), np.float32)


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class Stack(nnx.Module):
    """Three stacked layers; `names` annotates their kernels, `metadata` perhaps the stack dim."""

    def __init__(self, rngs, names, **metadata):
        init = nnx.with_partitioning(LECUN, names, **metadata)

        def layer(rngs):
            return nnx.Linear(16, 16, use_bias=False, kernel_init=init, rngs=rngs)

        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(layer))(rngs)

    def __call__(self, x):
        return jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)[0]


class NoLazyInit(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.bridge.ToNNX(nn.Dense(5), rngs=rngs)
        self.head = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x, train=False):
        return self.head(self.inner(x))


def weight_norm(rngs):
    return nnx.WeightNorm(nnx.Linear(12, 5, rngs=rngs), rngs=rngs)


def make_number(rngs):
    return 3


def annotated(metadata):
    """Makes a module with one parameter; `metadata` has annotations, and perhaps a `shape`."""
    metadata = dict(metadata)
    shape = metadata.pop("shape", (16, 4))

    class One(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(LECUN(rngs.params(), shape), eager_sharding=False, **metadata)

        def __call__(self, x):
            return x @ self.w[...]

    return One


def logical(rngs):
    init = nnx.with_partitioning(LECUN, (None, "hidden"))
    return nnx.Linear(16, 16, kernel_init=init, rngs=rngs)


COLUMN = {"split": True, "out_sharding": (None, "model")}
abstract = nnx.eval_shape(lambda: Dense(nnx.Rngs(0)))


def call(variables):
    """Traces a call of a model after a function has changed its variables."""
    interface, key = interface_of(Dense), jax.eval_shape(jax.random.key, 0)
    own = jax.eval_shape(interface.init, key)
    jax.eval_shape(lambda own, x: interface.apply(variables(own), x), own, BATCHES[0].inputs)


REFUSED = [
    *rows(
        "a model",
        lambda model: build(model, loss=mean_loss, axes={"data": 4}),
        (nnx.Linear, TypeError, r"Linear needs in_features, out_features in addition to rngs"),
        (NoRngs, TypeError, r"the class NoRngs takes no argument rngs"),
        (Nested, TypeError, r"parameter 'scales' holds a dict, expected an array"),
        (Bare, TypeError, r"'inner/scale' is an array of shape .* that is not in an nnx.Variable"),
        (Constant, r"no parameters, expected .*; in NNX those that an nnx.Param holds"),
        (make_number, TypeError, r"make_number\(rngs=...\) makes 3, expected an nnx.Module"),
        (lambda: 3, TypeError, r"expected an instance of a flax.linen.Module, or an nnx.Module"),
        (Lazy, r"makes a new variable 'seen' of type BatchStat.*__init__"),
        (Setting, r"parameter 'scale' is set when the model is called"),
        (NoLazyInit, r"in an nnx.bridge.ToNNX has no variables .*lazy_init\(jnp.ones"),
        (weight_norm, r"'layer_instance/kernel' is set when .*nnx.WeightNorm.* w / norm\(w\)"),
        (Peeking, r"would be sharded, but they .* NNX by param\["),
        (Reshaping, r"'scale' of shape \(12, 12\) is read as .* shape \(144,\)"),
        (Drawing, r"random stream 'noise/default' draws numbers and has no key"),
        (abstract, TypeError, "Dense has no values"),
        (
            functools.partial(nnx.BatchNorm, 12, axis_name="batch"),
            "a layer or a collective reduces over a mesh axis 'batch', but the mesh has",
        ),
    ),
    *rows(
        "a model under data_parallel",
        lambda model: build(model, data_parallel, loss=mean_loss, axes={"data": 4}),
        (Setting, r"parameter 'scale' is set when the model is called"),
        (weight_norm, r"'layer_instance/kernel' is set when the model is called"),
    ),
    *rows(
        "a call",
        call,
        (lambda own: {**own, "cache": {}}, r"collections \['cache'\], expected only \['params'\]"),
        (lambda own: {}, r"without the variable 'dense/bias' of collection"),
    ),
    *rows(
        "metadata of a split parameter",
        lambda more: build(annotated(more), loss=square_loss, batch=ROWS, axes=TWO_BY_FOUR),
        ({"split": True}, TypeError, r"'w' .* out_sharding=None and split=True, expected a tuple"),
        (COLUMN | {"split": "model"}, "split='model', expected split"),
        ({"shared": True, "out_sharding": (None, "model")}, "split=False, expected split=True"),
        (COLUMN | {"sharding_rules": (("model", "data"),)}, "expected mesh axes and no rules"),
        (COLUMN | {"shape": (2, 16, 4)}, "expected one name for each dimension.*PARTITION_NAME"),
        (COLUMN | {"shape": (16, 6)}, "dim 1 of size 6 does not divide over the 4 devices"),
    ),
    *rows(
        "names",
        lambda model: build(model, loss=square_loss, batch=ROWS, axes=TWO_BY_FOUR),
        (logical, r"of which \['hidden'\] are not axes of the mesh"),
        (
            functools.partial(Stack, names=(None, "model")),
            r"expected one name for each dimension.*PARTITION_NAME",
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
