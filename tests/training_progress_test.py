"""A bar in a terminal, plain lines in a log file."""

import io
import re

import pytest
import rich.console

from manualpar.training.progress import (
    LOG_WIDTH,
    TrainingProgress,
    describe,
    make_console,
    print_line,
)

METRICS = {"accuracy": 0.5, "loss": 1.25, "learning_rate": 1e-3, "examples_per_second": 1234.5}


@pytest.fixture
def console(request) -> rich.console.Console:
    """A console that writes into `console.file`, by default no terminal."""
    terminal = getattr(request, "param", False)
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120)


def _train(console: rich.console.Console) -> str:
    with TrainingProgress(console, num_steps=100) as progress:
        for step in range(1, 101):
            progress.advance(step)
        progress.report(100, "train", METRICS)
        progress.report(100, "eval", {"accuracy": 0.75, "loss": 0.5})
    return console.file.getvalue()


def test_a_log_file_gets_reports_and_nothing_else(console):
    assert _train(console).splitlines() == [
        "step 100/100  train  "
        "loss 1.2500  accuracy 0.5000  learning rate 1.00e-03  1,234 examples/s",
        "step 100/100  eval   loss 0.5000  accuracy 0.7500",
    ]


@pytest.mark.parametrize("console", [True], indirect=True)
def test_a_terminal_gets_a_bar_and_evaluations_above_it(console):
    shown = _train(console)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "\n").splitlines()
    (bar,) = {line for line in last if "100/100 " in line and "training" in line}
    assert "loss 1.2500  accuracy 0.5000  1,234 examples/s" in bar
    assert "━" in bar
    assert "step 100/100  eval   loss 0.5000  accuracy 0.7500" in last
    assert not any("100/100  train" in line for line in last)
    assert shown.index("\x1b[?25l") < shown.index("\x1b[?25h"), "the cursor was not given back"


def test_metrics_without_a_format_come_last():
    assert describe({"z": 2.0, "accuracy": 0.5, "loss": 1.0}) == "loss 1.0000  accuracy 0.5000  z 2"


@pytest.mark.parametrize("console", [True], indirect=True)
def test_a_terminal_gets_norms_above_the_bar(console):
    with TrainingProgress(console, num_steps=100) as progress:
        progress.report(100, "train", METRICS | {"gradient_norm": 0.5, "update_norm": 0.25})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n")
    assert "step 100/100  train  gradient norm 0.5  update norm 0.25\n" in shown
    assert "accuracy 0.5000  1,234 examples/s" in shown


def test_norms_are_named_in_words():
    norms = {"gradient_norm": 0.51234, "update_norm": 1e-5, "parameter_norm": 1234.5}
    assert describe(norms | {"loss": 1.0}) == (
        "loss 1.0000  gradient norm 0.512  update norm 1e-05  parameter norm 1.23e+03"
    )


def test_a_line_is_neither_wrapped_nor_read_as_markup(console):
    path = "/a/long/path" * 30 + "/[bold]"
    print_line(console, f"results: {path}")
    assert console.file.getvalue() == f"results: {path}\n"


def test_a_log_file_has_room_for_tables(capsys):
    assert make_console().width == LOG_WIDTH
