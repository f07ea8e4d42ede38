import pytest
from ml_collections import ConfigDict

from manualpar.plans.planned_experiment import prepare_planned
from manualpar.training.config import load_config
from manualpar.training.task import make_task
from tests.paths import ROOT

CONFIGS = ROOT / "configs"


def config_of(name: str) -> ConfigDict:
    """A config with a model that is traced fast."""
    config = ConfigDict(load_config(CONFIGS / name).to_dict())
    config.model.num_layers = 1
    return config.lock()


def test_vocabulary_changes_the_model_and_its_flops_and_nothing_else() -> None:
    config = config_of("fsdp_lm.py")
    trained = prepare_planned(config, devices=16)
    planned = prepare_planned(config, devices=16, vocab_size=32_000)
    shapes = {info.path: info.shape for info, _ in planned.program.parameters}
    before = {info.path: info.shape for info, _ in trained.program.parameters}
    assert trained.task.model == make_task(config).model
    hidden = config.model.hidden_size
    changed = {path for path in shapes if shapes[path] != before[path]}
    assert changed == {"embedding", "head"}
    assert shapes["embedding"] == (32_000, hidden)
    assert planned.program.abstract_batch == trained.program.abstract_batch
    # The head's product alone: six FLOPs for each weight and token.
    more = (32_000 - before["embedding"][0]) * hidden * 6 * config.data.sequence_length
    assert planned.task.flops_per_example - trained.task.flops_per_example == pytest.approx(more)
