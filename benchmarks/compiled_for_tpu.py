"""Manual against auto for the same language model, compiled for TPUs by XLA's own compiler.

python -m benchmarks.compiled_for_tpu [--topologies v5e:4x4 v6e:4x4 v5p:2x2x4] [--programs ...]
    [--layers 8 --hidden_size 2048 --mlp_size 8192 --heads 16 --sequence_length 2048]
    [--processes 1] [--output FILE.md] [--json FILE.json] [--against FILE.json]

No TPU is needed, but libtpu is: `pip install "manualpar[tpu-compiler]"`. Nothing is timed: HBM,
collectives and cycles are read off the program that the compiler has made, and are the same in
every run with the same versions. Seconds are an estimate from those: the compiler's cycles by the
chip's clock, and ring bytes by the links' bandwidth for what it estimates no cycles for, see
`manualpar.planner.tpu_compiler`. The step is estimated twice: one collective at a time has all
links, or each link is by itself (`manualpar.planner.link_timeline`). A program takes the compiler
half a minute of a core, or more.

With `--against`, the exit code is 1 if a program needs over one percent more of anything than it
did in an earlier run's file.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from benchmarks.results import note_conditions, write_results
from manualpar.compiler_options import Overlap
from manualpar.planner.plan import Plan
from manualpar.planner.topology import parse_topology
from manualpar.planner.tpu_compiler import compile_for_tpu
from manualpar.training.config import load_config
from manualpar.training.task import SPLIT_AXIS

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "fsdp_lm.py"
TOPOLOGIES = ("v5e:4x4", "v6e:4x4", "v5p:2x2x4")
VOCAB_SIZE = 32_000
MIB = 2**20
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Variant:
    """A program that is compared.

    Attributes:
      mode: Its mode.
      overlap: Whether compiler options are chosen for the chip and the mesh.
      is_axis_by_axis: Whether a shard is scattered over one of two mesh axes after the other.
      num_split: How many chips layers are split over; 0 for none.
      sequence: Whether these chips split the positions between layers too.
    """

    mode: str
    overlap: Overlap = "auto"
    is_axis_by_axis: bool = False
    num_split: int = 0
    sequence: bool = False


PROGRAMS: Mapping[str, Variant] = {
    "manual, no options": Variant("manual", "none"),
    "manual": Variant("manual"),
    "auto": Variant("auto"),
    "auto, no options": Variant("auto", "none"),
    "auto-unconstrained": Variant("auto-unconstrained"),
    "manual, axis by axis": Variant("manual", is_axis_by_axis=True),
    "manual, axis by axis, no options": Variant("manual", "none", is_axis_by_axis=True),
    "manual, split over 4": Variant("manual", num_split=4),
    "manual, split over 4, sequence": Variant("manual", num_split=4, sequence=True),
    "manual, split over 4, sequence, no options": Variant(
        "manual", "none", num_split=4, sequence=True
    ),
    "auto, split over 4": Variant("auto", num_split=4),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one program; bytes are a chip's, seconds a step's.

    Attributes:
      topology: For what it was compiled.
      program: Its name.
      plan: The compiler's plan of it; `None` if there is none.
      error: Why there is none.
    """

    topology: str
    program: str
    plan: Plan | None
    error: str = ""

    def cells(self) -> list[str]:
        """The row of a table."""
        plan = self.plan
        if plan is None or not plan.fits:
            why = (self.error or " ".join(plan.notes if plan else ())).replace("|", "/")
            return [self.topology, self.program, why, *[""] * (len(HEADER) - 3)]
        return [
            self.topology,
            self.program,
            f"{plan.peak_bytes / 2**30:.2f}",
            f"{plan.bytes_sent / MIB:,.0f}",
            *(_sent(plan, kinds) for kinds in KINDS.values()),
            *(f"{(seconds or 0.0) * 1e3:,.1f}" for seconds in _seconds(plan)),
            f"{plan.mfu or 0:.1%}",
        ]

    def figures(self) -> dict[str, float]:
        """What must not grow."""
        if self.plan is None or not self.plan.fits:
            return {}
        plan = self.plan
        compute, exposed, _, step, by_links = (seconds or 0.0 for seconds in _seconds(plan))
        return {
            "peak_bytes": plan.peak_bytes,
            "bytes_sent": plan.bytes_sent,
            "compute_seconds": compute,
            "exposed_seconds": exposed,
            "step_seconds": step,
            "step_seconds_by_links": by_links,
        }


KINDS: Mapping[str, tuple[str, ...]] = {
    "all-gathers": ("all_gather",),
    "reduce-scatters": ("reduce_scatter",),
    "all-reduces": ("all_reduce",),
    "others": ("permute", "all_to_all"),
}
HEADER = (
    *("topology", "program", "HBM GiB", "sent MiB"),
    *(f"{kind} MiB (asynchronous)" for kind in KINDS),
    *("compute ms", "exposed ms", "overlapped ms", "step ms", "by links ms", "MFU"),
)


def _sent(plan: Plan, kinds: Sequence[str]) -> str:
    """MiB sent by collectives of these kinds, and what share of that is asynchronous."""
    chosen = [each for each in plan.collectives if each.kind in kinds]
    total = sum(each.bytes_sent for each in chosen)
    is_async = sum(each.bytes_sent for each in chosen if each.is_async)
    return f"{total / MIB:,.0f} ({is_async / total:.0%})" if total else "0"


def _seconds(plan: Plan) -> tuple[float | None, ...]:
    """Compute, exposed and overlapped communication, the step, and the step by links."""
    sending = plan.exposed_seconds, plan.overlapped_seconds
    return plan.compute_seconds, *sending, plan.step_seconds, plan.step_seconds_by_links


def make_config(args: argparse.Namespace, topology: str, variant: Variant) -> Any:
    """The config of one program: one sequence a chip, FSDP, all of a layer computed again."""
    config = ml_collections.ConfigDict(load_config(CONFIG).to_dict())
    shape = parse_topology(topology)
    config.data.sequence_length = args.sequence_length
    config.data.batch_size = shape.num_devices
    config.model.num_layers, config.model.scan_layers = args.layers, True
    config.model.hidden_size, config.model.mlp_size = args.hidden_size, args.mlp_size
    config.model.num_heads = config.model.num_kv_heads = args.heads
    config.model.remat = "full"
    config.parallel.mode = variant.mode
    config.parallel.overlap = variant.overlap
    config.parallel.gather_dtype = "bfloat16"
    config.parallel.min_weight_size = 2**14
    if variant.is_axis_by_axis:
        minor = shape.shape[-1]
        sizes = {"data": shape.num_devices // minor, "data_minor": minor}
        config.parallel.mesh = ml_collections.ConfigDict(sizes)
        config.parallel.axis_by_axis = True
    if variant.num_split:
        sizes = {"data": shape.num_devices // variant.num_split, SPLIT_AXIS: variant.num_split}
        config.parallel.mesh = ml_collections.ConfigDict(sizes)
        config.parallel.sequence = variant.sequence
    return config.lock()


def compile_row(args: argparse.Namespace, topology: str, name: str) -> Row:
    """Compiles one program; what cannot be compiled says why in its row."""
    variant = PROGRAMS[name]
    try:
        plan = compile_for_tpu(
            make_config(args, topology, variant),
            topology,
            vocab_size=VOCAB_SIZE,
        )
    except ValueError as error:
        return Row(topology, name, None, str(error))
    return Row(topology, name, plan)


def grown(rows: Sequence[Row], before: Mapping[str, Any]) -> list[str]:
    """What has grown since an earlier run, in sentences."""
    known = {(row["topology"], row["program"]): row["figures"] for row in before["rows"]}
    sentences = []
    for row in rows:
        then, now = known.get((row.topology, row.program)), row.figures()
        if then and not now:
            sentences.append(f"{row.topology}, {row.program}: it no longer compiles: {row.error}")
        sentences += [
            f"{row.topology}, {row.program}: {name} is {now[name]:,.6g}, was {then[name]:,.6g}."
            for name in now
            if then and name in then and now[name] > then[name] * (1 + TOLERANCE)
        ]
    return sentences


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints the table, writes it, compares it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    for name, default in (
        ("layers", 8),
        ("hidden_size", 2048),
        ("mlp_size", 8192),
        ("heads", 16),
        ("sequence_length", 2048),
        ("processes", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("output", "json", "against"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.compiled_for_tpu", argv)
    shape = (
        f"L={args.layers}, D={args.hidden_size}, F={args.mlp_size}, {args.heads} heads, "
        f"V={VOCAB_SIZE:,}, one sequence of {args.sequence_length:,} a chip"
    )
    lines = [f"## Compiled for TPU: {shape}", "", f"FSDP; {conditions.sentence()}", ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    pairs = [(topology, name) for topology in args.topologies for name in args.programs]
    rows: list[Row] = []
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        for row in pool.map(lambda pair: compile_row(args, *pair), pairs):
            rows.append(row)
            lines.append(f"| {' | '.join(row.cells())} |")
            print(lines[-1], flush=True)
    data = {
        "shape": shape,
        "rows": [
            {
                "topology": row.topology,
                "program": row.program,
                "figures": row.figures(),
                "error": row.error,
                "plan": row.plan.to_json() if row.plan else None,
            }
            for row in rows
        ],
    }
    write_results(conditions, lines=lines, data=data, output=args.output, json_output=args.json)
    if not args.against:
        return 0
    sentences = grown(rows, json.loads(args.against.read_text(encoding="utf-8")))
    print("\n".join(sentences or ["Nothing needs more than it did."]))
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
