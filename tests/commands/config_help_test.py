"""`--help` of every command fits the terminal, and explains each flag and each field."""

import re
import shlex

import pytest
from absl import flags

from manualpar.commands.command_line import TRAINING, command_help, parse_command_line
from manualpar.commands.compare_command import COMPARING
from manualpar.commands.main import COMMANDS, main
from manualpar.training.config import find_config, flatten_config, load_config


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
