"""A config is checked field by field, and the message names the one that is wrong."""

import ml_collections
import pytest

from configs import fsdp, fsdp_lm
from manualpar.strategies import Field
from manualpar.training.checkpoints.compatibility import check_resumable
from manualpar.training.config import (
    check_config,
    complete_config,
    field_defaults,
    fields_of,
    flatten_config,
)
from manualpar.training.config_fields import FIELDS


def _set(config: ml_collections.ConfigDict, name: str, value):
    *groups, last = name.split(".")
    for group in groups:
        config = config[group]
    with config.unlocked(), config.ignore_type():
        config[last] = value


def _required(fields) -> list[str]:
    return [name for name, field in fields.items() if field.default is None]


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
    config.model.scan_layers = True
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


def test_flattening_stops_at_fields():
    flat = flatten_config(fsdp.get_config())
    assert flat.keys() >= set(_required(fields_of(fsdp.get_config())))
    assert flat.keys() <= fields_of(fsdp.get_config()).keys()
    assert flat["parallel.mesh"] == {"data": -1}
