import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import Batch
from manualpar.core.model.initialise import init_variables
from manualpar.core.model.interface import interface_of
from manualpar.core.model.linen.call_arguments import initial_call
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


class Nothing(nn.Module):
    def encode(self, x):
        return x


class NoInput(nn.Module):
    def __call__(self):
        return jnp.zeros(())


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


@pytest.mark.parametrize(
    ("model", "batch", "init_args", "message"),
    [
        (
            Decoder(),
            BATCH,
            None,
            r"Decoder.__call__ cannot be called with batch.inputs alone .* it also needs 'target', "
            r"'mask'. It takes \(source, target, scale=1.0, \*, mask, train=False\). Make the .*: "
            r"init_args=lambda batch: \(\(batch\['source'\], batch\['target'\]\), "
            r"\{'mask': batch\['mask'\]\}\)\.",
        ),
        (
            Decoder(),
            BATCH,
            lambda batch: ((X,), {"method": "encode"}),
            r"Decoder.encode cannot be called with the result of init_args .* needs 'key'",
        ),
        (Silent(), BATCH, lambda batch: ((X,), {"y": X}), "unexpected keyword argument 'y'"),
        (NoInput(), BATCH, None, r"too many positional .* init_args=lambda batch: \(\(\), \{\}\)"),
        (Nothing(), BATCH, None, "Nothing has no method '__call__', .*'method': '...'"),
        (
            Silent(),
            {"image": X},
            None,
            r"batch is a dict, expected one with .inputs, .* \(\(batch\['x'\],\), \{\}\)",
        ),
        (Silent(), BATCH, lambda batch: (X,), r"a tuple that is not the pair \(args, kwargs\)"),
        (Silent(), BATCH, lambda batch: X, "not the pair"),
        (Silent(), BATCH, lambda batch: (X, {}), "not the pair"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(model, batch, init_args, message):
    with pytest.raises(TypeError, match=message):
        initial_call(model, batch, init_args)


def test_initialisation_is_that_of_plain_flax():
    key = jax.random.key(3)
    x = jax.random.normal(key, (2, 5))
    ours = init_variables(
        interface_of(Silent()), key, Batch(jax.ShapeDtypeStruct(x.shape, x.dtype), None)
    )
    plain = Silent().init({"params": key}, x)
    jax.tree.map(np.testing.assert_array_equal, ours["params"], plain["params"])
