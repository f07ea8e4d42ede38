"""Chooses the exit code of a run, and ends all processes if one of them fails.

0  finished
1  an unexpected error, with a traceback; in `experiments.inspect`, a program over its budget
2  a mistake of the user, in one sentence
3  copies of the state differ between devices (`config.debug.check_replicas_every`)
4  another process was lost, failed, or did not come within `--wait` seconds
5  the loss or a gradient is not finite (`config.training.on_nonfinite`)
6  a file of a checkpoint, of the run or of its data cannot be read or written
7  `manualpar doctor --cluster`: a run on these hosts would be refused
75  SIGTERM or SIGUSR1: the run saved a checkpoint and stopped; the same command resumes it
127  the launcher cannot start the command
130  Ctrl-C
143  a second SIGTERM: the run ended at once; only the last checkpoint is saved
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

from manualpar.data import DamagedDataError
from manualpar.errors import FILES_EXIT_CODE, USAGE_EXIT_CODE, UsageError, print_error
from manualpar.system.cluster import FAILED_EXIT_CODE, LOST_PROCESS_EXIT_CODE, Cluster, NotMetError
from manualpar.system.storage import BucketError, FolderError
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints import CheckpointError
from manualpar.training.recorder import NonFiniteError
from manualpar.training.replicas import ReplicaError
from manualpar.training.trainer import StoppedError

STOPPED_EXIT_CODE = 75  # `EX_TEMPFAIL` in sysexits.h, which means "try again".
# Errors that are shown as one sentence.
EXIT_CODES: Mapping[type[Exception], int] = {
    UsageError: USAGE_EXIT_CODE,
    ReplicaError: 3,
    NotMetError: LOST_PROCESS_EXIT_CODE,
    NonFiniteError: 5,
    **dict.fromkeys(
        (CheckpointError, DamagedDataError, WriteError, BucketError, FolderError), FILES_EXIT_CODE
    ),
}
# Errors that every process raises, after the same step.
AGREED_ERRORS = (UsageError, StoppedError, NonFiniteError, ReplicaError)


@contextlib.contextmanager
def ending_all(
    cluster: Cluster, *, agreed: tuple[type[Exception], ...] = AGREED_ERRORS
) -> Iterator[None]:
    """Ends all processes if this context raises an error that the other processes may not raise.

    Enter this context inside every context whose exit waits for the other processes. An error of a
    type in `agreed` does not end the other processes, because they raise the same error.
    """
    try:
        yield
    except agreed:
        raise
    except Exception as error:
        end_all(cluster, error)
        raise


def end_all(cluster: Cluster, error: Exception) -> None:
    """Ends all processes because of an error in this process; does nothing for a single process.

    The other processes wait for this process in a collective. An ordinary exit of this process
    would wait for the other processes, forever.
    """
    if cluster.num_processes == 1:
        return
    # If another process was lost, `explain_failure` usually ends this process.
    if sentence := cluster.explain_failure(error):
        print_error(sentence)
        os._exit(LOST_PROCESS_EXIT_CODE)
    code = exit_code(error)
    with contextlib.ExitStack() as stack:
        # Both callbacks run even if the code below fails, for example because memory is full.
        stack.callback(os._exit, code)
        stack.callback(cluster.failed, error)
        if code == FAILED_EXIT_CODE:
            traceback.print_exception(error)
        else:
            print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()


def exit_code(error: Exception) -> int:
    """Returns the exit code for an error that ends a run."""
    codes = [code for kind, code in EXIT_CODES.items() if isinstance(error, kind)]
    return codes[0] if codes else FAILED_EXIT_CODE
