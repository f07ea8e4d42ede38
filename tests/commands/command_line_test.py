"""The command line sets what it says, and each mistake is one sentence."""

from pathlib import Path

import pytest

from manualpar.commands.command_line import parse_command_line
from manualpar.errors import UsageError
from manualpar.training.config import check_config, load_config
from tests.paths import ROOT

CONFIGS = ROOT / "configs"
DEFAULT = CONFIGS / "fsdp.py"


def _parse(*arguments: str):
    return parse_command_line(["program", *arguments], default_config=DEFAULT)


def test_everything_has_a_default():
    command = _parse()
    assert command.config == load_config(DEFAULT)
    assert command.config_path == DEFAULT
    assert (command.flags.workdir, command.flags.devices) == (None, None)


@pytest.mark.parametrize("form", [["--config={}"], ["--config", "{}"], ["-config={}"]])
def test_flags_and_overrides_are_followed(form):
    command = _parse(
        *(text.format(CONFIGS / "dp.py") for text in form),
        "--config.optimizer.learning_rate=3e-4",
        "--config.training.num_steps",
        "7",
        "--config.parallel.mesh.data=2",
        "--workdir=some/where",
        "--devices=4",
    )
    assert command.config.parallel.strategy == "dp"
    assert command.config.optimizer.learning_rate == 3e-4
    assert command.config.training.num_steps == 7
    assert command.config.parallel.mesh.to_dict() == {"data": 2}
    assert command.config.is_locked
    assert command.config_path == CONFIGS / "dp.py"
    assert (command.flags.workdir, command.flags.devices) == (Path("some/where"), 4)


def test_overrides_go_to_the_default_config_too():
    assert _parse("--config.seed=3", "--config.seed=4").config.seed == 4


def test_overrides_may_come_before_the_config():
    command = _parse("--config.seed", "3", f"--config={CONFIGS / 'dp.py'}")
    assert (command.config.seed, command.config.parallel.strategy) == (3, "dp")


def test_a_dict_replaces_a_group():
    command = _parse("--config.parallel.mesh={'replica': 2, 'data': -1}")
    assert command.config.parallel.mesh.to_dict() == {"replica": 2, "data": -1}


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("--config.parallel.pad=true", "pad", True),
        ("--config.parallel.pad=True", "pad", True),
        ("--config.parallel.pad", "pad", True),
        ("--config.parallel.reshard_after_forward=false", "reshard_after_forward", False),
        ("--noconfig.parallel.reshard_after_forward", "reshard_after_forward", False),
        ("--config.parallel.gather_dtype=bfloat16", "gather_dtype", "bfloat16"),
        ("--config.parallel.gather_dtype=", "gather_dtype", ""),
        ("--config.parallel.rules=(('embed',None),)", "rules", (("embed", None),)),
        ("--config.parallel.rules=[('a',('b','c'))]", "rules", (("a", ("b", "c")),)),
        ("--config.parallel.rules=()", "rules", ()),
    ],
)
def test_true_or_false_and_tuples_are_understood(argument, field, value):
    config = _parse(argument).config
    check_config(config)
    assert config.parallel[field] == value


def test_a_config_that_does_not_lock_itself_is_locked(tmp_path):
    text = "import ml_collections\ndef get_config(): return ml_collections.ConfigDict({'seed': 1})"
    (tmp_path / "a.py").write_text(text)
    assert _parse(f"--config={tmp_path / 'a.py'}").config.is_locked


def test_a_mesh_that_is_no_dict_leaves_the_overrides_alone(tmp_path):
    text = (CONFIGS / "fsdp.py").read_text()
    text = text.replace('ConfigDict({"data": -1})', "None")
    (tmp_path / "a.py").write_text(text)
    command = _parse(f"--config={tmp_path / 'a.py'}", "--config.seed=1")
    with pytest.raises(ValueError, match=r"parallel\.mesh is None, expected a dict of axis"):
        check_config(command.config)


def test_force_is_off_unless_asked_for():
    assert (_parse().flags.force, _parse("--force").flags.force) == (False, True)


def test_one_config_file_leaves_nothing_behind_for_the_next(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    _parse()
    with pytest.raises(UsageError, match="no function get_config"):
        _parse(f"--config={tmp_path / 'a.py'}")
