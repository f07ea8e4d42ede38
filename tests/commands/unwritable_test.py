"""Every command refuses a place that cannot be written to: in one sentence, before any work."""

from pathlib import Path

import pytest

from manualpar.commands.command_line import TRAINING, parse_command_line
from manualpar.commands.compare_command import COMPARING, compare_command
from manualpar.commands.import_export import IMPORTING, import_command
from manualpar.commands.inspect_command import INSPECTING, inspect_command
from manualpar.commands.main import main
from manualpar.commands.plan_command import PLANNING, plan_command
from manualpar.commands.train_command import run_command
from manualpar.errors import UsageError, print_error

TEXT = "texts.jsonl"
# Each command with the arguments that it needs, and the flag for its results.
WRITING = {
    "train": (["fsdp"], "workdir"),
    "inspect": (["fsdp", "--no-compile", "--devices=8"], "output"),
    "plan": (["fsdp"], "output"),
    "compare": ([], "output"),
    "generate": (["--workdir=run", f"--prompts={TEXT}"], "output"),
    "evaluate": (["--workdir=run"], "output"),
    "tokenize": ([f"--input={TEXT}", "--source=jsonl"], "output"),
    "import": ([], "workdir"),
    "export": (["--workdir=run"], "output"),
}
# `main` would parse these commands with absl, which works once in a process.
WITH_CONFIG = {
    "train": (run_command, "fsdp", TRAINING),
    "inspect": (inspect_command, "fsdp", INSPECTING),
    "plan": (plan_command, "fsdp", PLANNING),
    "compare": (compare_command, "compare", COMPARING),
    "import": (import_command, "fsdp_lm", IMPORTING),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(TEXT).write_text('{"text": "a"}\n')
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).resolve() != locked)


def _refusal(command: str, *arguments: str, capsys) -> str:
    try:
        if command in WITH_CONFIG:
            run, config, syntax = WITH_CONFIG[command]
            code = run(parse_command_line(["", *arguments], default_config=config, syntax=syntax))
        else:
            code = main(["manualpar", command, *arguments])
    except UsageError as error:  # From the parser, which would end the process with this code.
        print_error(error)
        code = 2
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not {path.name for path in Path().iterdir()} - {TEXT, "locked"}
    assert not list(Path("locked").iterdir())
    return error


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("folder", ["locked", TEXT])
def test_a_place_for_results_is_tried_first(command, folder, capsys):
    arguments, flag = WRITING[command]
    error = _refusal(command, *arguments, f"--{flag}={folder}/new", capsys=capsys)
    assert f"--{flag}" in error
    assert f"{folder} may not be" in error or f"{folder} is" in error


@pytest.mark.parametrize("command", ["train", "inspect", "plan", "compare"])
def test_so_is_the_current_folder(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    arguments, flag = WRITING[command]
    error = _refusal(command, *arguments, capsys=capsys)
    assert f"{tmp_path} may not be written to; name another folder with --{flag}." in error


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="only Linux has /proc")
def test_so_is_a_folder_whose_permissions_do_not_say_it(capsys):
    error = _refusal("train", "fsdp", "--workdir=/proc/run", capsys=capsys)
    assert "cannot be written to /proc/run: /proc may not be written to" in error


def test_a_folder_is_no_file_for_answers(capsys):
    arguments, _ = WRITING["generate"]
    error = _refusal("generate", *arguments, "--output=locked", capsys=capsys)
    assert "--output=locked is a folder, expected the name of a file." in error


def test_an_unknown_home_folder_is_a_sentence(capsys):
    error = _refusal("train", "--workdir=~nobody-of-this-name/run", capsys=capsys)
    assert "--workdir: ~nobody-of-this-name/run: the home folder is not known" in error
