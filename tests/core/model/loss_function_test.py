import jax.numpy as jnp
import pytest

from manualpar.core.model.loss_function import call_loss, check_loss

LOSSES = jnp.arange(8.0)


def test_what_it_returns_becomes_arrays():
    loss, metrics = check_loss((LOSSES.mean(), {"loss": (LOSSES.sum(), 8), "n": (1.0, 2)}), LOSSES)
    assert loss.mean == 3.5
    assert metrics["loss"][0] == 28
    assert metrics["loss"][1].dtype == jnp.int32
    assert metrics["n"][1] == 2


def test_errors_of_a_loss_stay_its_own():
    def other(*args):
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        call_loss(other, None, None, None, None)
