"""The files in `configs/` are complete, valid and documented."""

import importlib
import json

import pytest

from manualpar.training.config import check_config, fields_of, flatten_config
from tests.paths import ROOT

FOLDER = ROOT / "configs"
# The configs of comparisons have other fields, and that of own models has no model.
NAMES = sorted(
    {path.stem for path in FOLDER.glob("[a-z]*.py")} - {"compare", "compare_split", "own"}
)


def _config(name: str):
    return importlib.import_module(f"configs.{name}").get_config()


def test_there_are_configs():
    assert {"dp", "fsdp", "fsdp_lm", "hsdp", "long_lm", "moe_lm", "nd_lm"} <= set(NAMES)
    assert {"pp_lm", "tp_lm", "zero"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_locked_checked_and_json(name):
    config = _config(name)
    assert config.is_locked
    check_config(config)
    stored = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    fields = {name for name, field in fields_of(config).items() if field.kind is tuple}
    for group, name in (name.split(".") for name in fields & flatten_config(config).keys()):
        stored[group][name] = tuple(stored[group][name])
    assert stored == config.to_dict()


@pytest.mark.parametrize("name", ["compare", "compare_split"])
def test_a_comparison_is_not_shorter_than_its_warmup(name):
    config = _config(name)
    assert config.optimizer.warmup_steps <= config.training.num_steps


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_tells_the_command_the_devices_and_what_was_measured(name):
    text = importlib.import_module(f"configs.{name}").__doc__
    experiment = name if (FOLDER.parent / "experiments" / f"{name}.py").exists() else "fsdp"
    assert f"python -m experiments.{experiment} --config=configs/{name}.py" in text
    assert "devices" in text
    assert "measured" in text.lower()


def test_the_strategies_train_the_same_thing():
    fsdp = flatten_config(_config("fsdp"))
    for other, more in (("dp", set()), ("zero", set()), ("hsdp", {"parallel.mesh"})):
        values = flatten_config(_config(other))
        assert {name for name in fsdp if values[name] != fsdp[name]} == {"parallel.strategy"} | more
    values = flatten_config(_config("diloco"))
    meshes = {"parallel.strategy", "parallel.mesh"}
    assert {name for name in fsdp if values[name] != fsdp[name]} == meshes
