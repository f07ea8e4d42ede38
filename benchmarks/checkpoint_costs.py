"""What a checkpoint costs a run: the steps that saving takes, and the time until it goes on again.

Saving is measured within the training loop, a block with a checkpoint after its first step against
a block with none. A block with one ends when that is complete on disk, so that what is written in
the background is paid for, on processors that simulated devices need too.
"""

import functools
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.loop_blocks import SAVED_AFTER, Bench
from benchmarks.turns import Estimate, estimate, ratios, take_turns
from manualpar.training.checkpoints import Checkpoints
from manualpar.training.checkpoints.manifest import read_manifest, verify_files
from manualpar.training.monitoring.run_files import PLACED_FILES
from manualpar.training.workdir import FOLDER, restore

ROOT = Path(__file__).parent.parent
# What is written in the background shall have come to its end before the block does.
SPARE = 1.5
PROCESS_SECONDS = 600.0
FIRST_REPORT = re.compile(r"step\s+\d+/\d+\s+train\s")


class SaveCosts(NamedTuple):
    """What saving costs, the medians over rounds.

    Attributes:
      steps: Steps of a block.
      step_seconds: A step without saving.
      asynchronous: Steps that could have been made in the time that an asynchronous save takes up.
      synchronous: The same of a synchronous one.
      blocked: Seconds that the loop waits for an asynchronous `save` to return.
      background: Seconds from there until the checkpoint is complete, while training goes on.
      blocked_synchronous: Seconds that the loop waits for a synchronous one.
    """

    steps: int
    step_seconds: float
    asynchronous: Estimate
    synchronous: Estimate
    blocked: Estimate
    background: Estimate
    blocked_synchronous: Estimate


class ResumeTimes(NamedTuple):
    """What going on takes, in seconds.

    Attributes:
      verification: To hash every file and compare.
      reading: The rest of `restore`, until the state is on the devices.
    """

    verification: Estimate
    reading: Estimate


class Saves:
    """Blocks that save, one after the other, to a folder of their own.

    Attributes:
      blocked: Seconds that the loop waited for each save.
      background: Seconds from there until it was complete.
    """

    def __init__(self, bench: Bench, *, asynchronous: bool) -> None:
        """Makes no folder yet."""
        self._bench = bench
        self._folder = bench.folder / ("asynchronous" if asynchronous else "synchronous")
        keep = bench.config.checkpoint.keep
        self.checkpoints = Checkpoints(self._folder, keep=keep, asynchronous=asynchronous)
        self._number = 0
        self.blocked: list[float] = []
        self.background: list[float] = []

    def block(self, num_steps: int) -> float:
        """Makes steps with a save after the first; returns the seconds."""
        self._number += 1
        times = self._bench.loop(num_steps, saver=(self.checkpoints, self._number))
        self.blocked.append(times.blocked)
        # The last thing that happens in the folder before it gets its name is that the manifest
        # gets its own.
        complete = (self._folder / str(self._number)).stat().st_mtime
        self.background.append(max(complete - times.saved_at, 0.0))
        return times.seconds


def measure_saving(bench: Bench, *, steps: int, rounds: int) -> SaveCosts:
    """Measures what a save costs.

    Args:
      bench: What to train.
      steps: Steps of a block, at least two; 0 for as many as a save takes in the background.
      rounds: How many blocks of each kind.

    Returns:
      The costs.
    """
    asynchronous, synchronous = Saves(bench, asynchronous=True), Saves(bench, asynchronous=False)
    with asynchronous.checkpoints, synchronous.checkpoints:
        if not steps:
            steps = _steps_for(bench, asynchronous)
        seconds = take_turns(
            {
                "none": lambda n: bench.loop(n).seconds,
                "asynchronous": asynchronous.block,
                "synchronous": synchronous.block,
            },
            steps=steps,
            rounds=rounds,
        )
    lost = {
        name: estimate(steps * (ratio - 1) for ratio in ratios(seconds[name], seconds["none"]))
        for name in ("asynchronous", "synchronous")
    }
    return SaveCosts(
        steps,
        statistics.median(seconds["none"]) / steps,
        lost["asynchronous"],
        lost["synchronous"],
        estimate(asynchronous.blocked[-rounds:]),
        estimate(asynchronous.background[-rounds:]),
        estimate(synchronous.blocked[-rounds:]),
    )


def _steps_for(bench: Bench, saves: Saves) -> int:
    """How many steps a block needs to outlast a save."""
    trial = 4
    # The first save of a process is slower than the others.
    for _ in range(2):
        saves.block(trial)
    step = bench.loop(trial).seconds / trial
    return SAVED_AFTER + max(trial, math.ceil(SPARE * saves.background[-1] / step))


def measure_restoring(bench: Bench, *, rounds: int) -> ResumeTimes:
    """Measures how long restoring takes, from files that the machine has in memory."""
    folder = bench.folder / "restored"
    place = {
        "recorder": {"totals": {}, "latest": {}, "skipped": 0},
        "position": 0,
        "data": bench.experiment.task.dataset.fingerprint,
        "files": dict.fromkeys(PLACED_FILES, 0),
    }
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(bench.program, bench.state, step=1, extra=place)
    verification, reading = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        verify_files(folder / "1", read_manifest(folder / "1"))
        verification.append(time.perf_counter() - started)
        with Checkpoints(folder) as checkpoints:
            started = time.perf_counter()
            restored = restore(checkpoints, bench.experiment, bench.folder, report=print)
            jax.block_until_ready(restored.state)
            whole = time.perf_counter() - started
        reading.append(whole - verification[-1])
    return ResumeTimes(estimate(verification[1:]), estimate(reading[1:]))


def measure_processes(
    config: Path, folder: Path, *, rounds: int, devices: int | None
) -> dict[str, list[float]]:
    """Measures from the start of a process to the report of its first step.

    Args:
      config: What it trains.
      folder: Where to write.
      rounds: How many processes of each kind.
      devices: CPU devices that they simulate; `None` for what they would anyway.

    Returns:
      The seconds of each process, `fresh` or `resumed`, in turn.
    """
    folder.mkdir(parents=True)
    saved = folder / "saved"
    run = functools.partial(_run_process, config, devices=devices)
    run(saved, num_steps=1, until=saved / FOLDER / "1")
    seconds: dict[str, list[float]] = {"fresh": [], "resumed": []}
    for number in range(rounds):
        names = ["fresh", "resumed"]
        for name in names if number % 2 == 0 else reversed(names):
            workdir = folder / f"{name}-{number}"
            if name == "resumed":
                shutil.copytree(saved, workdir)
            seconds[name].append(run(workdir, num_steps=1 if name == "fresh" else 2))
            shutil.rmtree(workdir)
    return seconds


def _run_process(
    config: Path, workdir: Path, *, num_steps: int, devices: int | None, until: Path | None = None
) -> float:
    """Starts a training; ends it when its first step is reported, or when there is such a folder.

    Returns:
      The seconds until the report.
    """
    command = [
        *(sys.executable, "-m", "experiments.fsdp", f"--config={config.absolute()}"),
        # Its first step is its last, so that it is reported at once and not some steps later.
        f"--config.training.num_steps={num_steps}",
        "--config.training.eval_every_steps=0",
        f"--workdir={workdir}",
        *([] if devices is None else [f"--devices={devices}"]),
    ]
    errors = workdir.with_suffix(".errors")
    lines: list[str] = []
    started = time.perf_counter()
    with (
        open(errors, "w", encoding="utf-8") as stderr,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if FIRST_REPORT.search(line):
                    seconds = time.perf_counter() - started
                    _wait_for(until, process)
                    return seconds
        finally:
            process.send_signal(signal.SIGKILL)
    raise RuntimeError(
        f"{' '.join(command)} ended before its first step:\n{''.join(lines)}"
        f"{errors.read_text(encoding='utf-8')}"
    )


def _wait_for(folder: Path | None, process: subprocess.Popen[str]) -> None:
    """Waits until a process has made a folder."""
    deadline = time.monotonic() + PROCESS_SECONDS
    while folder is not None and not folder.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{folder} was not made.")
        time.sleep(0.05)
