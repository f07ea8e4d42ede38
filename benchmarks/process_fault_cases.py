"""The faults that `benchmarks.process_faults` causes in runs of two processes."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.process_faults_worker import HANGS
from benchmarks.process_strangers import STRANGERS, disturb

RUN_FOLDER = "the run's folder"  # Replaced by the folder's path in a worker's actions.
LOST, STOPPED, ABORTED = 4, 75, -signal.SIGABRT


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault in a run.

    Attributes:
      kind: The class of the fault, by which results are counted.
      name: A description of the fault.
      codes: The right exit codes of the processes without the fault, or of the launcher.
      says: A regular expression that the output of these processes or of the launcher must match.
      speaker: The only process whose output must match `says`; `None` for all.
      victim: The process with the fault; its exit code and its output are not checked.
      faults: The fault that a process causes in itself: `process`, `phase`, `at` and `do`, see
        `process_faults_worker`.
      flags: The additional command-line flags of each process.
      environment: The additional environment variables of each process.
      act: A function that causes the fault from outside; it gets the `Run`.
      launches: Whether `manualpar.launch` starts the processes; then the run has only the launcher.
      steps: The number of steps of the run.
    """

    kind: str
    name: str
    codes: Sequence[int]
    says: str
    speaker: int | None = None
    victim: int | None = None
    faults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    flags: Mapping[int, list[str]] = dataclasses.field(default_factory=dict)
    environment: Mapping[int, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    act: Callable[[Any], None] | None = None
    launches: bool = False
    steps: int = 100_000


def faults() -> Iterator[Fault]:
    """Yields all faults."""
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
        nonsense = rf"process {who} on .* was lost: it sent a message that no process of"
        yield _inside("say nonsense", "in a step", who, codes, nonsense)
        # A process without memory may still report its failure, or C++ code may end it first.
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
    """Makes a fault that process `who` causes in itself when it enters a phase."""
    at = 1 if phase in ("preparing", "starting") else 5
    what = {"process": who, "phase": phase, "at": at, "do": kind}
    return Fault(kind, f"{phase} (process {who})", codes, says, victim=who, faults=what)


def _differences() -> Iterator[Fault]:
    """Yields faults in which process 1 differs from process 0, for example in its config."""
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
    """Yields faults in which a starting process is killed, at different times after its launch."""
    for who in (1, 0):
        says = (
            rf"process {who} (on \S+ \(pid \d+\) )?(was lost: its connection closed|"
            rf"was ended by SIGKILL|of 2 not connected|does not answer)"
        )
        for seconds in (0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0):

            def act(run: Any, who: int = who, seconds: float = seconds) -> None:
                while len(run.children()) < 2:
                    time.sleep(0.01)
                victim = run.children()[who]
                time.sleep(seconds)
                os.kill(victim, signal.SIGKILL)

            name = f"killed after {seconds:g} s (process {who})"
            yield Fault("kill while starting", name, (137, 134), says, launches=True, act=act)


def _strangers() -> Iterator[Fault]:
    """Yields faults: strangers connect to the coordinator's port while process 1 is late."""
    for name in STRANGERS:

        def act(run: Any, name: str = name) -> None:
            disturb(name, run.port, until=lambda: "mesh: " in run.text(0))

        late = {"process": 1, "phase": "", "at": 0, "do": "late"}
        yield Fault("stranger", name, (0,), "test accuracy", 0, faults=late, act=act, steps=10)


def _signals() -> Iterator[Fault]:
    """Yields faults in which the launcher or the processes get a signal."""

    def send(*numbers: int, after: str = "step      5/") -> Callable[[Any], None]:
        def act(run: Any) -> None:
            run.wait_for(after)
            for number in numbers:
                os.kill(run.popens[0].pid, number)
                time.sleep(0.5)

        return act

    yield Fault(
        "signal", "SIGTERM to the launcher", (STOPPED,), "is saved", launches=True, act=send(15)
    )
    yield Fault(
        "signal", "SIGUSR1 to the launcher", (STOPPED,), "is saved", launches=True, act=send(10)
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
    yield Fault("signal", "SIGUSR1 to a process", (STOPPED,), "", act=send(10))

    def send_until_the_end(run: Any) -> None:
        """Sends SIGTERM again and again, as Slurm does with `--kill-on-bad-exit=1`."""
        send(15)(run)
        run.wait_for("stopped after step")
        while any(popen.poll() is None for popen in run.popens):
            for popen in run.popens:
                popen.send_signal(signal.SIGTERM)
            time.sleep(0.01)

    name = "SIGTERM to all, again and again, once all is saved"
    yield Fault("signal", name, (STOPPED,), "", act=send_until_the_end)
