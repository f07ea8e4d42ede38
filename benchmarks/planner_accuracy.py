"""Measures the errors of the planner's estimates: step times and memory.

python -m benchmarks.planner_accuracy [--parts steps memory] [--rounds 7] [--steps 3]
                                      [--output FILE.md] [--json FILE.json] [--tiny]

Part `steps` compares estimates with measured step times on eight simulated CPU devices, for four
kinds of models under four strategies, with several batch sizes and numbers of minibatches. The
planner needs a description of a device. It is made from four measurements on all devices at once: a
matrix product, a copy, a large all-gather and a tiny one. Simulated devices share the cores, so
absolute times cannot be right. So the result is Spearman's rank correlation, which shows whether
estimates and measurements have the same order. A time is the processor time of all threads divided
by the number of cores, so that other programs may run meanwhile. Communication and compute do not
overlap on these devices, so the estimates assume no overlap.

Part `memory` compares planned and compiled memory of the configs, with `benchmarks.planned_memory`.
A third comparison, with published speeds, is `benchmarks.calibration`.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.results import note_conditions, write_results
from benchmarks.turns import Block, estimate, table, take_turns
from benchmarks.workloads import make_workload
from manualpar import Program, data_parallel, fsdp, hsdp, make_mesh, zero
from manualpar.core.parameters.collectives import gather_invariant
from manualpar.inspect.throughput import Throughput
from manualpar.planner.hardware import Chip, Network
from manualpar.planner.roofline import estimate as estimate_step
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import Topology

PARTS = ("steps", "memory")
DEVICES = 8


class Case(NamedTuple):
    """A program whose estimate is compared with a measurement."""

    workload: str
    strategy: str
    batch_size: int
    num_minibatches: int

    @property
    def name(self) -> str:
        """The program's name in the table."""
        return (
            f"{self.workload}, {self.strategy}, batch {self.batch_size}, "
            f"{self.num_minibatches} minibatches"
        )


CASES = (
    Case("mlp", "dp", 128, 1),
    Case("mlp", "zero1", 128, 1),
    Case("mlp", "fsdp", 128, 1),
    Case("mlp", "hsdp", 128, 1),
    Case("mlp", "fsdp", 1024, 1),
    Case("mlp", "fsdp", 1024, 4),
    Case("mlp", "dp", 1024, 1),
    Case("classifier", "dp", 128, 1),
    Case("classifier", "fsdp", 128, 4),
    Case("classifier", "fsdp", 1024, 1),
    Case("lm", "dp", 32, 1),
    Case("lm", "fsdp", 32, 1),
    Case("lm-scanned", "fsdp", 32, 1),
    Case("lm-scanned", "fsdp", 8, 1),
    Case("lm-scanned", "zero1", 32, 1),
    Case("lm-scanned", "hsdp", 16, 2),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints and writes a report."""
    conditions = note_conditions("benchmarks.planner_accuracy", argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small models, to try the command")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    data: dict[str, Any] = {}
    lines = ["## How far the planner is off", "", conditions.sentence()]
    if "steps" in args.parts:
        cases = CASES[:2] if args.tiny else CASES
        more, data["steps"] = compare_steps(
            cases, rounds=args.rounds, steps=args.steps, is_tiny=args.tiny
        )
        lines += more
    if "memory" in args.parts:
        lines += compare_memory()
    print("\n".join(lines))
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)
    return 0


def compare_steps(
    cases: Sequence[Case], *, rounds: int, steps: int, is_tiny: bool
) -> tuple[list[str], dict[str, Any]]:
    """Returns the table of estimated and measured step times, and the same data for JSON."""
    chip = calibrate(size=256 if is_tiny else 1024)
    topology = Topology(chip, (DEVICES,))
    estimates: list[float] = []
    blocks: dict[str, Block] = {}
    for case in cases:
        program, batch = build(case, is_tiny=is_tiny)
        work = read_work(program, Throughput(case.batch_size))
        plan = estimate_step(work, topology)
        parts = (plan.compute_seconds, plan.exposed_seconds, plan.overlapped_seconds)
        estimates.append(sum(part or 0 for part in parts))
        blocks[case.name] = stepping(program, batch)
    timed = take_turns(blocks, steps=steps, rounds=rounds)
    measured = [estimate(seconds / steps for seconds in timed[case.name]) for case in cases]
    correlation = spearman(estimates, [each.median for each in measured])
    rows = [
        [
            case.name,
            f"{1e3 * guess:.2f}",
            seen.show(lambda x: f"{1e3 * x:.2f}"),
            f"{guess / seen.median:.2f}",
        ]
        for case, guess, seen in zip(cases, estimates, measured, strict=True)
    ]
    network = chip.network
    lines = [
        "",
        "### Against step times on simulated CPU devices",
        "",
        f"A device of {DEVICES}, all at work: {chip.flops['float32'] / 1e9:,.1f} GFLOP/s in "
        f"products, {chip.hbm_bandwidth / 1e9:,.1f} GB/s in copies, "
        f"{network.bandwidth / 1e9:,.2f} GB/s in a large all-gather, "
        f"{network.launch * 1e6:,.0f} µs for a tiny one; measured just before.",
        "",
        *table(["program", "estimate, ms", "measured, ms", "estimate / measured"], rows),
        "",
        f"Spearman's rank correlation over {len(cases)} programs: {correlation:.2f}. Measured: "
        "processor time of all threads over the number of cores, of every number here; its "
        f"median and 95% interval over {rounds} rounds of {steps} steps, in turn.",
    ]
    data = {
        "spearman": correlation,
        "chip": dataclasses.asdict(chip),
        "cases": [
            {**case._asdict(), "estimate_seconds": guess, "measured_seconds": seen._asdict()}
            for case, guess, seen in zip(cases, estimates, measured, strict=True)
        ],
    }
    return lines, data


def build(case: Case, *, is_tiny: bool = False) -> tuple[Program, Any]:
    """Builds a case's program on eight simulated devices, and its batch."""
    workload = make_workload(case.workload, is_tiny=is_tiny, batch_size=case.batch_size)
    groups = {"replica": 2} if case.strategy == "hsdp" else {}
    options: dict[str, Any] = {
        "mesh": make_mesh({**groups, "data": -1}),
        "batch": workload.abstract_batch,
        "num_minibatches": case.num_minibatches,
    }
    parts = workload.model, workload.tx, workload.loss_fn
    if case.strategy == "dp":
        return data_parallel(*parts, **options), workload.batch
    options["min_weight_size"] = workload.min_weight_size
    if case.strategy == "zero1":
        return zero(*parts, stage=1, **options), workload.batch
    builder = hsdp if case.strategy == "hsdp" else fsdp
    return builder(*parts, **options), workload.batch


def stepping(program: Program, batch: Any) -> Block:
    """Returns a function that runs a block of steps; the first step compiles."""
    state = program.init(jax.random.key(0))
    placed = jax.device_put(batch, program.batch_sharding)

    def run(steps: int) -> float:
        nonlocal state
        jax.block_until_ready(state)
        started = _clock()
        for _ in range(steps):
            state, _ = program.train_step(state, placed)
            jax.block_until_ready(state)
        return _clock() - started

    return run


def _clock() -> float:
    """Returns the processor seconds of this process divided by the number of cores."""
    return time.process_time() / len(os.sched_getaffinity(0))


def calibrate(*, size: int = 1024, repetitions: int = 7) -> Chip:
    """Describes a simulated device as a chip, from measurements on all devices at once.

    Args:
      size: The number of rows and columns of the matrix product. The copied arrays, and the results
        of the large all-gather, have `16 * size²` elements per device.
      repetitions: How often each measurement is repeated; the median is used.

    Returns:
      A chip named `cpu` in a node of eight, with efficiencies of 1.
    """
    mesh = make_mesh({"data": DEVICES})
    spread = PartitionSpec("data")

    def on_each(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
        """Returns the median seconds of a function that runs on all devices at once."""
        mapped = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=spread, check_vma=True)
        )
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spread))
        jax.block_until_ready(mapped(placed))
        seconds = []
        for _ in range(repetitions):
            started = _clock()
            jax.block_until_ready(mapped(placed))
            seconds.append(_clock() - started)
        return statistics.median(seconds)

    def gather(x: jax.Array) -> jax.Array:
        """Gathers over all devices, and reads one device's part of the result."""
        return gather_invariant(x, 0, ("data",))[: x.shape[0]] + x

    square = jnp.ones((DEVICES * size, size), jnp.float32)
    flat = jnp.ones((DEVICES * 16 * size * size,), jnp.float32)
    product = on_each(lambda x: x @ x.T, square)
    copied = on_each(lambda x: x + 1, flat)
    launch = on_each(gather, jnp.ones((DEVICES,), jnp.float32))
    gathered = on_each(gather, flat[: flat.size // DEVICES])
    share = flat.size // DEVICES * flat.dtype.itemsize
    sent = share / DEVICES * (DEVICES - 1)
    network = Network(
        kind="nodes",
        bandwidth=sent / max(gathered - launch, 1e-9),
        latency=0.0,
        launch=launch,
        slow_bandwidth=1.0,
        slow_latency=0.0,
        efficiency=1.0,
        node_size=DEVICES,
        names=("memory", "none"),
    )
    return Chip(
        name="cpu",
        device_kind="cpu",
        flops={"float32": 2 * size**3 / product},
        hbm_bytes=2**40,
        hbm_bandwidth=2 * share / copied,
        network=network,
        flops_efficiency=1.0,
        attention_efficiency=1.0,
        hbm_efficiency=1.0,
        clock=0.0,
        source="measured on this machine",
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Computes Spearman's rank correlation of values without ties; 1 for the same order."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (first, second)], float)
    return float(np.corrcoef(ranks)[0, 1])


def compare_memory() -> list[str]:
    """Returns the output of `benchmarks.planned_memory`."""
    command = [sys.executable, "-m", "benchmarks.planned_memory"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return ["", "### Against compiled memory", "", *printed.splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
