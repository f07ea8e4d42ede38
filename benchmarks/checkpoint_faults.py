"""Tests runs with damaged and hostile files: a run must refuse them, or resume correctly.

    python -m benchmarks.checkpoint_faults

A small run with checkpoints of steps 20 and 40 is written once, and copied for every case. A case
makes one change to the copy. Then this process does what a resumed run does: it checks and locks
the folder, verifies and restores the newest checkpoint, cuts the files of metrics back to the
checkpoint's step, appends a line to them, saves a checkpoint, and makes the page of the report. A
case is survived if

  - a run that must be refused raises one of the errors that end a run with exit code 2 or 6, and
    the message is one sentence;
  - a run that must go on restores the saved state bit for bit;
  - the case takes less than `MOST_SECONDS`;
  - no file outside of the run's folder is opened or changed. (A link that the user may have made is
    an exception.)

The exit code is 1 if a case is not survived.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from benchmarks.checkpoint_fault_cases import (
    EITHER,
    GOES_ON,
    REFUSED,
    STEPS,
    Case,
    cases,
    put,
)
from manualpar.core.mesh.mesh import simulate_devices
from manualpar.core.state.train_state import TrainState
from manualpar.errors import UsageError
from manualpar.system.storage.durable_files import WriteError
from manualpar.training.checkpoints import CheckpointError
from manualpar.training.config import load_config
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.monitoring.report import page_html
from manualpar.training.monitoring.run_files import RunWriter
from manualpar.training.monitoring.run_record import make_charts, read_run
from manualpar.training.recorder import parse_state
from manualpar.training.workdir import check_folder, lock_workdir, open_checkpoints, restore

CONFIG = Path(__file__).parent.parent / "configs" / "fsdp.py"
MOST_SECONDS = 60  # A case that does not hang takes less than 1% of this.
REFUSALS = (CheckpointError, UsageError, WriteError, ValueError)


class Reference(NamedTuple):
    """The undamaged run.

    Attributes:
      workdir: The run's folder.
      outside: A folder outside of the run, in which no file may be opened.
      experiment: The run's config, program and task.
      states: The state at each step that has a checkpoint.
    """

    workdir: Path
    outside: Path
    experiment: Experiment
    states: dict[int, TrainState]


class TooLongError(Exception):
    """A case takes longer than `MOST_SECONDS`."""


def make_reference(folder: Path) -> Reference:
    """Writes a run with two checkpoints, without training."""
    config = load_config(CONFIG)
    config.update_from_flattened_dict(
        {
            "data.source": "synthetic",
            "model.hidden_size": 8,
            "model.num_layers": 1,
            "optimizer.num_minibatches": 1,
            "checkpoint.every_steps": STEPS[0],
        }
    )
    experiment = prepare(config)
    workdir, outside = folder / "run", folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("{}")
    states = {
        step: experiment.program.init(jax.random.key(step)).replace(step=np.int32(step))
        for step in STEPS
    }
    states = {step: jax.device_put(state, _shardings(state)) for step, state in states.items()}
    with (
        open_checkpoints(config, workdir) as checkpoints,
        RunWriter(workdir, config=config.to_dict()) as writer,
    ):
        for step in STEPS:
            for number in range(step - STEPS[0], step, 5):
                rates = {"examples_per_second": 5.0}
                writer.write(number, "train", {"loss": 1 / (1 + number)}, throughput=rates)
            checkpoints.save(
                experiment.program, states[step], step=step, extra=_extra(experiment, writer, step)
            )
            (workdir / "discarded.jsonl").touch()
    with RunWriter(workdir, config=config.to_dict(), place=_place(workdir), step=STEPS[-1]):
        pass
    return Reference(workdir, outside, experiment, states)


def _shardings(state: TrainState) -> Any:
    """Returns the shardings of a state's arrays; the step, a NumPy number, is replicated."""
    mesh = jax.tree.leaves(state.params)[0].sharding.mesh
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    return jax.tree.map(lambda x: x.sharding if isinstance(x, jax.Array) else whole, state)


def _place(workdir: Path) -> dict[str, int]:
    """Returns the sizes of the two files of metrics, in bytes."""
    return {name: (workdir / name).stat().st_size for name in ("metrics.jsonl", "throughput.jsonl")}


def _extra(experiment: Experiment, writer: RunWriter, step: int) -> dict[str, Any]:
    """Returns the values of a checkpoint at `step` that are not arrays, as a run saves them."""
    return {
        "position": step * experiment.config.data.batch_size,
        "config": experiment.config.to_dict(),
        "data": experiment.task.dataset.fingerprint,
        "recorder": {"totals": {"train": {"loss": [1.0, 2.0]}}, "latest": {}, "skipped": 0},
        "files": writer.place(),
    }


class Watched:
    """Records which files in a folder Python code opens, while `is_on` is true."""

    def __init__(self, folder: Path) -> None:
        """Adds an audit hook to this process, which Python cannot remove again."""
        self._folder = str(folder)
        self.is_on = False
        self.opened: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in ("open", "os.scandir", "os.listdir"):
            path = arguments[0]
            if isinstance(path, str | os.PathLike) and self._folder in os.path.realpath(path):
                self.opened.append(str(path))


def attempt(case: Case, reference: Reference, workdir: Path, watched: Watched) -> str:
    """Applies a case to a copy of the run, and resumes the run.

    Args:
      case: The case.
      reference: The undamaged run.
      workdir: The folder for the copy.
      watched: The record of opened files in the outside folder.

    Returns:
      Why the case was not survived; `''` if it was survived.
    """
    shutil.copytree(reference.workdir, workdir)
    case.damage(workdir)
    before = _content(reference.outside)
    watched.opened, watched.is_on = [], True

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    previous = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_SECONDS)
    refusal, found = "", ""
    try:
        restored = _go_on(case, reference.experiment, workdir)
        if not _is_same(restored, reference.states[case.step]):
            found = "another state was restored"
    except REFUSALS as error:
        refusal = str(error)
    except Exception as error:  # Any other error is a finding.
        found = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        watched.is_on = False
    if found:
        return found
    is_sentence = "\n" not in refusal.partition("(saved -> asked for)")[0]
    if refusal and (case.expected == GOES_ON or not is_sentence):
        return f"refused: {refusal}"
    if not refusal and case.expected == REFUSED:
        return "went on"
    if case.expected == EITHER:
        return ""  # Opening a file outside is allowed: the link may be the user's.
    if watched.opened:
        return f"opened {watched.opened}"
    return "" if before == _content(reference.outside) else "changed a file outside"


def _go_on(case: Case, experiment: Experiment, workdir: Path) -> TrainState:
    """Resumes a run with the case's config, but does not train; returns the restored state."""
    config = ml_collections.ConfigDict(experiment.config.to_dict())
    config.update_from_flattened_dict(dict(case.changes))
    experiment = experiment._replace(config=config)

    def report(line: str) -> None:
        del line

    with contextlib.ExitStack() as stack:
        try:
            check_folder(config, workdir)
        except OSError as error:  # The command line does the same.
            raise UsageError(str(error)) from error
        stack.enter_context(lock_workdir(workdir, report=report))
        checkpoints = stack.enter_context(open_checkpoints(config, workdir))
        restored = restore(checkpoints, experiment, workdir, report=report)
        parse_state(restored.extra["recorder"])
        writer = RunWriter(
            workdir,
            config=config.to_dict(),
            place=restored.extra["files"],
            step=restored.step,
            report=report,
        )
        stack.enter_context(writer)
        writer.write(restored.step + 1, "train", {"loss": 0.25})
        checkpoints.save(
            experiment.program, restored.state, step=restored.step + 1, extra=restored.extra
        )
        run = read_run(workdir)
        make_charts(run)
        page_html(run, "", title="case", facts={})
    return restored.state


def _is_same(state: TrainState, other: TrainState) -> bool:
    """Returns whether two states have the same bits."""
    pairs = zip(_arrays(state), _arrays(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def _arrays(state: TrainState) -> list[np.ndarray]:
    """Returns all arrays of a state on the host, with the random key as integers."""
    plain = state.replace(rng=jax.random.key_data(state.rng))
    return [np.asarray(x) for x in jax.tree.leaves(plain)]


def _content(folder: Path) -> dict[str, bytes]:
    """Returns the content of each file in a folder, by path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def try_all(reference: Reference, chosen: list[Case], folder: Path) -> dict[str, list[str]]:
    """Tries all chosen cases, and prints those that are not survived.

    Returns:
      For each kind, what `attempt` returned for its cases: `''` for a survived case.
    """
    watched = Watched(reference.outside)
    outcomes: dict[str, list[str]] = {}
    for number, case in enumerate(chosen):
        workdir = folder / str(number)
        why = attempt(case, reference, workdir, watched)
        outcomes.setdefault(case.kind, []).append(why)
        if why:
            line = f"NOT SURVIVED  {case.kind}: {case.name}: expected that it {case.expected}"
            print(f"{line}; {why:.300}", flush=True)
        shutil.rmtree(workdir, ignore_errors=True)
        for path in reference.outside.iterdir():
            if path.name != "file":
                put(None, path)
    return outcomes


def main() -> None:
    """Tries all cases, or those that `--only` selects; prints how many were survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="text in a case's kind or name")
    only = parser.parse_args().only
    simulate_devices(8)
    # Some cases make a socket, and Linux allows at most 107 bytes for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="faults") as text:
        folder = Path(text).resolve()
        reference = make_reference(folder)
        chosen = [
            case
            for case in cases(reference.workdir, reference.outside)
            if only in f"{case.kind}: {case.name}"
        ]
        outcomes = try_all(reference, chosen, folder)
    print("| done to a run | tried | survived |\n| --- | --- | --- |")
    for kind, lines in outcomes.items():
        print(f"| {kind} | {len(lines)} | {lines.count('')} |")
    tried = sum(map(len, outcomes.values()))
    survived = sum(lines.count("") for lines in outcomes.values())
    print(f"| all | {tried} | {survived} |")
    sys.exit(survived != tried)


if __name__ == "__main__":
    main()
