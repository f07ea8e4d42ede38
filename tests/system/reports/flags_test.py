"""The one parser of flags: what a command line means, and a sentence for each mistake."""

import re
from pathlib import Path

import pytest

from manualpar.errors import UsageError
from manualpar.system.reports.flags import Flag, check_one_of, parse_flags
from manualpar.system.storage import BucketPath
from tests.paths import ROOT

USAGE = """A first sentence that is longer than a line
of the terminal.

{program} FOLDER [--one=<number>]
    [--two=<number>]
"""
FLAGS = {
    "folder": Flag("A folder.", Path, is_argument=True, is_required=True),
    "number": Flag("A number.", int, 3),
    "share": Flag("A share.", float, 0.5),
    "is_loud": Flag("Prints more.", bool, False),
    "output": Flag("A file.", Path, in_buckets=True),
    "on_disk": Flag("Another file.", Path),
    "kind": Flag("The kind.", default="a", choices=("a", "bcd"), heading="More"),
    "word": Flag("A word; repeatable.", default=[], repeats=True),
}


def _parse(*arguments, **options):
    return parse_flags(["do", *arguments], USAGE, FLAGS, **options)


def test_flags_have_values_and_defaults():
    found = _parse(
        "x", "--number", "-4", "--share=1e-2", "--is-loud", "--word=b", "--word", "--c_d"
    )
    assert vars(found) == {
        "folder": Path("x"),
        "number": -4,
        "share": 0.01,
        "is_loud": True,
        "output": None,
        "on_disk": None,
        "kind": "a",
        "word": ["b", "--c_d"],
    }
    found = _parse("--is_loud", "--no-is-loud", "--to=s3://bucket/b", "x", renamed={"to": "output"})
    assert (found.is_loud, found.folder) == (False, Path("x"))
    assert isinstance(found.output, BucketPath)


def test_an_argument_may_take_several_values():
    flags = {"run": FLAGS["folder"]._replace(repeats=True, default=[])}
    assert parse_flags(["do", "a", "b"], USAGE, flags).run == [Path("a"), Path("b")]
    with pytest.raises(SystemExit, match="2"):
        parse_flags(["do"], USAGE, flags)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x", "--number=1.5"], "--number=1.5: expected an integer without point or exponent."),
        (["x", "--share=much"], "--share=much: expected a number."),
        (["x", "--is-loud=maybe"], "--is-loud=maybe: expected true or false."),
        (["x", "--no-is-loud=1"], "--no-is-loud=1: expected --no-is-loud without a value."),
        (["x", "--kind=bcde"], "--kind=bcde: expected one of a, bcd; the nearest one is bcd."),
        (["x", "--on-disk=gs://bucket/b"], "--on-disk=gs://bucket/b: expected a path on a disk."),
        (["x", "--output=s3://k:secret@a/b"], "--output: "),
        (["x", "--output=a\0b"], r"--output='a\x00b': expected a value without NUL characters."),
        (["x", "--numbr=3"], "--numbr is not a known flag; the nearest one is --number."),
        (["x", "--zzz"], "--zzz is not a known flag; --help lists all."),
        (["x", "y"], "'y' is not understood; --help lists what is."),
        (["--number=3"], "FOLDER is missing: A folder."),
        (["x", "--number"], "Missing value for flag --number."),
        (["x", "--output=a", "--on_disk=b"], "--on-disk with --output: expected only one of them."),
    ],
)
def test_a_mistake_is_a_sentence_and_exit_code_2(capsys, arguments, expected):
    with pytest.raises(SystemExit, match="2"):
        _parse(*arguments, check=lambda flags: check_one_of(flags, "output", "on_disk"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {expected}")
    assert "secret" not in line


def test_one_of_two_flags_may_be_required():
    found = _parse("x")
    with pytest.raises(UsageError, match=r"expected --output or --on-disk\."):
        check_one_of(found, "output", "on_disk", is_required=True)


def test_there_is_no_other_parser():
    """Benchmarks and tools of the tests have their own, because no user types their flags."""
    pattern = re.compile(
        r"^\s*(import argparse|from absl import .*flags|from argparse)", re.MULTILINE
    )
    folders = ("manualpar", "docs", "experiments")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    parsers = {path.stem for path in files if pattern.search(path.read_text(encoding="utf-8"))}
    assert parsers == {"flags", "command_line"}


def test_help_begins_with_the_usage_and_lists_the_flags(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        _parse("x", "--number=wrong", "--help")
    shown = capsys.readouterr().out
    assert "terminal.\n\ndo FOLDER [--one=<number>]\n    [--two=<number>]\n\nFlags:\n" in shown
    assert "\n  --number=NUMBER         A number. [default 3]\n  --share" in shown
    assert "\n  --is-loud               Prints more.\n" in shown
    assert shown.endswith(
        "\n\nMore:\n  --kind=TEXT             The kind. [one of a, bcd; default a]\n"
    )
