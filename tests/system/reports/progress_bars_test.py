"""Bars of bytes are in terminals alone."""

import io
import re

import pytest
import rich.console

from manualpar.system.reports.progress_bars import bytes_bar


def _console(*, terminal: bool) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=100)


def _screen(console: rich.console.Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_a_terminal_shows_bytes_and_their_total_while_the_work_lasts():
    console = _console(terminal=True)
    with bytes_bar("reading", 4 * 2**20, console=console) as show:
        show(2**20, "5 documents")
    assert re.search(r"reading ━+╺?━* 1.0/4.0 MiB 5 documents", _screen(console))
    assert console.file.getvalue().endswith("\x1b[2K"), "the bar is still on the screen"


def test_more_than_the_total_is_the_total():
    console = _console(terminal=True)
    with bytes_bar("tokenizing", 100, console=console) as show:
        show(120)
    assert "100/100 bytes" in _screen(console)


@pytest.mark.parametrize("why", ["log file", "other process", "mpirun"])
def test_nothing_is_shown_where_nobody_looks(why, monkeypatch):
    if why == "mpirun":
        monkeypatch.setenv("PMI_RANK", "0")
    console = _console(terminal=why != "log file")
    with bytes_bar("reading", 100, console=console, is_shown=why != "other process") as show:
        show(50)
    assert console.file.getvalue().strip() == ""
