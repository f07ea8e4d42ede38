"""Runs the code blocks of a page, and compares their output with the output that the page shows.

    python -m docs.run docs/three_modes.md            # prints each block and its output
    python -m docs.run docs/three_modes.md --check    # fails if the page shows other output
    python -m docs.run docs/three_modes.md --write    # writes the output into the page

A page is a Markdown file. Its blocks of `python` run one after the other in one program, and its
blocks of `bash` each in a shell, all of them in one empty folder. If a block of `text` follows a
block that runs, it shows the output of that block. In it, `...` stands for any text. `--write` does
not change a block of `text` that matches the output, so its `...` stays. The code of a page must
draw the page's pictures: it writes each to this folder, under the name that the picture has in the
page. Pictures in `measured/` are not drawn, because they show finished measurements.
"""

import contextlib
import difflib
import io
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manualpar.errors import USAGE_EXIT_CODE, print_error
from manualpar.system.reports.flags import Flag, parse_flags
from manualpar.system.storage.untrusted import read_file

ROOT = Path(__file__).parents[1]
# A block that runs, and the block of `text` with its output, if only white space is between them.
_BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_DECIMAL = r"\d+\.\d+(?:e[+-]\d+)?"
_PICTURE = re.compile(r"!\[[^\]]*\]\((pictures/[^)]+)\)")

FLAGS = {
    "page": Flag("A Markdown file.", Path, is_required=True, is_argument=True),
    "check": Flag("Fails if the page shows other output.", bool, False),
    "write": Flag("Puts the output into the page.", bool, False),
}


class Block(NamedTuple):
    """A block that runs.

    Attributes:
      language: `python` or `bash`.
      code: The source code of the block.
      line: The number of the line of the page on which the code begins.
      shown: The output that the page shows for this block; `None` if the page shows none.
      span: The offsets of the start and the end of `shown` in the text of the page.
    """

    language: str
    code: str
    line: int
    shown: str | None
    span: tuple[int, int]


def read_blocks(text: str) -> list[Block]:
    """Returns the blocks of `python` and `bash` in the text of a page, in order."""
    return [
        Block(
            found["language"],
            found["code"],
            text[: found.start("code")].count("\n") + 1,
            found["shown"],
            found.span("shown"),
        )
        for found in _BLOCK.finditer(text)
    ]


def matches(shown: str, printed: str) -> bool:
    """Returns whether the output of a block matches the output that the page shows.

    Args:
      shown: The output that the page shows. `...` matches any text. A decimal fraction matches any
        number within 5% or 0.001 of it, because another machine adds numbers in another order.
      printed: The output of the block.
    """
    parts = re.split(rf"({_DECIMAL}|\.\.\.)", _tidy(shown))
    patterns = {part: ".*?" if part == "..." else f"({_DECIMAL})" for part in parts[1::2]}
    pattern = "".join(patterns.get(part, re.escape(part)) for part in parts)
    found = re.fullmatch(pattern, _tidy(printed), re.DOTALL)
    expected = [float(part) for part in parts[1::2] if part != "..."]
    return found is not None and all(
        math.isclose(float(got), value, rel_tol=0.05, abs_tol=1e-3)
        for got, value in zip(found.groups(), expected, strict=True)
    )


def run_blocks(page: Path, work: Path) -> Iterator[tuple[Block, str]]:
    """Runs the blocks of a page.

    Args:
      page: The Markdown file.
      work: An empty folder to which the code of the page may write.

    Yields:
      Each block and its output.

    Raises:
      subprocess.CalledProcessError: A block of `bash` failed.
      Exception: Any error that a block of `python` raises.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PATH": _path_of_this_python(), "PYTHONPATH": os.pathsep.join(paths)}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = read_blocks(page.read_text())
    with contextlib.chdir(work):
        yield from _run(blocks, page, os.environ | environment, namespace)


def _run(
    blocks: list[Block], page: Path, environment: dict[str, str], namespace: dict[str, Any]
) -> Iterator[tuple[Block, str]]:
    """Runs blocks in the current folder, see `run_blocks`."""
    for block in blocks:
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            yield block, done.stdout
            continue
        out = io.StringIO()
        padded = "\n" * (block.line - 1) + block.code  # Tracebacks then show lines of the page.
        with contextlib.redirect_stdout(out):
            exec(compile(padded, str(page), "exec"), namespace)
        yield block, out.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Runs a page; returns the exit code, which is 1 if `--check` finds a difference."""
    given = sys.argv[1:] if argv is None else argv
    flags = parse_flags(["python -m docs.run", *given], __doc__ or "", FLAGS)
    try:
        text, failures = read_file(flags.page, follow_links=True).decode(), 0
    except (OSError, ValueError) as error:
        print_error(f"{flags.page}: {error}")
        return USAGE_EXIT_CODE
    with tempfile.TemporaryDirectory() as work:
        written = []
        for block, printed in run_blocks(flags.page.resolve(), Path(work)):
            printed = printed.replace(work, "...")
            if not flags.check:
                print("\n".join(f"> {line}" for line in block.code.splitlines()))
                print(printed, end="", flush=True)
            if block.shown is None or matches(block.shown, printed):
                continue
            written.append((block.span, _tidy(printed)))
            failures += 1
            if flags.check:
                _print_difference(f"{flags.page}:{block.line}", block.shown, printed)
        drawn = [Path(work) / Path(name).name for name in _PICTURE.findall(text)]
        for picture in (picture for picture in drawn if not picture.exists()):
            print(f"{flags.page}: no block writes {picture.name}", file=sys.stderr)
            failures += 1
        if flags.write:
            for (start, end), printed in reversed(written):
                text = text[:start] + printed + text[end:]
            flags.page.write_text(text)
            pictures = flags.page.parent / "pictures"
            pictures.mkdir(exist_ok=True)
            for picture in filter(Path.exists, drawn):
                shutil.copy(picture, pictures)
    return 1 if flags.check and failures else 0


def _tidy(text: str) -> str:
    """Removes white space from the ends of the lines of a text, and empty lines at its end."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def _path_of_this_python() -> str:
    """Returns a `PATH` on which `python` is the interpreter of this process."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _print_difference(where: str, shown: str, printed: str) -> None:
    lines = difflib.unified_diff(
        _tidy(shown).splitlines(),
        _tidy(printed).splitlines(),
        f"{where} shows",
        f"{where} prints",
        lineterm="",
    )
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
