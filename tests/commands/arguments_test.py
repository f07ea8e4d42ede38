"""Short forms of arguments mean what the long forms mean."""

import pytest

from manualpar.commands.command_line import flags_parser, parse_command_line, parse_mesh, translate
from manualpar.commands.inspect_command import INSPECTING
from manualpar.errors import UsageError
from manualpar.training.config import config_folder

FLAGS = ("config", "workdir", "num_processes", "compile", "seed_of_flag", "output")


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
    ],
)
def test_arguments_are_translated(given, expected):
    switches, renamed = ("compile",), {"to": "output"}
    assert translate(given, flags=FLAGS, switches=switches, renamed=renamed) == expected


def test_the_first_argument_may_be_another_flag():
    found = translate(["folder"], flags=FLAGS, positional="config.model.from_hf")
    assert found == ["--config.model.from_hf=folder"]
    found = translate(["one", "two"], flags=FLAGS, positional="config.model.from_hf")
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
