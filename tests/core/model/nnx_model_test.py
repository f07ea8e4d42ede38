"""An NNX model trains as its Linen twin does, and sends the same, whatever the strategy."""

import functools
import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import (
    Batch,
    abstract_mesh,
    assert_same_as_one_device,
    data_parallel,
    fsdp,
    make_mesh,
)
from manualpar.core.model.interface import interface_of
from manualpar.core.model.nnx_model import NNXModel, assigning_tracers
from manualpar.core.modes.strategy import MODES
from manualpar.inspect import ledger
from manualpar.training.checkpoints import Checkpoints
from tests.core.model.nnx_training import sent, train, with_params
from tests.tiny import BATCHES, STRATEGIES, TOLERANCE, Classifier, build, loss_fn


class NNXClassifier(nnx.Module):
    """`Classifier`, whose call has no argument `train`."""

    def __init__(self, rngs, hidden=32):
        self.input_dense = nnx.Linear(12, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.output_dense = nnx.Linear(hidden, 5, rngs=rngs)

    def __call__(self, x):
        return self.output_dense(self.norm(nn.silu(self.input_dense(x))))


def renamed(params):
    """`Classifier`'s parameters with the names of its twin."""
    names = {"LayerNorm_0": "norm"}
    return {names.get(name, name): tree for name, tree in jax.device_get(params).items()}


def fast_or_slow(name, mode):
    is_fast = (name, mode) in {
        ("fsdp, pad, step", "manual"),
    }
    return pytest.param(name, mode, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "mode"), [fast_or_slow(*pair) for pair in itertools.product(STRATEGIES, MODES)]
)
def test_twins_train_and_send_alike(devices8, name, mode):
    options = {"mode": mode, "num_minibatches": 2, "use_scan": True}
    linen = build(name, devices8, **options)
    program = build(name, devices8, model=NNXClassifier, **options)
    assert sent(program) == sent(linen)
    start = linen.init(jax.random.key(0))
    state = with_params(program, renamed(start.params))
    _, expected = train(linen, start, BATCHES[:3])
    _, losses = train(program, state, BATCHES[:3])
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"gather_dtype": "bfloat16", "reduce_dtype": "float32"},
        {"gather_dtype": "bfloat16", "mode": "auto"},
        {"param_dtype": "bfloat16"},
        {"keep_gathered": ("output_dense",)},
        {"communicate_every": "gather-step"},
    ],
    ids=str,
)
def test_options_do_to_both_the_same(devices8, options):
    linen = build("fsdp", devices8[:4], **options)
    program = build("fsdp", devices8[:4], model=NNXClassifier, **options)
    assert sent(program) == sent(linen)


def test_the_ledgers_are_the_same(devices8):
    linen, program = (ledger(build("fsdp", devices8, model=m)) for m in (None, NNXClassifier))
    assert program.bytes_by_purpose() == linen.bytes_by_purpose()
    assert program.flops_by_phase() == linen.flops_by_phase()
    assert program.memory == linen.memory
    assert program.bytes_by_module() == renamed(linen.bytes_by_module())


# What is initialised.


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_parameters_are_those_of_the_module_on_every_mesh(devices8, num_devices):
    program = build("fsdp", devices8[:num_devices], model=NNXClassifier)
    state = program.init(jax.random.key(7))
    init_rng, _ = jax.random.split(jax.random.key(7))
    make = jax.jit(lambda key: nnx.state(NNXClassifier(rngs=nnx.Rngs(key)), nnx.Param))
    expected = nnx.to_pure_dict(make(init_rng))
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected))
    assert state.params["input_dense"]["kernel"].sharding.num_devices == num_devices


def test_an_instance_gives_its_values(devices8):
    model = NNXClassifier(rngs=nnx.Rngs(3))
    state = build("fsdp", devices8, model=model).init(jax.random.key(7))
    expected = nnx.to_pure_dict(nnx.state(model))
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected))


class Tables(nnx.Module):
    """Has arrays in dicts and lists, by names and by paths, and counts its calls in one of them."""

    def __init__(self, rngs):
        self.head = nnx.Linear(12, 5, rngs=rngs)
        self.scales = nnx.data({("head", "kernel"): jnp.full((12,), 2.0)})
        self.tables = nnx.data({"shift": jnp.arange(12.0), "more": [jnp.ones(12), np.ones(12)]})
        self.counts = nnx.data([jnp.zeros(())])

    def __call__(self, x):
        self.counts[0] = self.counts[0] + 1
        x = x * self.scales["head", "kernel"][None] + self.tables["shift"][None]
        return self.head(x + self.tables["more"][0][None] * self.tables["more"][1][None])


@pytest.mark.parametrize("as_class", [True, False], ids=["class", "instance"])
@pytest.mark.parametrize("name", ["fsdp", pytest.param("dp", marks=pytest.mark.slow)])
def test_arrays_in_lists_and_dicts_belong_to_a_model(devices8, tmp_path, name, as_class):
    given = Tables if as_class else Tables(nnx.Rngs(3))
    program = build(name, devices8, model=given, tx=optax.sgd(0.1))
    state = program.init(jax.random.key(0))
    plain = Tables(nnx.Rngs(3))
    nnx.update(plain, jax.device_get(program.whole(state)["params"]))

    def plain_loss(model):
        return loss_fn({}, lambda _, x, **kwargs: model(x), BATCHES[0], None)[0]

    value, grads = nnx.jit(nnx.value_and_grad(plain_loss))(plain)
    before = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    state, metrics = program.train_step(state, BATCHES[0])
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], value, rtol=1e-5)
    found = jax.device_get(program.whole(state))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, before, nnx.to_pure_dict(grads))
    chex.assert_trees_all_close(found["params"], expected, rtol=1e-4, atol=1e-6)
    assert found["constants"]["counts"]["0"] == 1
    assert found["constants"]["scales"].keys() == {"head.kernel"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1)
        restored = checkpoints.restore(program, report=print).state
    chex.assert_trees_all_equal(jax.device_get(program.whole(restored)), found)


@pytest.mark.parametrize(
    "model",
    [
        NNXClassifier,
        functools.partial(NNXClassifier, hidden=32),
        lambda rngs: NNXClassifier(rngs, 32),
        NNXClassifier(nnx.Rngs(0)),
    ],
    ids=["class", "partial", "function", "instance"],
)
def test_whatever_makes_a_module_is_a_model(model):
    mesh = abstract_mesh({"data": 8}, 8)
    program = fsdp(model, optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0], min_weight_size=16)
    assert program.abstract_state.params["input_dense"]["kernel"].shape == (12, 32)


def test_what_is_no_nnx_model_is_left_alone():
    for model in (Classifier, 3, None, jnp.sin):
        assert interface_of(model) is model
    assert isinstance(interface_of(NNXClassifier), NNXModel)
    assert interface_of(NNXClassifier).module.__class__ is NNXClassifier
    assert not isinstance(interface_of(Classifier()), NNXModel)


@pytest.mark.slow
def test_checkpoints_read_like_the_module(devices8, tmp_path):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(12, 12, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x[:, :5]

    program = build("fsdp", devices8[:4], model=Layers)
    state, _ = train(program, program.init(jax.random.key(0)), BATCHES[:1])
    paths = [info.path for info, _ in program.parameters]
    assert paths == [f"layers/{i}/{name}" for i in range(2) for name in ("bias", "kernel")]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(program, state, step=1, extra={})
    elsewhere = build("fsdp", devices8[:2], model=Layers)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(elsewhere, report=lambda line: None).state
    chex.assert_trees_all_equal(jax.device_get(restored.params), jax.device_get(state.params))


# What is refused.


def test_a_derivative_of_shards_in_a_loss_is_refused(devices8):
    def pulled_back(params, apply_fn, batch, rng):
        y, _ = jax.vjp(lambda p: apply_fn({"params": p}, batch.inputs), params)
        return y.mean(), {"loss": (y.sum(), y.size)}

    options = {"mesh": make_mesh({"data": 4}, devices8[:4]), "batch": BATCHES[0]}
    with pytest.raises(ValueError, match=r"<lambda> at nnx_model_test.py.* is differentiated with"):
        fsdp(NNXClassifier, optax.sgd(0.1), pulled_back, min_weight_size=16, **options)
    data_parallel(NNXClassifier, optax.sgd(0.1), pulled_back, **options)


class PulledBack(nnx.Module):
    def __init__(self, phases, rngs):
        self.dense = nnx.Linear(12, 12, rngs=rngs)
        self.phases = phases

    def __call__(self, x, train):
        if ("train" if train else "eval") not in self.phases:
            return self.dense(x)
        graphdef, state = nnx.split(self.dense)
        y, pullback = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return y + pullback(jnp.ones_like(y))[1]


@pytest.mark.parametrize(
    ("phases", "options"),
    [
        (("train", "eval"), {}),
        (("train",), {"num_minibatches": 2}),
        (("train",), {"reshard_after_forward": False}),
        (("eval",), {}),
    ],
)
def test_a_derivative_of_shards_in_a_module_is_refused(devices8, phases, options):
    def loss_fn(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, train=True)
        return (y**2).mean(), {"loss": ((y**2).sum(), jnp.float32(y.size))}

    args = (lambda rngs: PulledBack(phases, rngs)), optax.sgd(0.1), loss_fn
    shared = {"mesh": make_mesh({"data": 4}, devices8[:4]), "batch": BATCHES[0]}
    message = r"\(.*gather_params\) is differentiated within the model or the loss \(jax"
    with pytest.raises(ValueError, match=message):
        fsdp(*args, min_weight_size=16, **options, **shared)
    data_parallel(*args, **shared)
    fsdp(*args, min_weight_size=16, replicate=("dense",), **shared)


# -------------------------------------------------------------------------------------------------
# The keys that calls of NNX models are given, in streams of theirs and as an argument.


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


def only_the_last(rngs):
    return nnx.Sequential(nnx.Linear(32, 32, rngs=rngs), Told(rngs))


class Own(nnx.Sequential):
    """A sequence whose call has parameters of its own."""

    def __call__(self, x, train):
        for layer in self.layers:
            x = layer.up(x) if not train else x
        return x


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
        (only_the_last, {"train": True}, lambda m, rngs: m(X, rngs=rngs)),
        (lambda rngs: Own(Told(rngs)), {"train": False}, lambda m, rngs: m.layers[0].up(X)),
        (lambda rngs: nnx.Sequential(in_a_row(rngs)), {}, lambda m, rngs: m(X, rngs=rngs)),
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
