"""Several processes train as one would, save as one, stop together, and go on in another number."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs.small_runs import (
    assert_close_metrics,
    complete_steps,
    resumed_from,
    run_here,
    start,
    start_cluster,
    start_launcher,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.system.cluster.processes import free_port, lines_of_ours

# Sums are in another order across processes, which bfloat16 would show. Dropout is on.
EXACT = ("--config.model.dtype=float32", "--config.watch.lost_seconds=5")
LOST = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, devices8):
    """A run in one process."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run_here(workdir, *EXACT) == 0
    return workdir


def children_of(process):
    """The processes that a launcher has started, in order."""
    pid = process.popen.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_stops_all_and_one_goes_on(
    number, processes, tmp_path, undisturbed, capsys
):
    workdir = tmp_path / "run"
    launcher = start_launcher(processes, workdir, *EXACT, slow=20)
    wait_for_step(launcher, 18)
    os.kill(children_of(launcher)[1], number)
    assert launcher.wait() == 75, launcher.err
    saved = complete_steps(workdir)[-1]
    assert 18 <= saved < 40
    *said, first = lines_of_ours(launcher.err)
    assert said == [
        f"[1] {number.name}: stopping after this step; a second SIGTERM ends this process",
        f"[0] stopped after step {saved}, which is saved; the same command with "
        f"--workdir={workdir} goes on",
    ]
    # The launcher names those that were the first to end.
    assert re.fullmatch(r"process(es)? [\d, ]+ ended with exit code 75", first)
    # Process 0 alone shows and writes.
    assert all(line.startswith("[0] ") for line in lines_of_ours(launcher.out))
    assert "[0] mesh: data=8 on 8 simulated cpu devices" in launcher.out
    assert len(list(workdir.glob("events.out.*"))) == 1
    assert_close_metrics(workdir, undisturbed, until=saved)

    capsys.readouterr()
    assert run_here(workdir, *EXACT) == 0
    assert resumed_from(capsys.readouterr().out) == saved
    assert_close_metrics(workdir, undisturbed)


@pytest.mark.slow
def test_processes_that_differ_all_say_in_what(processes, tmp_path):
    who = ["--num_processes=2", f"--coordinator_address=127.0.0.1:{free_port()}"]
    started = [
        start(
            processes,
            tmp_path / "run",
            *who,
            f"--process_id={number}",
            f"--config.seed={number}",
            devices=4,
        )
        for number in range(2)
    ]
    for process in started:
        assert process.wait() == 2
        assert process.err == (
            "error: the processes of this run differ, expected the same in all of them:\n"
            "  config.seed is 0 in process 0 and 1 in process 1\n"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_main_thread_that_hangs_ends_all(victim, processes, tmp_path):
    more = ("--config.training.num_steps=100000", "--config.watch.stall_seconds=2")
    started = start_cluster(processes, tmp_path / "run", *EXACT, *more, hang=[victim, 60])
    for process in started:
        assert process.wait() == LOST, process.err
    sentence = f"process {victim} on .* was lost: it has made no progress for .*, but other "
    assert re.search(sentence, started[1 - victim].err)
    assert "the other processes have given up this process" in started[victim].err
    assert "faulty_config.py" in started[victim].err, "where it hangs"
    assert "stall: no step for 2 s, after step 60." in started[victim].err


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_to_the_launcher_ends_processes_that_hang(processes, tmp_path):
    more = ("--config.training.num_steps=100000", "--config.watch.lost_seconds=1000")
    launcher = start_launcher(processes, tmp_path / "run", *more, hang=[1, 60])
    wait_for_step(launcher, 57)
    launcher.send(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGKILL, launcher.err
    assert re.search("killed, because it did not end: process (0, )?1", launcher.err)


STRATEGIES = {
    "dp": ["--config.parallel.strategy=dp"],
    "fsdp": [],
    "hsdp": ["--config.parallel.strategy=hsdp", "--config.parallel.mesh={'replica': 2, 'data': 4}"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.long) for name in ("dp", "hsdp"))]
)
def test_several_processes_are_as_one(strategy, processes, tmp_path):
    more = [*EXACT, *STRATEGIES[strategy]]
    assert run_here(tmp_path / "one", *more) == 0
    launcher = start_launcher(processes, tmp_path / "two", *more)
    assert launcher.wait() == 0, launcher.err
    assert_close_metrics(tmp_path / "two", tmp_path / "one")
    names = [
        {path.name.split(".tfevents")[0] for path in (tmp_path / run).iterdir()}
        for run in ("one", "two")
    ]
    assert names[0] == names[1]
    assert complete_steps(tmp_path / "two") == [36, 40]


def finish(processes, workdir, count):
    """Goes on with several processes to the end; returns the step it went on from."""
    launcher = start_launcher(processes, workdir, *EXACT, count=count, devices=8 // count)
    assert launcher.wait() == 0, launcher.err
    return resumed_from(launcher.out)


@pytest.mark.slow
@pytest.mark.long
def test_two_go_on_from_four_and_four_from_two(processes, tmp_path, undisturbed):
    workdir, saved = tmp_path / "run", None
    for count, devices, slow in ((2, 4, 10), (4, 2, 20), (2, 4, 30)):
        launcher = start_launcher(
            processes, workdir, *EXACT, count=count, devices=devices, slow=slow
        )
        wait_for_step(launcher, slow - 2)
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 75, launcher.err
        assert saved is None or resumed_from(launcher.out) == saved
        saved = complete_steps(workdir)[-1]
    assert finish(processes, workdir, 4) == saved
    assert_close_metrics(workdir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "victim", "then"),
    [
        pytest.param(signal.SIGKILL, 1, 1, id="killed"),
        pytest.param(signal.SIGKILL, 0, 4, id="0 is killed"),
        pytest.param(signal.SIGSTOP, 1, 2, id="stopped"),
        pytest.param(None, 1, 4, id="an exception", marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_lost_ends_the_others_and_a_restart_goes_on(
    number, victim, then, processes, tmp_path, undisturbed, capsys
):
    workdir = tmp_path / "run"
    faults = {"slow": 18} if number else {"fail": [victim, 20]}
    started = start_cluster(processes, workdir, *EXACT, **faults)
    lost, other = started[victim], started[1 - victim]
    reason = "was lost: "
    if number:
        wait_for_step(started[0], 15)
        wait_for_checkpoint(workdir, 12)
        lost.send(number)
    else:
        assert lost.wait() == 1
        assert "ValueError: a mistake of this process\n" in lost.err
        reason = "failed: ValueError: a mistake of this process; "
    codes = (LOST, -signal.SIGABRT) if victim == 0 else (LOST,)
    assert other.wait() in codes, other.err
    lines = lines_of_ours(other.err)
    named = [line for line in lines if line.startswith(f"process {victim} on ")]
    if other.wait() == LOST:
        assert f"(pid {lost.popen.pid}) {reason}" in named[0]
    # JAX's coordination service is in process 0: with it gone, XLA has something to say as well.
    if victim:
        assert lines[0] == named[0]
    assert "Traceback" not in other.err
    if number == signal.SIGSTOP:
        lost.send(signal.SIGKILL)
        lost.wait()
    newest = complete_steps(workdir)[-1]
    assert newest >= 12
    if then == 1:
        capsys.readouterr()
        assert run_here(workdir, *EXACT) == 0
        assert resumed_from(capsys.readouterr().out) == newest
    else:
        assert finish(processes, workdir, then) == newest
    assert_close_metrics(workdir, undisturbed)
