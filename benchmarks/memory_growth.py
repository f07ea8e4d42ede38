"""How much the memory of a long run grows, against a loop of the bare jitted step.

python -m benchmarks.memory_growth [--steps 20000]

Each loop trains a tiny classifier on eight simulated devices in a process of its own. `bare` is the
program's jitted step on one batch; `run` is all that a run is, with a report every 10 steps;
`evaluating` evaluates every 500 steps besides, and `saving` keeps a checkpoint every 50. `orbax` is
`bare` with Orbax alone saving the same arrays as often. Every 1,000 steps the resident memory is
read after the allocator was asked to give back what is free (`malloc_trim`, Linux), and Python's
objects are counted. The growth is that from 4,000 steps on, by least squares: before that, pools
fill.
"""

import argparse
import collections
import contextlib
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import rich.console

from manualpar.commands.command_line import parse_command_line
from manualpar.core.state.train_state import TrainState
from manualpar.data import train_batch
from manualpar.system.cluster import initialize
from manualpar.training.devices import simulate_devices
from manualpar.training.experiment import Experiment, prepare
from manualpar.training.monitoring.stalls import StallDetector
from manualpar.training.run import run

CONFIG = Path(__file__).parent.parent / "configs" / "fsdp.py"
SMALL = {"model.hidden_size": 16, "model.num_layers": 1, "data.batch_size": 32}
# By name: every how many steps a loop evaluates, and every how many it saves.
KINDS = {"bare": (0, 0), "run": (0, 0), "evaluating": (500, 0), "saving": (0, 50), "orbax": (0, 50)}
BARE = ("bare", "orbax")
EVERY = 1000
SETTLED = 4000


def main() -> int:
    """Runs every loop in turn and prints how it grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=20000, help="default: 20000")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.steps < SETTLED + 2 * EVERY:
        parser.error(f"--steps={flags.steps}: expected at least {SETTLED + 2 * EVERY}")
    if flags.kind:
        print(json.dumps(_measure(flags.kind, flags.steps)))
        return 0
    print(f"{'loop':12s} MiB per 1,000 steps   objects per 1,000 steps   MiB at the end")
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.memory_growth"]
        command += [f"--steps={flags.steps}", f"--kind={kind}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        steps, sizes, objects = np.array(json.loads(done.stdout.splitlines()[-1]), float).T
        late = steps >= SETTLED
        growth = np.polyfit(steps[late], sizes[late], 1)[0] * 1000
        more = np.polyfit(steps[late], objects[late], 1)[0] * 1000
        print(f"{kind:12s} {growth:19.3f} {more:25.0f} {sizes[-1]:16.1f}", flush=True)
    return 0


def _measure(kind: str, steps: int) -> list[tuple[int, float, int]]:
    """Trains, and returns the step, the MiB and the objects after every `EVERY` steps."""
    simulate_devices(8)
    evaluates, saves = KINDS[kind]
    overrides = SMALL | {
        "optimizer.num_minibatches": 1,
        "training.num_steps": steps,
        "training.log_every_steps": 10,
        "training.eval_every_steps": evaluates,
        "checkpoint.every_steps": saves,
    }
    arguments = [f"--config.{name}={value}" for name, value in overrides.items()]
    experiment = prepare(parse_command_line(["", *arguments], default_config=CONFIG).config)
    found: list[tuple[int, float, int]] = []

    def note(step: int) -> None:
        if step % EVERY == 0 and (not found or found[-1][0] < step):
            gc.collect()
            found.append((step, _resident() / 2**20, len(gc.get_objects())))

    if kind in BARE:
        _run_bare(experiment, steps, saves, note)
        return found
    beat = StallDetector.beat

    def noted(detector: StallDetector, step: int) -> None:
        note(step)
        beat(detector, step)

    setattr(StallDetector, "beat", noted)  # noqa: B010  (a type checker refuses the assignment)
    cluster = initialize(timeout_seconds=10)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, cluster:
        console = rich.console.Console(file=nowhere)
        run(experiment, Path(folder) / "run", cluster=cluster, console=console)
    return found


def _run_bare(experiment: Experiment, steps: int, saves: int, note: Any) -> None:
    """The jitted step, a few steps ahead of what it is waited for, and Orbax alone if it saves."""
    program = experiment.program
    step_fn = getattr(program.train_step, "jitted", program.train_step)
    batch = train_batch(experiment.task.dataset.train, 0, batch_size=32, seed=0)
    batch = jax.device_put(batch, program.batch_sharding)
    state = program.init(jax.random.key(0))
    ahead: collections.deque[jax.Array] = collections.deque()
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(checkpointer):
        for step in range(1, steps + 1):
            state, metrics = step_fn(state, batch)
            ahead.append(jax.tree.leaves(metrics)[0])
            if len(ahead) > 8:
                ahead.popleft().block_until_ready()
            if saves and step % saves == 0:
                _save(checkpointer, Path(folder) / str(step), state)
            note(step)
        checkpointer.wait_until_finished()


def _save(checkpointer: Any, path: Path, state: TrainState) -> None:
    """Saves a state's arrays in the background, and removes the checkpoint before."""
    checkpointer.wait_until_finished()
    for earlier in path.parent.iterdir():
        shutil.rmtree(earlier)
    arrays = {"params": state.params, "opt_state": state.opt_state}
    checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))


def _resident() -> int:
    """Bytes of resident memory, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
