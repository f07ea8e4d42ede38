"""Runs the training that a command line describes.

`manualpar.training.exit_codes` lists the exit codes.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from manualpar.commands.command_line import DEFAULT_CONFIG, CommandLine, run_absl
from manualpar.commands.results import choose_devices, quiet_absl
from manualpar.data.dataset import SPLITS
from manualpar.errors import (
    FILES_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    JAX_NOTE,
    USAGE_EXIT_CODE,
    UsageError,
    describe_mistake,
    print_error,
    printable,
)
from manualpar.inspect.tables import print_line
from manualpar.system.cluster import (
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Cluster,
    DisagreementError,
    NotMetError,
    initialize,
)
from manualpar.system.storage import AnyPath, BucketError
from manualpar.training.agreement import experiment_facts, run_facts
from manualpar.training.config import check_config
from manualpar.training.division import read_earlier
from manualpar.training.exit_codes import (
    EXIT_CODES,
    STOPPED_EXIT_CODE,
    end_all,
    ending_all,
    exit_code,
)
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.memory_check import check_fits
from manualpar.training.monitoring.progress import make_console, show_tracing
from manualpar.training.monitoring.run_record import TimeLedger
from manualpar.training.recorder import NonFiniteError
from manualpar.training.run import run
from manualpar.training.trainer import StoppedError
from manualpar.training.workdir import FOLDER, RUNS, check_folder, choose_workdir

USAGE = """{program} [CONFIG] [--<field>=<value> ...]
    [--workdir=<folder>] [--mesh=<axis>=<size>,...] [--devices=<number>]
"""
NONFINITE_MEND = (
    ". config.training.on_nonfinite='skip' leaves out such an update; 'rollback' goes back to the "
    "latest checkpoint and leaves out the batch."
)


def main(
    argv: Sequence[str],
    about: str = "Trains a config, or resumes the run in a folder.",
    default_config: str = DEFAULT_CONFIG,
) -> NoReturn:
    """Runs the command line `argv` and ends the process; `about` is the first line of `--help`."""
    run_absl(run_command, argv, f"{about}\n\n{USAGE}", default_config)


def run_command(command: CommandLine) -> int:
    """Runs the training that a command line describes; returns the exit code."""
    times = TimeLedger()
    quiet_absl()
    config, flags = command.config, command.flags
    try:
        # Checks everything that can be checked before JAX starts.
        check_config(config)
        changes = check_folder(config, flags.workdir)
        choose_devices(flags.devices, force=flags.force)
        cluster = initialize(
            coordinator_address=flags.coordinator_address,
            num_processes=flags.num_processes,
            process_id=flags.process_id,
            timeout_seconds=config.watch.lost_seconds,
            start_timeout_seconds=flags.wait,
            facts=run_facts(config, flags.workdir, files=[command.config_path]),
            workdir=flags.workdir or RUNS,
        )
    except BucketError as error:
        print_error(error)
        return FILES_EXIT_CODE
    except NotMetError as error:
        print_error(error)
        return LOST_PROCESS_EXIT_CODE
    except (UsageError, ValueError, ConnectionError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except OSError as error:
        print_error(f"--workdir={flags.workdir} cannot be read: {error}")
        return FILES_EXIT_CODE
    with cluster.stop_on_sigterm(), cluster:
        return _run(command, cluster, times, changes=changes)


def _run(command: CommandLine, cluster: Cluster, times: TimeLedger, *, changes: list[str]) -> int:
    """Prepares and runs the training, in every process; returns the exit code."""
    console = make_console(process=cluster.process_id)
    remains, goes_on = "nothing was written", ""
    try:
        with ending_all(cluster):
            experiment, workdir = _prepare(command, cluster, show_tracing(console))
            remains = f"the results so far are in {workdir}"
            if command.config.checkpoint.every_steps:
                goes_on = f", and the same command with --workdir={workdir} goes on"
            for change in changes:
                print_line(console, change)
            result = run(experiment, workdir, cluster=cluster, console=console, times=times)
            cluster.nothing_to_lose()
    except KeyboardInterrupt as error:
        print_error(f"interrupted; {remains}{goes_on}")
        _print_notes(error)
        return INTERRUPTED_EXIT_CODE
    except StoppedError as error:
        how = f"which is saved; the same command with --workdir={workdir} goes on"
        if not error.is_saved:
            how = f"which is not saved, since config.checkpoint.every_steps is 0; {remains}"
        if cluster.is_main:
            print(f"{error}, {how}", file=sys.stderr)
        _print_notes(error)
        return STOPPED_EXIT_CODE if error.is_saved else TERMINATED_EXIT_CODE
    except tuple(EXIT_CODES) as error:
        before = "" if isinstance(error, UsageError) else f"stopped, {remains}; "
        mend = NONFINITE_MEND if isinstance(error, NonFiniteError) else ""
        print_error(f"{before}{error}{mend}")
        _print_notes(error)
        return exit_code(error)
    if result.sample:
        print_line(console, "sample:")
        for line in result.sample.splitlines():
            print_line(console, f"  {line}")
    headline = experiment.task.headline
    for split in reversed(SPLITS):
        if headline in (found := result.metrics.get(split, {})):
            words = headline.replace("_", " ")
            print_line(console, f"{split} {words}: {found[headline]:.4f}")
            break
    print_line(console, f"time: {times.elapsed:.1f} s")
    print_line(console, f"results: {workdir}")
    return 0


def _print_notes(error: BaseException) -> None:
    """Prints a line for each thing that failed after the error, while the run ended."""
    for note in dict.fromkeys(getattr(error, "__notes__", ())):
        if JAX_NOTE not in note:
            print(f"also: {printable(note)}", file=sys.stderr)


def _prepare(
    command: CommandLine, cluster: Cluster, tracing: contextlib.AbstractContextManager[None]
) -> tuple[Experiment, AnyPath]:
    """Prepares the experiment, checks it in all processes, and chooses its folder."""
    try:
        cluster.enter("preparing")
        workdir = command.flags.workdir
        earlier = read_earlier(workdir / FOLDER) if workdir is not None else None
        experiment = prepare(command.config, tracing=tracing, earlier=earlier)
        cluster.enter("comparing what it prepared")
        if cluster.num_processes > 1:
            cluster.agree(experiment_facts(experiment))
        cluster.enter("starting")
        if not command.flags.force:
            check_fits(experiment)
        return experiment, choose_workdir(workdir, name=command.config_path.stem)
    except (UsageError, ValueError) as error:
        mistake = UsageError(describe_mistake(error))
        # All processes raise a `DisagreementError`, but maybe only this one raises another error.
        if not isinstance(error, DisagreementError):
            end_all(cluster, mistake)
        raise mistake from error
