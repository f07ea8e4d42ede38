"""The keys that calls of NNX models are given, in streams of theirs and as an argument."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, assert_same_as_one_device, fsdp, make_mesh
from manualpar.core.model.interface import interface_of
from manualpar.core.model.nnx_model import assigning_tracers

X = jnp.ones((16, 32))
KEY = jax.random.key(1)


class Told(nnx.Module):
    """Its dropout has no stream, and its call takes one."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=False)

    def __call__(self, x, *, rngs=None):
        return self.dropout(self.up(x), rngs=rngs)


class Wrapped(nnx.Module):
    """Its call hands all arguments on."""

    def __init__(self, rngs):
        self.inner = Told(rngs)

    def __call__(self, x, **kwargs):
        return self.inner(x, **kwargs)

    def named(self, x, train, rngs):
        return self.inner(x, rngs=rngs) if train else self.inner.up(x)


class Streams(nnx.Module):
    """Its dropout has a stream, and what its call hands on takes no `rngs`."""

    def __init__(self, rngs):
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, **kwargs):
        return self.dropout(self.up(x, **kwargs))


def in_a_row(rngs):
    return nnx.Sequential(Told(rngs), nnx.Linear(32, 32, rngs=rngs), Told(rngs))


def drop_inner(module, x, rngs):
    return module.inner.dropout(x, rngs=rngs)


@pytest.mark.parametrize(
    ("model", "call", "plain"),
    [
        (Told, {}, lambda m, rngs: m(X, rngs=rngs)),
        (Told, {"train": True}, lambda m, rngs: m(X, rngs=rngs)),
        (Told, {"train": False}, lambda m, rngs: m.up(X)),
        (Wrapped, {}, lambda m, rngs: m(X, rngs=rngs)),
        (Wrapped, {"method": "named", "train": True}, lambda m, rngs: m.inner(X, rngs=rngs)),
        (Wrapped, {"method": drop_inner}, lambda m, rngs: m.inner.dropout(X, rngs=rngs)),
        (Wrapped, {"method": lambda m, x: m.inner.up(x)}, lambda m, rngs: m.inner.up(X)),
        (in_a_row, {"train": True}, lambda m, rngs: m(X, rngs=rngs)),
    ],
)
@pytest.mark.parametrize("form", ["keys", "rngs", "key"])
def test_a_call_gets_the_rngs_that_its_signature_has(model, call, plain, form):
    given = {"keys": {"dropout": KEY}, "rngs": nnx.Rngs(dropout=KEY), "key": KEY}[form]
    adapted = interface_of(model)
    got = adapted.apply(adapted.init(jax.random.key(0)), X, rngs=given, **call)
    key = nnx.Rngs(dropout=KEY).dropout() if form == "rngs" else KEY
    expected = plain(model(rngs=nnx.Rngs(jax.random.key(0))), nnx.Rngs(dropout=key))
    np.testing.assert_array_equal(got, expected)


def test_rngs_that_are_not_there_stay_so():
    adapted = interface_of(Told)
    variables = adapted.init(jax.random.key(0))
    for given in ({}, {"rngs": None}):
        with pytest.raises(ValueError, match="no `rngs` argument was provided"):
            adapted.apply(variables, X, **given)
    without_default = interface_of(Wrapped)
    args = {"method": lambda m, x, rngs: x if rngs is None else None}
    variables = without_default.init(jax.random.key(0))
    assert without_default.apply(variables, X, rngs=None, **args) is X


def test_a_model_with_streams_keeps_the_keys_for_them():
    adapted = interface_of(Streams)
    variables = adapted.init(jax.random.key(0))
    out = adapted.apply(variables, X, rngs={"dropout": KEY})
    assert 0.3 < (out == 0).mean() < 0.7


def test_a_recurrent_net_takes_the_only_key_for_its_carry():
    def make(rngs):
        return nnx.RNN(nnx.GRUCell(4, 6, rngs=rngs))

    adapted = interface_of(make)
    x = jnp.ones((2, 3, 4))
    got = adapted.apply(adapted.init(jax.random.key(0)), x, rngs={"dropout": KEY})
    np.testing.assert_array_equal(got, make(nnx.Rngs(jax.random.key(0)))(x))


def test_a_program_trains_it_and_evaluates_without_dropout(devices8):
    def loss(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, train=True, rngs={"dropout": rng})
        zeros = (y == 0).astype(jnp.float32)
        count = jnp.float32(y.size)
        return jnp.square(y).mean(), {
            "loss": (jnp.square(y).sum(), count),
            "zeros": (zeros.sum(), count),
        }

    options = {"mesh": make_mesh({"data": 8}), "batch": Batch(X, X), "min_weight_size": 16}
    program = fsdp(Told, optax.sgd(0.1), loss, **options)
    state = program.init(jax.random.key(0))
    assert program.eval_step(state, Batch(X, X))["zeros"][0] == 0
    zeros, total = program.train_step(state, Batch(X, X))[1]["zeros"]
    assert 0.4 < zeros / total < 0.6


class OwnCell(nnx.RNNCellBase):
    """A cell that begins with what it has learned, and draws a key as flax's cells do."""

    num_feature_axes = 1

    def __init__(self, rngs, scale=0.0):
        self.inner = nnx.Linear(10, 6, rngs=rngs)
        self.first = nnx.Param(jnp.linspace(0.1, 0.6, 6))
        self.scale = scale

    def initialize_carry(self, input_shape, rngs=None):
        key, shape = rngs(), (*input_shape[:-1], 6)
        noise = jax.random.normal(key, shape) if self.scale else jnp.zeros(shape)
        return self.first[None] + noise

    def __call__(self, carry, x):
        carry = nnx.tanh(self.inner(jnp.concatenate([carry, x], axis=-1)))
        return carry, carry


def both_ways(rngs):
    return nnx.Bidirectional(nnx.RNN(OwnCell(rngs)), nnx.RNN(nnx.LSTMCell(4, 6, rngs=rngs)))


def recurrent_loss(params, apply_fn, batch, rng):
    losses = jnp.square(apply_fn({"params": params}, batch.inputs)).mean((1, 2))
    return losses.mean(), {"loss": (losses.sum(), losses.size)}


@pytest.mark.parametrize(
    "model",
    [
        lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(4, 6, rngs=rngs), rngs=rngs),
        pytest.param(both_ways, marks=pytest.mark.slow),
        pytest.param(lambda rngs: nnx.RNN(OwnCell(rngs)), marks=pytest.mark.slow),
        pytest.param(lambda rngs: nnx.RNN(nnx.GRUCell(4, 6, rngs=rngs)), marks=pytest.mark.slow),
    ],
    ids=["stream of its own", "both ways", "own cell", "gru"],
)
def test_a_carry_that_uses_no_key_needs_none(devices8, model):
    batch = Batch(jax.random.normal(KEY, (16, 3, 4)), jnp.zeros(16))
    options = {"mesh": make_mesh({"data": 8}), "batch": batch, "min_weight_size": 6}
    program = fsdp(model, optax.sgd(1.0), recurrent_loss, **options)
    assert_same_as_one_device(program, batch, jax.random.key(0))
    adapted = interface_of(model)
    got = adapted.apply(adapted.init(jax.random.key(0)), batch.inputs)
    plain = model(nnx.Rngs(jax.random.key(0)))(batch.inputs)
    np.testing.assert_array_equal(got, plain)


def test_a_carry_that_is_drawn_needs_a_key():
    adapted = interface_of(lambda rngs: nnx.RNN(OwnCell(rngs, scale=1.0)))
    variables, x = adapted.init(jax.random.key(0)), jnp.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"'rngs' draws numbers .* rngs=\{'carry': key\}"):
        adapted.apply(variables, x)
    assert adapted.apply(variables, x, rngs={"carry": KEY}).shape == (2, 3, 6)


class Drawing(nnx.Module):
    """Draws from streams that are forked, split, mapped, merged again and reseeded."""

    def __init__(self, rngs):
        self.forked = rngs.fork()
        self.both = nnx.Param(self.forked.params.normal((4,)) + rngs.normal((4,)))
        self.scattered = nnx.split_rngs(splits=3)(nnx.vmap(make_linear))(rngs)
        merged = nnx.merge(*nnx.split(rngs))
        self.merged = nnx.Param(merged.normal((4,)) + merged.params.normal((4,)))
        nnx.reseed(merged, default=7)
        self.reseeded = nnx.Param(merged.normal((4,)))
        self.stack = nnx.vmap(make_linear)(rngs.split(2))
        self.dropout, self.norm = nnx.Dropout(0.1, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last = make_linear(rngs)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(x)))


def make_linear(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def drawn(key):
    """The state of the module and an output, all streams' keys as numbers."""
    module = Drawing(nnx.Rngs(key, params=key))
    out = module(jnp.ones((2, 4)))
    leaves = jax.tree.leaves(nnx.state(module))
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return out, [jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)]


def test_cheap_assignments_draw_the_bits_of_flax_and_ask_no_tracer_for_its_sharding(monkeypatch):
    asked = []

    @property
    def sharding(tracer):
        asked.append(tracer)
        raise AttributeError

    monkeypatch.setattr(jax.core.Tracer, "sharding", sharding)

    def draw(key):
        with assigning_tracers():
            return drawn(key)

    cheap = jax.jit(draw)(KEY)
    assert not asked
    plain = jax.jit(drawn)(KEY)
    assert asked, "flax asks no tracer any more: assigning_tracers is not needed"
    chex.assert_trees_all_equal(cheap, plain)


def test_building_asks_no_tracer_for_its_sharding(monkeypatch):
    asked = []
    monkeypatch.setattr(jax.core.Tracer, "sharding", property(asked.append))
    fsdp(Drawing, optax.sgd(0.1), squares, mesh=make_mesh({"data": 8}), batch=BATCH)
    assert not asked


BATCH = Batch(jnp.ones((16, 4)), jnp.zeros((16, 4)))


def squares(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs, rngs=rng)
    losses = jnp.square(out - batch.labels).mean(-1)
    return losses.mean(), {"loss": (losses.sum(), losses.size)}
