"""The text of `--help`, wrapped at the width of the terminal, and a parser for simple commands.

The width is the terminal's number of columns, or 80 without a terminal; the environment variable
`COLUMNS` sets another width. Text is wrapped only between words, so that it can be searched.
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from manualpar.errors import USAGE_EXIT_CODE

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


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that prints a usage error in one line, and ends the process with exit code 2.

    Flags are defined with dashes. An underscore in a flag's name means the same as a dash. `--help`
    begins with the description, in which `{program}` stands for the program's name.
    """

    def __init__(self, *, prog: str, description: str, **options: Any) -> None:
        """Makes a parser; `options` are other arguments of `argparse.ArgumentParser`."""
        super().__init__(
            prog=prog,
            usage=argparse.SUPPRESS,
            description=wrap_text(description.replace("{program}", prog)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments, see `argparse.ArgumentParser.parse_known_args`."""
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_with_dashes(x) for x in given], namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line, and ends the process with exit code 2."""
        self.exit(USAGE_EXIT_CODE, f"error: {message}\n")


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    is_flag = name.startswith("--") and " " not in name
    return (name.replace("_", "-") if is_flag else name) + equals + value
