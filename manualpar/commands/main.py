"""The command `manualpar`: `manualpar train`, `manualpar inspect` and so on.

`python -m manualpar` is the same command. A subcommand is imported when it is called, so that each
needs only the packages that it uses.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from manualpar.errors import (
    TRAIN,
    USAGE_EXIT_CODE,
    MissingExtraError,
    UsageError,
    print_error,
    require,
    suggest,
)
from manualpar.system.reports.help_text import fill

BROKEN_PIPE_EXIT_CODE = 141  # That of a program which SIGPIPE ends.


class Command(NamedTuple):
    """A subcommand.

    Attributes:
      summary: The sentence for the list of commands.
      function: The function that runs the command, as `module:name`. It gets the command line, the
        program's name first, and returns the exit code or ends the process.
      extra: The optional modules that the command cannot do without.
    """

    summary: str
    function: str
    extra: Sequence[str] = TRAIN


COMMANDS: Mapping[str, Command] = {
    "new": Command(
        "Writes a small project of your own: model, data, config, test.",
        "manualpar.commands.new_project_command:main",
        (),
    ),
    "configs": Command("Lists the configs, or prints one.", "manualpar.commands.list_configs:main"),
    "train": Command("Trains a config, or resumes a run.", "manualpar.commands.train_command:main"),
    "inspect": Command(
        "Shows the communication, memory and FLOPs of a config's step.",
        "manualpar.commands.inspect_command:main",
    ),
    "plan": Command(
        "Estimates a config's step on devices that are not here.",
        "manualpar.commands.plan_command:main",
    ),
    "compare": Command(
        "Compares strategies and modes of one config.", "manualpar.commands.compare_command:main"
    ),
    "compare-runs": Command(
        "Compares runs: losses, speed, memory, and what was set.",
        "manualpar.commands.compare_runs_command:main",
    ),
    "generate": Command(
        "Answers prompts with a trained model.", "manualpar.commands.generate_command:main"
    ),
    "evaluate": Command(
        "Evaluates a trained model on texts.", "manualpar.commands.evaluate_command:main"
    ),
    "tokenize": Command(
        "Turns texts into token files to train on.", "manualpar.data.tokenize:main", ("rich",)
    ),
    "import": Command(
        "Imports a Hugging Face model to train it.", "manualpar.commands.import_export:import_main"
    ),
    "export": Command(
        "Exports a trained model in Hugging Face's format.",
        "manualpar.commands.import_export:export_main",
    ),
    "doctor": Command(
        "Shows this machine's software and devices, and tries a step.",
        "manualpar.commands.doctor:main",
        (),
    ),
    "launch": Command(
        "Starts several processes of a command on this machine.",
        "manualpar.system.cluster.launch:main",
        (),
    ),
}


def usage() -> str:
    """Returns the text of `manualpar --help`."""
    width = max(map(len, COMMANDS))
    margin = " " * (width + 4)
    lines = [
        fill(command.summary, f"  {name:{width}s}  ", hanging=margin)
        for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            fill(
                "Trains flax models with manual parallelism: every collective is written by hand."
            ),
            "",
            "manualpar COMMAND [arguments]",
            "manualpar COMMAND --help",
            "manualpar --version",
            "",
            "Commands:",
            *lines,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`, by default that of this process; returns the exit code."""
    argv = sys.argv if argv is None else argv
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"manualpar {importlib.metadata.version('manualpar')}")
        return 0
    try:
        command = _command(name)
        require(f"manualpar {name}", *command.extra)
        module, _, function = command.function.partition(":")
        run = getattr(importlib.import_module(module), function)
    except (UsageError, MissingExtraError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    try:
        code: int = run([f"manualpar {name}", *argv[2:]])
        sys.stdout.flush()
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE
    return code


def _command(name: str) -> Command:
    """Returns the subcommand of this name; names the nearest one if there is none."""
    if name in COMMANDS:
        return COMMANDS[name]
    raise UsageError(
        f"{name!r} is not a command{suggest(name, COMMANDS)}; `manualpar --help` lists all."
    )
