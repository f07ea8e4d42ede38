"""Causes faults in runs of two processes, and checks how the runs end.

    python -m benchmarks.process_faults [--only=kill,hang] [--count=10]

Each fault happens in a separate small run: a process is killed, is stopped, raises an error, hangs
or ends; the processes differ in their config, versions or data; a process is killed while it
starts; strangers connect to the coordinator's port; the launcher gets signals. A fault is survived
if the processes without the fault end in time, with the exit code that docs/running.md promises,
and report the fault without a traceback. This command's exit code is 1 if a fault was not survived.

A fault takes about 15 seconds on two idle cores. The time limits are generous, because the machine
may be busy. The report contains the seconds that each kind of fault took at most.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process_fault_cases import RUN_FOLDER, Fault, faults
from benchmarks.results import note_conditions, write_results
from benchmarks.turns import table

ROOT = Path(__file__).parent.parent
WORKER = "benchmarks.process_faults_worker"
END_SECONDS = 150.0
LOST_SECONDS = 6.0
CONFIG = (
    "--config=configs/fsdp.py",
    "--config.model.hidden_size=16",
    "--config.model.num_layers=1",
    "--config.model.dtype=float32",
    "--config.data.batch_size=32",
    "--config.optimizer.num_minibatches=1",
    "--config.optimizer.warmup_steps=0",
    "--config.training.log_every_steps=5",
    "--config.training.eval_every_steps=5",
    "--config.training.eval_batches=2",
    "--config.checkpoint.every_steps=5",
    f"--config.watch.lost_seconds={LOST_SECONDS}",
)
# Log lines of C++ runtimes, which do not help users. Gloo's report that it is connected is not one.
RAW = re.compile(r"^[EFW]\d{4} |external/|\*\*\* |@ +0x|Gloo.*(fail|clos|reset|error|time)", re.I)


@dataclasses.dataclass
class Outcome:
    """How a run with a fault ended; the fault is survived if there are no complaints."""

    fault: Fault
    codes: list[int | None]
    seconds: float
    complaints: list[str]
    raw_lines: int


class Run:
    """The two processes of a run with a fault, or the launcher that starts them."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        """Starts the processes or the launcher."""
        self.port, self.folder = _free_port(), folder
        self.popens: list[subprocess.Popen[bytes]] = []
        self.outputs: list[Path] = []
        run = [*CONFIG, f"--config.training.num_steps={fault.steps}"]
        faults = json.dumps(fault.faults).replace(RUN_FOLDER, str(folder / "run"))
        shared = {"FAULTS": faults, "FAULTS_FLAGS": json.dumps(fault.flags)}
        workdir = f"--workdir={folder / 'run'}"
        command = [sys.executable, "-m", WORKER, *run, workdir]
        if fault.launches:
            own = ["--processes=2", "--devices-per-process=2", "--grace=25", "--"]
            self._start([sys.executable, "-m", "manualpar.launch", *own, *command], shared)
            return
        for process in range(2):
            who = {
                "MANUALPAR_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
                "MANUALPAR_NUM_PROCESSES": "2",
                "MANUALPAR_PROCESS_ID": str(process),
                "MANUALPAR_TOKEN": "the token of this run",
                "JAX_NUM_CPU_DEVICES": "2",
            }
            self._start(command, {**shared, **who, **fault.environment.get(process, {})})

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        """Starts a process whose output goes to a file."""
        self.outputs.append(self.folder / f"output{len(self.outputs)}")
        fixed = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
        with self.outputs[-1].open("wb") as output:
            self.popens.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=ROOT,
                    env={**os.environ, **fixed, "PYTHONUNBUFFERED": "1", **environment},
                    start_new_session=True,
                )
            )

    def text(self, number: int) -> str:
        """Returns the output of a process so far."""
        return self.outputs[number].read_text(errors="replace")

    def wait_for(self, text: str, number: int = 0) -> None:
        """Waits until process `number` has printed a text, or has ended."""
        until = time.monotonic() + END_SECONDS
        while text not in self.text(number) and time.monotonic() < until:
            if self.popens[number].poll() is not None:
                return
            time.sleep(0.02)

    def children(self) -> list[int]:
        """Returns the process ids of the processes that the launcher has started so far."""
        pid = self.popens[0].pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return [int(child) for child in found]

    def end(self, stopped: int | None) -> list[int | None]:
        """Waits for all processes but `stopped`, then kills the rest.

        Returns:
          The exit codes before the kill; `None` for a process that was still running.
        """
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until:
            running = [p.poll() is None for n, p in enumerate(self.popens) if n != stopped]
            if not any(running):
                break
            time.sleep(0.05)
        codes = [popen.poll() for popen in self.popens]
        for popen in self.popens:
            try:
                os.killpg(popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                popen.wait()
        return codes


def judge(fault: Fault, run: Run, codes: list[int | None], seconds: float) -> Outcome:
    """Compares the exit codes and the output of a run with those that the fault expects."""
    complaints, raw = [], 0
    for number, code in enumerate(codes):
        text = run.text(number)
        if number == fault.victim:
            continue
        raw += sum(bool(RAW.search(line)) for line in text.splitlines())
        if code not in fault.codes:
            complaints.append(f"process {number} ended with {code}, expected {fault.codes}")
        if fault.speaker in (None, number) and not re.search(fault.says, text):
            complaints.append(f"process {number} does not say {fault.says!r}")
        if "Traceback" in text:
            complaints.append(f"process {number} shows a traceback")
    return Outcome(fault, codes, seconds, complaints, raw)


def try_fault(fault: Fault, keep: Path | None) -> Outcome:
    """Starts a run, causes a fault in it, and waits for the end of the run."""
    folder = Path(tempfile.mkdtemp(prefix="process_fault"))
    run = Run(fault, folder)
    if fault.act is not None:
        fault.act(run)
    began = time.monotonic()
    outcome = judge(
        fault,
        run,
        run.end(fault.victim if fault.kind == "stop" else None),
        time.monotonic() - began,
    )
    if keep is not None and outcome.complaints:
        shutil.copytree(folder, keep / re.sub(r"\W+", "_", fault.name), dirs_exist_ok=True)
    shutil.rmtree(folder)
    return outcome


def report(outcomes: Sequence[Outcome]) -> list[str]:
    """Makes a table of the tried faults, with a row for each kind."""
    rows = []
    kinds = list(dict.fromkeys(outcome.fault.kind for outcome in outcomes))
    for kind in [*kinds, "all"]:
        some = [o for o in outcomes if kind in ("all", o.fault.kind)]
        survived = sum(not o.complaints for o in some)
        raw = sum(o.raw_lines > 0 for o in some)
        slowest = max(o.seconds for o in some)
        rows.append([kind, str(len(some)), str(survived), str(raw), f"{slowest:.0f}"])
    header = ["fault", "tried", "survived", "with lines of a runtime's", "slowest end, s"]
    return ["## Process faults", "", *table(header, rows)]


def _free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main(argv: Sequence[str] | None = None) -> int:
    """Tries the faults.

    Args:
      argv: The arguments, by default those of this process.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser(description="Causes faults in runs of two processes.")
    parser.add_argument("--only", default="", help="texts in kinds or names, with commas")
    parser.add_argument("--count", type=int, help="number of faults to try, spread over all")
    parser.add_argument("--keep", type=Path, help="a folder for files of failed faults")
    parser.add_argument("--output", type=Path, help="a Markdown file for the report")
    options = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.process_faults", argv)
    wanted = [part for part in options.only.split(",") if part]
    chosen = [
        fault
        for fault in faults()
        if not wanted or any(part in f"{fault.kind}: {fault.name}" for part in wanted)
    ]
    if options.count:
        chosen = chosen[:: max(1, len(chosen) // options.count)][: options.count]
    outcomes = []
    for fault in chosen:
        outcome = try_fault(fault, options.keep)
        outcomes.append(outcome)
        verdict = "; ".join(outcome.complaints) or "survived"
        seconds, raw = f"{outcome.seconds:.1f} s", f"{outcome.raw_lines} raw lines"
        print(
            f"{fault.kind}: {fault.name}: {outcome.codes}, {seconds}, {raw}: {verdict}", flush=True
        )
    lines = [*report(outcomes), "", conditions.sentence()]
    print("\n".join(lines))
    write_results(conditions, lines=lines, data={}, output=options.output, json_output=None)
    return int(any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
