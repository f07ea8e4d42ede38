"""The main of an experiment, for `absl.app.run`: what `experiments/` share.

Exit codes: 0 for a finished run, 2 for a mistake of the user's, 3 for devices that should hold the
same and do not (`config.debug.check_replicas_every`), 130 for Ctrl-C. Other errors are ours and
keep their traceback.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from absl import flags, logging

from manualpar.replicas import ReplicaError
from manualpar.training.command_line import (
    FLAGS_HELP,
    CommandLine,
    UsageError,
    load_config,
    parse_command_line,
)
from manualpar.training.config import check_config, flatten_config
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import Experiment, prepare, run
from manualpar.training.progress import make_console, print_line
from manualpar.training.writers import RunWriter, check_workdir, create_numbered_folder

USAGE_EXIT_CODE = 2
REPLICAS_EXIT_CODE = 3
INTERRUPTED_EXIT_CODE = 130


def flags_parser(description: str, default_config: Path) -> Callable[[list[str]], CommandLine]:
    """Makes the parser that `absl.app.run` takes.

    Args:
      description: What `--help` shows first.
      default_config: What `--config` is where it is not given.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process: with code 0
      for `--help`, with code 2 and a sentence for a mistake.
    """

    def parse(argv: list[str]) -> CommandLine:
        try:
            if {"--help", "-help", "-h", "--helpshort"} & set(argv):
                print(_help_text(description, default_config))
                sys.exit(0)
            return parse_command_line(argv, default_config=default_config, flag_values=flags.FLAGS)
        except UsageError as error:
            print_error(error)
            sys.exit(USAGE_EXIT_CODE)

    return parse


def run_command(command: CommandLine) -> int:
    """Does what a command line asks for, under the strategy that its config names.

    Args:
      command: The command line.

    Returns:
      The exit code.
    """
    started = time.perf_counter()
    # At its default absl shows jax's notes on the backends it does not find.
    logging.set_verbosity(logging.WARNING)
    console = make_console()
    remains = "nothing was written"
    try:
        try:
            experiment = _prepare(command)
            writer = _open_writer(command, experiment)
        except (UsageError, ValueError) as error:
            print_error(error)
            return USAGE_EXIT_CODE
        remains = f"the results so far are in {writer.workdir}"
        with writer:
            result = run(experiment, writer=writer, console=console)
    except KeyboardInterrupt:
        print_error(f"interrupted; {remains}")
        return INTERRUPTED_EXIT_CODE
    except ReplicaError as error:
        print_error(f"stopped, {remains}; {error}")
        return REPLICAS_EXIT_CODE
    print_line(console, f"test accuracy: {result['accuracy']:.4f}")
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {writer.workdir}")
    return 0


def print_error(error: object) -> None:
    """Prints what went wrong to standard error, without a traceback."""
    print(f"error: {error}", file=sys.stderr)


def _prepare(command: CommandLine) -> Experiment:
    """Checks everything that can be checked before something compiles."""
    check_config(command.config)
    if command.workdir:
        check_workdir(command.workdir)
    simulate_devices(command.devices)
    return prepare(command.config)


def _open_writer(command: CommandLine, experiment: Experiment) -> RunWriter:
    """Opens the files of the run, in a new folder unless the command line names one."""
    try:
        workdir = command.workdir or create_numbered_folder(Path("runs") / command.config_path.stem)
        return RunWriter(workdir, config=experiment.config.to_dict())
    except OSError as error:
        raise UsageError(
            f"the results cannot be written: {error}; name another folder with --workdir."
        ) from error


def _help_text(description: str, default_config: Path) -> str:
    """What `--help` prints: the flags, and the fields of the default config."""
    lines = [description.strip(), "", "Flags:"]
    lines += [f"  --{name:8s}  {text}" for name, text in FLAGS_HELP.items()]
    lines += ["", f"Fields of {default_config.name}, each a flag --config.<field>=<value>:"]
    fields = flatten_config(load_config(default_config))
    lines += [f"  {name:31s}  {value or repr(value)}" for name, value in fields.items()]
    return "\n".join(lines)
