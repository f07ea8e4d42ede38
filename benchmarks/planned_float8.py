"""Compares planned steps of Llama 3 in bfloat16 and float8 with torchtitan's published speeds.

python -m benchmarks.planned_float8 [--rows 8b 70b] [--output FILE.md] [--json FILE.json]

Each row is a run of torchtitan on H100s of 500 W (`PUBLISHED`). Its config is traced here in
bfloat16, with products in float8, and with gathers in float8 too, and the planner estimates the
steps (`manualpar.planner.roofline`). Nothing is compiled or timed. The planner's share of the peak
of products in bfloat16 is fitted to torchtitan's speed in bfloat16 (`benchmarks.calibration`); the
gain of float8, and what XLA takes to round and to transpose codes, are measured on an H200
(`benchmarks.measured_kernels`). So the gain is predicted. It is also predicted without the
transpositions, which a kernel that rounds and transposes at once would save.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections

from benchmarks.published_rows import TORCHTITAN
from benchmarks.results import note_conditions, write_results
from manualpar.planner.plan import StepEstimate
from manualpar.planner.roofline import estimate
from manualpar.planner.topology import parse_topology
from manualpar.plans.planned_experiment import planned_task
from manualpar.plans.sweep import Builder, Candidate
from manualpar.training.config import complete_config, named_config

VOCAB_SIZE = 128_256
ASYNC_TP = (
    "https://github.com/pytorch/torchtitan/blob/5ecb74e54b8d28abf605a248b7dec5f1876b08d8/"
    "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
)


class Published(NamedTuple):
    """A run that torchtitan published.

    Attributes:
      config: The config of the model.
      topology: The topology.
      mesh: The mesh; the products of layers are split over `model`, and sequences between them.
      batch_size: The sequences of a step, each of 8,192 tokens.
      remat: What is computed again here. torchtitan's `selective` keeps every second layer.
      bfloat16: Tokens a second of a device in bfloat16; 0 if they are not published.
      float8: The same in float8.
      source: Where they are published.
    """

    config: str
    topology: str
    mesh: Mapping[str, int]
    batch_size: int
    remat: str
    bfloat16: float
    float8: float
    source: str


PUBLISHED: Mapping[str, Published] = {
    "8b": Published(
        "plan/llama3_8b",
        "h100-500w:8",
        {"data": 8},
        16,
        "dots",
        6667,
        8532,
        f"{TORCHTITAN}, table 1",
    ),
    "8b, 128 devices": Published(
        "plan/llama3_8b",
        "h100-500w:16x8",
        {"data": 128},
        256,
        "dots",
        6514,
        8380,
        f"{TORCHTITAN}, table 3",
    ),
    "70b": Published(
        "plan/llama3_70b",
        "h100-500w:32x8",
        {"data": 32, "model": 8},
        512,
        "full",
        0,
        829,
        f"{TORCHTITAN}, table 4",
    ),
}
# The fields of each recipe.
RECIPES: Mapping[str, Mapping[str, str]] = {
    "bfloat16": {},
    "float8": {"model.matmul": "float8"},
    "float8, gathers too": {"model.matmul": "float8", "parallel.gather_code": "float8"},
}


def planned(row: Published, recipe: str) -> tuple[StepEstimate, StepEstimate]:
    """Plans a row in a recipe, with and without transpositions of codes."""
    config = ml_collections.ConfigDict(named_config(row.config).to_dict())
    config.data.batch_size = row.batch_size
    config.model.dtype = "bfloat16"
    config.parallel.sequence = "model" in row.mesh
    config.parallel.mesh = ml_collections.ConfigDict(dict(row.mesh))
    config.update_from_flattened_dict(dict(RECIPES[recipe]))
    config = complete_config(config)
    builder = Builder(config, planned_task(config, VOCAB_SIZE))
    candidate = Candidate("fsdp", row.mesh, 1, row.remat, "bfloat16")
    topology = parse_topology(row.topology)
    work = builder.read(candidate, topology)
    kept = [x for x in work.products if x.change != "transposed"]
    without = dataclasses.replace(work, products=tuple(kept))
    return estimate(work, topology), estimate(without, topology)


def figures_of(plan: StepEstimate, without: StepEstimate) -> dict[str, Any]:
    """Returns the figures of a plan, and the speed of a plan `without` transpositions."""
    seconds = {
        name: getattr(plan, name) for name in ("step_seconds", "compute_seconds", "exposed_seconds")
    }
    speed, not_transposed = ((x.tokens_per_second or 0.0) / x.num_devices for x in (plan, without))
    sent = sum(x.bytes_sent for x in plan.collectives)
    speeds = {"tokens_per_second": speed, "without_transpositions": not_transposed}
    return {**seconds, **speeds, "bytes_sent": sent, "fits": plan.fits}


def main(argv: Sequence[str] | None = None) -> int:
    """Plans each row in each recipe, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.planned_float8", argv)
    lines = ["## Llama 3 in float8, planned", "", conditions.sentence(), ""]
    header = ("model", "mesh", "products", "step s", "tokens/s", "gain", "not transposed")
    lines.append(f"| {' | '.join((*header, 'published', 'gain'))} |")
    lines.append(f"| --- | --- | --- | {' | '.join(['---:'] * 6)} |")
    print("\n".join(lines), flush=True)
    data: list[dict[str, Any]] = []
    for name in args.rows:
        row = PUBLISHED[name]
        found = {recipe: figures_of(*planned(row, recipe)) for recipe in RECIPES}
        first = found["bfloat16"]["tokens_per_second"]
        mesh = " x ".join(f"{axis}={size}" for axis, size in row.mesh.items())
        for recipe, x in found.items():
            is_exact, is_last = recipe == "bfloat16", recipe == list(RECIPES)[-1]
            speed = row.bfloat16 if is_exact else row.float8 if is_last else 0
            gain = speed / row.bfloat16 if speed and row.bfloat16 and is_last else 0
            cells = [name, mesh, recipe, f"{x['step_seconds']:.3f}"]
            cells += [f"{x['tokens_per_second']:,.0f}", f"{x['tokens_per_second'] / first:.2f}"]
            cells += [f"{x['without_transpositions'] / first:.2f}" if not is_exact else ""]
            cells += [f"{speed:,.0f}" if speed else "", f"{gain:.2f}" if gain else ""]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        data.append({"row": name, **row._asdict(), "planned": found})
    write_results(
        conditions, lines=lines, data={"rows": data}, output=args.output, json_output=args.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
