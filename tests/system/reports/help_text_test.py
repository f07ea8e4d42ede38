"""Texts of help are wrapped between words, at the width of the terminal."""

import os
import sys

import pytest

from manualpar.system.reports.help_text import (
    fill,
    list_flags,
    print_help,
    wrap_text,
)

TEXT = """A first sentence that is longer than a line
of the terminal.

{program} COMMAND [--one=<number>] [--two=<number>]
    [--three=<number>]

    an indented command
"""


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")


def test_paragraphs_are_filled_and_commands_are_not(narrow):
    assert wrap_text(TEXT.replace("{program}", "run")).split("\n") == [
        "A first sentence that is",
        "longer than a line of the",
        "terminal.",
        "",
        "run COMMAND [--one=<number>]",
        "    [--two=<number>]",
        "    [--three=<number>]",
        "",
        "    an indented command",
    ]


def test_words_are_not_broken(narrow):
    word = "manualpar.core.program.gradient-rounding"
    assert fill(f"see {word} there", "  ").split("\n") == ["  see", f"  {word}", "  there"]


def test_the_width_is_80_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = fill("word " * 100).split("\n")
    assert max(map(len, lines)) == 79


def test_a_flag_has_its_help_beside_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    flags = {"--short": "The help. " * 5, "--a-flag-with-a-long-name=TEXT": "Help."}
    assert list_flags(flags).split("\n") == [
        "  --short                 The help. The help. The help. The",
        "                          help. The help.",
        "  --a-flag-with-a-long-name=TEXT",
        "                          Help.",
    ]


def test_a_reader_may_close_the_pipe(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        print_help("a text")
        print("another text", file=closed, flush=True)  # As Python does when it exits.
