"""What a run shows while it trains: a bar in a terminal, plain lines anywhere else."""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Tables in a log file get room; a terminal has the width it has.
LOG_WIDTH = 120

FORMATS = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.4f}",
    "learning_rate": "learning rate {:.2e}",
    "gradient_norm": "gradient norm {:.3g}",
    "update_norm": "update norm {:.3g}",
    "parameter_norm": "parameter norm {:.3g}",
    "examples_per_second": "{:,.0f} examples/s",
}

# The bar has no room for them in a terminal of 80 columns.
NORMS = frozenset({"gradient_norm", "update_norm", "parameter_norm"})


def make_console() -> rich.console.Console:
    """The console that a run writes to, on standard output."""
    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    return console


def print_line(console: rich.console.Console, text: str) -> None:
    """Prints a line as it is: no markup, no colour, no wrapping that would break a path."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(metrics: Mapping[str, float]) -> str:
    """Metrics in a line, such as `loss 0.0312  accuracy 0.9903`; those with a format come first."""
    formats = {name: text for name, text in FORMATS.items() if name in metrics}
    formats |= {name: f"{name} {{:.4g}}" for name in metrics if name not in FORMATS}
    return "  ".join(text.format(metrics[name]) for name, text in formats.items())


class TrainingProgress:
    """Shows how far a training is. Use it as a context manager.

    In a terminal a bar moves with every step and shows the latest training metrics; evaluations and
    norms, where there are any, are printed above it. Anywhere else every report is a line, and
    steps in between are silent.
    """

    def __init__(self, console: rich.console.Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, metrics="")

    def advance(self, step: int) -> None:
        """Says that `step` updates are done."""
        self._bar.update(self._task, completed=step)

    def report(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of `split` after `step` updates."""
        if split == "train" and self._console.is_terminal:
            left_out = NORMS | {"learning_rate"}
            shown = {name: value for name, value in metrics.items() if name not in left_out}
            self._bar.update(self._task, metrics=describe(shown))
            metrics = {name: value for name, value in metrics.items() if name in NORMS}
            if not metrics:
                return
        digits = len(str(self._num_steps))
        line = f"step {step:{digits}d}/{self._num_steps}  {split:5s}  {describe(metrics)}"
        print_line(self._console, line)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
