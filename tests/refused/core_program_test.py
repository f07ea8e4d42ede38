"""Mistakes in the arguments of builders, in gradients, and in the options of steps."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import (
    Batch,
    abstract_mesh,
    accumulate_gradients,
    data_parallel,
    ema_params,
    fsdp,
    hsdp,
    params_ema,
    sync_gradients,
    sync_metrics,
    zero,
)
from manualpar.core.modes.variable_reduction import sync_collections
from tests.refused.table import build, check_refused, rows, trace_on
from tests.tiny import Classifier, loss_fn, make_batch, mean_loss

DATA_X = {"data": 2, "x": 4}
HSDP = {"builder": hsdp, "axes": {"replica": 2, "data": 4}}
STATE = types.SimpleNamespace(params={"w": np.ones(4, np.float32)}, apply_fn=None)
FEEDBACK = {"reduce_code": "int4", "error_feedback": True}


def with_nonfinite(params, apply_fn, batch, rng):
    value, metrics = loss_fn(params, apply_fn, batch, rng)
    return value, {**metrics, "nonfinite": metrics["loss"]}


ZERO1 = functools.partial(zero, stage=1)
ARGUMENTS = (
    ({"axis_name": "batch"}, r"axis_name names \['batch'\], but the mesh has .*data"),
    ({"axis_name": ()}, "axis_name names no axis"),
    ({"axis_name": ("data", "data")}, "names an axis twice"),
    ({"mesh": "data"}, TypeError, "mesh is 'data', expected a jax.sharding.Mesh"),
    ({"model": Classifier}, TypeError, "expected an instance of a flax.linen.Module"),
    ({"tx": 1e-3}, TypeError, "tx is 0.001, expected an optax.GradientTransformation"),
    ({"loss": None}, TypeError, "loss_fn is None, expected a function"),
    ({"batch": {"x": np.ones((8, 2))}}, TypeError, r"batch is a dict, expected .* \.inputs"),
    (
        {"batch": make_batch(size=60)},
        r"batch.inputs has 60 examples, expected a positive multiple of the 8 devices",
    ),
    ({"batch": make_batch(size=0)}, "has 0 examples"),
    (
        {"batch": make_batch().replace(labels=np.zeros(32, np.int32))},
        "different numbers of examples",
    ),
    ({"num_minibatches": 3}, "num_minibatches=3 does not divide the 8 examples"),
    ({"num_minibatches": 16}, "num_minibatches=16 does not divide the 8 examples"),
    ({"loss": lambda *_: (jnp.ones(3), {})}, r"the loss is float32\[3\]"),
    ({"loss": lambda *_: [jnp.ones(())]}, TypeError, r"returned a list, expected {'loss'"),
    ({"loss": lambda *_: (jnp.ones(()), {"losss": (1.0, 1)})}, "Did you mean it by 'losss'"),
)


def accumulate(case):
    """Accumulates gradients; `case` is the numbers of examples and of minibatches."""
    size, num_minibatches = case
    batch = Batch(np.ones((size, 4), np.float32), np.ones(size, np.float32))
    key = jax.eval_shape(jax.random.key, 0)
    accumulate_gradients(STATE, batch, key, num_minibatches, mean_loss)


def summed_over_data(x):
    p = jax.lax.pcast(jnp.ones(()), ("model",), to="varying")
    return sync_gradients(jax.grad(lambda p: jnp.sum(p * x))(p), ("data", "model"))


def summed_over_all(x):
    return sync_gradients(jax.grad(lambda p: jnp.sum(p["w"] * x))({"w": jnp.ones(())}), ("data",))


def mean_of_integers(x):
    tree = {"mean": x.sum().astype(int)}
    return sync_collections(tree, "data", before=tree, rules={"mean": "mean"})


def on_four_by_two(function, *axes):
    mesh = abstract_mesh({"data": 4, "model": 2}, 8)
    return trace_on(mesh, function, P(axes), np.ones(8, np.float32), out=P())


def feed_back(case):
    """Builds a program with error feedback and two minibatches; `case` is (builder, options)."""
    builder, options = case
    build(builder=builder, num_minibatches=2, **{**FEEDBACK, **options})


REFUSED = [
    *rows("data_parallel", lambda options: build(builder=data_parallel, **options), *ARGUMENTS),
    *rows("fsdp", lambda options: build(**options), *ARGUMENTS),
    *rows(
        "min_weight_size",
        lambda size: build(min_weight_size=size),
        *((size, f"fsdp: min_weight_size={size!r}") for size in (-1, 2.5, "16", True)),
    ),
    *rows(
        "minibatches",
        accumulate,
        ((10, 4), r"num_minibatches=4 does not divide the 10 examples of batch.inputs"),
        ((2, 4), r"num_minibatches=4 does not divide the 2 examples"),
        ((0, 1), r"num_minibatches=1 does not divide the 0 examples"),
        ((8, 0), r"num_minibatches=0, expected a positive integer"),
        ((8, 2.0), r"num_minibatches=2.0, expected a positive integer"),
        ((8, True), r"num_minibatches=True, expected a positive integer"),
    ),
    *rows(
        "a sum over an axis that is not bound",
        lambda function: function({"loss": (np.ones(()), np.ones(()))}, "data"),
        (sync_gradients, r"sync_gradients: axis_name names \['data'\]"),
        (sync_metrics, r"sync_metrics: axis_name names \['data'\]"),
    ),
    *rows(
        "gradients",
        lambda case: on_four_by_two(*case),
        (
            (summed_over_all, "data"),
            r"sync_gradients: grads\['w'\] is already summed over \['data'\].*pcast",
        ),
        ((summed_over_data, "data", "model"), r"already summed over \['data'\]"),
        ((mean_of_integers, "data"), r"collections\['mean'\] has dtype int32, which has no 'mean'"),
    ),
    *rows(
        "nonfinite",
        lambda case: build(nonfinite=case[1], **case[0]),
        *(
            ((options, value), "nonfinite=.* expected one of 'ignore', 'report', 'skip'")
            for options in ({"builder": data_parallel}, {"builder": ZERO1}, {}, HSDP)
            for value in (None, True, "stop", ["skip"])
        ),
    ),
    *rows(
        "nonfinite",
        lambda loss: build(loss=loss, nonfinite="skip"),
        (with_nonfinite, "fsdp: nonfinite='skip' reports a metric 'nonfinite'"),
    ),
    *rows(
        "error feedback",
        feed_back,
        ((fsdp, {"communicate_every": "minibatch"}), "expected reductions once a step"),
        ((fsdp, {"communicate_every": "gather-step"}), "expected reductions once a step"),
        ((zero, {"stage": 2}), "zero2: error_feedback=True with gradients that are reduced in"),
        (
            (data_parallel, {"reduce_code": None}),
            "error_feedback=True with no reduce_code, expected",
        ),
        ((data_parallel, {"mode": "auto"}), "reduce_code='int4' with mode='auto'"),
        (
            (ZERO1, {"axis_by_axis": True, "axes": DATA_X, "axis_name": tuple(DATA_X)}),
            r"with axis_by_axis=True over \('data', 'x'\), expected",
        ),
    ),
    *rows(
        "params_ema",
        params_ema,
        *((x, "expected at least 0 and less than 1") for x in (1, -0.1, math.nan)),
    ),
    *rows(
        "ema_params",
        lambda options: ema_params(build(**options).abstract_state),
        ({}, "has 0 averages of parameters, expected one"),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
