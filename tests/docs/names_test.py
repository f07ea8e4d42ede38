"""Names in prose exist, and become links; the first page of the reference has every public name."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import manualpar
from docs.site.links import find_entry, link_names, missing_names, name_in, names_defined
from docs.site.public_names import INTERNAL, find_object, listed_names, public_members, public_page
from tests.paths import ROOT

# The changelog and `docs/versions.md` also have the names of earlier releases.
PAGES = [
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "versions"),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "benchmarks/README")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_in_a_page_exist(page: Path):
    assert missing_names(page.read_text(encoding="utf-8")) == []


def test_the_names_in_docstrings_exist():
    missing = []
    for path in sorted((ROOT / "manualpar").rglob("*.py")):
        names = set(re.findall(r"`(manualpar(?:\.\w+)+)`", path.read_text(encoding="utf-8")))
        missing += [f"{path}: {name}" for name in names if find_entry(name) is None]
    assert missing == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("manualpar.layers", "manualpar.layers"),
        ("manualpar.core.mesh.mesh", "manualpar.core.mesh.mesh"),
        ("manualpar.fsdp", "manualpar.strategies.fsdp.fsdp"),
        ("manualpar.Program.adopt", "manualpar.core.program.program.Program.adopt"),
        ("manualpar.Program.init", "manualpar.core.program.program.Program"),  # An attribute.
        ("manualpar.Batch.inputs", "manualpar.core.state.train_state.Batch"),
        ("manualpar.core.mesh.mesh.MOST", "manualpar.core.mesh.mesh"),
        ("manualpar.no_such_name", None),
        ("manualpar.layers.no_such_name", None),
        ("manualpar.Program.no_such_name", None),
        ("manualpar.Batch.inputs.no_such_name", None),
        ("manualpar.pretrained.load_hf", None),  # An old name.
        ("manualpar.core.modes.strategy.Sends", None),
    ],
)
def test_a_name_has_the_entry_that_describes_it(name, entry):
    assert find_entry(name) == entry


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("manualpar.lora(model, alpha=16)", "manualpar.lora"),
        ("fsdp(..., keep=True)", "manualpar.fsdp"),
        ("fsdp", None),
        ("make_mesh", "manualpar.make_mesh"),
        ("Program.init", "manualpar.Program.init"),
        ("Transformer", "manualpar.models.Transformer"),
        ("Split", None),  # There is a `Split` of data, and one of layers.
        ("split(key)", None),
        ("program.init", None),
        ("manualpar train", None),
        ("manualpar/core/mesh/mesh.py", None),
    ],
)
def test_a_code_span_is_a_name_if_it_can_mean_nothing_else(code, name):
    assert name_in(code) == name


def test_a_name_that_the_page_defines_is_not_ours():
    page = "```python\nclass Transformer: ...\n```\n"
    page += "`Transformer`, `Program.nothing`, `manualpar.none`\n"
    assert names_defined(page) == {"Transformer"}
    assert missing_names(page) == ["manualpar.Program.nothing", "manualpar.none"]
    html = "<p><code>Transformer</code></p>"
    assert link_names(html, {"Transformer"}) == html
    assert link_names(html) != html


def test_names_become_links_in_running_text_alone():
    code = "<code>fsdp(&quot;x&quot;)</code>"
    link = f'<autoref identifier="manualpar.strategies.fsdp.fsdp">{code}</autoref>'
    kept = f"<h2>{code}</h2><a href='#'>{code}</a><pre>{code}</pre><p><code>jax.jit</code></p>"
    assert link_names(f"{kept}<td>{code}</td>") == f"{kept}<td>{link}</td>"


def test_the_first_page_of_the_reference_has_every_public_name_once():
    listed = [name for _, names in listed_names() for name in names]
    things = [id(find_object(name)) for name in listed]
    assert len(set(things)) == len(listed)
    rooms = ["manualpar"]
    rooms += [m.name for m in pkgutil.walk_packages(manualpar.__path__, "manualpar.") if m.ispkg]
    for room in map(importlib.import_module, rooms):
        members = public_members(room)
        missing = [name for name in members if id(getattr(room, name)) not in things]
        if room.__name__ in INTERNAL:
            assert missing == members, f"{room.__name__} is internal, but has listed names"
        else:
            assert missing == [], f"name them in GROUPS: {room.__name__}"


def test_every_public_name_has_an_entry_and_a_summary():
    rows = re.findall(r"(?m)^\| `(manualpar\.[\w.]+)` \| (.*) \|$", public_page())
    assert [name for name, _ in rows] == [name for _, names in listed_names() for name in names]
    modules = {name: entry for name, _ in rows if (entry := find_entry(name)).count(".") < 2}
    assert modules == {}
    assert [name for name, summary in rows if not summary.endswith(".")] == []
