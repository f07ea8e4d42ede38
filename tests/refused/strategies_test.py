"""Mistakes in a user's own strategies, in their registration, and in strategies' options."""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import manualpar
from manualpar import abstract_mesh, diloco, fsdp, gather_examples
from manualpar.core.modes.strategy import CommCounts, Strategy, place_parameter
from manualpar.core.parameters.annotations import split
from manualpar.core.parameters.placement import ParameterInfo, Placement, replicate
from manualpar.strategies import FSDP, Field, register
from manualpar.strategies.build import build_program
from manualpar.strategies.shared_options import STATE_SHARDING
from tests.refused.table import check_refused, rows
from tests.tiny import BATCHES, Classifier, class_loss, loss_fn

PLAIN = Strategy(
    "own", place=replicate, sends=lambda minibatches, keep: CommCounts(uses=minibatches)
)


def build_own(changes, axes=None):
    """Builds a program of a user's own strategy, which is `PLAIN` with `changes`."""
    mesh = abstract_mesh(axes or {"data": 4, "model": 2}, 8)
    strategy = dataclasses.replace(PLAIN, **changes)
    build_program(strategy, Classifier(), optax.sgd(0.1), loss_fn, mesh=mesh, batch=BATCHES[0])


def first_dim(name, **more):
    """Returns a strategy's `place`, which shards the first dim of every matrix over axis `name`."""

    def place(info, axes, axis_size):
        names = (name, *(None,) * (len(info.shape) - 1)) if len(info.shape) == 2 else info.names
        return Placement(names, **{key: value(info) for key, value in more.items()})

    return {"place": place}


def state_over_data(info, axes, axis_size):
    return Placement(info.names, state_names=(axes[0], *info.names[1:]))


KERNEL = ParameterInfo(
    path="k",
    shape=(8, 8, 2),
    dtype=jnp.float32,
    names=(None, "model", None),
    loop_dims=frozenset(),
    split_axes=frozenset({"model"}),
    shared_names=(None, None, "expert"),
)


def place_kernel(placed):
    """Places a parameter that the model splits over axis `model` and shares over axis `expert`."""
    mesh = abstract_mesh({"data": 2, "model": 2, "expert": 4}, 16)

    def place(info, axes, axis_size):
        return Placement(**{"names": info.names, **placed})

    place_parameter(dataclasses.replace(PLAIN, place=place), KERNEL, ("data",), mesh)


STAYS = r"expected \(None, 'model', None\) to stay"
DIMS_OF_THE_MODEL = (
    (("model", "data", None), r"names=.* expected \(None, 'model', None\) to stay: the model com"),
    ((None, None, None), STAYS),
    ((None, ("model", "data"), None), STAYS),
    ((None, "model", "data"), r"expected None for dims \[2\], because a loop runs over the"),
)


class OverReplicas(nn.Module):
    """A layer whose parameter `rows` is split over the replicas, or shared by them."""

    shared: bool

    @nn.compact
    def __call__(self, x):
        init = split(nn.initializers.ones, ("replica", None), shared=self.shared)
        return nn.Dense(8)(x) + self.param("rows", init, (2 - self.shared, 8)).sum()


def coupled(params, apply_fn, batch, rng):
    loss, metrics = class_loss(params, apply_fn, batch, rng)
    return loss + 0 * gather_examples(batch.inputs).sum(), metrics


def build_diloco(options):
    options = {"tx": optax.sgd(0.5), "model": nn.Sequential([nn.Dense(33), nn.Dense(8)])} | options
    options = {"every": 1, "outer_tx": optax.sgd(1.0), "loss": class_loss} | options
    model, tx, loss = (options.pop(name) for name in ("model", "tx", "loss"))
    mesh = abstract_mesh({"replica": 2, "data": 4}, 8)
    inner = functools.partial(fsdp, min_weight_size=4, pad=True)
    diloco(model, tx, loss, inner=inner, mesh=mesh, batch=BATCHES[0], **options)


def no_options(model, tx, loss_fn):
    return None


REFUSED = [
    *rows(
        "own",
        build_own,
        ({"gather_every": "once"}, "own: gather_every='once', expected one of 'minib"),
        ({"reduce_every": "microbatch"}, "own: reduce_every='microbatch', expected on"),
        ({"replica_axes": "data"}, TypeError, "own: replica_axes='data', expected a tuple of axes"),
        ({"sends": lambda m, keep: (m, 1)}, TypeError, r"own: sends returned \(1, 1\), expected a"),
        (
            {"place": lambda info, axes, n: PartitionSpec()},
            TypeError,
            r"own: place of parameter '\S+' of shape \S+ returned P\(\), expected a Placement",
        ),
        (
            {"place": lambda info: Placement(())},
            TypeError,
            r"^own: place is \S+\(info\), expected a function \(parameter, axes, number of "
            r"devices\) -> Placement \(too many positional arguments\)\.$",
        ),
        ({"place": Placement(())}, TypeError, r"^own: place is Placement\(.*, expected a function"),
        (
            {"sends": lambda m, keep, more: CommCounts(m)},
            TypeError,
            r"^own: sends is \S+\(m, keep, more\), expected a function \(number of minibatches",
        ),
        ({"place": lambda *_: Placement(("data",) * 9)}, "expected one entry for each"),
        (first_dim("dta"), r"names=\('dta', None\), expected each mesh"),
        (
            {"place": lambda info, *_: Placement(("data",) * len(info.shape))},
            r"names=\('data', 'data'\), expected each mesh axis at most once, of \['data', 'mo",
        ),
        (
            first_dim("data", padding=lambda info: (1,) + (0,) * (len(info.shape) - 1)),
            r"and \d+ elements along dim 0 do not divide over 4 devices; choose a dim that",
        ),
    ),
    *rows(
        "own",
        lambda place: build_own({"place": place}, {"data": 8}),
        (state_over_data, r"state_names=\('data'.* do not divide over 8 devices"),
    ),
    *rows("names", lambda names: place_kernel({"names": names}), *DIMS_OF_THE_MODEL),
    *rows("state_names", lambda names: place_kernel({"state_names": names}), *DIMS_OF_THE_MODEL),
    *rows(
        "register",
        lambda changes: register(dataclasses.replace(FSDP, **changes)),
        ({"builder": manualpar.zero}, r"manualpar\.\S+\.fsdp, is registered as 'fsdp', expected"),
        (
            {"builder": functools.partial(fsdp)},
            TypeError,
            r"builder of 'fsdp' is functools\.partial.*expected a func",
        ),
        (
            {"name": "other", "fields": {"pad": Field(int, 0)}},
            "field 'pad' of 'other' is an integer, at least 0, and",
        ),
        ({"builder": no_options}, TypeError, r"\(model, tx, loss_fn\), expected .*\*\*options\)"),
        ({"color": "pink"}, "color of 'fsdp' is 'pink', expected a code like"),
        ({"fields": {"pad": bool}}, TypeError, "fields of 'fsdp' are .*expected a dict with a F"),
        ({"fields": STATE_SHARDING}, TypeError, "fields of 'fsdp' are .*STATE_SHARDING_FIELDS"),
        *(
            ({"name": "other", **own}, "register: 'other' has 'param_dtype' among its fields or")
            for own in (
                {"fields": {"param_dtype": Field(str)}},
                {"constants": {"param_dtype": "bfloat16"}},
            )
        ),
    ),
    *rows(
        "diloco",
        build_diloco,
        ({"every": 0}, "every=0, expected a number of steps"),
        ({"outer_fragments": 2}, "outer_fragments=2, expected a number from 1 to every"),
        ({"every": 9, "outer_fragments": 5}, "fragments=5, expected at most 4, the num"),
        ({"outer_tx": optax.contrib.reduce_on_plateau()}, TypeError, "an outer step has no loss"),
        ({"outer_tx": 0.7}, TypeError, "outer_tx is 0.7, expected an optax"),
        (
            {"tx": optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()},
            "tx cannot be traced where values differ between replicas",
        ),
        ({"outer_code": "int2"}, "outer_code='int2', expected one of"),
        ({"mode": "auto"}, "mode='auto', expected 'manual'"),
        ({"replica_axis": "pod"}, r"names \['pod'\]"),
        ({"replica_axis": ("replica", "data")}, "expected another axis, of size 1"),
        ({"min_weight": 4}, TypeError, "'min_weight' is not an option"),
        *(
            (
                {"model": OverReplicas(shared)},
                r"parameter 'rows' of shape .., 8. is split over \['replica'\], an axis of",
            )
            for shared in (False, True)
        ),
        ({"loss": coupled, "every": 2}, r"among them \['replica'\]; expected no coll"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
