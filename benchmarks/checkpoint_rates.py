"""Measures how long a process saves and restores states of several sizes, and a rate for each part.

python -m benchmarks.checkpoint_rates [--mebibytes 24 96 384] [--rounds 5] [--folder DIR]
                                      [--restarts] [--output FILE.md] [--json FILE.json]

A state of stacked weights and Adam's two averages of them, sharded over eight simulated devices of
one process, is saved by `Checkpoints` and restored. A line through the medians says what does not
depend on the size, in seconds, and what does, in bytes a second. `manualpar.planner.goodput` scales
these to the bytes that a process of a large run writes.

With `--restarts` it measures instead how long a new process takes until its training step is
compiled, and it can restore. A failure costs that besides the time until it is noticed
(`config.watch.lost_seconds` at most) and that of the scheduler.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import Estimate, estimate, table
from manualpar import Batch, Program, fsdp, make_mesh
from manualpar.inspect import state_bytes
from manualpar.training.checkpoints import Checkpoints

PARTS = ("blocked", "background", "restore")
WIDTH = 1024


class Stack(nn.Module):
    """So many square weights."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies with each."""
        for _ in range(self.layers):
            x = nn.Dense(WIDTH, use_bias=False)(x)
        return x


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a report and writes it where asked."""
    conditions = note_conditions("benchmarks.checkpoint_rates", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[24, 96, 384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--restarts", action="store_true", help="how long a new process takes")
    parser.add_argument("--folder", type=Path, help="where to save, by default a temporary folder")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    if args.restarts:
        values = [restart(layers=8) for _ in range(args.rounds)]
        shown = estimate(values).show("{:.1f}".format)
        lines = ["## How fast a process restarts", "", conditions.sentence(), ""]
        lines.append(f"Until its training step is compiled it takes {shown} s.")
        print("\n".join(lines))
        write_results(
            conditions,
            lines=lines,
            data={"seconds": values},
            output=args.output,
            json_output=args.json,
        )
        return 0
    sizes: list[int] = []
    seconds: dict[str, list[Estimate]] = {part: [] for part in PARTS}
    for mebibytes in args.mebibytes:
        program = build(max(1, mebibytes * 2**20 // (3 * 4 * WIDTH**2)))
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            size, measured = measure(program, Path(folder), rounds=args.rounds)
        sizes.append(size)
        for part, values in measured.items():
            seconds[part].append(estimate(values))
    rows = [
        [f"{size / 2**20:,.0f} MiB", *(seconds[part][i].show("{:.3f}".format) for part in PARTS)]
        for i, size in enumerate(sizes)
    ]
    through = {part: fit(sizes, [x.median for x in seconds[part]]) for part in PARTS}
    written = [f"{start:.2f} + bytes / {rate / 1e6:,.0f} MB/s" for start, rate in through.values()]
    rows.append(["by the line", *written])
    header = ["state", "the loop waits, s", "then in the background, s", "restoring, s"]
    lines = ["## How fast a process saves", "", conditions.sentence(), "", *table(header, rows)]
    print("\n".join(lines))
    data: dict[str, Any] = {"bytes": sizes, "seconds": seconds, "lines": through}
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)
    return 0


def build(layers: int) -> Program:
    """A program with a state of so many weights, in shards on eight devices."""

    def loss_fn(params: Any, apply_fn: Any, batch: Batch, rng: jax.Array) -> Any:
        loss = jnp.square(apply_fn({"params": params}, batch.inputs)).mean(-1)
        return loss.mean(), {"loss": (loss.sum(), loss.size)}

    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    batch, mesh = Batch(x, x), make_mesh({"data": 8})
    return fsdp(Stack(layers), optax.adam(1e-3), loss_fn, mesh=mesh, batch=batch)


def restart(*, layers: int) -> float:
    """The seconds that a new process takes until its training step is compiled."""
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from benchmarks.checkpoint_rates import build
program = build({layers})
program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
"""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def measure(program: Program, folder: Path, *, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """The bytes of a state, and the seconds that saving and restoring it takes in each round."""
    state = jax.block_until_ready(program.init(jax.random.key(0)))
    measured: dict[str, list[float]] = {part: [] for part in PARTS}
    for step in range(rounds + 1):
        with Checkpoints(folder / "saved") as checkpoints:
            times = [time.perf_counter()]
            checkpoints.save(program, state, step=step, extra={})
            times.append(time.perf_counter())
            checkpoints.wait()
            times.append(time.perf_counter())
        with Checkpoints(folder / "saved") as checkpoints:
            times.append(time.perf_counter())
            restored = checkpoints.restore(program, report=print)
            jax.block_until_ready(restored.state)
            times.append(time.perf_counter())
        shutil.rmtree(folder / "saved")
        if step:  # The first save of a process is slower than the others.
            for part, begin, end in zip(PARTS, (0, 1, 3), (1, 2, 4), strict=True):
                measured[part].append(times[end] - times[begin])
    whole = state_bytes(state.params)[1] + state_bytes(state.opt_state)[1]
    return whole, measured


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """The line through points: seconds that are always there, and bytes a second."""
    slope, constant = np.polyfit(sizes, seconds, 1)
    return max(float(constant), 0.0), float(1 / slope)


if __name__ == "__main__":
    raise SystemExit(main())
