"""The command `manualpar`: its list, its subcommands, and mistakes."""

import importlib
import re

import manualpar
from manualpar.commands.main import COMMANDS, main
from manualpar.errors import MissingExtraError
from manualpar.training.config import config_folder, named_configs


def test_help_lists_every_command_and_each_has_a_function(capsys):
    assert main(["manualpar"]) == main(["manualpar", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", shown, re.MULTILINE)
        module, _, function = command.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_version(capsys):
    assert main(["manualpar", "--version"]) == 0
    assert capsys.readouterr().out == f"manualpar {manualpar.__version__}\n"


def test_a_command_gets_its_arguments_and_its_exit_code_is_returned(capsys):
    assert main(["manualpar", "launch", "--processes=1", "--", "/no/such/command"]) == 127
    assert "'/no/such/command' cannot be started" in capsys.readouterr().err


def test_unknown_commands_and_missing_packages_are_a_sentence(monkeypatch, capsys):
    assert main(["manualpar", "trian"]) == 2
    assert capsys.readouterr().err.startswith("error: 'trian' is not a command; the nearest one is")

    def refuse(user, *modules):
        raise MissingExtraError(f"{user} needs {modules[0]}")

    monkeypatch.setattr("manualpar.commands.main.require", refuse)
    assert main(["manualpar", "train"]) == 2
    assert capsys.readouterr().err == "error: manualpar train needs grain\n"


def test_configs_are_listed_and_printed(capsys):
    assert main(["manualpar", "configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [name for name, _ in named_configs()]
    assert all(line.endswith(".") for line in lines)
    assert main(["manualpar", "configs", "dp"]) == 0
    assert capsys.readouterr().out == (config_folder() / "dp.py").read_text()
    assert main(["manualpar", "configs", "pd"]) == 2
    assert "the nearest one is 'dp'" in capsys.readouterr().err
