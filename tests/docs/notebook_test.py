"""Pages become notebooks, which run and print what the pages show."""

import pytest

from docs.notebook import main, make_notebook
from docs.run import matches, read_blocks
from tests.paths import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = ("fsdp", "three_modes")

PAGE = """# A page

```
python -m docs.run docs/page.md
```

See [another](other.md) and [a site](https://example.org).

```python
x = 1
```

```text
```

Then

```python
print(x)
```

```text
1
```

the end.
"""


def test_a_notebook_has_the_text_and_the_code_of_its_page():
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    cells = nbformat.reads(make_notebook(PAGE), as_version=4).cells
    assert [cell.cell_type for cell in cells] == [
        "markdown",
        "code",
        "markdown",
        "code",
        "markdown",
    ]
    assert [cell.source for cell in cells[1::2]] == ["x = 1", "print(x)"]
    assert cells[0].source == "# A page\n\n\nSee another and [a site](https://example.org)."
    assert [cells[2].source, cells[4].source] == ["Then", "the end."]
    assert make_notebook(PAGE) == make_notebook(PAGE)


@pytest.mark.parametrize("page", ["```bash\nls\n```\n", "![a](pictures/a.png)\n"])
def test_a_page_that_is_no_notebook_is_refused(page, tmp_path, capsys):
    pytest.importorskip("nbformat", reason="pip install -e '.[interop]'")
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "page.md")])
    assert "expected only blocks of python" in capsys.readouterr().err
    assert not (tmp_path / "page.ipynb").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_its_page_shows(name, tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[interop]'")
    import nbformat

    page = DOCS / f"{name}.md"
    main([str(page), f"--to={tmp_path / 'page.ipynb'}"])
    notebook = nbformat.read(tmp_path / "page.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
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
