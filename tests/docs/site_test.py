"""The site is built strictly, holds every page and every public name, and leads nowhere wrong."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import manualpar
from tests.paths import ROOT


def test_every_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = re.findall(r"[\w/]+\.md", str(nav))
    assert len(pages) == len(set(pages))
    own = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert own == {page for page in pages if "/" not in page} - {"index.md"}


@pytest.mark.slow
def test_the_site_is_built_and_describes_every_public_name(tmp_path: Path):
    mkdocs = pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    assert mkdocs is not None
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    described = set()
    for page in (tmp_path / "reference").glob("*.html"):
        described |= set(re.findall(r'id="(manualpar[\w.]*)"', page.read_text(encoding="utf-8")))
    rooms = [
        "manualpar",
        *(m.name for m in pkgutil.walk_packages(manualpar.__path__, "manualpar.") if m.ispkg),
    ]
    missing = []
    for room in map(importlib.import_module, rooms):
        for name in getattr(room, "__all__", ()):
            thing = getattr(room, name)
            where = getattr(thing, "__module__", None)
            if where is not None and where.startswith("manualpar."):
                path = f"{where}.{getattr(thing, '__qualname__', name)}"
                missing += [path] if path not in described else []
    assert missing == []
    # Nothing is fetched from elsewhere when a page is shown.
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="https?://[^"]*\.(?:css|js|woff2?)"', home) == []
