"""Numbers in words, and tables of them."""

import io

import pytest
import rich.console

from manualpar.system.reports.tables import (
    describe_bytes,
    describe_count,
    describe_difference,
    describe_flops,
    describe_seconds,
    describe_share,
    print_line,
    print_table,
)


def _console(width: int = 120) -> rich.console.Console:
    """A console that writes into `console.file`."""
    return rich.console.Console(file=io.StringIO(), width=width)


def test_a_line_is_neither_wrapped_nor_read_as_markup():
    console = _console()
    path = "/a/long/path" * 30 + "/[bold]"
    print_line(console, f"results: {path}\n\x1b[2J")
    assert console.file.getvalue() == f"results: {path}\n\\x1b[2J\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "0.999 KiB"),
        (2**20, "1 MiB"),
        (1.5 * 2**50, "1.54e+03 TiB"),
    ],
)
def test_bytes_have_three_digits(size, text):
    assert describe_bytes(size) == text


@pytest.mark.parametrize(
    ("flops", "text"), [(0, "0"), (999, "999 FLOP"), (999.6, "1 kFLOP"), (2.5e18, "2.5e+03 PFLOP")]
)
def test_operations_have_three_digits(flops, text):
    assert describe_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (1.1e-5, "11 µs"), (0.9996e-3, "1 ms"), (0.2, "200 ms"), (1.2345, "1.23 s")],
)
def test_seconds_have_three_digits(seconds, text):
    assert describe_seconds(seconds) == text


def test_a_difference_has_a_sign_and_what_is_unknown_a_dash():
    assert [describe_difference(x, describe_bytes) for x in (3, -3, 0)] == ["+3 B", "-3 B", "="]
    assert describe_count(1024.4) == "1,024"
    assert describe_count(1024, 8) == "128"
    assert describe_share(1, 8) == "12.5%"
    assert describe_share(1, 0) == "-"
    describers = (describe_bytes, describe_flops, describe_seconds, describe_count, describe_share)
    assert [describe(None) for describe in describers] == ["-"] * 5


def test_words_stand_on_the_left_and_what_is_too_much_is_counted():
    console = _console()
    rows = [("[a]", "b", "1"), ("c", "d", "22"), ("e", "f", "3")]
    last = ("all", "", "26")
    headers = ("first", "second", "n")
    print_table(console, headers, rows, title="[T]", words=2, last=last, most=2)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line for line in lines if set(line) - {"─"}] == [
        "[T]",
        "first   second    n",
        "[a]     b         1",
        "c       d        22",
        "all              26",
        "and 1 more, which are in the files",
    ]
    assert lines[-1] == ""


def test_without_rows_there_is_the_title_alone():
    console = _console()
    print_table(console, ("a",), [], title="nothing", last=("sum",))
    assert console.file.getvalue() == "nothing\n"


def test_a_narrow_terminal_breaks_words_and_leaves_out_no_digit():
    console = _console(width=20)
    print_table(console, ("name", "number"), [("gather_params of all", "123,456,789")])
    shown = console.file.getvalue()
    assert sum(character.isdigit() for character in shown) == 9
    assert "…" not in shown
