"""The command line sets what it says, and each mistake is one sentence."""

import re
import shlex
from pathlib import Path

import pytest
from absl import flags

from manualpar.commands.command_line import (
    TRAINING,
    Syntax,
    command_help,
    flags_parser,
    parse_command_line,
    parse_mesh,
    translate_fields,
)
from manualpar.commands.compare_command import COMPARING
from manualpar.commands.inspect_command import INSPECTING
from manualpar.commands.main import COMMANDS, main
from manualpar.errors import UsageError
from manualpar.system.reports.flags import Flag
from manualpar.training.config import (
    check_config,
    config_folder,
    find_config,
    flatten_config,
    load_config,
)
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


# -------------------------------------------------------------------------------------------------
# `--help` of every command fits the terminal, and explains each flag and each field.


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(flags, "FLAGS", flags.FlagValues())


def _help_of(command: str, capsys) -> str:
    try:
        code = main(["manualpar", command, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_is_longer_than_the_terminal_only_if_it_is_a_word(
    command, columns, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = _help_of(command, capsys).splitlines()
    assert [x for x in lines if len(x) > columns and " " in x.strip()] == []
    assert f"manualpar {command}" in "\n".join(lines)


@pytest.mark.parametrize("columns", [60, 80])
def test_so_is_the_list_of_commands(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["manualpar", "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_has_a_help(command, capsys):
    shown = re.split(r"\n(?:Flags|options):\n", _help_of(command, capsys))[1]
    shown = shown.split("\n\n")[0]
    entries = re.split(r"\n(?=  -)", shown)
    assert len(entries) >= 1
    for entry in entries:
        assert re.search(r"(  |\n +)\S.*\S$", entry.lstrip(), re.DOTALL), entry


@pytest.mark.parametrize("config", ["fsdp", "fsdp_lm", "diloco", "compare"])
def test_a_field_is_shown_as_the_flag_that_sets_it(config):
    syntax = COMPARING if config == "compare" else TRAINING
    shown = command_help("About.", ["program", config, "--help"], "fsdp", syntax)
    values = flatten_config(load_config(find_config(config)))
    fields = shown.split("Fields of")[1]
    entries = re.split(r"\n  (?=--)", re.sub(r"\n\n.*:\n", "\n", fields))[1:]
    shown_flags = [re.match(r'--[\w.]+=("(\\.|[^"\\])*"|\S+)', entry) for entry in entries]
    flags_of_fields = [shlex.split(flag[0])[0] for flag in shown_flags]
    assert {flag.split("=")[0][2:] for flag in flags_of_fields} == values.keys()
    assert all(re.search(r"\.\s+\[.*(no\s+default|default\s.*)\]$", x, re.DOTALL) for x in entries)
    given = parse_command_line(
        ["program", config, *flags_of_fields], default_config="fsdp", syntax=syntax
    )
    assert flatten_config(given.config) == values


def test_fields_are_grouped():
    shown = command_help("About.", ["program", "fsdp_lm"], "fsdp", TRAINING)
    headings = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert headings == [
        "Flags",
        "General",
        "Model",
        "Data",
        "Optimizer",
        "Learning rate after the warm-up",
        "Training and evaluation",
        "Parallelism",
        "Parallelism, only for other strategies than fsdp",
        "Checkpoints",
        "Text that is generated at the end",
        "Lost and stalled processes",
        "Debugging",
    ]
    unused = shown.split("only for other strategies")[1].split("Checkpoints")[0]
    assert "--parallel.outer_momentum=" in unused
    assert "--parallel.communicate_every=" not in unused


# -------------------------------------------------------------------------------------------------
# Short forms of arguments mean what the long forms mean.


FLAGS = {name: Flag("Help.") for name in ("workdir", "num_processes", "seed_of_flag", "output")}
SHORT = Syntax({**FLAGS, "compile": Flag("Help.", bool)}, renamed={"to": "output"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["dp", "x/y.py", "--workdir", "w"], ["--config=dp", "--config=x/y.py", "--workdir", "w"]),
        (
            ["--num-processes=2", "--num_processes", "2"],
            ["--num_processes=2", "--num_processes", "2"],
        ),
        (["--no-compile", "--nocompile"], ["--nocompile", "--nocompile"]),
        (["--model.num_layers=4"], ["--config.model.num_layers=4"]),
        (["--model.num-layers", "4"], ["--config.model.num_layers", "4"]),
        (["--config.seed=1", "-config.seed=1"], ["--config.seed=1", "--config.seed=1"]),
        (["--seed=1", "--profile=1:2"], ["--config.seed=1", "--config.profile=1:2"]),
        (["--noconfig.training.norm_metrics"], ["--noconfig.training.norm_metrics"]),
        (["--mesh=data=4,model=2"], ["--config.parallel.mesh={'data': 4, 'model': 2}"]),
        (["--mesh", "data=-1"], ["--config.parallel.mesh={'data': -1}"]),
        (["--to=x"], ["--output=x"]),
        (["--seed=1", "dp"], ["--config.seed=1", "dp"]),  # The command refuses the second.
        (["--data.path=a-b --c_d=e"], ["--config.data.path=a-b --c_d=e"]),
        (["--output", "-a-b", "--seed=1"], ["--output", "-a-b", "--config.seed=1"]),
    ],
)
def test_arguments_are_translated(given, expected):
    assert translate_fields(given, SHORT) == expected


def test_the_first_argument_may_be_another_flag():
    syntax = SHORT._replace(positional="config.model.from_hf")
    found = translate_fields(["folder"], syntax)
    assert found == ["--config.model.from_hf=folder"]
    found = translate_fields(["one", "two"], syntax)
    assert found == ["--config.model.from_hf=one", "two"]  # The command refuses the second.


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=2,data=4", "1a=2", "=2"])
def test_a_mesh_that_is_not_understood_is_refused(text):
    with pytest.raises(UsageError, match="expected axes such as data=4,model=2"):
        parse_mesh(text)


def test_configs_by_name_are_the_files_of_the_package():
    arguments = ["program", "dp", "plan/llama3_8b", "--no-compile", "--parallel.mode=auto"]
    line = parse_command_line(arguments, default_config="fsdp", syntax=INSPECTING)
    folder = config_folder()
    assert [each.path for each in line.configs] == [
        folder / "dp.py",
        folder / "plan" / "llama3_8b.py",
    ]
    assert [each.config.parallel.mode for each in line.configs] == ["auto", "auto"]
    assert line.flags.compile is False


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help", "--config=fsdp_lm"],
        ["--config", "fsdp_lm", "--help"],
        ["--help", "--seed", "1", "-config", "fsdp_lm"],
        ["fsdp_lm", "--help"],
    ],
)
def test_help_shows_the_fields_of_the_named_config(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        flags_parser("About.", "fsdp")(["program", *arguments])
    shown = capsys.readouterr().out
    assert "Fields of fsdp_lm.py" in shown
    with pytest.raises(SystemExit, match="2"):
        flags_parser("About.", "fsdp")(["program", "none", "--help"])
    with pytest.raises(SystemExit, match="2"):
        flags_parser("About.", "fsdp")(["program", "--help", "--config"])
