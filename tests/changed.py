"""Finds the tests that a change can reach: `python -m pytest --changed`.

A change is what git reports: files that differ from the branch that this one follows, and files
that git does not know yet. A test is reached if its file imports a changed file, directly or
through others. Imports run one way, so a change of an application reaches none of the library's
tests.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

# Tests that start commands, run pages or read sources: imports do not say what they depend on.
READ_ALL = ("tests/docs", "tests/house", "tests/commands", "tests/runs", "tests/benchmarks")
# A sample of code in a string may look like an import, and then a test more runs.
_FROM = re.compile(r"^\s*from ([\w.]+) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
_NAME = re.compile(r"(?<!\bas )\b(?!as\b)\w+")
_IMPORT = re.compile(r"^\s*import ([\w.]+)", re.MULTILINE)
CODE = ("manualpar", "configs", "experiments", "benchmarks", "docs", "tests")


def changed_files() -> frozenset[str]:
    """Returns the paths that git reports, relative to the root; none if there is no git."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    try:
        base = lines("merge-base", "HEAD", "@{upstream}") or ["HEAD"]
        untracked = lines("ls-files", "--others", "--exclude-standard")
        return frozenset(lines("diff", "--name-only", base[0]) + untracked)
    except FileNotFoundError:
        return frozenset()


def reached_tests(changed: frozenset[str]) -> frozenset[Path] | None:
    """Returns the files of tests that a change of these paths reaches; `None` stands for all."""
    pages = frozenset(path for path in changed if path.endswith(".md"))
    shared = ("tests/__init__.py", "tests/conftest.py", "tests/compiling.py", "tests/changed.py")
    if any(path in shared or not path.endswith(".py") for path in changed - pages):
        return None
    sources = _sources()
    removed = {_module(path) for path in changed if not (ROOT / path).exists()}
    reached = {_module(path) for path in changed}
    importers = _importers(sources, removed)
    pending = list(reached)
    while pending:
        new = importers.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return frozenset(
        ROOT / path
        for name, path in sources.items()
        if path.endswith("_test.py") and (name in reached or path.startswith(READ_ALL))
    )


def _sources() -> dict[str, str]:
    """The path of each module, by the module's name."""
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return {_module(str(p.relative_to(ROOT))): str(p.relative_to(ROOT)) for p in paths}


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _importers(sources: dict[str, str], removed: set[str]) -> dict[str, set[str]]:
    """The modules that import a module, by its name; a package passes names on."""
    texts = {name: (ROOT / path).read_text() for name, path in sources.items()}
    passed_on = {
        name: dict(_names(texts[name]))
        for name, path in sources.items()
        if path.endswith("__init__.py")
    }
    known, importers = sources.keys() | removed, dict[str, set[str]]()
    for name, text in texts.items():
        for imported, module in _names(text):
            # `from package import module`, `from package import function`, `import module`.
            found = f"{module}.{imported}"
            if found not in known:
                found = passed_on.get(module, {}).get(imported, module)
            importers.setdefault(found, set()).add(name)
    return importers


def _names(source: str) -> Iterator[tuple[str, str]]:
    """Yields each imported name with the module that it is taken from; absolute imports only."""
    for module, names in _FROM.findall(source):
        yield from ((name, module) for name in _NAME.findall(names))
    yield from (("", module) for module in _IMPORT.findall(source))
