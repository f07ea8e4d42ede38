"""Sums and counts add up, and their means are printed."""

import math

import jax
import jax.numpy as jnp

from manualpar.core.state.metrics import add_metrics, mean_metrics, print_metrics


def test_the_mean_is_of_examples_and_not_of_means():
    first = {"loss": (jnp.float32(3.0), jnp.float32(1.0))}
    second = {"loss": (jnp.float32(1.0), jnp.float32(3.0))}
    total = add_metrics(add_metrics(None, first), second)
    assert mean_metrics(total) == {"loss": 1.0}


def test_metrics_are_added_in_one_computation_and_keep_their_order():
    metrics = {name: (jnp.float32(1.0), jnp.float32(2.0)) for name in ("loss", "b", "accuracy")}
    assert list(add_metrics(metrics, metrics)) == ["loss", "b", "accuracy"]
    jaxpr = jax.make_jaxpr(add_metrics)(metrics, metrics)
    assert len(jaxpr.eqns) == 1
    assert add_metrics({"a": (1.5, 1)}, {"a": (2, 1)}) == {"a": (3.5, 2)}


def test_nothing_counted_has_no_mean():
    assert math.isnan(mean_metrics({"loss": (0.0, 0)})["loss"])


def test_printing_with_and_without_a_title(capsys):
    metrics = {"loss": (jnp.float32(1.0), jnp.float32(4.0)), "accuracy": (1.0, 2)}
    print_metrics(metrics)
    print_metrics(metrics, title="Test")
    print_metrics(metrics, title="A title longer than all lines")
    assert capsys.readouterr().out.splitlines() == [
        "loss: 0.250000",
        "accuracy: 0.500000",
        "====== Test ======",
        "loss: 0.250000",
        "accuracy: 0.500000",
        " A title longer than all lines ",
        "loss: 0.250000",
        "accuracy: 0.500000",
    ]
