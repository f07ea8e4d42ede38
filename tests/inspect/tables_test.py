"""Numbers in words, and tables of them."""

import io
from typing import NamedTuple

import pytest
import rich.console

from manualpar.inspect.tables import (
    TableColumn,
    describe_bytes,
    describe_count,
    describe_difference,
    describe_flops,
    describe_seconds,
    describe_share,
    markdown_table,
    print_line,
    print_side_by_side,
    print_table,
    print_wrapped,
    share_of,
    text_columns,
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
    assert describe_share(1, 8) == "12.5%"
    assert describe_share(1, 0) == "-"
    describers = (describe_bytes, describe_flops, describe_seconds, describe_count, describe_share)
    assert [describe(None) for describe in describers] == ["-"] * 5


def test_words_stand_on_the_left_and_what_is_too_much_is_counted():
    console = _console()
    rows = [("[a]", "b", "1"), ("c", "d", "22"), ("e", "f", "3")]
    columns = text_columns(("first", "second", "n"), words=2)
    print_table(console, columns, rows, title="[T]", last=("all", "", "26"), most=2)
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
    print_table(console, text_columns(("a",)), [], title="nothing", last=("sum",))
    assert console.file.getvalue() == "nothing\n"


def test_a_narrow_terminal_breaks_words_and_leaves_out_no_digit():
    console = _console(width=20)
    columns = text_columns(("name", "number"))
    print_table(console, columns, [("gather_params of all", "123,456,789")])
    shown = console.file.getvalue()
    assert sum(character.isdigit() for character in shown) == 9
    assert "…" not in shown


class Step(NamedTuple):
    name: str
    size: int
    hidden: float | None = None


COLUMNS = (
    TableColumn("step", "name"),
    TableColumn("bytes", 1, describe_bytes),
    TableColumn("share", "size", share_of(8), is_summed=False),
    TableColumn("hidden", lambda step: step.hidden, describe_seconds, is_optional=True),
)
STEPS = [Step("first", 2), Step("second", 6)]


def _cells(console: rich.console.Console) -> list[list[str]]:
    lines = [line.split("  ") for line in console.file.getvalue().splitlines()]
    cells = [[cell for cell in map(str.strip, line) if cell.strip("─ ")] for line in lines]
    return [line for line in cells if line]


def test_a_column_reads_a_field_an_index_or_a_key_and_an_optional_one_without_values_is_left_out():
    console = _console()
    print_table(console, COLUMNS, STEPS, last=Step("all", 8))
    assert _cells(console) == [
        ["step", "bytes", "share"],
        ["first", "2 B", "25.0%"],
        ["second", "6 B", "75.0%"],
        ["all", "8 B"],
    ]
    console = _console()
    print_table(console, COLUMNS, [*STEPS, Step("third", 0, 1.0)])
    assert [line[3:] for line in _cells(console)] == [["hidden"], ["-"], ["-"], ["1 s"]]
    assert [COLUMNS[0].cell({"name": "a"}), TableColumn("", "other", str).cell({})] == [
        "a",
        "-",
    ]


def test_the_same_columns_compare_rows_side_by_side():
    console = _console()
    print_side_by_side(console, COLUMNS[1:], STEPS, names=[step.name for step in STEPS])
    assert _cells(console) == [
        ["first", "second"],
        ["bytes", "2 B", "6 B"],
        ["share", "25.0%", "75.0%"],
    ]


def test_the_same_columns_make_a_table_in_markdown():
    assert markdown_table(COLUMNS, STEPS).splitlines() == [
        "| step | bytes | share |",
        "| --- | ---: | ---: |",
        "| first | 2 B | 25.0% |",
        "| second | 6 B | 75.0% |",
    ]


NAMES = ("layer_0/attention/query/kernel", "expert_layers/router", "P('data', None) largest one")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_names_and_numbers_are_whole_however_narrow_the_terminal_is(width):
    console = _console(width=width)
    rows = [(NAMES[0], NAMES[2], "1.95 MiB", "100.0%"), (NAMES[1], "", "123,456,789", "0.1%")]
    columns = text_columns(("name", "how it is sharded", "bytes of a device", "share"), words=2)
    print_table(console, columns, rows)
    lines = console.file.getvalue().splitlines()
    for text in (*NAMES[:2], "1.95 MiB", "123,456,789", "100.0%"):
        assert sum(text in line for line in lines) == 1
    words = {word for line in lines for word in line.split() if word.strip("─")}
    assert words == {
        word for row in (*rows, [x.name for x in columns]) for x in row for word in x.split()
    }
    least = len(NAMES[0]) + len("P('data',") + len("123,456,789") + len("100.0%") + 3
    assert max(len(line.rstrip()) for line in lines) <= max(width, least)


def test_columns_move_together_before_a_table_is_too_wide():
    columns, row = text_columns(("aaaa", "bbbb", "cccc")), ("x", "y", "z")

    def shown(width):
        console = _console(width=width)
        print_table(console, columns, [row])
        return console.file.getvalue().splitlines()[0].rstrip()

    assert [shown(width) for width in (18, 17, 15, 9)] == [
        "aaaa   bbbb   cccc",
        "aaaa  bbbb  cccc",
        "aaaa bbbb cccc",
        "aaaa bbbb cccc",
    ]


def test_a_paragraph_is_wrapped_between_words():
    console = _console(width=20)
    print_wrapped(console, "set --config.parallel.mesh=data:8,model:2 [bold] or not", "next")
    assert console.file.getvalue() == (
        "set\n--config.parallel.mesh=data:8,model:2\n[bold] or not\nnext\n"
    )
