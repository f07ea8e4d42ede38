"""The Dockerfile and the devcontainer name files, versions and extras that exist."""

import configparser
import json
import re

from tests.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
DEVCONTAINER = ROOT / ".devcontainer" / "devcontainer.json"


def _setup() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_copied_files_exist_and_are_not_ignored():
    copied = re.findall(r"(?m)^COPY --chown=1000:1000 (.*) \S+$", DOCKERFILE)
    assert len(copied) == DOCKERFILE.count("\nCOPY ")
    paths = [path for sources in copied for path in sources.split()]
    assert "." in paths
    for path in paths:
        assert (ROOT / path).exists(), path
        assert f"{path.removesuffix('/')}/" not in IGNORED
        assert path not in IGNORED


def test_what_git_ignores_does_not_enter_the_image():
    for pattern in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines():
        if pattern and not pattern.startswith("#"):
            name = pattern.lstrip("/")
            assert name in IGNORED or f"**/{name}" in IGNORED, pattern
    assert ".git" in IGNORED


def test_the_python_is_the_one_of_the_lock_and_extras_exist():
    """`.ci/install` installs constraints/ci.txt with this Python alone."""
    [version] = re.findall(r"(?m)^ARG PYTHON=(.*)$", DOCKERFILE)
    assert f"Python {version} on Linux x86-64" in (ROOT / "constraints" / "ci.txt").read_text()
    classifiers = _setup()["metadata"]["classifiers"]
    assert f"Programming Language :: Python :: {version}" in classifiers
    [named] = re.findall(r"--build-arg EXTRA=(\w+) \. +# or (.*)", DOCKERFILE)
    extras = {named[0], *named[1].replace("or ", "").split(", ")}
    assert extras == {"cuda12", "cuda13", "tpu"}
    assert extras <= _setup()["options.extras_require"].keys()


def test_the_image_has_the_environment_that_make_uses():
    """The stamps of the Makefile are in the folder that `VENV` names, which is on `PATH`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    stamps = re.findall(r"(?m)^INSTALLED\w* := \$\(VENV\)/(\S+)$", makefile)
    [touched] = re.findall(r"(?m)^RUN touch (.*)$", DOCKERFILE)
    assert touched.replace('"', "").split() == [f"${{VENV}}/{stamp}" for stamp in stamps]
    assert "\nVENV ?= " in makefile
    assert "\nENV PATH=${VENV}/bin:${PATH}\n" in DOCKERFILE
    assert '.ci/install python3 "${VENV}"' in DOCKERFILE


def test_the_image_runs_the_command_as_a_user_with_a_number():
    """Kubernetes refuses `runAsNonRoot` for a user that has only a name."""
    assert "\nUSER 1000\n" in DOCKERFILE
    assert '\nENTRYPOINT ["tini", "--", "manualpar"]\n' in DOCKERFILE
    assert "manualpar = manualpar." in _setup()["options.entry_points"]["console_scripts"]


def test_the_devcontainer_builds_the_dockerfile_and_uses_its_environment():
    config = json.loads(DEVCONTAINER.read_text(encoding="utf-8"))
    folder = DEVCONTAINER.parent
    assert (folder / config["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (folder / config["build"]["context"]).resolve() == ROOT
    user = config["remoteUser"]
    assert f"useradd --create-home --uid 1000 {user}\n" in DOCKERFILE
    [environment] = re.findall(r" VENV=(\S+)", DOCKERFILE)
    settings = config["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == f"{environment}/bin/python"
    assert "make --always-make" in config["postCreateCommand"]
