"""Makes a Jupyter notebook from a page of `docs/`.

    python -m docs.notebook docs/fsdp.md --to=fsdp.ipynb

Each block of `python` becomes a code cell, and the text between two blocks becomes a text cell. The
first code cell installs manualpar from the repository's address if it is missing. The notebook does
not contain the output that the page shows, because its code prints the output again.
"""

import posixpath
import re
import sys
from pathlib import Path

from docs.repository import file_address, find_repository, replace_links
from docs.run import ROOT, read_blocks
from manualpar.errors import USAGE_EXIT_CODE, print_error, require
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage.untrusted import read_file

FLAGS = {
    "page": Flag("A Markdown file.", Path, is_required=True, is_argument=True),
    "to": Flag("The file to write; by default next to the page.", Path),
}
# The extras that the code of a page needs, and packages that no extra installs.
EXTRAS = {
    "attention": "train",
    "how_it_works": "examples",
    "hugging_face_data": "train",
    "preferences": "train",
    "questions": "train,examples",
    "start_from_what_you_have": "train,pretrained",
    "which_strategy": "train",
    "your_loop": "train",
}
PACKAGES = {"hugging_face_data": "datasets"}
# The block in a page that says how to run the page, which a notebook does not need.
_HOW_TO_RUN = re.compile(r"^```\npython -m docs\.run .*\n```\n", re.MULTILINE)
_INSTALL = """\
# Installs manualpar if it is missing, for example in Colab.
import importlib.util

if importlib.util.find_spec("manualpar") is None:
    {install}
"""
# Without an address: no package index has manualpar, and a stranger could register the name there.
_REFUSE = """\
raise ModuleNotFoundError(
        "manualpar is missing, and no package index has it: run pip install -e . in a checkout."
    )"""


def notebook_pages() -> list[str]:
    """Returns the names of the pages that can be notebooks."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [page.stem for page in pages if is_python_alone(page.read_text(encoding="utf-8"))]


def is_python_alone(text: str) -> bool:
    """Returns whether a page has blocks of `python`, and neither blocks of `bash` nor pictures.

    A notebook outside of the repository lacks the files that these need.
    """
    languages = {block.language for block in read_blocks(text)}
    return languages == {"python"} and "![" not in text


def make_notebook(text: str, name: str, repository: str = "") -> str:
    """Returns the content of an `.ipynb` file for a page.

    Args:
      text: The Markdown text of the page.
      name: The name of the page's file in `docs/`, without `.md`.
      repository: The web address of the repository, to which links lead, and from which the first
        cell installs. Without it, links become plain text, and the cell names the checkout.

    Raises:
      ValueError: The page has a block of `bash` or a picture, or no block of `python`.
    """
    require("a notebook", "nbformat")
    import nbformat

    if not is_python_alone(text):
        raise ValueError("the page has bash, pictures or no code; expected only blocks of python")
    text = _with_addresses(text, name, repository)
    blocks = read_blocks(text)
    new, cells, end = nbformat.v4, [], 0
    for block in blocks:
        start = text.index(f"```python\n{block.code}", end)
        cells += _text_cells(text[end:start])
        cells.append(new.new_code_cell(block.code.strip()))
        end = block.span[1] if block.shown is not None else start + len(block.code) + 10
        end = text.index("```\n", end) + 4
    cells += _text_cells(text[end:])
    cells.insert(1, new.new_code_cell(_preparation(text, name, repository)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # Not random, so a page always gives the same file.
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return nbformat.writes(new.new_notebook(cells=cells, metadata=metadata)) + "\n"


def _with_addresses(text: str, name: str, repository: str) -> str:
    """Replaces the targets of a page's links by their web addresses."""

    def find_target(file: str, anchor: str) -> str:
        path = posixpath.normpath(posixpath.join("docs", file or f"{name}.md"))
        return f"{file_address(repository, path)}{anchor}" if repository else ""

    return replace_links(text, find_target)


def _preparation(text: str, name: str, repository: str) -> str:
    """Returns the code of the cell that makes the page's code run in a fresh environment."""
    extras = f"[{EXTRAS[name]}]" if name in EXTRAS else ""
    requirement = f'"manualpar{extras} @ git+{repository}"'
    packages = " ".join([requirement, *PACKAGES.get(name, "").split()])
    install = f"%pip install --quiet {packages}" if repository else _REFUSE
    return _INSTALL.format(install=install).strip()


def _text_cells(text: str) -> list[dict[str, object]]:
    import nbformat

    text = _HOW_TO_RUN.sub("", text).strip()
    return [nbformat.v4.new_markdown_cell(text)] if text else []


def main(argv: list[str] | None = None) -> int:
    """Writes the notebook of a page; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    flags = parse_flags(["python -m docs.notebook", *given], __doc__ or "", FLAGS)
    try:
        text = read_file(flags.page, follow_links=True).decode()
        notebook = make_notebook(text, flags.page.stem, find_repository())
        (flags.to or flags.page.with_suffix(".ipynb")).write_text(notebook, encoding="utf-8")
    except (OSError, ValueError) as error:
        print_error(f"{flags.page}: {error}")
        return USAGE_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
