"""Continuous integration uses fixed versions: actions by commit, packages by version and hash."""

import configparser
import os
import re
import shutil
import subprocess

import pytest

from tests.changed import reached_tests
from tests.paths import ROOT


def test_actions_are_named_by_the_hash_of_a_commit():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    uses = re.findall(r"uses: (.*)", text)
    assert len(uses) == 12
    for use in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", use)


def test_two_hosts_are_tried_by_root_alone_and_the_others_are_told_so(tmp_path):
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    done = subprocess.run(
        [ROOT / "tests" / "cluster" / "run"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (77, "")
    assert re.fullmatch(r"tests/cluster/run cannot run here: .* needs root\n", done.stderr)


@pytest.mark.parametrize(
    ("has", "found"),
    [
        ({"bin/python3.13": 127, "pyenv/versions/3.13.0/bin/python3.13": 0}, 1),  # A shim.
        ({"bin/python3.13": 0, "bin/python3.12": 0, "bin/python3": 0}, 0),
        ({"bin/python3.13": 1, "pyenv/versions/3.12.1/bin/python3.12": 0, "bin/python3.11": 0}, 1),
        ({"bin/python3.10": 0, "bin/python3": 1}, None),
    ],
)
def test_the_newest_python_that_runs_is_found(tmp_path, has, found):
    """Each program of `has` ends with the code that is given, whatever is asked of it."""
    for name, code in has.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
    for tool in ("bash", "dirname", "sed", "sort"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [ROOT / ".ci" / "find-python"],
        env={"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    if found is None:
        assert done.returncode == 1
        assert "no Python 3.13 3.12 3.11 on PATH" in done.stderr
    else:
        assert done.stdout == f"{tmp_path / list(has)[found]}\n"


def test_the_lock_has_each_dependency_once_with_a_version_and_a_hash():
    lines = (ROOT / "constraints" / "ci.txt").read_text().splitlines()[1:]
    found = [
        re.fullmatch(r"([\w.-]+)==[\w.+!]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines
    ]
    assert all(found)
    names = [re.sub(r"[_.-]+", "-", match[1]).lower() for match in found]
    assert len(names) == len(set(names))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    brought = ("train", "examples", "pretrained", "data", "plots", "test", "lint")
    wanted = [setup["options"]["install_requires"], *(extras[name] for name in brought)]
    for line in "\n".join(wanted).split("\n"):
        if line and not line.startswith("manualpar["):
            assert re.split(r"[ \[><=~]", line)[0].lower() in names


def test_a_change_reaches_the_tests_that_import_it_and_those_that_run_commands():
    def reached(path):
        return {str(test.relative_to(ROOT)) for test in reached_tests(frozenset({path}))}

    planner = reached("manualpar/planner/hardware.py")
    assert {"tests/planner/hardware_test.py", "tests/commands/plan_command_test.py"} <= planner
    assert "tests/laws/strategies_test.py" not in planner
    # `from manualpar import fsdp` is an import of the module that has it.
    assert "tests/laws/strategies_test.py" in reached("manualpar/strategies/fsdp.py")
    assert "tests/planner/hardware_test.py" not in reached("docs/fsdp.md")
    assert reached_tests(frozenset({"setup.cfg"})) is None
