"""The schedule passes through its documented points, and biases do not decay."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.models import Classifier
from manualpar.training.optimizer import adamw, warmup_cosine_schedule, weight_decay_mask


def test_the_schedule_warms_up_from_the_first_update_and_ends_at_zero():
    schedule = warmup_cosine_schedule(0.8, warmup_steps=3, num_steps=13)
    rates = [float(schedule(step)) for step in range(14)]
    np.testing.assert_allclose(rates[:4], [0.2, 0.4, 0.6, 0.8], rtol=1e-6)
    assert rates[8] == pytest.approx(0.4)  # half-way down
    assert rates[13] == pytest.approx(0, abs=1e-7)
    assert np.all(np.diff(rates[3:]) < 0)


def test_without_warmup_the_first_update_is_at_the_peak():
    assert warmup_cosine_schedule(0.8, warmup_steps=0, num_steps=10)(0) == pytest.approx(0.8)


def test_a_run_shorter_than_its_warmup_ends_within_it():
    schedule = warmup_cosine_schedule(1.0, warmup_steps=9, num_steps=5)
    np.testing.assert_allclose([schedule(s) for s in range(5)], np.arange(1, 6) / 10, rtol=1e-6)


def test_biases_and_scales_are_spared_also_in_a_scan():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm()(nn.Dense(4)(x)), None

    scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    params = scanned().init(jax.random.key(0), jnp.ones((2, 4)), None)["params"]
    assert params["Dense_0"]["bias"].ndim == 2
    mask = weight_decay_mask(params)
    assert mask == {
        "Dense_0": {"kernel": True, "bias": False},
        "LayerNorm_0": {"scale": False, "bias": False},
    }
    assert weight_decay_mask({"gain": jnp.ones(3), "table": jnp.ones((3, 2))}) == {
        "gain": False,
        "table": True,
    }


@pytest.mark.slow
def test_weight_decay_moves_kernels_by_its_share_and_biases_not_at_all():
    params = Classifier(hidden_size=4).init(jax.random.key(0), jnp.ones((1, 3)), train=False)
    params = jax.tree.map(lambda x: x + 1.0, params["params"])
    tx = adamw(lambda _: 0.5, weight_decay=0.1)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for layer in params:
        np.testing.assert_allclose(updates[layer]["bias"], 0)
        np.testing.assert_allclose(
            updates[layer]["kernel"], -0.5 * 0.1 * params[layer]["kernel"], rtol=1e-6
        )
