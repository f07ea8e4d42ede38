"""A config is checked field by field, and the message names the one that is wrong."""

import re

import ml_collections
import pytest

from configs import fsdp, fsdp_lm
from manualpar.strategies import Field
from manualpar.training.checkpoints.compatibility import REMOVED, RENAMED, check_resumable
from manualpar.training.config import (
    FIELDS,
    MODEL_FIELDS,
    check_config,
    complete_config,
    field_defaults,
    fields_of,
    flatten_config,
    nearest,
)


def _set(config: ml_collections.ConfigDict, name: str, value):
    *groups, last = name.split(".")
    for group in groups:
        config = config[group]
    with config.unlocked(), config.ignore_type():
        config[last] = value


def _required(fields) -> list[str]:
    return [name for name, field in fields.items() if field.default is None]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "seed",
            -1,
            "config.seed is -1, expected an integer, at least 0 and less than 4294967296.",
        ),
        ("seed", 2**32, "config.seed is 4294967296, expected an integer"),
        ("model.name", "transformr", "the nearest one is 'transformer'"),
        ("model.num_heads", 3, "num_heads is not a known field of a config with model.name='class"),
        ("training.on_nonfinite", "ignroe", "the nearest one is 'ignore'"),
        ("checkpoint.every_steps", -1, "config.checkpoint.every_steps is -1, expected an integer"),
        ("watch.lost_seconds", 0, "config.watch.lost_seconds is 0.0, expected a finite number"),
        ("seed", True, "config.seed is True, expected an integer"),
        ("seed", 1.0, "config.seed is 1.0, expected an integer"),
        ("training.log_every_steps", 0, "log_every_steps is 0, expected an integer, at least 1."),
        ("data.batch_size", 2**31, "is 2147483648, expected an integer, at least 1 and less than"),
        ("model.dropout_rate", 1.0, "expected a finite number, at least 0 and less than 1."),
        (
            "optimizer.learning_rate",
            float("nan"),
            "config.optimizer.learning_rate is nan, expected",
        ),
        (
            "optimizer.learning_rate",
            float("inf"),
            "config.optimizer.learning_rate is inf, expected",
        ),
        ("optimizer.weight_decay", "0.1", "config.optimizer.weight_decay is '0.1', expected a"),
        (
            "data.source",
            "digitz",
            "expected one of 'digits', 'synthetic'; the nearest one is 'digits'",
        ),
        ("data.source", 3, "config.data.source is 3, expected one of 'digits', 'synthetic'."),
        (
            "parallel.strategy",
            "fdsp",
            "config.parallel.strategy is 'fdsp', expected one of 'dp', 'zero1', 'zero2', 'fsdp', "
            "'hsdp', 'diloco'; the nearest one is 'fsdp'.",
        ),
        ("parallel.strategy", "zero", "the nearest one is 'zero1'."),
        (
            "parallel.mode",
            "automatic",
            "config.parallel.mode is 'automatic', expected one of 'manual', 'auto', 'explicit', "
            "'auto-unconstrained'; the nearest one is 'auto'.",
        ),
        ("parallel.pad", 1, "config.parallel.pad is 1, expected True or False."),
        ("parallel.reshard_after_forward", "no", "is 'no', expected True or False."),
        (
            "parallel.communicate_every",
            "epoch",
            "is 'epoch', expected one of 'minibatch', 'step', 'gather-step'",
        ),
        (
            "parallel.keep_gathered",
            "head",
            "config.parallel.keep_gathered is 'head', expected a tuple of names such as ('head',).",
        ),
        (
            "parallel.keep_gathered",
            (("head", None),),
            "is (('head', None),), expected a tuple of n",
        ),
        ("parallel.keep_gathered", ("",), "config.parallel.keep_gathered is ('',), expected a"),
        ("parallel.axis_by_axis", 1, "config.parallel.axis_by_axis is 1, expected True or False."),
        (
            "parallel.gather_dtype",
            "float16",
            "expected one of '', 'bfloat16', 'float32'; the nearest one is 'bfloat16'.",
        ),
        ("parallel.reduce_dtype", None, "config.parallel.reduce_dtype is None, expected one of ''"),
        (
            "parallel.rules",
            ("embed", None),
            "config.parallel.rules is ('embed', None), expected a tuple of pairs such as "
            "(('embed', None), ('mlp', 'data')).",
        ),
        ("parallel.rules", (("embed", 3),), "is (('embed', 3),), expected a tuple of pairs"),
        ("parallel.rules", (("a", "b", "c"),), "is (('a', 'b', 'c'),), expected a tuple of pairs"),
        ("parallel.rules", "embed", "config.parallel.rules is 'embed', expected a tuple of pairs"),
        ("training.norm_metrics", 0, "config.training.norm_metrics is 0, expected True or False."),
        (
            "debug.check_replicas_every",
            -1,
            "config.debug.check_replicas_every is -1, expected an integer, at least 0.",
        ),
        ("debug.draw_sharding", True, "config.debug.draw_sharding is True, expected a string."),
        ("model.dtype", "bfloat", "the nearest one is 'bfloat16'"),
        (
            "parallel.mesh",
            ml_collections.ConfigDict({"": 8}),
            "mesh has an axis '', expected names",
        ),
        (
            "parallel.mesh.data",
            ml_collections.ConfigDict({"a": 1}),
            "config.parallel.mesh.data is a: 1 , expected a number of devices",
        ),
        (
            "parallel.mesh_order",
            ("model", "data"),
            "config.parallel.mesh_order is ('model', 'data') and names ['model'], which the mesh",
        ),
        ("data.prefetch", 10**9, "is 1000000000, expected an integer, at least 1 and less than"),
        ("training.num_steps", 2**31, "expected an integer, at least 1 and less than 2147483648."),
        (
            "optimizer.learning_rate",
            1e39,
            "is 1e+39, expected a finite number, at least 0 and less",
        ),
        ("watch.stall_seconds", 1e300, "is 1e+300, expected a finite number, at least 0 and less"),
        (
            "model.num_layers",
            10**6,
            "config.model.num_layers is 1000000, expected at most 1000: ea",
        ),
        ("optimizer.num_minibatches", 1001, "num_minibatches is 1001, expected at most 1000: each"),
        ("parallel.mesh", 8, "config.parallel.mesh is 8, expected a dict of axis sizes"),
        ("parallel.mesh.data", 0, "config.parallel.mesh.data is 0, expected a number of devices"),
        ("parallel.mesh.data", 2.0, "config.parallel.mesh.data is 2.0, expected a number"),
        (
            "training.num_step",
            1,
            "num_step is not a known field of a config with model.name='classifier'; the nearest "
            "one is config.training.num_steps.",
        ),
    ],
)
def test_what_does_not_fit_is_named(name, value, message):
    config = fsdp.get_config()
    _set(config, name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_config(config)


@pytest.mark.parametrize(
    ("module", "name"),
    [(fsdp, name) for name in _required({**FIELDS, **MODEL_FIELDS["classifier"]})]
    + [(fsdp_lm, name) for name in _required(MODEL_FIELDS["transformer"])],
)
def test_every_field_without_a_default_must_be_there(module, name):
    config = module.get_config().unlock()
    *groups, last = name.split(".")
    group = config[groups[0]] if groups else config
    del group[last]
    with pytest.raises(ValueError, match=f"config.{name} is missing, expected"):
        check_config(config)


def test_a_config_may_leave_out_what_has_a_default(monkeypatch):
    plain = fsdp.get_config()
    number = Field(int, 1, default=3)
    monkeypatch.setattr("manualpar.training.config.FIELDS", {**FIELDS, "new.number": number})
    check_config(plain)
    complete = complete_config(plain)
    assert complete.is_locked
    assert complete.new.number == 3
    assert "new" not in plain
    with complete.unlocked():
        complete.new.number = 5
    assert complete_config(complete).new.number == 5
    _set(complete, "new.number", 0)
    with pytest.raises(
        ValueError, match=r"config\.new\.number is 0, expected an integer, at least"
    ):
        check_config(complete)
    # A run from before there was the field had the default.
    saved, defaults = flatten_config(plain), field_defaults(plain)
    assert defaults["new.number"] == 3
    current = flatten_config(complete_config(plain))
    assert check_resumable(saved, current, defaults=defaults) == []
    current["new.number"] = 4
    assert check_resumable(saved, current, defaults=defaults) == ["new.number: 3 -> 4"]


def test_as_many_layers_as_one_likes_are_scanned():
    config = fsdp_lm.get_config()
    config.model.num_layers = 10**6
    with pytest.raises(ValueError, match=r"by itself; or set config\.model\.scan_layers=True"):
        check_config(config)
    config.model.scan_layers = True
    check_config(config)
    for name, value in (
        ("model.num_layers", 2**31),
        ("model.num_experts", 1001),
        ("parallel.pipeline_chunks", 1001),
    ):
        changed = config.copy_and_resolve_references()
        _set(changed, name, value)
        with pytest.raises(ValueError, match=rf"config\.{name} is {value}, expected .* less than"):
            check_config(changed)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_field_is_explained(name):
    config = fsdp_lm.get_config()
    group, field = name.split(".")
    with config.unlocked():
        config[group][field] = REMOVED[name][0]
    with pytest.raises(ValueError, match=f"config.{name} was removed: it .*; delete the field"):
        check_config(config)


def test_a_renamed_value_is_refused_with_its_new_name():
    for name, values in RENAMED.items():
        for old, new in values.items():
            config = fsdp.get_config()
            _set(config, name, old)
            with pytest.raises(
                ValueError, match=f"config.{name} is '{old}', .* called '{new}' now"
            ):
                check_config(config)


def test_an_integer_passes_for_a_number():
    config = fsdp.get_config()
    _set(config, "optimizer.weight_decay", 0)
    check_config(config)


@pytest.mark.parametrize(
    "rules", [(("embed", None),), (("a", "data"), ("b", ("replica", "data"))), (("a", ()),)]
)
def test_rules_are_pairs_of_a_name_and_axes(rules):
    config = fsdp.get_config()
    _set(config, "parallel.rules", rules)
    check_config(config)


@pytest.mark.parametrize("names", [(), ("head",), ("head", "layer_0/mlp/up/kernel")])
def test_what_is_kept_is_named(names):
    config = fsdp.get_config()
    _set(config, "parallel.keep_gathered", names)
    check_config(config)


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match=r"config is a dict, expected an ml_collections\.Conf"):
        check_config({})


def test_flattening_stops_at_fields():
    flat = flatten_config(fsdp.get_config())
    assert flat.keys() == set(_required(fields_of(fsdp.get_config())))
    assert flat["parallel.mesh"].to_dict() == {"data": -1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("optimiser.warmup", "optimizer.warmup_steps"),
        ("model.batch_size", "data.batch_size"),
        ("parallel.weight_decay", "optimizer.weight_decay"),
        ("sed", "seed"),
    ],
)
def test_the_nearest_name_is_found_by_its_last_part_too(name, expected):
    assert nearest(name, FIELDS) == expected
