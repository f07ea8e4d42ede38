"""Runs of two processes to which something happens, and what became of them.

    python -m benchmarks.process_faults [--only=kill,hang] [--count=10]

Each fault happens to a small run of its own: a process is killed, stopped, raises, hangs or ends;
it has another config, seed, version, token or data; it is killed while it starts; strangers talk to
the port where the processes meet; the launcher gets signals. A fault is survived if all processes
end in time, with the exit code that docs/running.md promises, and those that nothing happened to
say what did, without a traceback. The exit code is 1 if one was not survived.

It takes about a quarter of a minute a fault on two idle cores. The bounds are generous, because a
busy machine is no fault; the seconds are reported.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.process_faults_worker import HANGS
from benchmarks.process_strangers import STRANGERS, disturb
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
    "--config.training.log_every_steps=5",
    "--config.training.eval_every_steps=5",
    "--config.training.eval_batches=2",
    "--config.checkpoint.every_steps=5",
    f"--config.watch.lost_seconds={LOST_SECONDS}",
)
# What runtimes print that nobody can read. That Gloo is connected is no such thing.
RAW = re.compile(r"^[EFW]\d{4} |external/|\*\*\* |@ +0x|Gloo.*(fail|clos|reset|error|time)", re.I)
RUN_FOLDER = "the run's folder"  # Stands for its path in what a worker does.
LOST, STOPPED, ABORTED = 4, 75, -signal.SIGABRT


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens to a run.

    Attributes:
      kind: Its class, by which the results are counted.
      name: What happens.
      codes: The exit codes that are right, of the processes that nothing happens to, or of the
        launcher.
      says: What they say, a regular expression.
      victim: The process that it happens to, whose own end does not count.
      faults: What the worker of each process does, by its number; see the worker.
      flags: What each process has on its command line besides.
      environment: What each process has in its environment besides.
      act: What is done to the processes from outside.
      launches: Whether the launcher starts them; then `act` gets it alone.
      steps: After how many steps the run ends.
    """

    kind: str
    name: str
    codes: Sequence[int]
    says: str
    victim: int | None = None
    faults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    flags: Mapping[int, list[str]] = dataclasses.field(default_factory=dict)
    environment: Mapping[int, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    act: Callable[["Run"], None] | None = None
    launches: bool = False
    steps: int = 100_000


@dataclasses.dataclass
class Outcome:
    """What became of a run."""

    fault: Fault
    codes: list[int | None]
    seconds: float
    complaints: list[str]
    raw_lines: int


class Run:
    """The processes of a run, or its launcher."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        """Starts them."""
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
        """What one of them has printed."""
        return self.outputs[number].read_text(errors="replace")

    def wait_for(self, text: str, number: int = 0) -> None:
        """Waits until one of them has printed something, or has ended."""
        until = time.monotonic() + END_SECONDS
        while text not in self.text(number) and time.monotonic() < until:
            if self.popens[number].poll() is not None:
                return
            time.sleep(0.02)

    def children(self) -> list[int]:
        """The processes that a launcher has started so far."""
        pid = self.popens[0].pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return [int(child) for child in found]

    def end(self, stopped: int | None) -> list[int | None]:
        """Waits for them, but for one that is stopped; `None` for one that does not end."""
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


def faults() -> Iterator[Fault]:
    """All faults."""
    phases = ("reading a batch", "in a step", "between two steps", "evaluating", "saving")
    early = ("preparing", "starting")
    for who in (1, 0):
        lost = rf"process {who} on \S+ \(pid \d+\) was lost: its connection closed"
        silent = rf"process {who} on .* was lost: it has been silent"
        hung = rf"process {who} on .* was lost: it has made no progress|the processes stand still"
        codes = (LOST, ABORTED) if who == 0 else (LOST,)
        for phase in (*early, *phases):
            yield _inside("kill", phase, who, codes, lost)
        for phase in ("in a step", "saving"):
            yield _inside("stop", phase, who, codes, silent)
        for phase in (*early, *phases[:2], *phases[3:]):
            yield _inside("raise", phase, who, (LOST,), rf"process {who} on .* failed: .*a mistake")
        for phase in phases:
            yield _inside("hang", phase, who, (LOST,), hung)
        yield _inside("hang holding Python's lock", "in a step", who, codes, silent)
        yield _inside("exit with code 0", "in a step", who, codes, lost)
        nonsense = rf"process {who} on .* was lost: it sent what no process of this run sends"
        yield _inside("say nonsense", "in a step", who, codes, nonsense)
        # A process without memory may still be able to say so, or be ended by the C++ below.
        memory = rf"process {who} on .* (failed: |was lost: its connection closed)"
        for kind in ("raise MemoryError", "raise RESOURCE_EXHAUSTED"):
            yield _inside(kind, "in a step", who, (LOST,), memory)
        for room in (0, 50, 100, 150, 200, 250, 300):
            yield _inside(f"leave MiB {room}", "starting", who, codes, memory)
    yield from _differences()
    yield from _killed_early()
    yield from _strangers()
    yield from _signals()


def _inside(kind: str, phase: str, who: int, codes: Sequence[int], says: str) -> Fault:
    """A fault that a process makes itself when it enters a phase."""
    at = 1 if phase in ("preparing", "starting") else 5
    what = {"process": who, "phase": phase, "at": at, "do": kind}
    return Fault(kind, f"{phase} (process {who})", codes, says, victim=who, faults=what)


def _differences() -> Iterator[Fault]:
    """Processes that are not of one run."""
    for name, says, more in (
        ("seed", r"config.seed is 42 in process 0 and 3 in process 1", ["--config.seed=3"]),
        ("model", r"config.model.hidden_size is 16 in", ["--config.model.hidden_size=32"]),
        ("optimizer", r"learning_rate is .* in", ["--config.optimizer.learning_rate=1e-5"]),
        ("steps", r"num_steps is 100000 in", ["--config.training.num_steps=60"]),
        ("evaluations", r"eval_every_steps is 5 in", ["--config.training.eval_every_steps=7"]),
        ("checkpoints", r"every_steps is 5 in", ["--config.checkpoint.every_steps=30"]),
        ("mesh", r"parallel.mesh is .* in", ["--config.parallel.mesh={'data': 4}"]),
        ("strategy", r"parallel.strategy is .* in", ["--config.parallel.strategy=dp"]),
        ("folder", r"--workdir is .* in process 0 and \S*other", ["--workdir=/tmp/other"]),
    ):
        yield Fault("differ", f"another {name}", (2,), says, flags={1: more})
    for package in ("jax", "jaxlib", "flax"):
        what = {"process": 1, "phase": "", "at": 0, "do": f"version {package}"}
        says = rf"{package} is \S+ in process 0 and 0.0.1 in process 1"
        yield Fault("differ", f"another {package}", (2,), says, faults=what)
    what = {"process": 1, "phase": "", "at": 0, "do": f"hide {RUN_FOLDER}"}
    says = "process 1 on .* does not find in .*checkpoints what process 0"
    yield Fault("differ", "another file system (needs root)", (6,), says, faults=what)
    what = {"process": 1, "phase": "", "at": 0, "do": "data"}
    yield Fault("differ", "other data", (2,), "the data's fingerprint is .* in", faults=what)
    for name, says, variables in (
        ("number of devices", "number of devices is 2 in", {"JAX_NUM_CPU_DEVICES": "4"}),
        ("number of processes", "num_processes is 2 in", {"MANUALPAR_NUM_PROCESSES": "3"}),
        ("setting of jax", "jax_enable_x64 is False in", {"JAX_ENABLE_X64": "1"}),
    ):
        yield Fault("differ", f"another {name}", (2,), says, environment={1: variables})


def _killed_early() -> Iterator[Fault]:
    """A process that is killed while it starts, by the time since the launcher has started it."""
    for who in (1, 0):
        says = (
            rf"process {who} (on \S+ \(pid \d+\) )?(was lost: its connection closed|"
            rf"was ended by SIGKILL|of 2 not connected|is not there)"
        )
        for seconds in (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0):

            def act(run: Run, who: int = who, seconds: float = seconds) -> None:
                while len(run.children()) < 2:
                    time.sleep(0.01)
                victim = run.children()[who]
                time.sleep(seconds)
                os.kill(victim, signal.SIGKILL)

            name = f"killed after {seconds:g} s (process {who})"
            yield Fault("kill while starting", name, (137, 134), says, launches=True, act=act)


def _strangers() -> Iterator[Fault]:
    """Strangers that talk to the port where the processes meet, one of which comes late."""
    for name in STRANGERS:

        def act(run: Run, name: str = name) -> None:
            disturb(name, run.port, until=lambda: "mesh: " in run.text(0))

        late = {"process": 1, "phase": "", "at": 0, "do": "late"}
        says = "test accuracy|" if name else ""
        yield Fault("stranger", name, (0,), says, faults=late, act=act, steps=10)


def _signals() -> Iterator[Fault]:
    """Signals to the launcher and to a process."""

    def send(*numbers: int, after: str = "step      5/") -> Callable[[Run], None]:
        def act(run: Run) -> None:
            run.wait_for(after)
            for number in numbers:
                os.kill(run.popens[0].pid, number)
                time.sleep(0.5)

        return act

    yield Fault(
        "signal", "SIGTERM to the launcher", (STOPPED,), "is saved", launches=True, act=send(15)
    )
    yield Fault(
        "signal", "SIGINT to the launcher", (130,), "interrupted", launches=True, act=send(2)
    )
    twice = (STOPPED, 137, 143)
    yield Fault("signal", "SIGTERM twice", twice, "SIGTERM", launches=True, act=send(15, 15))
    for who in (1, 0):
        what = {"process": who, "phase": "in a step", "at": 12, "do": "hang"}
        says = "killed, because|was lost|stand still"
        name = f"SIGTERM to the launcher while process {who} hangs"
        codes, term = (LOST, 134, 137), send(15, after=HANGS)
        yield Fault("signal", name, codes, says, faults=what, launches=True, act=term)
    yield Fault("signal", "SIGTERM to a process", (STOPPED,), "", act=send(15))

    def send_until_the_end(run: Run) -> None:
        """As Slurm does with `--kill-on-bad-exit=1`."""
        send(15)(run)
        run.wait_for("stopped after step")
        while any(popen.poll() is None for popen in run.popens):
            for popen in run.popens:
                popen.send_signal(signal.SIGTERM)
            time.sleep(0.01)

    name = "SIGTERM to all, again and again, once all is saved"
    yield Fault("signal", name, (STOPPED,), "", act=send_until_the_end)


def judge(fault: Fault, run: Run, codes: list[int | None], seconds: float) -> Outcome:
    """Says what is not as it should be."""
    complaints, raw = [], 0
    for number, code in enumerate(codes):
        text = run.text(number)
        if number == fault.victim:
            continue
        raw += sum(bool(RAW.search(line)) for line in text.splitlines())
        if code not in fault.codes:
            complaints.append(f"process {number} ended with {code}, expected {fault.codes}")
        if not re.search(fault.says, text):
            complaints.append(f"process {number} does not say {fault.says!r}")
        if "Traceback" in text:
            complaints.append(f"process {number} shows a traceback")
    return Outcome(fault, codes, seconds, complaints, raw)


def try_fault(fault: Fault, keep: Path | None) -> Outcome:
    """Makes a fault happen to a run."""
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
    """A table of what was tried, by class."""
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
    """A port that nobody uses now."""
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
    parser = argparse.ArgumentParser(description="Tries faults of processes.")
    parser.add_argument("--only", default="", help="parts of kinds or names, with commas")
    parser.add_argument("--count", type=int, help="only so many, spread over all")
    parser.add_argument("--keep", type=Path, help="a folder for the output of what went wrong")
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
