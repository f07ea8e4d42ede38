"""The pages run, and print what they show."""

import ast
import re
import subprocess
import sys

import jax
import pytest

from docs.run import main, matches, read_blocks
from tests.paths import ROOT

PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if read_blocks(page.read_text()))

LONG = (
    *("tune_a_model", "all_axes", "experts", "plan_a_pod", "long_context", "your_own_model"),
    *("fine_tuning", "own_run"),
)

# They show compiled programs and reprs, which are others in earlier versions.
OF_NEWEST_JAX = ("find_a_problem", "fsdp", "resume_elsewhere", "your_loop")


def _pages():
    return [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.stem in LONG else (), id=page.stem)
        for page in PAGES
    ],
)
def test_a_page_prints_what_it_shows(page):
    if page.stem in OF_NEWEST_JAX and jax.__version_info__ < (0, 12):
        pytest.skip("shows what JAX 0.12 prints")
    for library in ("transformers", "datasets"):
        if re.search(rf"^(import|from) {library}\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(library, reason="pip install -e '.[interop]'")
    command = [sys.executable, "-m", "docs.run", str(page), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pages_lead_to_files_that_exist():
    for page in _pages():
        text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"(?m)^#+ (.*)$", (page.parent / target).read_text())
                slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
                assert anchor in slugs, f"{page.name}: {target}#{anchor}"


def test_pages_name_files_and_what_is_in_them():
    """In running text: `manualpar/core/modes/remat.py`, and `box` (`core/modes/manual.py`)."""
    places = (ROOT, ROOT / "manualpar", ROOT / ".ci")
    for page in _pages():
        text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|md|toml))`", text):
            assert any((place / name).exists() for place in places), f"{page.name}: {name}"
        for name, path in re.findall(r"`([\w.]+)`\s\(`([a-z_/]+/\w+\.py)`\)", text):
            (file,) = (place / path for place in places if (place / path).exists())
            assert name.split(".")[-1] in file.read_text(), f"{page.name}: {name} in {path}"


def test_pages_name_commands_that_exist():
    """In prose and in code; a command that git alone has is named by `git show`."""
    for page in _pages():
        text = page.read_text()
        for name in re.findall(
            r"-m ((?:benchmarks|configs|docs|experiments|manualpar)[.\w]*)", text
        ):
            path = ROOT / name.rstrip(".").replace(".", "/")
            found = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert found or page.name == "CHANGELOG.md", f"{page.name}: {name}"


def test_pages_quote_errors_that_exist():
    """In bold, with `...` for what differs: **"the batch is ..., expected ..."**."""
    said = set()
    for path in (ROOT / "manualpar").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            said.update(x.value for x in parts if isinstance(x, ast.Constant) and x.value)
    text = "\n".join(x for x in said if isinstance(x, str))
    quoted = re.findall(r'\*\*"(.+?)"\*\*', (ROOT / "docs" / "questions.md").read_text(), re.DOTALL)
    assert len(quoted) > 10
    parts = [x.strip(" ,") for sentence in quoted for x in " ".join(sentence.split()).split("...")]
    assert not [x for x in parts if x not in text]


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("a\nb\n", "a  \nb\n\n", True),
        ("a\n", "b\n", False),
        ("a ... c\n", "a b\nb c\n", True),
        ("a ... c\n", "a b d\n", False),
        ("loss 0.5000\n", "loss 0.5100\n", True),
        ("loss 0.5000\n", "loss 0.6\n", False),
        ("loss 0.5000 ... 3\n", "loss 0.5001 x 4 3\n", True),
        ("step 30\n", "step 31\n", False),
        ("rate 1.5e-05\n", "rate 1.50e-05\n", True),
        ("(4, 2)\n", "(4, 2)\n", True),
        ("", "something\n", False),
    ],
)
def test_what_counts_as_the_same(shown, printed, expected):
    assert matches(shown, printed) == expected


PAGE = """# A page
```python
x = 20
print(x + 1)
```

```text
{shown}
```

Words, and a block that shows nothing:

```bash
echo $((3 + 4)) > seven
```

```python
import pathlib
print(pathlib.Path("seven").read_text(), x)
```

```text
7
 20
```
"""


def test_a_page_that_shows_something_else_is_named_and_mended(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(shown="22"))
    assert main([str(page), "--check"]) == 1
    captured = capsys.readouterr()
    assert f"{page}:3 shows" in captured.err
    assert "-22\n+21" in captured.err
    assert main([str(page), "--write"]) == 0
    assert page.read_text() == PAGE.format(shown="21")
    assert main([str(page), "--check"]) == 0


def test_a_block_that_fails_names_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        main([str(page), "--check"])
    assert caught.traceback[-1].lineno + 1 == 4
    page.write_text("```bash\nfalse\necho not reached\n```\n")
    with pytest.raises(subprocess.CalledProcessError):
        main([str(page), "--check"])


def test_a_picture_that_nothing_draws_is_named(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("![it](pictures/it.png)\n")
    assert main([str(page), "--check"]) == 1
    assert "no block writes it.png" in capsys.readouterr().err
    page.write_text("![it](pictures/it.png)\n```bash\ntouch it.png\n```\n")
    assert main([str(page), "--write"]) == 0
    assert (tmp_path / "pictures" / "it.png").exists()
    assert main([str(page), "--check"]) == 0
