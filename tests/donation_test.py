import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar.guards.donation import check_alive


def test_what_is_gone_is_named():
    state = {"params": {"kernel": jnp.ones(3), "rng": jax.random.key(0)}, "step": np.zeros(2)}
    check_alive("train_step", state=state, batch=None)
    state["params"]["kernel"].delete()
    with pytest.raises(
        ValueError, match=r"train_step: state\['params'\]\['kernel'\] .*Use the returned one.*cells"
    ):
        check_alive("train_step", state=state)
    with pytest.raises(ValueError, match=r"eval_step: batch.* Make the batch again"):
        check_alive("eval_step", batch=state)


def test_what_is_being_traced_is_alive():
    jax.eval_shape(lambda x: check_alive("train_step", state=x), jnp.ones(3))
