"""What docs/versions.md promises: of old names, config fields, the version, and exit codes."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import manualpar
from manualpar import errors
from manualpar.strategies import BUILT_IN, Field
from manualpar.system import cluster
from manualpar.training import exit_codes
from manualpar.training.checkpoints.compatibility import REMOVED
from manualpar.training.config_fields import FIELDS, MODEL_FIELDS
from tests.paths import ROOT

# The version of the latest release, and the config fields of all releases. A release adds its own.
RELEASE, *_NAMES = (ROOT / "tests" / "house" / "released_fields.txt").read_text().split()
RELEASED = frozenset(_NAMES)


def _text(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


@pytest.mark.parametrize(("old", "new"), manualpar.MOVED.items())
def test_an_import_by_an_old_name_is_told_the_new_one(old, new):
    importlib.import_module(new)
    package, _, name = old.rpartition(".")
    said = f"^{re.escape(old)} is {re.escape(new)} since release 0.3$"
    for source in (f"import {old}", f"import {old}.x", f"from {package} import {name}"):
        with pytest.raises(ModuleNotFoundError, match=said):
            exec(source)
    if package == "manualpar":
        with pytest.raises(AttributeError, match=f"attribute '{name}'; it is {re.escape(new)} "):
            getattr(manualpar, name)


def _config_fields() -> dict[str, Field]:
    groups = [FIELDS, *MODEL_FIELDS.values()]
    groups += [{f"parallel.{x}": y for x, y in kind.fields.items()} for kind in BUILT_IN]
    return {name: field for group in groups for name, field in group.items()}


def test_released_config_fields_stay_known_or_are_explained():
    """So no config of a release meets a field that is merely "not known": see `REMOVED`."""
    known = {*_config_fields(), *REMOVED}
    assert len(RELEASED) > 150
    assert sorted(RELEASED - known) == []


def test_config_fields_that_are_new_since_the_release_have_defaults():
    """So a config of the latest release is complete."""
    fields = _config_fields()
    assert [x for x in fields.keys() - RELEASED if fields[x].default is None] == []


def _renamed() -> Iterator[tuple[str, str, str]]:
    """Yields the module, the old name and the new name of each call of `old_names`."""
    for path in sorted((ROOT / "manualpar").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "old_names":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                for old, new in ast.literal_eval(node.args[1]).items():
                    yield module.removesuffix(".__init__"), old, new


RENAMED = tuple(_renamed())


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_gives_the_same_object_and_a_warning(module, old, new):
    found = importlib.import_module(module)
    assert new in found.__all__
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is {new} now") as warned:
        exec(f"from {module} import {old} as x", there := {})
    assert there["x"] is getattr(found, new)
    assert {Path(each.filename).name for each in warned} == {"<string>"}, "the user's own line"
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        getattr(found, "nothing")  # noqa: B009


# Words that were of this package alone, where other projects have one: `docs/glossary.md`.
OLD_WORDS = re.compile(r"closed[ _-]form|CommPolicy|\bRoute\b(?! to host)|\broute_parameter\b")


def test_code_and_pages_use_the_words_of_the_field():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    pages.remove(ROOT / "docs" / "glossary.md")  # It says which old name is which new one.
    sources = [x for folder in ("manualpar", "benchmarks") for x in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*pages, *sources)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OLD_WORDS.search(line)
        and "__name__, {" not in line
        and not line.startswith('    "manualpar.plan')
    ]
    assert not found, "\n".join(found)


def test_other_names_are_missing_as_anywhere():
    with pytest.raises(AttributeError, match=r"module 'manualpar' has no attribute 'nothing'$"):
        getattr(manualpar, "nothing")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'manualpar\.nothing'"):
        importlib.import_module("manualpar.nothing")


def test_all_places_name_the_same_version():
    latest = re.findall(r"(?m)^## \[(\d[\d.]*)\]", _text("CHANGELOG.md"))[0]
    [cited] = re.findall(r"(?m)^version: (.*)$", _text("CITATION.cff"))
    assert {manualpar.__version__, cited, RELEASE} == {latest}


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
