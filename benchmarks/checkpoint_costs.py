"""Measures the costs of checkpoints: the steps lost to saving, and the time to resume.

A block is a fixed number of steps of the training loop. The cost of saving is the difference
between a block that saves a checkpoint after its first step and a block that saves none. The block
that saves ends when the checkpoint is complete on disk. So its time includes the writing in the
background, which uses the same processors as the simulated devices.
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
# A block lasts at least this many times as long as a background save, which thus ends first.
SPARE = 1.5
PROCESS_SECONDS = 600.0
FIRST_REPORT = re.compile(r"step\s+\d+/\d+\s+train\s")


class SaveCosts(NamedTuple):
    """The costs of saving: medians over rounds.

    Attributes:
      steps: The number of steps of a block.
      step_seconds: The seconds of a step without saving.
      asynchronous: The cost of an asynchronous save, in steps.
      synchronous: The cost of a synchronous save, in steps.
      blocked: Seconds that the loop waits for an asynchronous `save` to return.
      background: Seconds after `blocked` until the checkpoint is complete, while training goes on.
      blocked_synchronous: Seconds that the loop waits for a synchronous save.
    """

    steps: int
    step_seconds: float
    asynchronous: Estimate
    synchronous: Estimate
    blocked: Estimate
    background: Estimate
    blocked_synchronous: Estimate


class ResumeTimes(NamedTuple):
    """The costs of resuming, in seconds.

    Attributes:
      verification: The time to hash every file and compare the hashes.
      reading: The time of the rest of `restore`, until the state is on the devices.
    """

    verification: Estimate
    reading: Estimate


class Saves:
    """Runs blocks, each of which saves one checkpoint, into one folder.

    Attributes:
      blocked: Seconds that the loop waited for each save.
      background: Seconds from the end of each wait until the save was complete.
    """

    def __init__(self, bench: Bench, *, asynchronous: bool) -> None:
        """Opens the checkpoints of a folder that does not exist yet; the first save makes it."""
        self._bench = bench
        self._folder = bench.folder / ("asynchronous" if asynchronous else "synchronous")
        keep = bench.config.checkpoint.keep
        self.checkpoints = Checkpoints(self._folder, keep=keep, asynchronous=asynchronous)
        self._number = 0
        self.blocked: list[float] = []
        self.background: list[float] = []

    def block(self, num_steps: int) -> float:
        """Runs steps with a save after the first step; returns the seconds."""
        self._number += 1
        times = self._bench.loop(num_steps, saver=(self.checkpoints, self._number))
        self.blocked.append(times.blocked)
        # The save's last change in the folder renames the manifest, so this is the save's end.
        complete = (self._folder / str(self._number)).stat().st_mtime
        self.background.append(max(complete - times.saved_at, 0.0))
        return times.seconds


def measure_saving(bench: Bench, *, steps: int, rounds: int) -> SaveCosts:
    """Measures the costs of a save.

    Args:
      bench: The program to train.
      steps: Steps of a block, at least two; 0 chooses a number with which the
        background save ends within the block.
      rounds: The number of blocks of each kind: no save, asynchronous save, synchronous save.

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
    """Returns a number of steps with which a block lasts longer than a background save."""
    trial = 4
    # The first save of a process is slower than the others.
    for _ in range(2):
        saves.block(trial)
    step = bench.loop(trial).seconds / trial
    return SAVED_AFTER + max(trial, math.ceil(SPARE * saves.background[-1] / step))


def measure_restoring(bench: Bench, *, rounds: int) -> ResumeTimes:
    """Measures restoring from files that are in the machine's file cache."""
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
    """Measures the time from the start of a process to the report of its first step.

    Args:
      config: The config to train.
      folder: The folder to write to.
      rounds: The number of processes of each kind.
      devices: The number of simulated CPU devices; `None` for the config's default.

    Returns:
      The seconds of the `fresh` and of the `resumed` processes, which alternate.
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
    """Trains in a new process, and kills it after the report of its first step.

    If `until` is given, the process is killed only after it has made this folder.

    Returns:
      The seconds from the start of the process to the report.
    """
    command = [
        *(sys.executable, "-m", "experiments.fsdp", f"--config={config.absolute()}"),
        # The first step is also the last, because the last step is reported at once.
        f"--config.training.num_steps={num_steps}",
        "--config.optimizer.warmup_steps=0",
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
