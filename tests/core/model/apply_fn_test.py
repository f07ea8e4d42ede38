import dataclasses

import jax
import jax.numpy as jnp
import pytest

from manualpar.core.model.apply_fn import CarryingApply
from manualpar.core.model.interface import interface_of
from tests.core.model.switched import Switched

X = jnp.ones(4)


@pytest.fixture
def variables():
    return Switched().init(jax.random.key(0), X, False)


def apply_fn(variables, *, train):
    collections = {"counters": variables["counters"]}
    model = dataclasses.replace(interface_of(Switched()), phase="train" if train else "eval")
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
