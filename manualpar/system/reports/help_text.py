"""The text of `--help`, wrapped at the width of the terminal.

The width is the terminal's number of columns, or 80 without a terminal; the environment variable
`COLUMNS` sets another width. Text is wrapped only between words, so that it can be searched.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping

NAMES_WIDTH = 26  # The column at which the help of a flag begins.


def fill(text: str, indent: str = "", *, hanging: str | None = None) -> str:
    """Wraps one paragraph.

    Args:
      indent: Begins every line.
      hanging: Begins every line except the first; by default `indent`.
    """
    return textwrap.fill(
        text,
        shutil.get_terminal_size((80, 24)).columns,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_text(text: str) -> str:
    """Wraps the paragraphs of a text.

    A paragraph with an indented line consists of commands. Each of its lines stays a line, and
    wrapped parts are indented further.
    """
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(map(_wrap_paragraph, paragraphs))


def _wrap_paragraph(paragraph: str) -> str:
    lines = paragraph.rstrip().split("\n")
    if not any(line.startswith(" ") for line in lines):
        return fill(" ".join(lines))
    wrapped = []
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        wrapped.append(fill(line.lstrip(), indent, hanging=f"{indent}    "))
    return "\n".join(wrapped)


def list_flags(flags: Mapping[str, str]) -> str:
    """Lists flags, each with its help beside it; a long flag has its help in the next lines."""
    margin = " " * NAMES_WIDTH
    blocks: list[str] = []
    for flag, text in flags.items():
        first = f"  {flag}"
        if len(first) > NAMES_WIDTH - 2:
            blocks.append(first)
            first = ""
        blocks.append(fill(text, first.ljust(NAMES_WIDTH), hanging=margin))
    return "\n".join(blocks)


def print_help(text: str) -> None:
    """Prints a long text; a reader such as `head` may close the pipe before the end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
