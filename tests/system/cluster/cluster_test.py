"""What becomes of the processes of a cluster when one of them is lost, fails or is to stop."""

import os
import queue
import re
import signal

import jax
import pytest

from manualpar.system.cluster import (
    FAILED_EXIT_CODE,
    LOST_PROCESS_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    Cluster,
)
from manualpar.system.cluster.stopping import STOP_SIGNALS, on_stop_signal
from tests.system.cluster.processes import lines_of_ours

LONG = {"strategy": "fsdp", "mesh": {"data": -1}, "steps": 100_000, "devices": 1}


def start_training(processes, count, **options):
    """Starts a run that does not end by itself, and lets it train a little."""
    started = processes.start_workers(count, **{**LONG, **options})
    for process in started:
        process.wait_for("step 5")
    return started


def steps_of(process):
    return [int(step) for step in re.findall(r"^step (\d+)$", process.out, re.MULTILINE)]


def assert_lost(process, lost, reason):
    """Ended for the sake of another process, and the first thing it said is which."""
    assert process.wait() == LOST_PROCESS_EXIT_CODE, process.err
    # On a busy machine processes start slowly, so that others say for whom they wait.
    said = [line for line in lines_of_ours(process.err) if " not connected after " not in line]
    pid = re.search(r"^pid (\d+)$", lost.out, re.MULTILINE)[1]
    number = lost.out_path.parent.name.removeprefix("process")
    assert re.match(
        rf"process {number} on \S+ \(pid {pid}\) {reason}; process \d ends too", said[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_ends_the_others(processes, count, victim):
    started = start_training(processes, count)
    started[victim].send(signal.SIGKILL)
    for process in started:
        if process is not started[victim]:
            assert_lost(process, started[victim], "was lost: its connection closed")


@pytest.mark.slow
def test_process_0_that_is_killed_ends_the_others(processes):
    """XLA aborts processes that lose JAX's coordination service, at the same moment as ours end."""
    started = start_training(processes, 3)
    started[0].send(signal.SIGKILL)
    for process in started[1:]:
        assert process.wait() in (LOST_PROCESS_EXIT_CODE, -signal.SIGABRT)
        assert "process 0 on " in process.err


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_is_stopped_ends_the_others(processes, victim):
    started = start_training(processes, 3)
    started[victim].send(signal.SIGSTOP)
    for process in started:
        if process is not started[victim]:
            assert_lost(process, started[victim], r"was lost: it has been silent for 3 s")


@pytest.mark.slow
def test_a_process_that_wakes_up_does_not_go_on_alone(processes):
    started = start_training(processes, 2)
    started[1].send(signal.SIGSTOP)
    assert_lost(started[0], started[1], r"was lost: it has been silent for 3 s")
    started[1].send(signal.SIGCONT)
    assert started[1].wait() in (LOST_PROCESS_EXIT_CODE, -signal.SIGABRT)
    assert "lost" in started[1].err


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_in_a_process_ends_the_others(processes, failing):
    started = processes.start_workers(3, **LONG, fail=[failing, 4])
    assert started[failing].wait() == FAILED_EXIT_CODE
    assert "Traceback" in started[failing].err
    for process in started:
        if process is not started[failing]:
            reason = "failed: ValueError: a mistake of this process"
            assert_lost(process, started[failing], reason)
            assert "Traceback" not in process.err


@pytest.mark.slow
def test_processes_that_fail_alike_each_show_their_own_error(processes):
    started = processes.start_workers(2, strategy="fsdp", mesh={"data": 5}, steps=1)
    for process in started:
        assert process.wait() == FAILED_EXIT_CODE
        assert "ValueError" in process.err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "number"), [(0, signal.SIGTERM), (3, signal.SIGUSR1)])
def test_a_signal_to_one_stops_all_after_the_same_step(processes, asked, number):
    started = start_training(processes, 4)
    started[asked].send(number)
    for process in started:
        assert process.wait() == 0, process.err
    assert len({steps_of(process)[-1] for process in started}) == 1
    said = [f"{number.name}: stopping" in process.err for process in started]
    assert said == [i == asked for i in range(4)]


@pytest.mark.slow
def test_processes_that_are_ahead_stop_after_the_same_step(processes):
    started = processes.start_workers(2, **LONG, ahead=6)
    started[1].wait_for("step 6")  # While process 0 waits before its own step 6.
    started[1].send(signal.SIGTERM)
    for process in started:
        assert process.wait() == 0, process.err
    assert len({steps_of(process)[-1] for process in started}) == 1


@pytest.mark.slow
def test_a_second_sigterm_ends_a_process_at_once(processes):
    started = processes.start_workers(2, **{**LONG, "seconds": 300.0})
    for process in started:
        process.wait_for("training")
    started[1].send(signal.SIGTERM)
    started[1].wait_for("SIGTERM", in_errors=True)
    started[1].send(signal.SIGTERM)
    assert started[1].wait() == TERMINATED_EXIT_CODE


@pytest.mark.slow
def test_who_is_done_early_is_not_taken_for_lost(processes):
    options = {"strategy": "dp", "mesh": {"data": -1}, "steps": 2, "devices": 1, "timeout": 1.0}
    for process in processes.start_workers(2, **options, seconds_after=3.0):
        assert process.wait() == 0, process.err
        assert process.out.splitlines()[-1] == "finished"


# A process that is alone.


def test_alone_a_request_stops_the_next_call():
    cluster = Cluster()
    assert not cluster.should_stop(1)
    cluster.request_stop()
    assert cluster.should_stop(2)
    assert cluster.should_stop(3)
    ((process, (step, seconds)),) = cluster.steps().items()
    assert (process, step) == (0, 3)
    assert seconds >= 0


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_alone_a_signal_is_a_request_to_stop(number, capfd):
    with Cluster() as cluster:
        with cluster.stop_on_sigterm():
            os.kill(os.getpid(), number)
            while not cluster.should_stop(1):
                pass
        assert signal.getsignal(number) == signal.SIG_DFL
    assert f"{number.name}: stopping after this step; a second SIGTERM" in capfd.readouterr().err


def test_only_a_second_sigterm_ends_at_once():
    """Slurm may send SIGUSR1 before the time limit, and SIGTERM at the limit, during the save."""
    calls = queue.Queue()
    with on_stop_signal(calls.put, lambda: calls.put("second")):
        for number, expected in (
            (signal.SIGUSR1, signal.SIGUSR1),
            (signal.SIGUSR1, None),
            (signal.SIGTERM, signal.SIGTERM),
            (signal.SIGUSR1, None),
            (signal.SIGTERM, "second"),
            (signal.SIGTERM, "second"),
        ):
            os.kill(os.getpid(), number)
            if expected is not None:
                assert calls.get(timeout=10) == expected
    assert calls.empty()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_after_all_is_saved_a_sigterm_changes_nothing(num_processes, capfd):
    """Schedulers send it to those that are left when the first process has ended."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    cluster = Cluster(num_processes=num_processes)
    try:
        with cluster.stop_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            while not cluster.should_stop(1):
                pass
            cluster.nothing_to_lose()
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
        # Several processes can only end now. One may be a notebook's.
        for number in STOP_SIGNALS:
            is_ignored = signal.getsignal(number) == signal.SIG_IGN
            assert is_ignored == (num_processes > 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert capfd.readouterr().err.count(": stopping") == 1


def test_alone_an_error_is_ones_own():
    cluster = Cluster()
    error = jax.errors.JaxRuntimeError("Connection reset")
    assert cluster.explain_failure(error) is None
    cluster.failed(error)
