"""Evaluation turns training off in every module, whoever tells it to train."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax import sgd

from manualpar import Batch, data_parallel, fsdp, make_mesh
from manualpar.core.model.apply_fn import CarryingApply
from manualpar.core.model.interface import interface_of
from manualpar.models import Transformer

X = jnp.ones((16, 8))
BATCH = Batch(X, jnp.zeros(16))


class ByField(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=not self.train)(x)


class InSetup(nn.Module):
    training: bool = True

    def setup(self):
        self.dropout = nn.Dropout(0.5, deterministic=not self.training)

    def __call__(self, x):
        return self.dropout(x)


class Inside(nn.Module):
    """Whatever is inside is told to train where it stands."""

    block: Any

    @nn.compact
    def __call__(self, x):
        return self.block(x)


class Argument(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5)(x, False)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            2, dropout_rate=0.5, broadcast_dropout=False, deterministic=False
        )
        return attention(x[:, None])[:, 0]


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            is_training: bool = False

            @nn.compact
            def __call__(self, x, _):
                x = nn.Dropout(0.5, deterministic=not self.is_training)(x)
                return nn.Dropout(0.5, deterministic=False)(x), None

        rngs = {"params": True, "dropout": True}
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs=rngs, length=2)
        return layers(is_training=True)(x, None)[0]


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(ByField)()(x)


class Statistics(nn.Module):
    """Batch statistics and dropout, by one argument for both or by fields."""

    fields: bool = False

    @nn.compact
    def __call__(self, x, train):
        if self.fields:
            x = nn.BatchNorm(use_running_average=False, name="norm")(x)
            return nn.Dropout(0.5, deterministic=False)(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


def evaluate(model, *args, eval_dropout=False, key=0, **kwargs):
    phase = "eval_dropout" if eval_dropout else "eval"
    model = dataclasses.replace(interface_of(model), phase=phase)
    variables = model.init(jax.random.key(0), X, *args)
    collections = {name: tree for name, tree in variables.items() if name != "params"}
    apply_fn = CarryingApply(model, collections)
    rngs = {"dropout": jax.random.key(key)}
    return apply_fn({"params": variables.get("params", {})}, X, *args, rngs=rngs, **kwargs)


SWITCHED = {
    "a field": ByField(),
    "a field in setup": InSetup(),
    "inside, a field": Inside(ByField()),
    "inside, a layer": Inside(nn.Sequential([nn.Dropout(0.5, deterministic=False)])),
    "inside, an argument": Inside(Argument()),
    "attention": Attention(),
    "scan and remat": Scanned(),
    "jit": Jitted(),
}


def fast_or_slow(name):
    is_slow = name in ("scan and remat", "jit")
    return pytest.param(name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize("name", list(map(fast_or_slow, SWITCHED)))
def test_dropout_is_off_wherever_it_is_told_to_train(name):
    model = SWITCHED[name]
    one, other = (evaluate(model, key=key) for key in range(2))
    assert jnp.array_equal(one, other)
    assert name == "attention" or jnp.array_equal(one, X)
    noisy, other = (evaluate(model, key=key, eval_dropout=True) for key in range(2))
    assert not jnp.array_equal(noisy, other)
    # It is the model in training that was left as it is.
    params = model.init(jax.random.key(0), X)
    rngs = {"dropout": jax.random.key(0)}
    assert jnp.array_equal(model.apply(params, X, rngs=rngs), noisy)


@pytest.mark.parametrize("fields", [False, True], ids=["argument", "fields"])
def test_statistics_are_those_of_the_state_with_dropout_on_too(fields):
    model = Statistics(fields)
    off = evaluate(model, True)
    np.testing.assert_allclose(off, X, rtol=1e-4)  # The mean is 0 and the variance 1.
    on = evaluate(model, True, eval_dropout=True)
    assert set(np.unique(np.round(on, 3))) == {0, 2}


def test_a_loss_of_evaluation_has_nothing_of_training_with_dropout_on_too():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "mlp_size": 8}
    model = Transformer(vocab_size=8, label_smoothing=0.3, z_loss=0.1, scan_layers=False, **sizes)
    tokens = np.arange(4)[None]
    params = model.init(jax.random.key(0), tokens)
    in_training, evaluated, expected = (
        jax.jit(functools.partial(apply, train=train))(params, tokens, labels=tokens)[0]
        for apply, train in (
            (model.apply, True),
            (dataclasses.replace(interface_of(model), phase="eval_dropout").apply, True),
            (model.apply, False),
        )
    )
    np.testing.assert_allclose(evaluated, expected, rtol=1e-6)
    assert (in_training > 1.01 * expected).all()


def test_an_nnx_model_has_its_own_switch():
    model = NNXModel
    np.testing.assert_allclose(evaluate(model), X, rtol=1e-4)
    np.testing.assert_allclose(evaluate(model, train=True), X, rtol=1e-4)
    for kwargs in ({}, {"train": True}):
        on = evaluate(model, eval_dropout=True, **kwargs)
        assert set(np.unique(np.round(on, 3))) == {0, 2}


def test_what_is_none_is_left_to_the_other():
    class Both(nn.Module):
        deterministic: bool | None = None

        @nn.compact
        def __call__(self, x, deterministic=None):
            merged = nn.merge_param("deterministic", self.deterministic, deterministic)
            return nn.Dropout(0.5)(x, deterministic=merged)

    assert (evaluate(Inside(Both(False))) == X).all()
    assert (evaluate(Both(), False) == X).all()
    assert (evaluate(Both(False), None) == X).all()


def loss_fn(params, apply_fn, batch, rng):
    out = apply_fn({"params": params}, batch.inputs, rngs={"dropout": rng}).mean(-1)
    return out.mean(), {"loss": (out.sum(), out.size), "second": ((out**2).sum(), out.size)}


class WithParameters(nn.Module):
    dropout: Any

    @nn.compact
    def __call__(self, x):
        return self.dropout(nn.Dense(64)(x))


def build(dropout, builder=data_parallel, **options):
    model, mesh = WithParameters(dropout), make_mesh({"data": 8})
    return builder(model, sgd(0.1), loss_fn, mesh=mesh, batch=BATCH, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["manual", pytest.param("explicit", marks=pytest.mark.slow)])
def test_monte_carlo_masks_are_the_devices_and_the_steps_own(devices8, mode):
    dropout = nn.Dropout(0.5, deterministic=False)
    program = build(dropout, builder=fsdp, min_weight_size=16, mode=mode, eval_dropout=True)
    state = program.init(jax.random.key(0))
    first, again = (program.eval_step(state, BATCH) for _ in range(2))
    assert first["loss"][0] == again["loss"][0]
    # All examples are the same: with one mask for all, the mean of squares were the mean squared.
    mean, second = (total / count for total, count in (first["loss"], first["second"]))
    assert second > mean**2 * 1.001
    other = program.eval_step(state.replace(rng=jax.random.key(5)), BATCH)
    assert other["loss"][0] != first["loss"][0]
    state, _ = program.train_step(state.replace(params=jax.tree.map(jnp.copy, state.params)), BATCH)
    assert program.eval_step(state, BATCH)["loss"][0] != first["loss"][0]
