"""What docs/versions.md promises: names, fields and exit codes of the latest release still work."""

import importlib
import re
import sys
import warnings

import pytest

import manualpar
from manualpar import _moved, errors
from manualpar.strategies import BUILT_IN
from manualpar.system import cluster
from manualpar.training import exit_codes
from manualpar.training.checkpoints.compatibility import REMOVED
from manualpar.training.config import FIELDS, MODEL_FIELDS
from tests.house import released
from tests.paths import ROOT

# Names without an old name: the page lists them.
WITHOUT_OLD_NAME = {"manualpar.generation.Piece"}


@pytest.fixture(autouse=True)
def forget_old_names():
    yield
    for name in _moved.MOVED:
        sys.modules.pop(f"manualpar.{name}", None)


def _text(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("package", "names"), released.read()["names"].items())
def test_released_names_work_and_those_that_moved_warn(package, names):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(package)
        missing = {f"{package}.{name}" for name in names if not hasattr(module, name)}
    assert missing <= WITHOUT_OLD_NAME
    if _moved.new_name(package):
        assert any(warning.category is DeprecationWarning for warning in caught)


def test_released_config_fields_are_known_or_explained():
    fields = set(released.read()["fields"])
    assert len(fields) > 100
    assert fields <= {*released.config_fields(), *REMOVED}


def test_new_config_fields_have_defaults():
    """So a config of the latest release is complete."""
    groups = [FIELDS, *MODEL_FIELDS.values()]
    groups += [{f"parallel.{x}": y for x, y in kind.fields.items()} for kind in BUILT_IN]
    fields = {name: field for group in groups for name, field in group.items()}
    new = fields.keys() - set(released.read()["fields"])
    assert [name for name in new if fields[name].default is None] == []


def test_names_without_an_old_name_are_on_the_page():
    for name in WITHOUT_OLD_NAME:
        assert f"`{name}`" in _text("docs", "versions.md")


def test_all_places_name_the_same_version():
    latest = re.findall(r"(?m)^## \[(\d[\d.]*)\]", _text("CHANGELOG.md"))[0]
    [cited] = re.findall(r"(?m)^version: (.*)$", _text("CITATION.cff"))
    assert {manualpar.__version__, cited, released.read()["version"]} == {latest}


def test_exit_codes_are_the_documented_ones():
    codes = {
        errors.USAGE_EXIT_CODE,
        errors.FILES_EXIT_CODE,
        errors.INTERRUPTED_EXIT_CODE,
        errors.UNREADY_EXIT_CODE,
        cluster.LOST_PROCESS_EXIT_CODE,
        cluster.FAILED_EXIT_CODE,
        cluster.TERMINATED_EXIT_CODE,
        exit_codes.STOPPED_EXIT_CODE,
        *exit_codes.EXIT_CODES.values(),
    }
    table = _text("docs", "running.md").partition("| code | meaning |")[2].partition("\n\n")[0]
    documented = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", table)}
    assert codes == documented - {0}


def test_the_page_has_the_versions_of_the_constraints():
    rows = re.findall(
        r"(?m)^\| ([a-z-]+) \| ([\d.]+) \| ([\d.]+) \|$", _text("docs", "versions.md")
    )
    assert "jax" in {package for package, _, _ in rows}
    oldest, locked = _text("constraints", "minimum.txt"), _text("constraints", "ci.txt")
    for package, low, exact in rows:
        assert f"\n{package}=={low}\n" in oldest
        assert f"\n{package}=={exact} --hash" in locked


def test_the_page_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+_test\.py)`", _text("docs", "versions.md"))
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).exists(), path
