"""The losses: means over the examples, or the tokens, that count."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import make_mesh
from manualpar.core.state.train_state import Batch
from manualpar.models import Classifier
from manualpar.models.cross_entropy import classification_loss, language_model_loss

MODEL = Classifier(hidden_size=8, num_classes=5, dropout_rate=0.0)


def _batch(mask=None) -> Batch:
    inputs = jax.random.normal(jax.random.key(1), (6, 4))
    return Batch(inputs, jnp.arange(6) % 5, mask)


@functools.cache
def _params():
    init = jax.jit(lambda key: MODEL.init(key, jnp.zeros((1, 4)), train=False))
    return init(jax.random.key(0))["params"]


@jax.jit
def _loss(params, batch: Batch):
    return classification_loss(params, MODEL.apply, batch, jax.random.key(2))


_value_and_grad = jax.jit(jax.value_and_grad(_loss, has_aux=True))


def _losses_by_hand(params, batch: Batch) -> np.ndarray:
    logits = np.asarray(MODEL.apply({"params": params}, batch.inputs, train=False), np.float64)
    normalizer = np.log(np.exp(logits).sum(axis=1))
    return normalizer - logits[np.arange(len(logits)), np.asarray(batch.labels)]


def test_the_loss_is_the_mean_cross_entropy_and_the_metrics_are_sums():
    params, batch = _params(), _batch()
    loss, metrics = _loss(params, batch)
    expected = _losses_by_hand(params, batch)
    assert loss == pytest.approx(expected.mean(), rel=1e-5)
    assert metrics["loss"] == (pytest.approx(expected.sum(), rel=1e-5), 6)
    predicted = MODEL.apply({"params": params}, batch.inputs, train=False).argmax(axis=1)
    assert metrics["accuracy"] == ((predicted == batch.labels).sum(), 6)


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 0, 0], [0.25, 0, 0.5, 0, 0, 0]])
def test_masked_examples_leave_no_trace_and_weights_count(mask):
    params, mask = _params(), jnp.array(mask, jnp.float32)
    batch = _batch(mask)
    (loss, metrics), grads = _value_and_grad(params, batch)
    weights = np.asarray(mask)
    expected = (_losses_by_hand(params, batch) * weights).sum() / weights.sum()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["loss"] == (pytest.approx(expected * weights.sum(), rel=1e-5), weights.sum())
    assert metrics["accuracy"][1] == weights.sum()

    other = batch.replace(
        inputs=jnp.where(mask[:, None] > 0, batch.inputs, 7.0),
        labels=jnp.where(mask > 0, batch.labels, -100),  # None of the five classes.
    )
    (_, other_metrics), other_grads = _value_and_grad(params, other)
    chex.assert_trees_all_close((metrics, grads), (other_metrics, other_grads), rtol=1e-5)


def test_nothing_but_padding_is_no_loss_and_no_gradient():
    (loss, metrics), grads = _value_and_grad(_params(), _batch(jnp.zeros(6)))
    assert loss == 0
    assert metrics["loss"] == (0, 0)
    chex.assert_trees_all_equal(grads, jax.tree.map(jnp.zeros_like, grads))


def test_the_model_is_told_to_train_with_the_key():
    model = MODEL.clone(dropout_rate=0.5)
    losses = [
        classification_loss(_params(), model.apply, _batch(), jax.random.key(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


def _bigrams(variables, tokens, train, rngs):
    """A language model whose logits are a row of a table, `[V, V]`."""
    assert train
    assert set(rngs) == {"dropout"}
    return variables["params"][tokens]


def _text(mask=None) -> Batch:
    tokens = np.array([[1, 4, 2, 2], [0, 3, 1, 2], [4, 4, 0, 1]])
    return Batch(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), mask)


TABLE = jax.random.normal(jax.random.key(3), (5, 5))


@pytest.mark.parametrize(
    "mask",
    [None, [[1, 1, 0], [0, 0, 0], [1, 0, 1]], [[0.5, 0, 2], [0, 0, 0], [1, 0.25, 0]]],
    ids=["none", "padding", "weights"],
)
def test_the_loss_of_a_language_model_is_the_mean_over_the_tokens_that_count(mask):
    batch = _text(None if mask is None else jnp.array(mask, jnp.float32))
    loss, metrics = language_model_loss(TABLE, _bigrams, batch, jax.random.key(0))
    logits = np.asarray(TABLE, np.float64)[np.asarray(batch.inputs)]
    chosen = np.take_along_axis(logits, np.asarray(batch.labels)[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
    weights = np.ones((3, 3)) if mask is None else np.array(mask)
    assert loss == pytest.approx((losses * weights).sum() / weights.sum(), rel=1e-6)
    assert metrics["loss"] == (pytest.approx((losses * weights).sum(), rel=1e-6), weights.sum())
    correct = logits.argmax(axis=-1) == np.asarray(batch.labels)
    assert metrics["accuracy"] == ((correct * weights).sum(), weights.sum())


def test_text_that_is_nothing_but_padding_is_no_loss_and_no_gradient():
    (loss, metrics), grads = jax.value_and_grad(language_model_loss, has_aux=True)(
        TABLE, _bigrams, _text(jnp.zeros((3, 3))), jax.random.key(0)
    )
    assert loss == 0
    assert metrics == {"loss": (0, 0), "accuracy": (0, 0)}
    chex.assert_trees_all_equal(grads, jnp.zeros_like(TABLE))


class Answers(nn.Module):
    """A model that is given labels, and returns what a test wants."""

    answer: Any

    def __call__(self, tokens, train=False, labels=None):
        return self.answer(tokens, labels)


def test_a_model_that_takes_labels_says_what_its_losses_are():
    model = Answers(lambda tokens, labels: (tokens * 0.5, tokens == labels))
    batch = _text()
    loss, metrics = language_model_loss({}, model.apply, batch, jax.random.key(0))
    assert loss == pytest.approx(0.5 * batch.inputs.mean())
    assert metrics["accuracy"] == ((batch.inputs == batch.labels).sum(), 9)


@pytest.mark.parametrize("masked", [False, True])
def test_logits_that_are_split_have_the_loss_the_metrics_and_the_gradient_of_one_device(
    devices8, masked
):
    mesh = make_mesh({"data": 2, "model": 4}, devices=devices8)
    table = jax.random.normal(jax.random.key(4), (8, 8)).round(1)  # Some logits are equal.
    tokens = jax.random.randint(jax.random.key(5), (4, 7), 0, 8)
    mask = jnp.arange(24).reshape(4, 6) % 4 / 2 if masked else jnp.ones((4, 6))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], mask)

    def of_share(table, batch):
        grad = jax.value_and_grad(language_model_loss, has_aux=True)
        (loss, metrics), grads = grad(table, _bigrams, batch, jax.random.key(0))
        return jax.tree.map(lambda x: x[None], (loss, metrics)), grads[None]

    def on_device(table, batch):
        return of_share(jax.lax.pcast(table, ("data",), to="varying"), batch)

    shares = jax.tree.map(lambda x: x.reshape(2, 2, 6), batch)
    expected = jax.jit(jax.vmap(of_share, in_axes=(None, 0)))(table, shares)
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(None, "model"), P("data")),
        out_specs=(P("data"), P("data", None, "model")),
        check_vma=True,
    )
    got = jax.tree.map(lambda x, y: x.reshape(y.shape), jax.jit(run)(table, batch), expected)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)
    assert 0 < got[0][1]["accuracy"][0].sum() < 24
