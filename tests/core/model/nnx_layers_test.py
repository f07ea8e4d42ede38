"""What NNX layers keep and draw besides parameters: statistics, masks, what is shared or sown."""

import dataclasses

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from manualpar import Batch, assert_same_as_one_device, fsdp, make_mesh
from manualpar.core.model.interface import interface_of
from tests.core.model.nnx_training import in_modes, sent, train, with_params
from tests.tiny import BATCHES, TOLERANCE, loss_fn


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16, name="up")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dense(5, name="head")(nn.relu(x))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.up(x))))


def build(model, devices, builder=fsdp, **options):
    options = {"mesh": make_mesh({"data": -1}, devices), "batch": BATCHES[0], **options}
    if builder is fsdp:
        options.setdefault("min_weight_size", 16)
    return builder(model, optax.sgd(0.1), options.pop("loss", loss_fn), **options)


@pytest.mark.slow
@in_modes("manual")
def test_batch_norm(devices8, mode):
    linen, program = (build(model, devices8, mode=mode) for model in (LinenNormed(), Normed))
    assert sent(program) == sent(linen)
    start = linen.init(jax.random.key(0))
    state = with_params(program, jax.device_get(start.params))
    expected, expected_losses = train(linen, start, BATCHES[:3])
    state, losses = train(program, state, BATCHES[:3])
    np.testing.assert_allclose(losses, expected_losses, **TOLERANCE)
    chex.assert_trees_all_close(state.collections, expected.collections, **TOLERANCE)
    assert set(state.collections) == {"batch_stats"}
    evaluated = program.eval_step(state, BATCHES[3])["loss"][0]
    np.testing.assert_allclose(
        evaluated, linen.eval_step(expected, BATCHES[3])["loss"][0], **TOLERANCE
    )


def outputs(params, apply_fn, batch, rng):
    """The sum of the outputs' squares, and the share of them that dropout made zero."""
    y = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
    return (y**2).mean(), {
        "loss": ((y**2).sum(), jnp.float32(y.size)),
        "zeros": ((y == 0).sum() * 1.0, jnp.float32(y.size)),
    }


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones((32,)))
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.scale[None] * x
        return self.first(x) - self.second(x)


@in_modes("manual", "explicit")
def test_dropout(devices8, mode):
    batch = Batch(inputs=np.ones((64, 32), np.float32), labels=np.zeros(64, np.int32))
    program = build(Dropping, devices8, mode=mode, loss=outputs, batch=batch)
    state = program.init(jax.random.key(0))
    evaluated = program.eval_step(state, batch)
    assert evaluated["zeros"][0] == 64 * 32
    zeros = []
    for _ in range(3):
        state, metrics = program.train_step(state, batch)
        zeros.append(float(metrics["zeros"][0] / metrics["zeros"][1]))
    assert len(set(zeros)) == 3
    assert all(0.4 < z < 0.6 for z in zeros)


def test_train_turns_nnxs_own_switch():
    module = Dropping(nnx.Rngs(0))
    module.eval()
    model = interface_of(module)
    variables, x = model.init(jax.random.key(0)), jnp.ones((4, 32))
    rngs = {"dropout": jax.random.key(1)}
    assert (model.apply(variables, x, rngs=rngs) == 0).all()  # As it was given.
    assert (model.apply(variables, x, train=True, rngs=rngs) != 0).any()
    assert (model.apply(variables, x, train=False) == 0).all()
    assert (dataclasses.replace(model, phase="eval").apply(variables, x) == 0).all()


def test_streams_take_the_keys_of_their_names():
    class Drawing(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.named = nnx.Rngs(noise=rngs(), other=rngs())
            self.dropouts = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(rngs.split(3))

        def __call__(self):
            return self.named.noise(), self.named.other(), self.dropouts.rngs.key[...]

    model = interface_of(Drawing)
    variables = model.init(jax.random.key(0))

    def draw(**seeds):
        rngs = {name: jax.random.key(seed) for name, seed in seeds.items()}
        out = model.apply(variables, rngs=rngs)
        return [tuple(map(tuple, np.atleast_2d(jax.random.key_data(x)))) for x in out]

    noise, other, stack = draw(noise=0, other=1, dropout=2)
    assert len({noise, other, *stack}) == 5
    assert draw(noise=0, other=1, dropout=3)[:2] == [noise, other]
    assert draw(noise=0, other=4, dropout=2)[::2] == [noise, stack]
    assert draw(noise=0, default=1, dropout=2)[1] == other
    with pytest.raises(ValueError, match=r"'named/other' .* rngs=\{'other': key\}; .* \['dropout'"):
        draw(noise=0, dropout=2)


def test_masks_differ_by_device(devices8):
    def loss(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng})
        rows = (y.reshape(-1, 32) != 0).astype(jnp.float32) @ (2.0 ** jnp.arange(32) / 2**20)
        return (y**2).mean(), {
            "loss": ((y**2).sum(), jnp.float32(y.size)),
            "code": (rows.sum(), jnp.float32(1)),
            "square": ((rows**2).sum(), jnp.float32(1)),
        }

    class One(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones((32,)))
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.scale[None] * x)

    batch = Batch(inputs=np.ones((8, 32), np.float32), labels=np.zeros(8, np.int32))
    program = build(One, devices8, loss=loss, batch=batch)
    _, metrics = program.train_step(program.init(jax.random.key(0)), batch)
    total, square = float(metrics["code"][0]), float(metrics["square"][0])
    assert square * 8 > total**2 * 1.01  # Cauchy and Schwarz: equal if all devices drew one mask.


def test_shared(devices8):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(12, 12, rngs=rngs)
            self.b = self.a
            self.head = nnx.Linear(12, 5, rngs=rngs)

        def __call__(self, x):
            return self.head(self.b(nnx.relu(self.a(x))))

    class LinenTied(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            a = nn.Dense(12, name="a")
            return nn.Dense(5, name="head")(a(nn.relu(a(x))))

    linen, program = (build(model, devices8[:4]) for model in (LinenTied(), Tied))
    assert set(program.abstract_state.params) == {"a", "head"}
    start = linen.init(jax.random.key(0))
    _, expected = train(linen, start, BATCHES[:2])
    assert sent(program) == sent(linen)
    start = linen.init(jax.random.key(0))
    _, losses = train(program, with_params(program, jax.device_get(start.params)), BATCHES[:2])
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False)
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.run = nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs))

    def __call__(self, x, train):
        x = x + self.attention(self.norm(x), deterministic=not train)
        return self.run(x)[:, -1, :5]


class Embedding(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 16, rngs=rngs)
        self.rest = Recurrent(rngs)

    def __call__(self, x, train):
        return self.embed.attend(self.embed(x))[:, 0, :5] + self.rest(self.embed(x), train)


TOKENS = np.arange(64 * 6, dtype=np.int32).reshape(64, 6) % 40
VECTORS = np.random.default_rng(0).normal(size=(64, 6, 16)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x", "mode"),
    [
        (Embedding, TOKENS, "manual"),
        pytest.param(Embedding, TOKENS, "auto", marks=pytest.mark.slow),
        pytest.param(Recurrent, VECTORS, "explicit", marks=pytest.mark.slow),
    ],
)
def test_other_layers(devices8, model, x, mode):
    batch = Batch(inputs=x, labels=np.arange(64, dtype=np.int32) % 5)
    one = build(model, devices8[:1], batch=batch)
    program = build(model, devices8[:4], batch=batch, mode=mode)
    _, expected = train(one, one.init(jax.random.key(0)), [batch] * 2)
    _, losses = train(program, program.init(jax.random.key(0)), [batch] * 2)
    np.testing.assert_allclose(losses, expected, **TOLERANCE)


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(12, 12, rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        x = self.body(x)
        self.sow("losses", "size", (x**2).mean())
        self.sow(nnx.Intermediate, "features", x)
        return self.head(x)

    def hidden(self, x):
        return self.body(x)


@pytest.mark.slow
def test_what_is_sown_is_there_for_the_asking(devices8):
    def loss(params, apply_fn, batch, rng):
        out, state = apply_fn({"params": params}, batch.inputs, mutable=["losses", "intermediates"])
        (size,) = state["losses"]["size"]
        (hidden,) = state["intermediates"]["features"]
        again = apply_fn({"params": params}, batch.inputs, method="hidden")
        function = apply_fn({"params": params}, batch.inputs, method=Sowing.hidden)
        total = (out**2).mean() + size
        count = jnp.float32(len(out))
        difference = (abs(hidden - again) + abs(hidden - function)).sum()
        return total, {"loss": (total * count, count), "difference": (difference, count)}

    one, program = (build(Sowing, devices, loss=loss) for devices in (devices8[:1], devices8[:4]))
    assert program.abstract_state.collections == {}
    _, expected = train(one, one.init(jax.random.key(0)), BATCHES[:2])
    state, losses = train(program, program.init(jax.random.key(0)), BATCHES[:2])
    np.testing.assert_allclose(losses, expected, **TOLERANCE)
    assert program.eval_step(state, BATCHES[0])["difference"][0] == 0


class Penalty(nnx.Variable):
    """What a call leaves for the loss, as flax's example of a VAE does."""


class SowsInLayers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Sowing(rngs)])
        self.count = Penalty(jnp.zeros(()))

    def __call__(self, x):
        out = self.perturb("out", self.layers[0](x))
        add = {"init_fn": lambda: jnp.zeros(()), "reduce_fn": jnp.add}
        self.sow(Penalty, "sum", out.sum(), **add)
        self.count[...] += 1
        return out


def test_what_earlier_calls_have_sown_is_in_no_state(devices8):
    def loss(params, apply_fn, batch, rng, teacher):
        names = ["losses", "Penalty", "perturbations"]
        out, made = apply_fn({"params": params}, batch.inputs, mutable=names)
        goal, told = teacher(batch.inputs, mutable="Penalty")
        size, sums = made["losses"]["layers"]["0"]["size"], made["Penalty"]["sum"]
        total = ((out - goal) ** 2).mean() + sums / len(out) + told["Penalty"]["sum"] / len(out)
        return total + sum(size)

    def a_step():
        program = build(model, devices8[:2], loss=loss, other_models={"teacher": teacher})
        its = jax.tree.map(
            lambda x: jnp.full(x.shape, 0.1, x.dtype, device=x.sharding),
            program.abstract_others["teacher"],
        )
        start = program.init(jax.random.key(0))
        state, metrics = program.train_step(start, BATCHES[0], teacher=its)
        return program, its, (state.params, state.collections, metrics)

    model, teacher = SowsInLayers(nnx.Rngs(0)), SowsInLayers(nnx.Rngs(1))
    _, _, expected = a_step()
    for called in (model, teacher):
        called.count[...] = -1.0  # The call makes it zero again.
        with pytest.warns(DeprecationWarning, match="nnx.capture"):
            called(BATCHES[0].inputs[:2])
    assert {"sum", "out"} < vars(model).keys()
    program, its, found = a_step()
    assert set(found[1]["Penalty"]) == set(its["Penalty"]) == {"count"}
    chex.assert_trees_all_equal(found, expected)
    start = program.init_from(nnx.state(model))  # Which has what the call has sown.
    assert start.collections.keys() == {"Penalty"}
    assert {"sum", "out"} < vars(model).keys()  # The instance is the user's.


def called_as_it_is_made(rngs):
    """Calls the model in the function that makes it, as qwix does, with another number of rows."""
    model = SowsInLayers(rngs)
    model(jnp.ones((2, 12)))
    model.count[...] = 0.0
    return model


def test_what_a_function_sows_while_it_makes_the_model_is_in_no_state(devices8):
    def loss(params, apply_fn, batch, rng, teacher):
        goal, told = teacher(batch.inputs, mutable="Penalty")
        out, made = apply_fn({"params": params}, batch.inputs, mutable=["Penalty"])
        return ((out - goal) ** 2).mean() + made["Penalty"]["sum"] + told["Penalty"]["sum"]

    def a_step(model):
        program = build(model, devices8[:2], loss=loss, other_models={"teacher": model})
        its = jax.tree.map(
            lambda x: jnp.full(x.shape, 0.1, x.dtype, device=x.sharding),
            program.abstract_others["teacher"],
        )
        start = program.init(jax.random.key(0))
        state, metrics = program.train_step(start, BATCHES[0], teacher=its)
        return its, state.params, state.collections, metrics

    expected = a_step(SowsInLayers)
    with pytest.warns(DeprecationWarning, match="nnx.capture"):
        found = a_step(called_as_it_is_made)
    assert set(found[2]["Penalty"]) == set(found[0]["Penalty"]) == {"count"}
    chex.assert_trees_all_equal(found, expected)


class ReadsItsMean(nnx.Module):
    def __init__(self, rngs):
        self.head, self.mean = nnx.Linear(12, 5, rngs=rngs), Penalty(jnp.zeros(()))

    def __call__(self, x, train=True):
        y = self.head(x) - self.mean[...]
        self.sow(Penalty, "mean", y.mean(), init_fn=lambda: 0.0, reduce_fn=lambda _, mean: mean)
        return y


class SowsItsFirstMean(ReadsItsMean):
    def __init__(self, rngs):
        self.head = nnx.Linear(12, 5, rngs=rngs)
        self.sow(Penalty, "mean", jnp.zeros(()), init_fn=lambda: 0.0, reduce_fn=jnp.add)


@pytest.mark.filterwarnings("ignore:.*nnx.capture:DeprecationWarning")
@pytest.mark.parametrize(
    "model",
    [ReadsItsMean, ReadsItsMean(nnx.Rngs(0)), SowsItsFirstMean],
    ids=["class", "object", "sown"],
)
def test_what_a_model_reads_is_its_own_although_it_sows_over_it(devices8, model):
    program = build(model, devices8[:2])
    assert set(program.abstract_state.collections["Penalty"]) == {"mean"}


class Leaving(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(12, 12, rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        x = self.body(x)
        self.body.size = Penalty((x**2).mean())
        self.sow(Penalty, "sown", x.mean())
        return self.head(x)


def test_a_variable_that_a_call_makes_is_there_for_the_asking(devices8):
    def loss(params, apply_fn, batch, rng):
        out, made = apply_fn({"params": params}, batch.inputs, mutable=["Penalty"])
        size, (mean,) = made["Penalty"]["body"]["size"], made["Penalty"]["sown"]
        losses = (out**2).mean(-1)
        total = losses.mean() + size + mean
        return total, {"loss": (total * len(out), len(out))}

    program = build(Leaving, devices8[:4], loss=loss)
    assert program.abstract_state.collections == {}
    assert_same_as_one_device(program, BATCHES[0], jax.random.key(0))
    adapted = interface_of(Leaving)
    variables, x = adapted.init(jax.random.key(0)), BATCHES[0].inputs
    assert adapted.apply(variables, x, mutable=True)[1]["Penalty"].keys() == {"body"}
    with pytest.raises(ValueError, match=r"new variable 'body/size'.*mutable=\['Penalty'\]"):
        adapted.apply(variables, x, mutable=["batch_stats"])


class Told(nnx.Module):
    """A module that is told whether it trains, by an argument of one of three names."""

    def __init__(self, rngs, name):
        self.scale = nnx.Param(jnp.ones((12, 5)))
        self.name = name

    def __call__(self, x, **switches):
        (is_on,) = switches.values()
        assert set(switches) == {self.name}
        return x @ self.scale[...] * (2.0 if is_on else 1.0)


@pytest.mark.parametrize(("name", "trains"), [("train", True), ("deterministic", False)])
def test_evaluation_overrules_what_a_loss_says(devices8, name, trains):
    def loss(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, **{name: trains})
        return y.mean(), {"loss": (y.sum(), jnp.float32(y.size))}

    def make(rngs):
        return Told(rngs, name)

    program = build(make, devices8[:4], loss=loss)
    state = program.init(jax.random.key(0))
    evaluated = float(program.eval_step(state, BATCHES[0])["loss"][0])
    _, metrics = program.train_step(state, BATCHES[0])
    ratio = 2.0 if trains else 0.5
    np.testing.assert_allclose(float(metrics["loss"][0]) / evaluated, ratio, rtol=1e-5)


def test_a_loss_need_not_mention_training(devices8):
    def loss(params, apply_fn, batch, rng):
        y = apply_fn({"params": params}, batch.inputs, rngs=rng)  # One key for all streams.
        return (y**2).mean(), {"loss": ((y**2).sum(), jnp.float32(y.size))}

    program = build(
        lambda rngs: nnx.Sequential(nnx.Linear(12, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)),
        devices8[:4],
        loss=loss,
    )
    state = program.init(jax.random.key(0))
    evaluated = [float(program.eval_step(state, BATCHES[0])["loss"][0]) for _ in range(2)]
    _, metrics = program.train_step(state, BATCHES[0])
    assert evaluated[0] == evaluated[1] != float(metrics["loss"][0])
