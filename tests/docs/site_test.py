"""The site is built strictly, has every page and every public name, and no link leads nowhere."""

import html
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import manualpar
from docs.notebook import notebook_pages
from docs.repository import VARIABLE
from docs.site.public_names import listed_names
from tests.paths import ROOT

REPOSITORY = "https://example.org/owner/name"


def test_every_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = re.findall(r"[\w/]+\.md", str(nav))
    assert len(pages) == len(set(pages))
    assert [len(entry["Start here"]) for entry in nav if "Start here" in entry] == [5]
    own = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert own == {page for page in pages if "/" not in page} - {"index.md"}
    # The README has five pages, and this page has all, for readers of the repository.
    listed = re.findall(r"\]\((\w+\.md)", (ROOT / "docs" / "pages.md").read_text(encoding="utf-8"))
    assert own - set(listed) == {"pages.md"}


@pytest.mark.slow
def test_the_site_is_built_and_describes_every_public_name(tmp_path: Path):
    mkdocs = pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    assert mkdocs is not None
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {VARIABLE: REPOSITORY}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
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
            # A constant, such as a `StrategyKind`, has the `__module__` of its class.
            if where is not None and where.startswith("manualpar.") and hasattr(thing, "__name__"):
                path = f"{where}.{getattr(thing, '__qualname__', name)}"
                missing += [path] if path not in described else []
    assert missing == []
    _check_the_header(tmp_path)
    _check_the_links_of_names(tmp_path)
    _check_the_search(tmp_path)
    assert {page.stem for page in (tmp_path / "notebooks").glob("*")} == set(notebook_pages())


def _check_the_header(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    header = home[home.index("<header") : home.index("</header>")]
    assert f"manualpar {manualpar.__version__}" in header
    assert f'href="{REPOSITORY}"' in header
    tabs = re.findall(r'<a href="([^"]*)" class="md-tabs__link">\s*(\w+)', home)
    assert ("reference/index.html", "Reference") in tabs
    assert (site / "project" / "changelog.html").exists()
    # Nothing is fetched from elsewhere when a page is shown.
    assert re.findall(r'(?:src|href)="https?://[^"]*\.(?:css|js|woff2?)"', home) == []
    assert 'data-md-component="source"' not in home


# What people type, and a page that must be among those with the word in a title or as a keyword.
SEARCHES = {
    "OOM": "questions",
    "W&B": "questions",
    "wandb": "own_run",
    "dataset": "data",
    "DataLoader": "own_run",
    "loss mask": "your_own_model",
    "checkpoint": "resume_elsewhere",
    "gradient clipping": "questions",
    "mixed precision": "questions",
    "Slurm": "clusters",
    "multi-host": "clusters",
    "Muon": "running",
    "fp8": "families",
    "fsdp": "reference/manualpar",
    "fit": "reference/manualpar",
    "Program": "reference/manualpar",
}


def _check_the_search(site: Path) -> None:
    """Words that people type find their page, and internal modules come last or not at all."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for word, page in SEARCHES.items():
        found = {
            section["location"].partition(".html")[0]
            for section in index
            if word.lower() in f"{section['title']} {section.get('tags', '')}".lower()
        }
        assert page in found, word
    assert {x["boost"] for x in index if x["location"].startswith("questions.html")} == {2}
    internal = {
        section["location"]
        for section in index
        if section["location"].startswith("reference/") and section.get("boost", 1) >= 1
    }
    pages = {location.partition("#")[0] for location in internal}
    assert pages == {"reference/index.html", "reference/manualpar.html"}
    assert not any("manualpar.system.reports" in section["location"] for section in index)
    entry = (site / "reference" / "manualpar.html").read_text(encoding="utf-8")
    for name in ("manualpar.fsdp", "manualpar.Program", "manualpar.training.fit"):
        assert f"<code>{name}</code>" in entry


def _check_the_links_of_names(site: Path) -> None:
    """Every name on the first page of the reference, and one in prose, leads to its entry."""
    page = (site / "reference" / "index.html").read_text(encoding="utf-8")
    links = re.findall(
        r'<td>\s*<a [^>]*href="([^"#]+)#([^"]+)"[^>]*><code>(manualpar[^<]+)</code>', page
    )
    assert [name for *_, name in links] == [name for _, names in listed_names() for name in names]
    for target, entry, name in links:
        described = (site / "reference" / html.unescape(target)).read_text(encoding="utf-8")
        assert f'id="{entry}"' in described, name
    prose = (site / "generation.html").read_text(encoding="utf-8")
    entry = "reference/inspect.html#manualpar.inspect.communication.trace_collectives"
    assert re.search(
        rf'href="{entry}"[^>]*><code>manualpar.inspect.trace_collectives</code>', prose
    )
    for page in site.rglob("*.html"):
        assert "<autoref" not in page.read_text(encoding="utf-8"), page
