"""Wrong values of builders' options, and options that cannot be combined."""

import functools

import optax
import pytest

from manualpar import Pipeline, abstract_mesh, data_parallel, diloco, fsdp, hsdp, zero
from tests.refused.table import build, check_refused, rows
from tests.tiny import BATCHES, Classifier, loss_fn

TWO = ("data", "node")
INSIDE = {"replica_mean": "backward"}
GROUPS = {"replica": 2, "data": 4}


def build_fsdp(options):
    build(**options)


def build_zero(options):
    build(builder=zero, **options)


def build_data_parallel(options):
    build(builder=data_parallel, **options)


def build_hsdp(options):
    build(builder=hsdp, axes=GROUPS, **options)


def build_calling(case):
    """Builds a program whose loss has an argument `critic`, and calls it if the case says so."""
    models, calls, options = case

    def loss(params, apply_fn, batch, rng, critic):
        result = loss_fn(params, apply_fn, batch, rng)
        return (result[0] + critic(batch.inputs, train=True).mean(), result[1]) if calls else result

    build(loss=loss, other_models=models, **options)


def program_elsewhere(**options):
    return fsdp(
        Classifier(),
        optax.sgd(0.1),
        loss_fn,
        mesh=abstract_mesh({"data": 4}, 4),
        batch=BATCHES[0],
        **options,
    )


def build_regathering(options):
    build(axes={"data": 4, "node": 2}, **{"axis_name": TWO, "regather_axes": ("data",), **options})


CRITIC = {"critic": Classifier()}
REPLICAS = functools.partial(diloco, every=2, outer_tx=optax.sgd(1.0))
REFUSED = [
    *rows(
        "other_models",
        build_calling,
        (({"judge": Classifier()}, True, {}), TypeError, r"'judge', expected the name of an arg"),
        (({"batch": Classifier()}, True, {}), TypeError, r"'batch', expected the name of an arg"),
        (
            ({}, True, {}),
            TypeError,
            r"loss_fn takes \(params, .*critic\), expected \(params, .*name",
        ),
        (([], True, {}), TypeError, r"other_models=\[\], expected a dict of programs or models"),
        (({"critic": 3}, True, {}), TypeError, r"other_models\['critic'\]: model is 3, expected"),
        ((CRITIC, False, {}), r"'critic', expected a model with parameters that loss_fn calls"),
        (({"critic": program_elsewhere()}, True, {}), r"program on the mesh {'data': 4} in mode "),
        (
            ({"critic": program_elsewhere(mode="auto")}, True, {"axes": {"data": 4}}),
            r"in mode 'auto', expected the mesh {'data': 4} .* mode 'manual': both compute",
        ),
        (
            (CRITIC, True, {"pipeline": Pipeline(), "axes": {"data": 4, "stage": 2}}),
            r"other_models=\['critic'\] with a pipeline, expected none of both, because a stage",
        ),
        (
            (CRITIC, True, {"builder": REPLICAS, "axes": {"replica": 2, "data": 4}}),
            r"diloco: other_models=\['critic'\], expected none, because each replica",
        ),
    ),
    *rows(
        "fsdp",
        build_fsdp,
        ({"remat": "dots"}, r"fsdp: remat='dots', expected one of 'model', 'auto'"),
        ({"mode": "gspmd"}, r"fsdp: mode='gspmd', expected one of 'manual', 'auto', "),
        ({"communicate_every": "layer"}, r"'layer', expected one of 'minibatch', 'step'"),
        ({"keep_gathered": ("outptu",)}, r"keep_gathered names 'outptu', .* 'output_dense'"),
        ({"keep_gathered": "head"}, TypeError, "fsdp: keep_gathered='head', expected a tuple of"),
        ({"axis_by_axis": 1}, r"fsdp: axis_by_axis=1, expected one of True, False"),
        ({"reshard_after_forward": 1}, r"reshard_after_forward=1, expected one of True"),
        ({"gather_dtype": "float16"}, r"fsdp: gather_dtype='float16', expected one of"),
        ({"gather_dtype": "bf16"}, r"fsdp: gather_dtype='bf16', expected one of"),
        ({"reduce_dtype": "int8"}, r"fsdp: reduce_dtype='int8', expected one of"),
        (
            {"reduce_dtype": "bfloat16", "mode": "auto"},
            r"reduce_dtype='bfloat16' with mode='auto', expected None: XLA chooses",
        ),
        ({"num_minibatches": 3, "mode": "auto"}, r"=3 does not divide the 8 examples of"),
        ({"num_minibatches": 0, "mode": "explicit"}, r"=0, expected a positive integer"),
        ({"minibatches": 4}, TypeError, r"fsdp: 'minibatches' is not .* mean 'num_minibatches'"),
        ({"gather_code": "int4"}, "fsdp: gather_code='int4', expected one of None, 'int8'"),
        ({"reduce_code": "fp8"}, "reduce_code='fp8', expected one of None, 'int8', 'int4'"),
        ({"reduce_code": True}, "reduce_code=True, expected one of"),
        ({"gather_code": "int8", "mode": "auto"}, "gather_code='int8' with mode='auto', expected"),
        ({"reduce_code": "int4", "mode": "explicit"}, "reduce_code='int4' with mode='explicit'"),
        ({"trainable": ("*/bias", "output/*")}, r"'output/\*'.*fits no parameter.*'output_dense/"),
        *(
            ({"trainable": globs}, TypeError, "expected a tuple of one or more globs")
            for globs in ("*/bias", (), ("*/bias", 3))
        ),
        ({"frozen_dtype": "bfloat16"}, "frozen_dtype='bfloat16', expected None"),
    ),
    *rows(
        "zero",
        build_zero,
        ({"stage": 3}, r"zero: stage=3, expected one of 1, 2"),
        ({"stage": True}, r"zero: stage=True, expected one of 1, 2"),
        ({"pad": "yes"}, r"zero: pad='yes', expected one of True, False"),
    ),
    *rows(
        "data_parallel",
        build_data_parallel,
        ({"axis_by_axis": True, "mode": "auto"}, r"=True with mode='auto', expected False"),
        ({"use_scan": 1}, r"data_parallel: use_scan=1, expected one of True, False"),
    ),
    *rows(
        "hsdp",
        build_hsdp,
        ({"min_weight_size": -1}, r"hsdp: min_weight_size=-1, expected a number of"),
        ({"replica_axis": "pod"}, r"hsdp: axis_name names \['pod'\], but the mesh has"),
        ({"replica_mean": "layer"}, "replica_mean='layer', expected one of 'step', 'backward'"),
        ({**INSIDE, "mode": "auto"}, "replica_mean='backward' with mode='auto', expected 'manual'"),
        ({**INSIDE, "communicate_every": "step"}, "communicate_every='step', expected 'minibatch'"),
        (
            {**INSIDE, "reduce_code": "int8", "error_feedback": True},
            "error_feedback=True, expected",
        ),
        ({**INSIDE, "pipeline": Pipeline("node")}, "with pipeline="),
    ),
    *rows(
        "regather_axes",
        build_regathering,
        ({"mode": "auto"}, "mode='auto', expected 'manual'"),
        ({"communicate_every": "step"}, "communicate_every='step', expected"),
        ({"reshard_after_forward": False}, "reshard_after_forward=False, expected"),
        ({"pipeline": Pipeline("node")}, "with pipeline="),
        ({"regather_axes": TWO}, "expected the first axes of axis_name, but not all"),
        ({"regather_axes": ("node",)}, r"axis_name=\('data', 'node'\), expected the first"),
        ({"regather_axes": "data"}, TypeError, "regather_axes='data', expected a tuple"),
    ),
    *rows(
        "a missing batch",
        lambda mesh: zero(Classifier(), optax.sgd(0.1), loss_fn, mesh=mesh),
        (abstract_mesh({"data": 8}, 8), TypeError, r"zero: batch= is missing, expected it as a"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
