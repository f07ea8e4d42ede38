"""Axes that a parameter is not sharded over, and errors within the functions of a strategy."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest

from manualpar import abstract_mesh
from manualpar.core.modes.strategy import CommCounts, Strategy, place_parameter
from manualpar.core.parameters.placement import ParameterInfo, Placement, replicate
from manualpar.strategies.build import build_program
from tests.tiny import BATCHES, Classifier, loss_fn

PLAIN = Strategy(
    "own", place=replicate, sends=lambda minibatches, keep: CommCounts(uses=minibatches)
)


def build(strategy):
    mesh = abstract_mesh({"data": 4, "model": 2}, 8)
    return build_program(
        strategy, Classifier(), optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0]
    )


@pytest.mark.parametrize(
    ("names", "shared"), [(("data", None), ()), ((None, None), ("data", None))]
)
def test_a_parameter_is_not_sharded_over_axes_whose_devices_compute_with_parts(names, shared):
    split = frozenset({"data"}) if names[0] else frozenset()
    info = ParameterInfo("w", (4, 8), jnp.float32, names, frozenset(), split, shared)
    mesh = abstract_mesh({"data": 4, "replica": 2}, 8)
    fails = dataclasses.replace(PLAIN, place=lambda *_: 1 / 0)
    assert place_parameter(fails, info, ("data",), mesh) == Placement(names)
    over = place_parameter(
        dataclasses.replace(PLAIN, place=lambda info, axes, n: Placement((*info.names[:1], axes))),
        info,
        ("data", "replica"),
        mesh,
    )
    assert over == Placement((names[0], ("replica",)))


@pytest.mark.parametrize("what", ["place", "sends"])
def test_an_error_within_says_whose_it_is(what):
    def fails(*args):
        _rows, _columns = (1,)

    build(PLAIN)
    with pytest.raises(ValueError, match="not enough values") as raised:
        build(dataclasses.replace(PLAIN, **{what: fails}))
    (note,) = raised.value.__notes__
    named = {"place": "own: place of parameter", "sends": "`sends` of strategy 'own'"}
    assert named[what] in note
