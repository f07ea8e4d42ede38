"""The configs of large models keep the rules for configs, and have the published sizes."""

import importlib
import math

import jax
import jax.numpy as jnp
import pytest

from manualpar.training.config import check_config
from manualpar.training.experiment import prepare
from manualpar.training.task import make_task
from tests.paths import ROOT

FOLDER = ROOT / "configs" / "plan"
# For each config, in billions: the published number of parameters, and how many more ours has.
PUBLISHED = {
    "llama3_8b": (8.03, 0.0),
    "llama3_70b": (70.6, 0.0),
    "llama3_405b": (405.9, 0.0),
    "mixtral_8x22b": (140.6, 0.0),
    "deepseek_v3": (671.0, 31.2),
}


def _module(name):
    return importlib.import_module(f"configs.plan.{name}")


def test_every_config_is_compared_with_what_was_published():
    assert {path.stem for path in FOLDER.glob("[a-z]*.py")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_the_published_number_of_parameters(name):
    config = _module(name).get_config()
    assert config.is_locked
    check_config(config)
    model = make_task(config).model
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    billions = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) / 1e9
    published, more = PUBLISHED[name]
    assert billions == pytest.approx(published + more, rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_docstring_tells_the_command_the_devices_and_the_source(name):
    text = _module(name).__doc__
    assert f"python -m experiments.plan --config=configs/plan/{name}.py" in text
    for word in ("devices", "measured", "https://", "parameters"):
        assert word in text


@pytest.mark.slow
def test_the_largest_is_traced_for_devices_that_nobody_has():
    config = _module("llama3_405b").get_config()
    with config.unlocked():
        config.parallel.mesh = {"data": -1, "model": 8}
    program = prepare(config, devices=16_384).program
    assert dict(program.mesh.shape) == {"data": 2048, "model": 8}
