"""Shows the progress of a run: a bar in a terminal, plain lines anywhere else.

The bar is on one line, with the most important numbers first. If the line is too long, the bar
becomes shorter, and then the least important numbers are left out. The files have every number.

A program is traced when it is built, and its steps are compiled when they are first called. Both
can take minutes, so a terminal shows their seconds, and a log file gets a line when each begins and
a line when it ends.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from manualpar.inspect.tables import describe_bytes, print_line
from manualpar.system.reports.progress_bars import is_forwarded, logged_seconds, running_seconds

Result = TypeVar("Result")

# Width of a table in a log file, in characters. In a terminal, a table has the terminal's width.
LOG_WIDTH = 120

# Formats of the metrics, the most important metric first.
FORMATS: Mapping[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "bits_per_byte": "bits/byte {:.4f}".format,
    "accuracy": "accuracy {:.4f}".format,
    "learning_rate": "learning rate {:.2e}".format,
    "gradient_norm": "gradient norm {:.3g}".format,
    "update_norm": "update norm {:.3g}".format,
    "parameter_norm": "parameter norm {:.3g}".format,
    "examples_per_second": "{:,.0f} examples/s".format,
    "tokens_per_second": "{:,.0f} tokens/s".format,
    "mfu": "MFU {:.1%}".format,
    "memory_bytes": lambda size: f"{describe_bytes(size)} in use",
}
# Metrics that the bar leaves out, because a terminal of 80 columns has no room for them.
NORMS = frozenset({"gradient_norm", "update_norm", "parameter_norm"})
LEFT_OUT = NORMS | {"learning_rate"}
# Metrics with these prefixes are only in the files: they are inputs of calculations, or too many.
NOT_SHOWN = ("model_flops_per_second", "expert_")
BAR_WIDTH, SMALLEST_BAR = 40, 4
LONGEST_TIME = len("100:00:00")
LABEL = "training"
COMPILING = "compiling"
LONGEST_LABEL = len(f"{COMPILING} (9999 s)")
# The remaining time is estimated from the steps in this many seconds. With rich's default of 30 s,
# there would be no estimate for slower steps.
ETA_SECONDS = 600.0


class _Console(rich.console.Console):
    """A console that becomes quiet if the reader of a pipe, such as `head`, has read enough.

    The work goes on, because its results are files.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console(*, process: int = 0) -> rich.console.Console:
    """Makes a run's console, which writes to standard output; only process 0 shows anything."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot show must not end a run with an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = _Console(
        highlight=False, quiet=process != 0, force_terminal=False if is_forwarded() else None
    )
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


@contextlib.contextmanager
def show_tracing(console: rich.console.Console) -> Iterator[None]:
    """Shows that the program is traced, as long as the context lasts."""
    with (
        running_seconds(console, "tracing"),
        logged_seconds(console, "tracing the program", "traced the program"),
    ):
        yield


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics in a line such as `loss 0.0312  accuracy 0.9903`, ordered by `FORMATS`."""
    return "  ".join(_texts(metrics).values())


def describe_within(metrics: Mapping[str, float], width: int, *, also: str = "") -> str:
    """Formats the most important metrics in at most `width` characters; '' if none fits.

    If room is left, the text `also` is added at the end.
    """
    texts = [text for name, text in _texts(metrics).items() if name not in LEFT_OUT]
    line = ""
    for text in [*texts, also]:
        longer = f"{line}  {text}" if line else text
        if text and len(longer) <= width:
            line = longer
    return line


def _texts(metrics: Mapping[str, float]) -> dict[str, str]:
    """Formats each metric, in the order of `FORMATS`."""
    metrics = {name: value for name, value in metrics.items() if not name.startswith(NOT_SHOWN)}
    if "tokens_per_second" in metrics:
        metrics.pop("examples_per_second", None)  # Would repeat `tokens_per_second`.
    texts = {name: text(metrics[name]) for name, text in FORMATS.items() if name in metrics}
    others = {name: f"{name} {metrics[name]:.4g}" for name in metrics if name not in FORMATS}
    return texts | others


class TrainingProgress:
    """Shows the progress of a training. Use it as a context manager.

    In a terminal, a bar moves with every step and shows the latest training metrics. Evaluations
    and norms are printed above the bar. Outside a terminal, every report is a line, and the steps
    between two reports print nothing.
    """

    def __init__(
        self,
        console: rich.console.Console,
        *,
        num_steps: int,
        first_step: int = 0,
        state_bytes: int | None = None,
        while_compiling: Callable[[], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        ),
        get_time: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes the bar, which appears when the context is entered.

        Args:
          state_bytes: The bytes of the state on the fullest device; `None` to show none.
          while_compiling: Makes a context in which a step is compiled.
          get_time: Returns the time in seconds, to estimate the remaining time.
        """
        self._console = console
        self._num_steps = num_steps
        self._get_time, self._while_compiling = get_time, while_compiling
        self._compiled: list[Callable[..., Any]] = []
        self._compiling: _Compiling | None = None
        self._metrics: dict[str, float] = {}
        self._also = "" if state_bytes is None else f"state {describe_bytes(state_bytes)}/device"
        self._bar_column = BarColumn(BAR_WIDTH)
        self._bar = Progress(
            TextColumn("{task.fields[label]}", markup=False),
            self._bar_column,
            TextColumn("step"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            get_time=get_time,
            speed_estimate_period=ETA_SECONDS,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task(
            LABEL, total=num_steps, completed=first_step, **self._fields()
        )

    def call(self, name: str, step: Callable[..., Result], *args: Any) -> Result:
        """Calls a jitted step, and shows the first call of each step as `compiling (3 s)`.

        Args:
          name: The name of the step in a log file, such as `training step`.
        """
        if step in self._compiled:
            return step(*args)
        self._compiled.append(step)
        self._compiling = _Compiling(self._get_time)
        self._bar.update(self._task, **self._fields())
        lines = f"compiling the {name}", f"compiled the {name}"
        try:
            with (
                self._while_compiling(),
                logged_seconds(self._console, *lines, get_time=self._get_time),
            ):
                return step(*args)
        finally:
            self._compiling = None
            self._bar.update(self._task, **self._fields())

    def advance(self, step: int) -> None:
        """Moves the bar to `step` updates."""
        self._bar.update(self._task, completed=step, **self._fields())

    def report(
        self,
        step: int,
        split: str,
        metrics: Mapping[str, float],
        *,
        throughput: Mapping[str, float] | None = None,
    ) -> None:
        """Shows the metrics of `split` after `step` updates, followed by `throughput`."""
        shown = {**metrics, **(throughput or {})}
        if split == "train" and self._console.is_terminal:
            self._metrics = shown
            self._bar.update(self._task, **self._fields())
            shown = {name: value for name, value in shown.items() if name in NORMS}
            if not shown:
                return
        digits = len(str(self._num_steps))
        line = f"step {step:{digits}d}/{self._num_steps}  {split:5s}  {describe_metrics(shown)}"
        print_line(self._console, line)

    def _fields(self) -> dict[str, Any]:
        """Returns the texts beside the bar, and sets the bar's width to the rest of the line."""
        # Columns: label, bar, "step", 12/34, metrics, time, and a space between any two.
        steps = 2 * len(str(self._num_steps)) + 1
        room = self._console.width - len("step") - steps - LONGEST_TIME - 5 - SMALLEST_BAR
        label: object = self._compiling or LABEL
        width = LONGEST_LABEL if self._compiling else len(LABEL)
        metrics = describe_within(self._metrics, room - width, also=self._also)
        without_label = describe_within(self._metrics, room, also=self._also)
        if len(without_label) > len(metrics) and not self._compiling:
            label, width, metrics = "", 0, without_label
        self._bar_column.bar_width = min(
            BAR_WIDTH, max(room - width - len(metrics), 0) + SMALLEST_BAR
        )
        return {"label": label, "metrics": metrics}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._bar.stop()


class _Compiling:
    """A label whose text has the seconds since the label was made."""

    def __init__(self, get_time: Callable[[], float]) -> None:
        self._get_time, self._started = get_time, get_time()

    def __str__(self) -> str:
        return f"{COMPILING} ({self._get_time() - self._started:.0f} s)"
