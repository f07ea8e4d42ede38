"""`manualpar new` writes a project that trains, is inspected, and passes its own test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manualpar.commands.main import main
from tests.paths import ROOT

FILES = ["README.md", "config.py", "data.py", "model.py", "model_test.py", "task.py", "train.py"]


def test_a_project_is_written_once_and_nothing_is_overwritten(tmp_path: Path, capsys):
    folder = tmp_path / "my_project"
    assert main(["manualpar", "new", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "README.md").read_text().startswith("# my_project\n")
    (folder / "model.py").write_text("mine")
    assert main(["manualpar", "new", str(folder)]) == 2
    assert "my_project exists and is not empty; name another folder" in capsys.readouterr().err
    assert (folder / "model.py").read_text() == "mine"
    (tmp_path / "file").write_text("")
    for name in ("file", "file/inside", ".."):
        assert main(["manualpar", "new", str(tmp_path / name)]) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_project_trains_and_resumes_and_passes_its_test(tmp_path: Path):
    folder = tmp_path / "my_project"
    assert main(["manualpar", "new", str(folder)]) == 0

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = run("train.py", "--training.num_steps=200", "--workdir=run", "--mesh=data=4,model=2")
    assert float(shown.split("test accuracy: ")[1].split()[0]) > 0.95
    again = run(
        "-m", "manualpar", "train", "config.py", "--workdir=run", "--training.num_steps=220"
    )
    assert "going on from the checkpoint of step 200" in again
    assert "reduce-" in run("-m", "manualpar", "inspect", "config.py", "--nocompile")
    assert "4 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider")
