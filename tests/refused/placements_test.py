"""What a strategy says wrongly is refused in the name of the strategy and the parameter."""

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from manualpar import abstract_mesh
from manualpar.core.modes.strategy import CommCounts, Strategy
from manualpar.core.parameters.parameter_info import ParameterInfo
from manualpar.core.parameters.placement import Placement
from manualpar.core.parameters.shard_rules import replicate
from manualpar.core.program.placement_check import place_parameter
from manualpar.core.program.program import build_program
from tests.tiny import BATCHES, Classifier, loss_fn

PLAIN = Strategy(
    "own", place=replicate, sends=lambda minibatches, keep: CommCounts(uses=minibatches)
)


def build(strategy, sizes=None):
    mesh = abstract_mesh(sizes or {"data": 4, "model": 2}, 8)
    return build_program(
        strategy, Classifier(), optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0]
    )


def first_dim(name, **more):
    """Places the first dim of every matrix over `name`."""

    def place(info, axes, axis_size):
        names = (name, *(None,) * (len(info.shape) - 1)) if len(info.shape) == 2 else info.names
        return Placement(names, **{key: value(info) for key, value in more.items()})

    return place


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gather_every": "once"}, ValueError, "own: gather_every='once', expected one of 'minib"),
        ({"reduce_every": "microbatch"}, ValueError, "own: reduce_every='microbatch', expected on"),
        ({"replica_axes": "data"}, TypeError, "own: replica_axes='data', expected a tuple of axes"),
        (
            {"sends": lambda m, keep: (m, 1)},
            TypeError,
            r"own: sends returned \(1, 1\), expected a",
        ),
        (
            {"place": lambda info, axes, n: PartitionSpec()},
            TypeError,
            r"own: place of parameter '\S+' of shape \S+ returned P\(\), expected a Placement",
        ),
        ({"place": lambda *_: Placement(("data",) * 9)}, ValueError, "expected one for each dim"),
        (
            {"place": first_dim("dta")},
            ValueError,
            r"names=\('dta', None\), expected each mesh",
        ),
        (
            {"place": lambda info, *_: Placement(("data",) * len(info.shape))},
            ValueError,
            r"names=\('data', 'data'\), expected each mesh axis once at most, of \['data', 'mo",
        ),
        (
            {"place": first_dim("data", padding=lambda info: (1,) + (0,) * (len(info.shape) - 1))},
            ValueError,
            r"and \d+ elements along dim 0 do not divide over 4 devices; expected a dim that",
        ),
    ],
)
def test_what_a_strategy_says_wrongly_names_it(changes, error, message):
    build(PLAIN)
    with pytest.raises(error, match=message):
        build(dataclasses.replace(PLAIN, **changes))


def test_a_state_that_does_not_divide_is_refused_too():
    def place(info, axes, axis_size):
        return Placement(info.names, state_names=(axes[0], *info.names[1:]))

    with pytest.raises(ValueError, match=r"state_names=\('data'.* do not divide over 8 devices"):
        build(dataclasses.replace(PLAIN, place=place), {"data": 8})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("model", "data", None),
            r"names=.* expected \(None, 'model', None\) to stay: the model com",
        ),
        ((None, None, None), r"expected \(None, 'model', None\) to stay"),
        ((None, ("model", "data"), None), r"expected \(None, 'model', None\) to stay"),
        (
            (None, "model", "data"),
            r"expected dims \[2\] to stay whole, because a loop runs over the",
        ),
    ],
)
@pytest.mark.parametrize("field", ["names", "state_names"])
def test_dims_that_the_model_splits_or_shares_stay(field, names, message):
    info = ParameterInfo(
        path="k",
        shape=(8, 8, 2),
        dtype=jnp.float32,
        names=(None, "model", None),
        loop_dims=frozenset(),
        split_axes=frozenset({"model"}),
        shared_names=(None, None, "expert"),
    )
    mesh = abstract_mesh({"data": 2, "model": 2, "expert": 4}, 16)

    def place(info, axes, axis_size):
        return Placement(**{"names": info.names, field: names})

    with pytest.raises(ValueError, match=message):
        place_parameter(dataclasses.replace(PLAIN, place=place), info, ("data",), mesh)


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

    with pytest.raises(ValueError, match="not enough values") as raised:
        build(dataclasses.replace(PLAIN, **{what: fails}))
    (note,) = raised.value.__notes__
    named = {"place": "own: place of parameter", "sends": "`sends` of strategy 'own'"}
    assert named[what] in note
