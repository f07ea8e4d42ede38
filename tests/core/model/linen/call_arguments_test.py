import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import Batch
from manualpar.core.model.interface import interface_of
from manualpar.core.model.linen_model import initial_call
from manualpar.core.model.trace_model import init_variables
from tests.core.model.switched import Switched

X = jnp.ones(4)


class Silent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Required(nn.Module):
    def __call__(self, x, deterministic, training=True):
        return x


class Decoder(nn.Module):
    def __call__(self, source, target, scale=1.0, *, mask, train=False):
        return source

    def encode(self, source, key):
        return source


BATCH = Batch(X, X)


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        (Switched(), {"train": False}),
        (Silent(), {}),
        (nn.remat(Switched)(), {"train": False}),
        (nn.Sequential([nn.Dense(3)]), {}),
        (Required(), {"deterministic": True}),
    ],
)
def test_a_model_is_initialised_with_the_inputs_and_told_not_to_train(model, kwargs):
    assert initial_call(model, BATCH) == ((X,), kwargs)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (((1, 2), {"mask": 3}), {"mask": 3, "train": False}),
        (((1,), {"target": 2, "mask": 3}), {"target": 2, "mask": 3, "train": False}),
        (((1, 2), {"mask": 3, "train": True}), {"mask": 3, "train": True}),
        (((1, 2), {"method": "encode"}), {"method": "encode"}),
        (((1, 2), {"method": Decoder.encode}), {"method": Decoder.encode}),
    ],
)
def test_init_args_say_how_a_model_is_called(call, expected):
    assert initial_call(Decoder(), {"any": "batch"}, lambda batch: call) == (call[0], expected)
    assert initial_call(Switched(), BATCH, lambda batch: ((1, True), {})) == ((1, True), {})


def test_initialisation_is_that_of_plain_flax():
    key = jax.random.key(3)
    x = jax.random.normal(key, (2, 5))
    ours = init_variables(
        interface_of(Silent()), key, Batch(jax.ShapeDtypeStruct(x.shape, x.dtype), None)
    )
    plain = Silent().init({"params": key}, x)
    jax.tree.map(np.testing.assert_array_equal, ours["params"], plain["params"])
