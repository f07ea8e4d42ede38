"""Mistakes in Linen models, in their loss functions, and in how the models are called."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import Batch, abstract_mesh, data_parallel, hsdp
from manualpar.core.model.apply_fn import CarryingApply
from manualpar.core.model.interface import interface_of
from manualpar.core.model.linen_model import initial_call
from manualpar.core.model.loss_function import call_loss, check_loss
from manualpar.core.state.metrics import add_metrics
from tests.core.model.switched import Switched
from tests.refused.table import build, check_refused, rows, trace_on
from tests.tiny import mean_loss

X = np.ones(4, np.float32)
BATCH = Batch(X, X)
ROWS = Batch(np.ones((16, 8), np.float32), np.zeros(16, np.int32))
DATA8 = abstract_mesh({"data": 8}, 8)


# Wrong models; their names say what is wrong.


class Silent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Decoder(nn.Module):
    def __call__(self, source, target, scale=1.0, *, mask, train=False):
        return source

    def encode(self, source, key):
        return source


class Nothing(nn.Module):
    def encode(self, x):
        return x


class NoInput(nn.Module):
    def __call__(self):
        return jnp.zeros(())


class Empty(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x


class ByHand(nn.Module):
    def __call__(self, x):
        return x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)


class Growing(nn.Module):
    grow: str

    @nn.compact
    def __call__(self, x):
        seen = self.variable("memory", "seen", lambda: jnp.zeros(2))
        if self.grow == "shape":
            seen.value = jnp.zeros(3)
        else:
            self.variable("memory", "more", lambda: jnp.zeros(2))
        return x


class Seen(nn.Module):
    """Adds 0 or 1 to a variable, as a condition on the data decides."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("stats", "seen", jnp.zeros, ())
        if not self.is_initializing():
            seen.value += jax.lax.cond(x.sum() > 0, lambda: 1.0, lambda: 0.0)
        return nn.Dense(4)(x)


class Typing(nn.Module):
    width: int
    names: tuple

    @nn.compact
    def __call__(self, x):
        x = jax.sharding.reshard(x, P(None, "model"))
        init = functools.partial(nn.initializers.lecun_normal(), out_sharding=P(*self.names))
        return nn.Dense(self.width, kernel_init=init)(x)


# Losses.


build_small = functools.partial(build, loss=mean_loss, batch=ROWS)


def drawing(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
    return out.mean(), {"loss": (out.sum(), out.size)}


def reducing(name):
    def loss(params, apply_fn, batch, rng):
        value, metrics = mean_loss(params, apply_fn, batch, rng)
        return jax.lax.pmean(value, name), metrics

    return loss


LOSSES = np.arange(8.0, dtype=np.float32)
MEAN, SUM = LOSSES.mean(), LOSSES.sum()


original = jax.lax.scan, jax.lax.while_loop, jax.lax.cond


def scan(x):
    return original[0](lambda h, x: (h + x, None), jnp.zeros(2), x)


def while_loop(x):
    return original[1](lambda h: h.sum() < 3, lambda h: h + x[0], jnp.zeros(2))


def cond(x):
    return original[2](x.sum() > 0, lambda: jnp.zeros(2), lambda: x[0])


def pull(x):
    y, vjp = jax.vjp(lambda x: jnp.sin(x).sum(), x)
    return vjp(jnp.ones(y.shape))


def call_on_devices(function):
    x = jax.ShapeDtypeStruct((8, 2), jnp.float32)

    def call(x):
        return call_loss(lambda params, apply_fn, batch, rng: function(batch), None, None, x, None)

    return trace_on(DATA8, call, P("data"), x)


UNBOUND = "a layer or a collective reduces over a mesh axis 'batch', but "
CONSTANT = (
    r"function, at core_model_test.py:\d+ \(return original.*\), a loop .* has a constant .* type "
    r"float32\[2\].*mode='auto'"
)
NORM = nn.BatchNorm(use_running_average=False, axis_name="batch")
DRAWS = nn.Sequential([nn.Dense(64), ByHand()])
MEMORY = {"memory": {"seen": np.zeros(2, np.float32)}}
# Models and losses that reduce over a mesh axis that is not bound, and options of their programs.
OF_NO_AXIS = (
    ((NORM, {}), UNBOUND + r"the mesh has the axes \['data'\].* axis_aliases=.'batch': 'data'."),
    ((NORM, {"mode": "auto"}), UNBOUND + "in this mode no axis is bound"),
    ((nn.Dense(4), {"loss": reducing("batch")}), UNBOUND + r".*build make_mesh\({'batch': -1}\)"),
    (
        (nn.Dense(4), {"loss": reducing("data"), "mode": "auto"}),
        "reduces over a mesh axis 'data', .*'data': 'data'.*leave it out",
    ),
)

REFUSED = [
    *rows(
        "call arguments",
        lambda case: initial_call(*case),
        (
            (Decoder(), BATCH, None),
            TypeError,
            r"Decoder.__call__ cannot be called with batch.inputs alone .* it also needs 'target', "
            r"'mask'. It takes \(source, target, scale=1.0, \*, mask, train=False\). Make the .*: "
            r"init_args=lambda batch: \(\(batch\['source'\], batch\['target'\]\), "
            r"\{'mask': batch\['mask'\]\}\)\.",
        ),
        (
            (Decoder(), BATCH, lambda batch: ((X,), {"method": "encode"})),
            TypeError,
            r"Decoder.encode cannot be called with the result of init_args .* needs 'key'",
        ),
        (
            (Silent(), BATCH, lambda batch: ((X,), {"y": X})),
            TypeError,
            "unexpected keyword argument 'y'",
        ),
        (
            (NoInput(), BATCH, None),
            TypeError,
            r"too many positional .* init_args=lambda batch: \(\(\), \{\}\)",
        ),
        (
            (Nothing(), BATCH, None),
            TypeError,
            "Nothing has no method '__call__', .*'method': '...'",
        ),
        (
            (Silent(), {"image": X}, None),
            TypeError,
            r"batch is a dict, expected one with .inputs, .* \(\(batch\['x'\],\), \{\}\)",
        ),
        (
            (Silent(), BATCH, lambda batch: (X,)),
            TypeError,
            r"a tuple that is not the pair \(args, kwargs\)",
        ),
        ((Silent(), BATCH, lambda batch: X), TypeError, "not the pair"),
        ((Silent(), BATCH, lambda batch: (X, {})), TypeError, "not the pair"),
    ),
    *rows(
        "loss",
        lambda returned: jax.eval_shape(lambda: check_loss(returned, X)),
        ((MEAN,), TypeError, "loss_fn returned a tuple of 1 values, expected {'loss'"),
        (None, TypeError, "loss_fn returned a NoneType, expected {'loss'"),
        (LOSSES, r"the loss is float32\[8\], expected a floating-point scalar"),
        ({}, "loss_fn returned no terms"),
        ({"lose": (SUM, 8)}, r"the terms are \['lose'\], expected a 'loss' among them"),
        ({"loss": SUM}, r"term 'loss' is \(float32\[\]\), expected a pair"),
        ({"loss": (np.int32(8), 8)}, "term 'loss' has a sum of dtype int32"),
        ((LOSSES, {}), r"the loss is float32\[8\], expected a floating-point scalar"),
        ((np.int32(8), {}), r"the loss is int32\[\], expected a floating-point"),
        ((np.complex64(8), {}), r"the loss is complex64\[\]"),
        ((None, {}), TypeError, "loss_fn returned a NoneType"),
        ((MEAN, MEAN), TypeError, "metrics is a .*, expected a dict"),
        ((MEAN, {}), r"metrics has \[\], expected a 'loss'"),
        ((MEAN, {"lose": (SUM, 8)}), r"metrics has \['lose'\].*Did you mean it by 'lose'"),
        (
            (MEAN, {"loss": SUM}),
            r"metrics\['loss'\] is \(float32\[\]\), expected a pair of scalars",
        ),
        ((MEAN, {"loss": (SUM, None)}), r"metrics\['loss'\] is \(float32\[\], a NoneType\)"),
        (
            (MEAN, {"loss": (SUM, 8), "acc": (LOSSES, 8)}),
            r"metrics\['acc'\] is \(float32\[8\], a int\), expected a pair of scalars",
        ),
        (
            (MEAN, {"loss": (SUM, np.array(300, jnp.bfloat16))}),
            "count of dtype bfloat16, which cannot hold large counts",
        ),
        ((MEAN, {"loss": (SUM, np.bool_(True))}), "count of dtype bool"),
    ),
    *rows(
        "metrics",
        lambda names: add_metrics(*({name: (1, 1)} for name in names)),
        ("ab", r"second has the metrics \['b'\], .* of first, \['a'\]"),
    ),
    *rows(
        "a loop by another name",
        call_on_devices,
        *((function, TypeError, CONSTANT) for function in (scan, while_loop, cond)),
        (pull, TypeError, r"cotangent .* is a constant, .* jnp.ones_like\(y\)"),
    ),
    *rows(
        "a collection that changes",
        lambda grow: jax.eval_shape(CarryingApply(interface_of(Growing(grow)), MEMORY), {}, X),
        ("shape", r"changes shapes or dtypes in collection 'memory': seen: float32\[2\] ->"),
        ("structure", r"changes what collection 'memory' consists of, from \[.*seen.*more"),
    ),
    *rows(
        "mutable",
        lambda mutable: CarryingApply(interface_of(Switched()), {})({}, X, True, mutable=mutable),
        (True, TypeError, "mutable=True, expected the names of collections"),
    ),
    *rows(
        "dropout by hand",
        lambda option: build_small(DRAWS, data_parallel, loss=drawing, eval_dropout=option),
        (
            False,
            r"model: 'layers_1' .ByHand. draws from rngs\['dropout'\] in evaluation.*eval_dropout",
        ),
        (1, "eval_dropout=1, expected one of True, False"),
    ),
    *rows(
        "types",
        lambda case: build_small(Typing(*case), axes={"data": 2, "model": 4}, mode="explicit"),
        ((6, (None, "model")), r"fsdp: .*does not evenly divide .*Shard a dim that divides"),
        ((8, (None, "modle")), r"fsdp: .*but the mesh has the axes .*'modle' is none of them"),
        ((8, ("model", None)), r"fsdp: .*ambiguous .*Say so with out_sharding= there"),
    ),
    *rows("dp", lambda case: build_small(case[0], data_parallel, **case[1]), *OF_NO_AXIS),
    *rows("fsdp", lambda case: build_small(case[0], **case[1]), *OF_NO_AXIS),
    *rows(
        "axis_aliases",
        lambda aliases: build_small(NORM, axis_aliases=aliases),
        ({"batch": "date"}, "fsdp: axis_aliases has 'batch': 'date', expected axes of the"),
        ({"batch": ()}, r"fsdp: axis_aliases has 'batch': \(\), expected axes of the mesh"),
        (
            {"batch": 1},
            TypeError,
            "fsdp: axis_aliases={'batch': 1}, expected a dict with a mesh axis",
        ),
        ("batch", TypeError, "fsdp: axis_aliases='batch', expected a dict"),
    ),
    *rows(
        "axis_aliases on a mesh",
        lambda options: build_small(NORM, axis_aliases={"batch": "data"}, **options),
        ({"axes": {"data": 4, "batch": 2}}, "'batch' is an axis of the mesh; expected a name that"),
        (
            {"builder": hsdp, "axes": {"replica": 2, "data": 4}, "mode": "auto"},
            "but in this mode the batch is global",
        ),
    ),
    *rows(
        "a model",
        build_small,
        (Empty(), "has no parameters"),
        (Seen(), "sync_collections"),
        (
            nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "pipe"))),
            r"parameter 'kernel' of shape .* are not axes of the",
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
