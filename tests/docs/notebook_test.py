"""Pages become notebooks, which run and print what the pages show."""

import ast
import re
import subprocess
import sys

import pytest

from docs.notebook import EXTRAS, main, make_notebook, notebook_pages
from docs.run import matches, read_blocks
from manualpar.errors import MODULES
from tests.paths import ROOT

DOCS = ROOT / "docs"
REPOSITORY = "https://example.org/owner/name"

PAGE = """# A page

```
python -m docs.run docs/page.md
```

See [another](other.md#part), [above](#a-page), [code](../manualpar/errors.py) and [a site](https://example.org).

```python
x = 1
```

```text
```

Then

```python
print([str][0](x))
```

```text
1
```

the end.
"""


def test_a_notebook_has_the_text_and_the_code_of_its_page():
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    notebook = nbformat.reads(make_notebook(PAGE, "page"), as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    cells = notebook.cells
    kinds = ["markdown", "code", "code", "markdown", "code", "markdown"]
    assert [cell.cell_type for cell in cells] == kinds
    assert "pip install -e . in a checkout" in cells[1].source
    assert [cells[2].source, cells[4].source] == ["x = 1", "print([str][0](x))"]
    plain = "See another, above, code and [a site](https://example.org)."
    assert cells[0].source == f"# A page\n\n\n{plain}"
    assert [cells[3].source, cells[5].source] == ["Then", "the end."]
    assert make_notebook(PAGE, "page") == make_notebook(PAGE, "page")


def test_the_links_of_a_notebook_lead_to_the_repository():
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    cells = nbformat.reads(make_notebook(PAGE, "which_strategy", REPOSITORY), as_version=4).cells
    files = f"{REPOSITORY}/blob/HEAD"
    assert f"[another]({files}/docs/other.md#part)" in cells[0].source
    assert f"[above]({files}/docs/which_strategy.md#a-page)" in cells[0].source
    assert f"[code]({files}/manualpar/errors.py)" in cells[0].source
    assert "[a site](https://example.org)" in cells[0].source
    assert f'%pip install --quiet "manualpar[train] @ git+{REPOSITORY}"' in cells[1].source


@pytest.mark.parametrize("repository", ["", REPOSITORY])
def test_a_notebook_installs_from_the_address_alone(repository):
    """Nobody owns the name on a package index, so anybody could put code there."""
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    cells = nbformat.reads(make_notebook(PAGE, "attention", repository), as_version=4).cells
    installs = re.findall(r"%pip .*", cells[1].source)
    assert installs == (
        [f'%pip install --quiet "manualpar[train] @ git+{REPOSITORY}"'] * bool(repository)
    )
    compile(re.sub(r"%pip .*", "pass", cells[1].source), "cell", "exec")


@pytest.mark.parametrize("name", notebook_pages())
def test_a_page_of_python_alone_is_a_valid_notebook(name):
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    notebook = nbformat.reads(make_notebook(text, name, REPOSITORY), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.source for cell in code[1:]] == [b.code.strip() for b in read_blocks(text)]


@pytest.mark.parametrize("name", notebook_pages())
def test_a_page_without_its_command_begins_with_a_complete_thought(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    command = f"```\npython -m docs.run docs/{name}.md\n```\n\n"
    title, first = text.replace(command, "").split("\n\n")[:2]
    assert title.startswith("# ")
    assert re.match(r"[A-Z][\w' ]+", first)
    assert not re.search(r"(?i)this command|command above|the above", first)


@pytest.mark.slow
def test_pages_for_eight_devices_need_no_optional_package():
    """Runs the imports of all pages outside of `EXTRAS`; no optional package can be imported."""
    of_flax = {"orbax", "rich"}  # flax requires these, so they are always installed.
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({sorted(MODULES.keys() - of_flax)}))"]
    for name in set(notebook_pages()) - EXTRAS.keys():
        blocks = read_blocks((DOCS / f"{name}.md").read_text(encoding="utf-8"))
        nodes = ast.walk(ast.parse("\n".join(block.code for block in blocks)))
        lines += [ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    lines += ["simulate_devices(8)", "assert make_mesh({'data': -1}).size == 8"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"EXTRAS of docs/notebook.py lacks a page: {done.stderr}"


@pytest.mark.parametrize("page", ["```bash\nls\n```\n", "![a](pictures/a.png)\n"])
def test_a_page_that_is_no_notebook_is_refused(page, tmp_path, capsys):
    pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    (tmp_path / "page.md").write_text(page)
    assert main([str(tmp_path / "page.md")]) == 2
    assert "expected only blocks of python" in capsys.readouterr().err
    assert not (tmp_path / "page.ipynb").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["guides", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp", "three_modes"))],
)
def test_a_notebook_prints_what_its_page_shows(name, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[interop]'")
    import nbformat

    page = DOCS / f"{name}.md"
    main([str(page), f"--to={tmp_path / 'page.ipynb'}"])
    notebook = nbformat.read(tmp_path / "page.ipynb", as_version=4)
    # The kernel runs outside of the repository, and finds the package as if it were installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    install, *cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert install.outputs == []
    blocks = read_blocks(page.read_text())
    assert len(cells) == len(blocks)
    for cell, block in zip(cells, blocks, strict=True):
        printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        shown = block.shown or ""
        if any(output.output_type == "display_data" for output in cell.outputs):
            # A notebook shows in colours what a page draws with lines, after what is printed.
            shown = "".join(shown.splitlines(keepends=True)[: printed.count("\n")])
            assert "P(" in printed
        assert block.shown is None or matches(shown, printed), cell.source
