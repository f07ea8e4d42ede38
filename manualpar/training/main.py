"""The main of an experiment, for `absl.app.run`: what `experiments/` share.

Exit codes, for people and schedulers:

     0  finished
     1  an error of ours, with a traceback; of `experiments.inspect`, a budget that is broken
     2  a mistake of the user's, in one sentence
     3  devices that should hold the same do not (`config.debug.check_replicas_every`)
     4  another process was lost, or failed
     5  the loss or a gradient is not finite (`config.training.on_nonfinite`)
     6  a checkpoint, or a file of the run or of its data, cannot be read or written
    75  asked to stop by SIGTERM, stopped and saved: start the same command again to go on
   130  Ctrl-C
   143  SIGTERM a second time: ended at once, nothing saved since the last checkpoint
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from absl import flags, logging

from manualpar.checkpoints import CheckpointError
from manualpar.cluster import (
    FAILED_EXIT_CODE,
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Cluster,
    DisagreementError,
    initialize,
)
from manualpar.data import DamagedDataError
from manualpar.guards.replicas import ReplicaError
from manualpar.training.command_line import (
    FLAGS_HELP,
    CommandLine,
    UsageError,
    load_config,
    parse_command_line,
)
from manualpar.training.config import check_config, flatten_config
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import prepare
from manualpar.training.fit import check_fits
from manualpar.training.loop import StoppedError
from manualpar.training.recorder import NonFiniteError
from manualpar.training.run import run
from manualpar.training.shared_facts import experiment_facts, run_facts
from manualpar.training.workdir import check_folder, choose_workdir
from manualpar.watching.durable_files import WriteError
from manualpar.watching.screen import make_console, print_line

USAGE_EXIT_CODE = 2
REPLICAS_EXIT_CODE = 3
NONFINITE_EXIT_CODE = 5
FILES_EXIT_CODE = 6
STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again.
INTERRUPTED_EXIT_CODE = 130
FILES_ERRORS = (CheckpointError, DamagedDataError, WriteError)
# Every process has these after the same step.
AGREED_ERRORS = (StoppedError, NonFiniteError, ReplicaError)

Parsed = TypeVar("Parsed")


def flags_parser(description: str, default_config: Path) -> Callable[[list[str]], CommandLine]:
    """Makes the parser that `absl.app.run` takes.

    Args:
      description: What `--help` shows first.
      default_config: What `--config` is where it is not given.

    Returns:
      A function of the arguments that returns what they ask for, or ends the process: with code 0
      for `--help`, with code 2 and a sentence for a mistake.
    """
    return ending_parser(
        lambda argv: parse_command_line(
            argv, default_config=default_config, flag_values=flags.FLAGS
        ),
        help_text=lambda: _help_text(description, default_config),
    )


def ending_parser(
    parse: Callable[[list[str]], Parsed], *, help_text: Callable[[], str]
) -> Callable[[list[str]], Parsed]:
    """Makes a parser for `absl.app.run` that ends the process where there is nothing to run.

    Args:
      parse: Understands the arguments; a mistake in them is a `UsageError`.
      help_text: Makes what `--help` shows.

    Returns:
      A function of the arguments that returns what `parse` does, or ends the process: with code 0
      for `--help`, with code 2 and a sentence for a mistake.
    """

    def parse_or_end(argv: list[str]) -> Parsed:
        if {"--help", "-help", "-h", "--helpshort"} & set(argv):
            print(help_text())
            sys.exit(0)
        try:
            return parse(argv)
        except UsageError as error:
            print_error(error)
            sys.exit(USAGE_EXIT_CODE)

    return parse_or_end


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
    try:
        changes = _check(command)
        cluster = _join(command)
    except (UsageError, ValueError, ConnectionError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except OSError as error:
        print_error(f"--workdir={command.workdir} cannot be read: {error}")
        return FILES_EXIT_CODE
    with cluster, cluster.stop_on_sigterm():
        try:
            return _run(command, cluster, changes=changes, started=started)
        except Exception as error:
            _end_all(cluster, error)
            raise


def _run(command: CommandLine, cluster: Cluster, *, changes: list[str], started: float) -> int:
    """Prepares and runs what a command line asks for, in all processes."""
    console = make_console(process=cluster.process_id)
    remains, goes_on = "nothing was written", ""
    try:
        try:
            cluster.enter("preparing")
            experiment = prepare(command.config)
            cluster.enter("comparing what it prepared")
            if cluster.num_processes > 1:
                cluster.agree(experiment_facts(experiment))
            cluster.enter("starting")
            if not command.force:
                check_fits(experiment)
            workdir = choose_workdir(command)
        except (UsageError, ValueError) as error:
            if not isinstance(error, DisagreementError):
                _end_all(cluster, UsageError(str(error)))
            print_error(error)
            return USAGE_EXIT_CODE
        remains = f"the results so far are in {workdir}"
        if command.config.checkpoint.every_steps:
            goes_on = f", and the same command with --workdir={workdir} goes on"
        for change in changes:
            print_line(console, change)
        result = run(
            experiment,
            workdir,
            cluster=cluster,
            console=console,
            on_error=lambda error: _end_all(cluster, error),
        )
    except UsageError as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        print_error(f"interrupted; {remains}{goes_on}")
        return INTERRUPTED_EXIT_CODE
    except StoppedError as error:
        return _explain_stop(error, workdir, is_main=cluster.is_main)
    except NonFiniteError as error:
        print_error(
            f"stopped, {remains}; {error}. config.training.on_nonfinite='skip' leaves such an "
            "update out, 'rollback' goes back to the latest checkpoint and past the batch."
        )
        return NONFINITE_EXIT_CODE
    except ReplicaError as error:
        print_error(f"stopped, {remains}; {error}")
        return REPLICAS_EXIT_CODE
    except FILES_ERRORS as error:
        print_error(f"stopped, {remains}; {error}")
        return FILES_EXIT_CODE
    if result.sample:
        print_line(console, "sample:")
        for line in result.sample.splitlines():
            print_line(console, f"  {line}")
    headline = experiment.task.headline
    print_line(console, f"test {headline.replace('_', ' ')}: {result.metrics[headline]:.4f}")
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {workdir}")
    return 0


def _end_all(cluster: Cluster, error: Exception) -> None:
    """Ends this process and the others, if there are others and they may not have the error too.

    They wait for this process in a collective, and an ordinary end would wait for them.
    """
    if cluster.num_processes == 1 or isinstance(error, AGREED_ERRORS):
        return
    if sentence := cluster.explain_failure(error):  # Mostly it does not even return then.
        print_error(sentence)
        os._exit(LOST_PROCESS_EXIT_CODE)
    code = FAILED_EXIT_CODE
    if isinstance(error, FILES_ERRORS):
        code = FILES_EXIT_CODE
    elif isinstance(error, UsageError):
        code = USAGE_EXIT_CODE
    if code == FAILED_EXIT_CODE:
        traceback.print_exception(error)
    else:
        print_error(error)
    cluster.failed(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explain_stop(error: StoppedError, workdir: Path, *, is_main: bool) -> int:
    """Says, in one of the processes, how a run that was asked to stop goes on."""
    how = f"which is saved; the same command with --workdir={workdir} goes on"
    if not error.is_saved:
        how = (
            "which is not saved, since config.checkpoint.every_steps is 0; the results so far are "
            f"in {workdir}"
        )
    if is_main:
        print(f"{error}, {how}", file=sys.stderr)
    return STOPPED_EXIT_CODE if error.is_saved else TERMINATED_EXIT_CODE


def print_error(error: object) -> None:
    """Prints what went wrong to standard error, without a traceback, as text that can be shown."""
    lines = f"error: {error}".split("\n")
    shown = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)
    print("\n".join(shown), file=sys.stderr)


def _check(command: CommandLine) -> list[str]:
    """Checks everything that can be checked before there are devices."""
    check_config(command.config)
    return check_folder(command.config, command.workdir)


def _join(command: CommandLine) -> Cluster:
    """Makes this process one of those that train together, if there are others."""
    simulate_devices(command.devices, force=command.force)
    return initialize(
        coordinator_address=command.coordinator_address,
        num_processes=command.num_processes,
        process_id=command.process_id,
        timeout_seconds=command.config.watch.lost_seconds,
        facts=run_facts(command),
    )


def _help_text(description: str, default_config: Path) -> str:
    """What `--help` prints: the flags, and the fields of the default config."""
    lines = [description.strip(), "", "Flags:"]
    lines += [f"  --{name:20s}  {text}" for name, text in FLAGS_HELP.items()]
    lines += ["", f"Fields of {default_config.name}, each a flag --config.<field>=<value>:"]
    fields = flatten_config(load_config(default_config))
    lines += [f"  {name:31s}  {value or repr(value)}" for name, value in fields.items()]
    return "\n".join(lines)
