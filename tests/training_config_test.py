"""A config is checked field by field, and the message names the one that is wrong."""

import re

import ml_collections
import pytest

from configs import fsdp
from manualpar.training.config import FIELDS, check_config, flatten_config, nearest


def _set(config: ml_collections.ConfigDict, name: str, value):
    *groups, last = name.split(".")
    for group in groups:
        config = config[group]
    with config.unlocked(), config.ignore_type():
        config[last] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "seed",
            -1,
            "config.seed is -1, expected an integer, at least 0 and less than 4294967296.",
        ),
        ("seed", 2**32, "config.seed is 4294967296, expected an integer"),
        ("seed", True, "config.seed is True, expected an integer"),
        ("seed", 1.0, "config.seed is 1.0, expected an integer"),
        ("data.batch_size", 0, "config.data.batch_size is 0, expected an integer, at least 1."),
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
            "config.parallel.strategy is 'fdsp', expected one of 'dp', 'fsdp'",
        ),
        ("parallel.mode", "auto", "config.parallel.mode is 'auto', expected one of 'manual'"),
        ("model.dtype", "bfloat", "the nearest one is 'bfloat16'"),
        ("parallel.mesh", 8, "config.parallel.mesh is 8, expected a dict of axis sizes"),
        ("parallel.mesh.data", 0, "config.parallel.mesh.data is 0, expected a number of devices"),
        ("parallel.mesh.data", 2.0, "config.parallel.mesh.data is 2.0, expected a number"),
        (
            "training.num_step",
            1,
            "num_step is not a known field; the nearest one is config.training.num_steps.",
        ),
    ],
)
def test_what_does_not_fit_is_named(name, value, message):
    config = fsdp.get_config()
    _set(config, name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_config(config)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_must_be_there(name):
    config = fsdp.get_config().unlock()
    *groups, last = name.split(".")
    group = config[groups[0]] if groups else config
    del group[last]
    with pytest.raises(ValueError, match=f"config.{name} is missing, expected"):
        check_config(config)


def test_an_integer_passes_for_a_number():
    config = fsdp.get_config()
    _set(config, "optimizer.weight_decay", 0)
    check_config(config)


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match=r"config is a dict, expected an ml_collections\.Conf"):
        check_config({})


def test_flattening_stops_at_fields():
    flat = flatten_config(fsdp.get_config())
    assert flat.keys() == FIELDS.keys()
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
