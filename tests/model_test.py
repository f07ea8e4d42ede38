import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manualpar import Batch
from manualpar.linen.call_arguments import initial_call
from manualpar.user_model.adapter import adapt
from manualpar.user_model.carried_collections import CarryingApply
from manualpar.user_model.initialise import init_variables


class Switched(nn.Module):
    """Says what it was told; counts its calls."""

    @nn.compact
    def __call__(self, x, train, scale=1.0, *, deterministic=False):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            calls.value += 1
        said = jnp.array([train, deterministic], jnp.float32)
        self.sow("losses", "said", said.sum())
        return self.param("w", nn.initializers.ones, ()) * x.sum() * scale, said

    def other(self, x, train=True):
        return self(x, train)


class Silent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


X = jnp.ones(4)


@pytest.fixture
def variables():
    return Switched().init(jax.random.key(0), X, False)


def apply_fn(variables, *, train):
    collections = {"counters": variables["counters"]}
    model = dataclasses.replace(adapt(Switched()), phase="train" if train else "eval")
    return CarryingApply(model, collections)


@pytest.mark.parametrize(
    ("args", "kwargs", "train", "deterministic"),
    [
        ((True,), {}, False, False),
        ((), {"train": True}, False, False),
        ((True,), {"deterministic": False}, False, True),
        ((True, 2.0), {"deterministic": True}, False, True),
    ],
)
def test_evaluation_overrules_what_says_train(variables, args, kwargs, train, deterministic):
    params = {"params": variables["params"]}
    _, said = apply_fn(variables, train=False)(params, X, *args, **kwargs)
    assert said.tolist() == [train, deterministic]
    _, said = apply_fn(variables, train=True)(params, X, *args, **kwargs)
    assert said.tolist() == [True, kwargs.get("deterministic", False)]


@pytest.mark.parametrize("method", ["other", Switched.other], ids=["name", "function"])
def test_evaluation_overrules_another_method_too(variables, method):
    params = {"params": variables["params"]}
    _, said = apply_fn(variables, train=False)(params, X, True, method=method)
    assert said[0] == 0
    _, said = apply_fn(variables, train=True)(params, X, True, method=method)
    assert said[0] == 1


def test_other_arguments_pass(variables):
    out, _ = apply_fn(variables, train=False)({"params": variables["params"]}, X, True, 3.0)
    assert out == 12


def test_collections_are_handed_in_and_kept(variables):
    apply = apply_fn(variables, train=True)
    for calls in (1, 2):
        apply({"params": variables["params"]}, X, True)
        assert apply.collections["counters"]["calls"] == calls


def test_what_the_caller_asks_for_is_returned(variables):
    apply = apply_fn(variables, train=True)
    params = {"params": variables["params"]}
    for mutable in ("losses", ["losses"], ("losses",)):
        (_, said), sown = apply(params, X, True, mutable=mutable)
        assert set(sown) == {"losses"}
        assert sown["losses"]["said"][0] == said.sum()
    assert apply.collections["counters"]["calls"] == 3
    _, nothing = apply(params, X, True, mutable=[])
    assert nothing == {}
    with pytest.raises(TypeError, match="mutable=True, expected the names of collections"):
        apply(params, X, True, mutable=True)


def test_a_collection_of_another_structure_or_shape_is_refused(variables):
    class Growing(nn.Module):
        grow: str

        @nn.compact
        def __call__(self, x):
            seen = self.variable("memory", "seen", lambda: jnp.zeros(2))
            if self.grow == "shape":
                seen.value = jnp.zeros(3)
            else:
                self.variable("memory", "more", lambda: jnp.zeros(2))
            return x

    collections = {"memory": {"seen": jnp.zeros(2)}}
    for grow, message in (
        ("shape", r"changes shapes or dtypes in collection 'memory': seen: float32\[2\] ->"),
        ("structure", r"changes what collection 'memory' consists of, from \[.*seen.*more"),
    ):
        with pytest.raises(ValueError, match=message):
            CarryingApply(adapt(Growing(grow)), collections)({}, X)


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
            r"'mask'. It takes \(source, target, scale=1.0, \*, mask, train=False\). Say what .*: "
            r"init_args=lambda batch: \(\(batch\['source'\], batch\['target'\]\), "
            r"\{'mask': batch\['mask'\]\}\)\.",
        ),
        (
            Decoder(),
            BATCH,
            lambda batch: ((X,), {"method": "encode"}),
            r"Decoder.encode cannot be called with what init_args returns .* needs 'key'",
        ),
        (Silent(), BATCH, lambda batch: ((X,), {"y": X}), "unexpected keyword argument 'y'"),
        (NoInput(), BATCH, None, r"too many positional .* init_args=lambda batch: \(\(\), \{\}\)"),
        (Nothing(), BATCH, None, "Nothing has no method '__call__', .*'method': '...'"),
        (
            Silent(),
            {"image": X},
            None,
            r"batch is a dict, expected one with .inputs: .* \(\(batch\['x'\],\), \{\}\)",
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
    ours = init_variables(adapt(Silent()), key, Batch(jax.ShapeDtypeStruct(x.shape, x.dtype), None))
    plain = Silent().init({"params": key}, x)
    jax.tree.map(np.testing.assert_array_equal, ours["params"], plain["params"])
