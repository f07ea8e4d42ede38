"""Training from a command line to an exit code, for `absl.app.run`.

Exit codes, for people and schedulers:

     0  finished
     1  an error of ours, with a traceback; of `experiments.inspect`, a budget that is broken
     2  a mistake of the user's, in one sentence
     3  copies of the state differ between devices (`config.debug.check_replicas_every`)
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
from pathlib import Path

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
from manualpar.training.command_line import CommandLine, quiet_absl
from manualpar.training.config import check_config
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.fit import check_fits
from manualpar.training.loop import StoppedError
from manualpar.training.recorder import NonFiniteError
from manualpar.training.run import run
from manualpar.training.shared_facts import experiment_facts, run_facts
from manualpar.training.workdir import check_folder, choose_workdir
from manualpar.usage import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, UsageError, print_error
from manualpar.watching.durable_files import WriteError
from manualpar.watching.screen import make_console, print_line

REPLICAS_EXIT_CODE = 3
NONFINITE_EXIT_CODE = 5
FILES_EXIT_CODE = 6
STOPPED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again.
FILES_ERRORS = (CheckpointError, DamagedDataError, WriteError)
# Errors that every process raises after the same step.
AGREED_ERRORS = (StoppedError, NonFiniteError, ReplicaError)


def run_command(command: CommandLine) -> int:
    """Trains what a command line asks for, under the strategy that its config names.

    Args:
      command: The command line.

    Returns:
      The exit code.
    """
    started = time.perf_counter()
    quiet_absl()
    config, flags = command.config, command.flags
    try:
        # Everything that can be checked before there are devices.
        check_config(config)
        changes = check_folder(config, flags.workdir)
        simulate_devices(flags.devices, force=flags.force)
        cluster = initialize(
            coordinator_address=flags.coordinator_address,
            num_processes=flags.num_processes,
            process_id=flags.process_id,
            timeout_seconds=config.watch.lost_seconds,
            facts=run_facts(command),
        )
    except (UsageError, ValueError, ConnectionError) as error:
        print_error(error)
        return USAGE_EXIT_CODE
    except OSError as error:
        print_error(f"--workdir={flags.workdir} cannot be read: {error}")
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
            experiment = _prepare(command, cluster)
            workdir = choose_workdir(command)
        except (UsageError, ValueError) as error:
            if not isinstance(error, DisagreementError):
                _end_all(cluster, UsageError(str(error)))
            raise UsageError(str(error)) from error
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
    except (ReplicaError, *FILES_ERRORS) as error:
        print_error(f"stopped, {remains}; {error}")
        return REPLICAS_EXIT_CODE if isinstance(error, ReplicaError) else FILES_EXIT_CODE
    if result.sample:
        print_line(console, "sample:")
        for line in result.sample.splitlines():
            print_line(console, f"  {line}")
    headline = experiment.task.headline
    print_line(console, f"test {headline.replace('_', ' ')}: {result.metrics[headline]:.4f}")
    print_line(console, f"time: {time.perf_counter() - started:.1f} s")
    print_line(console, f"results: {workdir}")
    return 0


def _prepare(command: CommandLine, cluster: Cluster) -> Experiment:
    cluster.enter("preparing")
    experiment = prepare(command.config)
    cluster.enter("comparing what it prepared")
    if cluster.num_processes > 1:
        cluster.agree(experiment_facts(experiment))
    cluster.enter("starting")
    if not command.flags.force:
        check_fits(experiment)
    return experiment


def _end_all(cluster: Cluster, error: Exception) -> None:
    """Ends all processes, if there are several and the others may not raise this error.

    They wait for this process in a collective, and an ordinary end would wait for them.
    """
    if cluster.num_processes == 1 or isinstance(error, AGREED_ERRORS):
        return
    if sentence := cluster.explain_failure(error):  # If there is one, it mostly does not return.
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
    """Says in one of the processes how a run that was asked to stop goes on."""
    how = f"which is saved; the same command with --workdir={workdir} goes on"
    if not error.is_saved:
        how = (
            "which is not saved, since config.checkpoint.every_steps is 0; the results so far are "
            f"in {workdir}"
        )
    if is_main:
        print(f"{error}, {how}", file=sys.stderr)
    return STOPPED_EXIT_CODE if error.is_saved else TERMINATED_EXIT_CODE
