"""Runs to be disturbed: small ones, as processes like a user's, or by the same command in here.

Runs are compared with one that nobody disturbed: the same bytes in `metrics.jsonl` and the same
bits in the arrays of the last checkpoint. Processes compile as this one does, so that it does not
matter which of the two ways a run was made.
"""

import json
import re
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from manualpar.commands.command_line import parse_command_line
from manualpar.commands.train_command import run_command
from manualpar.system.cluster import Cluster
from manualpar.training.checkpoints.manifest import read_manifest, verify_files
from manualpar.training.checkpoints.retention import list_steps
from tests.compiling import ENVIRONMENT
from tests.paths import ROOT
from tests.system.cluster.processes import HANG_SECONDS, free_port

CONFIG = ROOT / "tests" / "runs" / "faulty_config.py"
# Of the intervals none divides another, so that a checkpoint finds sums half done. Dropout is on.
SMALL = (
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.data.batch_size=32",
    "--config.optimizer.num_minibatches=1",
    "--config.optimizer.warmup_steps=0",
    "--config.schedule.name=constant_schedule",  # It does not depend on the number of steps.
    "--config.training.num_steps=40",
    "--config.training.log_every_steps=3",
    "--config.training.eval_every_steps=7",
    "--config.checkpoint.every_steps=4",
)


def arguments(workdir, *more, config=CONFIG):
    """What follows the program's name."""
    return [f"--config={config}", *SMALL, *more, f"--workdir={workdir}"]


def environment_of(**faults):
    """What a process's environment has besides ours; see `faulty_config`."""
    return {
        **ENVIRONMENT,
        "PYTHONUNBUFFERED": "1",
        "FAULTS": json.dumps(faults),
    }


def start(processes, workdir, *more, devices=8, **faults):
    """Starts a run as a process."""
    own = [*arguments(workdir, *more), f"--devices={devices}"]
    command = [sys.executable, "-m", "experiments.fsdp", *own]
    return processes.start(command, **environment_of(**faults))


def start_launcher(processes, workdir, *more, count=2, devices=4, **faults):
    """Starts several processes of a run through the launcher; returns the launcher."""
    own = [f"--processes={count}", f"--devices-per-process={devices}", "--"]
    run = [sys.executable, "-m", "experiments.fsdp", *arguments(workdir, *more)]
    command = [sys.executable, "-m", "manualpar.launch", *own, *run]
    return processes.start(command, **environment_of(**faults))


def start_cluster(processes, workdir, *more, count=2, devices=4, **faults):
    """Starts several processes of a run, as a scheduler would."""
    port = free_port()
    who = [
        f"--coordinator_address=127.0.0.1:{port}",
        f"--num_processes={count}",
    ]
    return [
        start(processes, workdir, *more, *who, f"--process_id={number}", devices=devices, **faults)
        for number in range(count)
    ]


def run_here(workdir, *more, config="fsdp.py", charts=False):
    """Runs it in this process; returns the exit code.

    Drawing the charts of its report takes as long as all else that a run does.
    """
    argv = ["program", *arguments(workdir, *more, config=ROOT / "configs" / config)]
    parsed = parse_command_line(argv, default_config=CONFIG)
    if charts:
        return run_command(parsed)
    with mock.patch(
        "manualpar.training.monitoring.report.draw_charts", return_value=("<svg></svg>", b"")
    ):
        return run_command(parsed)


def wait_for_step(process, step):
    """Waits until a process, or process 0 of a launcher, reports a step, or a later one."""
    deadline = time.monotonic() + HANG_SECONDS
    while max([-1, *steps_shown(process.out)]) < step:
        assert process.popen.poll() is None, f"ended before step {step}:\n{process.err}"
        assert time.monotonic() < deadline, f"no step {step} in:\n{process.out}\n{process.err}"
        time.sleep(0.02)


def wait_for_checkpoint(workdir, step=1):
    """Waits until a run has a checkpoint of a step, or of a later one, that is complete."""
    until = time.monotonic() + HANG_SECONDS
    while max([0, *list_steps(workdir / "checkpoints")]) < step:  # Its name says it is complete.
        assert time.monotonic() < until, f"no checkpoint of step {step} in {workdir}"
        time.sleep(0.05)


def steps_shown(output):
    """The steps that are reported in an output, in order."""
    return [int(step) for step in re.findall(r"^(?:\[0\] )?step +(\d+)/", output, re.MULTILINE)]


def resumed_from(output):
    """The step that an output says the run goes on from."""
    found = re.search(r"going on from the checkpoint of step (\d+) in ", output)
    assert found, output
    return int(found[1])


def complete_steps(workdir):
    """The steps of all complete checkpoints, each of which has been verified."""
    folder = workdir / "checkpoints"
    steps = list_steps(folder)
    for step in steps:
        manifest = read_manifest(folder / str(step))
        assert manifest.step == step
        verify_files(folder / str(step), manifest)
    return steps


def checkpoint_arrays(workdir, step):
    """The arrays of a checkpoint by path, as a program that knows nothing of ours reads them."""
    import orbax.checkpoint as ocp

    path = (workdir / "checkpoints" / str(step) / "state").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
        tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    return {jax.tree_util.keystr(at): x for at, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_metrics(workdir, undisturbed):
    """The same bytes: no line is missing, none is there twice, none differs."""
    lines, expected = (
        (folder / "metrics.jsonl").read_text().splitlines() for folder in (workdir, undisturbed)
    )
    assert lines == expected


def assert_same_run(workdir, undisturbed):
    """The same metrics and, bit for bit, the same last checkpoint."""
    assert_same_metrics(workdir, undisturbed)
    newest = complete_steps(undisturbed)[-1]
    assert complete_steps(workdir)[-1] == newest
    arrays, expected = (checkpoint_arrays(folder, newest) for folder in (workdir, undisturbed))
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == expected[name].tobytes(), name


def assert_close_metrics(workdir, undisturbed, *, until=None, rtol=1e-5):
    """The same lines with numbers that differ by rounding; those after a step may be missing."""
    lines, expected = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (workdir, undisturbed)
    )
    if until is not None:
        lines, expected = (
            [line for line in found if line["step"] <= until and line["split"] != "test"]
            for found in (lines, expected)
        )
    places = [
        [(line["step"], line["split"], *line) for line in found] for found in (lines, expected)
    ]
    assert places[0] == places[1]
    for line, other in zip(lines, expected, strict=True):
        assert line == {name: _close(value, rtol) for name, value in other.items()}


def _close(value, rtol):
    """A value that equals those close to it."""
    return pytest.approx(value, rel=rtol) if isinstance(value, float) else value


def at_step(monkeypatch, step, act):
    """Has a run in here call `act(cluster)` after a step, before the step is saved."""
    should_stop = Cluster.should_stop

    def disturbed(self, now):
        if now == step:
            act(self)
        return should_stop(self, now)

    monkeypatch.setattr(Cluster, "should_stop", disturbed)


def content(folder):
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flag_of_text(folder: Path) -> str:
    """Writes sixty short texts into a folder, and returns the flag that trains on them."""
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"{number} and {number**2} and no more\n" * 5)
    return f"--config.data.path={folder}"
