"""Makes a Jupyter notebook from a page of `docs/`.

    python -m docs.notebook docs/fsdp.md --to=fsdp.ipynb

Each block of `python` becomes a code cell, and the text between two blocks becomes a text cell. The
notebook does not contain the output that the page shows, because its code prints the output again.
"""

import argparse
import re
import sys
from pathlib import Path

from docs.run import read_blocks
from manualpar.errors import require
from manualpar.system.reports.help_text import OneSentenceParser
from manualpar.system.storage.untrusted import read_file

# The block in a page that says how to run the page, which a notebook does not need.
_HOW_TO_RUN = re.compile(r"^```\npython -m docs\.run .*\n```\n", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)")


def make_notebook(text: str) -> str:
    """Returns the content of an `.ipynb` file for the Markdown text of a page.

    Raises:
      ValueError: The page has a block of `bash` or a picture; a notebook outside of the repository
        lacks the files that these need.
    """
    require("a notebook", "nbformat")
    import nbformat

    blocks = read_blocks(text)
    if "![" in text or any(block.language != "python" for block in blocks):
        raise ValueError("the page has blocks of bash or pictures, expected only blocks of python")
    new, cells, end = nbformat.v4, [], 0
    for block in blocks:
        start = text.index(f"```python\n{block.code}", end)
        cells += _text_cells(text[end:start])
        cells.append(new.new_code_cell(block.code.strip()))
        end = block.span[1] if block.shown is not None else start + len(block.code) + 10
        end = text.index("```\n", end) + 4
    cells += _text_cells(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # Not random, so a page always gives the same file.
    return nbformat.writes(new.new_notebook(cells=cells)) + "\n"


def _text_cells(text: str) -> list[dict[str, object]]:
    import nbformat

    # Links to other pages become plain text, because a notebook is used without these pages.
    text = _LINK.sub(r"\1", _HOW_TO_RUN.sub("", text)).strip()
    return [nbformat.v4.new_markdown_cell(text)] if text else []


def main(argv: list[str] | None = None) -> int:
    """Writes the notebook of a page; returns the exit code."""
    parser = OneSentenceParser(prog="python -m docs.notebook", description=__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("page", type=Path, help="a Markdown file")
    parser.add_argument("--to", type=Path, help="the file to write (default: next to the page)")
    flags = parser.parse_args(argv)
    try:
        notebook = make_notebook(read_file(flags.page, follow_links=True).decode())
        (flags.to or flags.page.with_suffix(".ipynb")).write_text(notebook, encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(f"{flags.page}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
