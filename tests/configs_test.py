"""The configs that come with the project keep the rules for configs."""

import importlib
import json
from pathlib import Path

import pytest

from manualpar.training.config import check_config, flatten_config

NAMES = sorted(path.stem for path in (Path(__file__).parent.parent / "configs").glob("[a-z]*.py"))


def _config(name: str):
    return importlib.import_module(f"configs.{name}").get_config()


def test_there_are_configs():
    assert {"dp", "fsdp"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_locked_checked_and_json(name):
    config = _config(name)
    assert config.is_locked
    check_config(config)
    assert json.loads(json.dumps(config.to_dict(), allow_nan=False)) == config.to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_tells_the_command_the_devices_and_what_was_measured(name):
    text = importlib.import_module(f"configs.{name}").__doc__
    assert (
        f"python -m experiments.{_config(name).parallel.strategy} --config=configs/{name}.py"
        in text
    )
    assert "devices" in text
    assert "measured" in text.lower()


def test_the_strategies_train_the_same_thing():
    dp, fsdp = flatten_config(_config("dp")), flatten_config(_config("fsdp"))
    different = {name for name in dp if dp[name] != fsdp[name]}
    assert different == {"parallel.strategy"}
