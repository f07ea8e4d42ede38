"""The classification loss: a mean over the examples that count."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.models import Classifier
from manualpar.train_state import Batch
from manualpar.training.losses import classification_loss

MODEL = Classifier(hidden_size=8, num_classes=5, dropout_rate=0.0)


def _batch(mask=None) -> Batch:
    inputs = jax.random.normal(jax.random.key(1), (6, 4))
    return Batch(inputs, jnp.arange(6) % 5, mask)


def _params():
    return MODEL.init(jax.random.key(0), jnp.zeros((1, 4)), train=False)["params"]


def _loss(params, batch: Batch):
    return classification_loss(params, MODEL.apply, batch, jax.random.key(2))


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
    (loss, metrics), grads = jax.value_and_grad(_loss, has_aux=True)(params, batch)
    weights = np.asarray(mask)
    expected = (_losses_by_hand(params, batch) * weights).sum() / weights.sum()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["loss"] == (pytest.approx(expected * weights.sum(), rel=1e-5), weights.sum())
    assert metrics["accuracy"][1] == weights.sum()

    other = batch.replace(inputs=jnp.where(mask[:, None] > 0, batch.inputs, 7.0))
    (_, other_metrics), other_grads = jax.value_and_grad(_loss, has_aux=True)(params, other)
    chex.assert_trees_all_close((metrics, grads), (other_metrics, other_grads), rtol=1e-5)


def test_nothing_but_padding_is_no_loss_and_no_gradient():
    (loss, metrics), grads = jax.value_and_grad(_loss, has_aux=True)(
        _params(), _batch(jnp.zeros(6))
    )
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
