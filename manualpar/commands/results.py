"""Runs the work of a command: errors become a sentence and an exit code, results get a folder."""

import contextlib
import json
import logging as standard_logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.console
from absl import logging

from manualpar.core.mesh.mesh import simulate_devices
from manualpar.errors import (
    INTERRUPTED_EXIT_CODE,
    USAGE_EXIT_CODE,
    MissingExtraError,
    UsageError,
    describe_mistake,
    print_error,
)
from manualpar.inspect.tables import print_line
from manualpar.system.storage.compilation_cache import check_compilation_cache
from manualpar.system.storage.durable_files import check_writable
from manualpar.system.storage.untrusted import write_file
from manualpar.training.monitoring.progress import make_console
from manualpar.training.monitoring.run_files import check_workdir, create_numbered_folder


def answer(work: Callable[[rich.console.Console], Path]) -> int:
    """Runs a command that writes a folder of results; prints the time it took, and the folder.

    `work` returns the folder, and raises a `UsageError` for a user's mistake. On Ctrl-C it may
    raise a `KeyboardInterrupt` whose argument is a text about the files written so far.
    """
    started = time.perf_counter()
    quiet_absl()
    console = make_console()
    try:
        results = work(console)
    except UsageError as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt as error:
        print_error(f"interrupted; {str(error) or 'nothing was written'}")
        return INTERRUPTED_EXIT_CODE
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {results}")
    return 0


def choose_devices(count: int | None, *, force: bool = False) -> None:
    """Chooses the devices of a command, see `simulate_devices`; checks JAX's compilation cache."""
    check_compilation_cache()
    simulate_devices(count, force=force)


def quiet_absl() -> None:
    """Hides messages that absl prints by default: JAX's about missing backends, matplotlib's.

    Matplotlib says when it cannot write to the home folder, and then uses a temporary folder.
    """
    logging.set_verbosity(logging.WARNING)
    standard_logging.getLogger("matplotlib").setLevel(standard_logging.ERROR)


@contextlib.contextmanager
def users_mistakes(where: str = "") -> Iterator[None]:
    """Turns a `ValueError` in this context into a `UsageError`; its message begins with `where`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{where}{describe_mistake(error)}") from error


def check_output(folder: Path | None, parent: Path) -> None:
    """Checks, before any work, that `results_folder` can create its folder."""
    if folder is not None:
        check_workdir(folder, "--output")
    check_writable(folder or parent, "--output")


@contextlib.contextmanager
def results_folder(folder: Path | None, parent: Path) -> Iterator[Path]:
    """Creates a folder for results: `folder`, or if this is `None` a numbered one in `parent`."""
    try:
        folder = folder or create_numbered_folder(parent)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        where = f"{error.filename or folder}: {error.strerror or error}"
        raise UsageError(
            f"the results cannot be written: {where}; name another folder with --output."
        ) from error


@contextlib.contextmanager
def with_picture(console: rich.console.Console) -> Iterator[None]:
    """Says in a line that a picture is left out, if the code in the context lacks matplotlib."""
    try:
        yield
    except MissingExtraError as error:
        print_line(console, str(error))


def write_json(path: Path, value: Any) -> None:
    """Writes a value to a new file as indented JSON."""
    write_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
