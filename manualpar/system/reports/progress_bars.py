"""Shows work that takes long: the bytes done of a total, or the seconds so far.

The bars are shown only in a terminal, and they disappear when the work is done. Without rich, which
is optional, there are no bars of bytes.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

# Environment variables that Open MPI and MPICH set in each process.
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


class ShowBytes(Protocol):
    """A function that moves a bar of bytes."""

    def __call__(self, done: int, text: str = "") -> None:
        """Moves the bar to `done` bytes, and shows `text` after it."""


def is_forwarded() -> bool:
    """Returns whether `mpirun` forwards the output of this process.

    `mpirun` runs each process in a pseudo-terminal and forwards the output as through a pipe.
    """
    return any(name in os.environ for name in MPI_RANKS)


@contextlib.contextmanager
def bytes_bar(
    work: str, total: int, *, console: Any = None, is_shown: bool = True
) -> Iterator[ShowBytes]:
    """Shows how many bytes of a total are done, if standard error is a terminal.

    Args:
      work: The work, such as `tokenizing`.
      total: The bytes at the end of the work.
      console: The rich console to show the bar on; standard error by default.
      is_shown: Whether this process shows the bar.
    """
    if not is_shown or importlib.util.find_spec("rich") is None:
        yield lambda done, text="": None
        return
    # Imported here, because rich is optional.
    import rich.console
    import rich.progress

    console = console or rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TextColumn("{task.fields[text]}", markup=False),
        rich.progress.TimeRemainingColumn(),
    )
    is_shown = console.is_terminal and not is_forwarded()
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not is_shown
    ) as bar:
        task = bar.add_task(work, total=total, text="")

        def show(done: int, text: str = "") -> None:
            bar.update(task, completed=min(done, total), text=text)

        yield show


@contextlib.contextmanager
def running_seconds(console: Any, doing: str) -> Iterator[None]:
    """Shows a line such as `tracing (3 s)` in a terminal, as long as the context lasts."""
    # Imported here, because rich is optional.
    from rich.progress import Progress, TextColumn

    text = TextColumn("{task.description} ({task.elapsed:.0f} s)", markup=False)
    is_shown = console.is_terminal and not console.quiet
    with Progress(text, console=console, transient=True, disable=not is_shown) as bar:
        bar.add_task(doing)
        yield


@contextlib.contextmanager
def logged_seconds(
    console: Any, doing: str, done: str, *, get_time: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Prints a line when work begins and a line with its seconds when it ends, in a log file.

    In a terminal nothing is printed. If the work fails, there is no second line.

    Args:
      doing: The first line, such as `compiling the training step`.
      done: The second line without the seconds, such as `compiled the training step`.
      get_time: Returns the time in seconds.
    """
    from manualpar.inspect.tables import print_line  # Imports rich.

    if console.is_terminal:
        yield
        return
    started = get_time()
    print_line(console, doing)
    yield
    print_line(console, f"{done} in {get_time() - started:.1f} s")
