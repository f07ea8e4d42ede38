"""A bar in a terminal, plain lines in a log file."""

import io
import re
import subprocess
import sys

import pytest
import rich.console

from manualpar.inspect.tables import print_line
from manualpar.training.monitoring.progress import (
    LOG_WIDTH,
    TrainingProgress,
    describe_metrics,
    describe_within,
    make_console,
    show_tracing,
)
from tests.paths import ROOT

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
    assert (
        describe_metrics({"z": 2.0, "accuracy": 0.5, "loss": 1.0})
        == "loss 1.0000  accuracy 0.5000  z 2"
    )


@pytest.mark.parametrize("console", [True], indirect=True)
def test_a_terminal_gets_norms_above_the_bar(console):
    with TrainingProgress(console, num_steps=100) as progress:
        progress.report(100, "train", METRICS | {"gradient_norm": 0.5, "update_norm": 0.25})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()).replace("\r", "\n")
    assert "step 100/100  train  gradient norm 0.5  update norm 0.25\n" in shown
    assert "accuracy 0.5000  1,234 examples/s" in shown


def test_norms_are_named_in_words():
    norms = {"gradient_norm": 0.51234, "update_norm": 1e-5, "parameter_norm": 1234.5}
    assert describe_metrics(norms | {"loss": 1.0}) == (
        "loss 1.0000  gradient norm 0.512  update norm 1e-05  parameter norm 1.23e+03"
    )


def test_a_log_file_has_room_for_tables(capsys):
    assert make_console().width == LOG_WIDTH


def test_work_goes_on_if_the_reader_of_a_pipe_has_read_enough():
    code = """import sys
from manualpar.training.monitoring.progress import make_console
console = make_console()
for _ in range(10_000):
    console.print("a line")
print("all done", file=sys.stderr)"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr.read() == "all done\n"
    assert process.returncode == 0


LANGUAGE_MODEL = {"loss": 1.23456, "bits_per_byte": 1.78109, "learning_rate": 1e-3}
RATES = {
    "tokens_per_second": 12345.6,
    "examples_per_second": 48.2,
    "mfu": 0.4123,
    "memory_bytes": 3 * 2**30,
    "model_flops_per_second": 1e12,
}


def _screen(text: str) -> list[str]:
    """The lines of what a terminal was sent, without what moves its cursor or colours."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()


def _last_bar(width: int, *, num_steps: int = 1000, state_bytes: int | None = 2**20) -> str:
    console = rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False
    )
    with TrainingProgress(console, num_steps=num_steps, state_bytes=state_bytes) as progress:
        progress.report(num_steps, "train", LANGUAGE_MODEL, throughput=RATES)
        progress.advance(num_steps)
    steps = f"{num_steps}/{num_steps}"
    return [line for line in _screen(console.file.getvalue()) if steps in line][-1]


@pytest.mark.parametrize("num_steps", [10, 1000, 1_000_000])
@pytest.mark.parametrize("width", [60, 79, 80, 100, 120, 200])
def test_the_bar_fits_the_terminal_and_shows_whole_numbers(width, num_steps):
    bar = _last_bar(width, num_steps=num_steps)
    assert len(bar) <= width
    assert "…" not in bar
    assert "━━━━" in bar
    assert bar.rstrip().endswith("0:00:00")
    assert len(bar.rstrip()) <= width - 2, "no room for a time of more than nine hours"
    assert "loss 1.2346" in bar


def test_80_columns_have_what_is_most_important():
    bar = _last_bar(80)
    assert "step 1000/1000 loss 1.2346  bits/byte 1.7811  12,346 tokens/s" in bar
    assert "MFU" not in bar


def test_a_wide_terminal_has_it_all():
    bar = _last_bar(200)
    assert bar.startswith("training " + "━" * 40 + " step 1000/1000 loss 1.2346  bits/byte 1.7811")
    assert "12,346 tokens/s  MFU 41.2%  3 GiB in use  state 1 MiB/device 0:00:00" in bar
    assert "learning rate" not in bar
    assert "examples/s" not in bar, "tokens are enough"


def test_what_has_no_room_leaves_it_to_what_is_shorter():
    metrics = {"loss": 1.0, "accuracy": 0.5, "z": 2.0}
    assert describe_within(metrics, 11) == "loss 1.0000"
    assert describe_within(metrics, 16) == "loss 1.0000  z 2"
    assert describe_within(metrics, 10) == "z 2"
    assert describe_within(metrics, 1, also="also") == ""
    assert describe_within({}, 10, also="also") == "also"


def test_the_screen_shows_metrics_and_rates_together(console):
    with TrainingProgress(console, num_steps=100) as progress:
        progress.report(100, "train", LANGUAGE_MODEL, throughput=RATES)
    assert console.file.getvalue() == (
        "step 100/100  train  loss 1.2346  bits/byte 1.7811  learning rate 1.00e-03  "
        "12,346 tokens/s  MFU 41.2%  3 GiB in use\n"
    )


@pytest.mark.parametrize("first_step", [0, 900])
@pytest.mark.parametrize("seconds", [0.01, 2.0, 60.0])
def test_the_time_that_remains_counts_the_steps_of_this_run_alone(first_step, seconds):
    now = [0.0]
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=120)
    with TrainingProgress(
        console, num_steps=1000, first_step=first_step, get_time=lambda: now[0]
    ) as progress:
        assert progress._bar.tasks[0].completed == first_step
        now[0] += 100.0  # compiles
        for step in range(first_step + 1, first_step + 41):
            progress.advance(step)
            now[0] += seconds
        remaining = progress._bar.tasks[0].time_remaining
    assert remaining == pytest.approx(seconds * (960 - first_step), abs=1)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_under_mpirun_there_are_plain_lines(variable, monkeypatch):
    """It gives a process a terminal that nobody sees."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert make_console().is_terminal
    monkeypatch.setenv(variable, "0")
    console = make_console()
    assert not console.is_terminal
    assert console.width == LOG_WIDTH


def test_only_process_0_shows_something(capsys):
    for process in (0, 1):
        console = make_console(process=process)
        print_line(console, f"process {process}")
        with TrainingProgress(console, num_steps=2) as progress:
            progress.advance(1)
            progress.report(1, "eval", {"loss": 1.0})
    shown = capsys.readouterr().out
    assert "process 0" in shown
    assert "process 1" not in shown
    assert shown.count("loss 1.0000") == 1


class SlowStep:
    """A step whose first call takes 75 seconds of a clock, and that calls `during` then."""

    def __init__(self, during=lambda: None) -> None:
        self.now, self._during = 0.0, during

    def __call__(self, state, batch):
        if not self.now:
            self.now = 75.0
            self._during()
        return state + batch


def test_a_log_file_says_when_a_step_is_compiled_and_how_long_it_took(console):
    step = SlowStep()
    with TrainingProgress(console, num_steps=9, get_time=lambda: step.now) as progress:
        assert progress.call("training step", step, 1, 2) == 3
        assert progress.call("training step", step, 3, 4) == 7
    assert console.file.getvalue().splitlines() == [
        "compiling the training step",
        "compiled the training step in 75.0 s",
    ]


def test_a_step_that_cannot_be_compiled_was_not_compiled(console):
    def fail(state):
        raise RuntimeError("out of memory")

    with TrainingProgress(console, num_steps=9) as progress, pytest.raises(RuntimeError):
        progress.call("training step", fail, 1)
    assert console.file.getvalue() == "compiling the training step\n"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_says_for_how_long_a_step_compiles(width):
    console = rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False
    )
    step = SlowStep(lambda: progress._bar.refresh())
    with TrainingProgress(
        console, num_steps=1000, state_bytes=2**20, get_time=lambda: step.now
    ) as progress:
        progress.report(0, "train", LANGUAGE_MODEL)
        for batch in range(3):
            progress.call("training step", step, 1, batch)
    lines = _screen(console.file.getvalue())
    (shown,) = {line for line in lines if line.startswith("compiling (75 s) ━━━━")}
    assert len(shown) <= width
    assert "step    0/1000" in shown
    assert "compiling" not in lines[-1]
    assert "compiled" not in console.file.getvalue()


def test_tracing_is_a_line_at_its_beginning_and_at_its_end(console):
    with show_tracing(console):
        assert console.file.getvalue() == "tracing the program\n"
    assert re.fullmatch(
        r"tracing the program\ntraced the program in \d+\.\d s\n", console.file.getvalue()
    )


@pytest.mark.parametrize("console", [True], indirect=True)
def test_a_terminal_shows_tracing_only_while_it_lasts(console):
    with show_tracing(console):
        pass
    assert "tracing (0 s)" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K"), "the line is still on the screen"
