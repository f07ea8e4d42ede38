"""The command line sets what it says, and each mistake is one sentence."""

import re
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.parallel.pad=maybe"], "--config.parallel.pad=maybe: expected true or false."),
        (["--config.parallel.rules=(('a',None)"], "rules=(('a',None): expected a tuple of pairs"),
        (["--config.parallel.mesh.replica=2"], "one is --config.parallel.mesh.data; to change"),
        (
            ["--config.parallel.mesh.replica=2"],
            """complete mesh, as in --config.parallel.mesh="{'replica': 2, 'data': -1}".""",
        ),
        (["--config.nonsense=1"], "has no field 'nonsense'; the nearest one is --config.seed."),
        (["--config.optimizer.learning_rat=1"], "nearest one is --config.optimizer.learning_rate."),
        (["--config.model.prefetch=True"], "=True: model.prefetch was removed: it made"),
        (["--config.seed.x=1"], "no field 'seed.x'"),
        (["--config.parallel.mesh.date=1"], "the nearest one is --config.parallel.mesh.data"),
        (["--config.=1"], "no field ''"),
        (["--config.seed=abc"], "--config.seed=abc: expected an integer"),
        (["--config.training.num_steps=1.5"], "1.5: expected an integer without point or"),
        (["--config.training.num_steps=1e5"], "exponent such as 1000."),
        (["--config.optimizer.learning_rate=x"], "learning_rate=x: expected a number such as 0.00"),
        (["--config.optimizer=3"], "--config.optimizer=3: expected a dict such as {'data': -1}."),
        (["--config.seed"], "Missing value for flag --config.seed."),
        ([f"--config={DEFAULT}", f"--config={DEFAULT}"], "--config is given twice"),
        (["--config=configs/none.py"], "--config=configs/none.py: there is no such file"),
        ([f"--config={CONFIGS}"], "there is no such file"),
        (["--config="], "--config has no value"),
        (["--config"], "--config has no value"),
        (["--workdri=x"], "--workdri is not a known flag; the nearest one is --workdir."),
        (["--device=4"], "the nearest one is --devices."),
        (["--devices=0"], "--devices=0: expected at least 1 device to simulate."),
        (["--devices=-8"], "--devices=-8: expected at least 1 device to simulate."),
        (["--devices=two"], "--devices=two: expected an integer"),
        (["fsdp.py"], "'fsdp.py' is not understood"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(arguments, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        _parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = 1", "the file has no function get_config(), expected one."),
        ("a.py", "get_config = 3", "the file has no function get_config()"),
        ("a.py", "def get_config(): return {}", "get_config() returns a dict, expected an ml_coll"),
        ("a.py", "def get_config(): pass", "get_config() returns a NoneType, expected"),
        ("a.py", "x = 1\ndef f(:", "a.py: line 2: invalid syntax."),
        ("a.txt", "x = 1", "expected a Python file whose name ends in .py."),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        _parse(f"--config={tmp_path / name}")


def test_a_config_that_does_not_lock_itself_is_locked(tmp_path):
    text = "import ml_collections\ndef get_config(): return ml_collections.ConfigDict({'seed': 1})"
    (tmp_path / "a.py").write_text(text)
    assert _parse(f"--config={tmp_path / 'a.py'}").config.is_locked


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n1 / 0", "line 2: ZeroDivisionError: division by zero"),
        ("import nothing_such", "line 1: ModuleNotFoundError: No module named 'nothing_such'"),
        (
            "def get_config():\n    raise RuntimeError('one\\n two')",
            "line 2: RuntimeError: one two",
        ),
        ("def get_config(x): return x", "TypeError: get_config() missing 1 required positional"),
        (
            "def get_config(): return get_config()",
            "line 1: RecursionError: maximum recursion depth",
        ),
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        (
            "from configs import fsdp\ndef get_config():\n    config = fsdp.get_config()\n"
            "    config.parallel.mesh = 3\n    return config",
            "line 4: TypeError: Could not override field 'mesh'",
        ),
    ],
)
def test_an_error_inside_a_config_file_is_one_sentence_with_its_line(tmp_path, text, found):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"a.py: {found}")) as caught:
        _parse(f"--config={tmp_path / 'a.py'}")
    assert "\n" not in str(caught.value)


def test_a_name_that_no_file_can_have_is_no_file():
    with pytest.raises(UsageError, match=r"aa\.py: File name too long"):
        _parse(f"--config={'a' * 5000}.py")


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
