"""Compares modes `manual` and `auto` for a language model, compiled by XLA for TPUs or GPUs.

python -m benchmarks.compiled_for_chips [--topologies v5e:4x4 h100:8 ...] [--programs ...]
    [--layouts fsdp hsdp ...] [--shapes 8x2048 7b] [--remat auto] [--processes 1]
    [--output FILE.md] [--json FILE.json] [--against FILE.json]

No TPU and no GPU is needed, but a compiler is: `pip install "manualpar[tpu-compiler]"` or
`"manualpar[gpu-compiler]"`. Nothing is timed: HBM, collectives and cycles are read from the
compiled program, and are the same in every run with the same versions. Compute seconds are the
estimates of the compiler for a TPU, and for a GPU those of `manualpar.planner.compiled_plan`. The
seconds of a collective are the bytes that rings send divided by the links' bandwidth. The seconds
of a step are estimated twice for a TPU: if one collective at a time uses all links, and with a
separate model of each link (`manualpar.planner.compiled_plan`). Compiling a program takes half a
minute on one core, or more.

`--against` names the `--json` file of an earlier run. The exit code is 1 if any figure of a program
has grown by more than one percent since that run.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections

from benchmarks.results import note_conditions, write_results
from manualpar.core.mesh.compiler_options import Overlap, choose_options
from manualpar.models.transformer import REMATS
from manualpar.planner.hardware import chip_named
from manualpar.planner.plan import StepEstimate
from manualpar.planner.topology import parse_topology
from manualpar.plans.gpu_compiler import compile_for_gpu
from manualpar.plans.tpu_compiler import compile_for_tpu
from manualpar.training.config import load_config
from manualpar.training.task import CONTEXT_AXIS, EXPERT_AXIS, SPLIT_AXIS, STAGE_AXIS

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "fsdp_lm.py"
TOPOLOGIES = ("v5e:4x4", "v5e:2x4", "v6e:4x4", "v5p:2x2x4")
VOCAB_SIZE = 32_000
MIB = 2**20
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a language model."""

    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    sequence_length: int = 2048

    def __str__(self) -> str:
        return (
            f"L={self.layers}, D={self.hidden_size:,}, F={self.mlp_size:,}, {self.heads} heads, "
            f"V={VOCAB_SIZE:,}, one sequence of {self.sequence_length:,} a chip (zero2: two)"
        )


SHAPES: Mapping[str, Shape] = {
    "8x2048": Shape(8, 2048, 8192, 16),
    "7b": Shape(32, 4096, 11008, 32),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step is divided over the devices.

    Attributes:
      axes: The mesh axes beside `data`, with their sizes.
      fields: Other fields of the config, by name.
      is_axis_by_axis: Whether gradients are scattered over two mesh axes, one after the other.
      sequences: The number of sequences in a batch for each chip.
    """

    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_axis_by_axis: bool = False
    sequences: int = 1


_EXPERTS = {"model.num_experts": 8, "model.mlp_size": 2048}
_FLOAT8 = {"model.matmul": "float8"}
_CODES = {**_FLOAT8, "parallel.gather_code": "float8"}
LAYOUTS: Mapping[str, Layout] = {
    "fsdp": Layout(),
    "fsdp, float8": Layout(fields=_FLOAT8),
    "fsdp, float8 codes": Layout(fields=_CODES),
    "axis by axis": Layout(is_axis_by_axis=True),
    "dp": Layout(fields={"parallel.strategy": "dp"}),
    "zero1": Layout(fields={"parallel.strategy": "zero1"}),
    "zero2": Layout(
        fields={"parallel.strategy": "zero2", "optimizer.num_minibatches": 2}, sequences=2
    ),
    "hsdp": Layout({"replica": 2}, {"parallel.strategy": "hsdp"}),
    # Only mode manual has it: the mean over replicas in the backward pass.
    "hsdp, mean inside": Layout(
        {"replica": 2}, {"parallel.strategy": "hsdp", "parallel.replica_mean": "backward"}
    ),
    "split over 4": Layout({SPLIT_AXIS: 4}),
    "split over 4, sequence": Layout({SPLIT_AXIS: 4}, {"parallel.sequence": True}),
    "split over 4, sequence, float8 codes": Layout(
        {SPLIT_AXIS: 4}, {"parallel.sequence": True, **_CODES}
    ),
    "split over 4, dual batch": Layout({SPLIT_AXIS: 4}, {"parallel.layer_overlap": "dual_batch"}),
    "split over 4, sequence, dual batch": Layout(
        {SPLIT_AXIS: 4}, {"parallel.sequence": True, "parallel.layer_overlap": "dual_batch"}
    ),
    "split over 4, ring": Layout(
        {SPLIT_AXIS: 4}, {"parallel.sequence": True, "parallel.layer_overlap": "ring"}
    ),
    "experts over 4": Layout({EXPERT_AXIS: 4}, _EXPERTS),
    "experts over 4, no capacity": Layout(
        {EXPERT_AXIS: 4}, {**_EXPERTS, "model.capacity_factor": 0.0}
    ),
    "4 stages": Layout(
        {STAGE_AXIS: 4},
        {"optimizer.num_minibatches": 4, "parallel.communicate_every": "step"},
    ),
    "context over 4": Layout({CONTEXT_AXIS: 4}),
    "context over 4, ring": Layout({CONTEXT_AXIS: 4}, {"parallel.context_attention": "ring"}),
    "context over 4, ulysses": Layout({CONTEXT_AXIS: 4}, {"parallel.context_attention": "ulysses"}),
}
REFERENCE = "auto"


class Variant(NamedTuple):
    """A program's mode and compiler options.

    Attributes:
      mode: The mode.
      overlap: Whether compiler options are chosen for the chip and the mesh.
      is_given_all: Whether all options are passed that make mode `auto` faster on GPUs, on any
        mesh. TPUs have no such options.
    """

    mode: str
    overlap: Overlap = "auto"
    is_given_all: bool = False


PROGRAMS: Mapping[str, Variant] = {
    REFERENCE: Variant("auto"),
    "manual": Variant("manual"),
    "manual, no options": Variant("manual", "none"),
    "auto, no options": Variant("auto", "none"),
    "auto, all options": Variant("auto", "none", is_given_all=True),
    "explicit": Variant("explicit"),
    "auto-unconstrained": Variant("auto-unconstrained"),
}
# The options that `overlap="auto"` has for a single axis of GPUs.
ALL_OPTIONS = choose_options(chip_named("h100").device_kind, [8]).options
COMPARED = ("auto", "manual", "manual, no options")


@dataclasses.dataclass(frozen=True)
class Row:
    """The results for one program: bytes per chip, and seconds per step.

    Attributes:
      shape: The name of the model, a key of `SHAPES`.
      topology: The topology for which the program was compiled.
      layout: How it is divided over the devices, a key of `LAYOUTS`.
      program: The program's name, a key of `PROGRAMS`.
      plan: The estimate from the compiled program; `None` if it could not be compiled.
      error: Why it could not be compiled, or "".
    """

    shape: str
    topology: str
    layout: str
    program: str
    plan: StepEstimate | None
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the row is of."""
        return self.shape, self.topology, self.layout, self.program

    def cells(self, reference: "Row | None" = None) -> list[str]:
        """Returns a table row, with step times relative to the row `reference`."""
        plan, names = self.plan, [*self.key]
        if plan is None or not plan.fits:
            why = (self.error or " ".join(plan.notes if plan else ())).replace("|", "/")
            return [*names, why, *[""] * (len(HEADER) - 5)]
        return [
            *names,
            f"{plan.peak_bytes / 2**30:.2f}",
            f"{plan.memory['temporaries'] / MIB:,.0f}",
            f"{plan.bytes_sent / MIB:,.0f}",
            *(_sent(plan, kinds) for kinds in KINDS.values()),
            *(f"{(seconds or 0.0) * 1e3:,.1f}" for seconds in _seconds(plan)),
            f"{plan.mfu or 0:.1%}",
            self._compared(reference),
        ]

    def _compared(self, reference: "Row | None") -> str:
        """Returns both estimates of the step time, divided by those of `reference`."""
        mine, others = self.figures(), reference.figures() if reference else {}
        names = ("step_seconds", "step_seconds_by_links")
        return " / ".join(f"{mine[name] / others[name]:.3f}" for name in names if others.get(name))

    def figures(self) -> dict[str, float]:
        """Returns the figures that `--against` compares, by name; none if the step does not fit."""
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
    *("model", "topology", "layout", "program", "HBM GiB", "temporaries MiB", "sent MiB"),
    *(f"{kind} MiB (asynchronous)" for kind in KINDS),
    *("compute ms", "exposed ms", "overlapped ms", "step ms", "by links ms", "MFU"),
    f"of {REFERENCE}, both",
)


def _sent(plan: StepEstimate, kinds: Sequence[str]) -> str:
    """Returns the MiB that collectives of these kinds send, and the share sent asynchronously."""
    chosen = [each for each in plan.collectives if each.kind in kinds]
    total = sum(each.bytes_sent for each in chosen)
    is_async = sum(each.bytes_sent for each in chosen if each.is_async)
    return f"{total / MIB:,.0f} ({is_async / total:.0%})" if total else "0"


def _seconds(plan: StepEstimate) -> tuple[float | None, ...]:
    """Returns seconds: compute, exposed and overlapped communication, the step's two estimates."""
    sending = plan.exposed_seconds, plan.overlapped_seconds
    return plan.compute_seconds, *sending, plan.step_seconds, plan.step_seconds_by_links


def make_config(
    shape: Shape, topology: str, layout: Layout, variant: Variant, remat: str = "auto"
) -> Any:
    """Makes the config of one program, whose layers run in a loop if `remat` does not unroll it."""
    config = ml_collections.ConfigDict(load_config(CONFIG).to_dict())
    devices = parse_topology(topology)
    config.data.sequence_length = shape.sequence_length
    config.data.batch_size = devices.num_devices * layout.sequences
    config.model.num_layers, config.model.scan_layers = shape.layers, True
    config.model.hidden_size, config.model.mlp_size = shape.hidden_size, shape.mlp_size
    config.model.num_heads = config.model.num_kv_heads = shape.heads
    config.model.remat = remat
    config.parallel.mode = variant.mode
    config.parallel.overlap = variant.overlap
    config.parallel.gather_dtype = "bfloat16"
    config.parallel.min_weight_size = 2**18  # The builders' default: norms are not sharded.
    axes = {"data_minor": devices.shape[-1]} if layout.is_axis_by_axis else dict(layout.axes)
    config.parallel.axis_by_axis = layout.is_axis_by_axis
    if axes:
        sizes = {"data": devices.num_devices // math.prod(axes.values()), **axes}
        config.parallel.mesh = ml_collections.ConfigDict(sizes)
    config.update_from_flattened_dict(layout.fields)
    return config.lock()


def compile_row(shape: str, topology: str, layout: str, program: str, remat: str = "auto") -> Row:
    """Compiles one program; if that fails, the row contains the reason."""
    is_tpu, variant = parse_topology(topology).chip.is_tpu, PROGRAMS[program]
    compile_step = compile_for_tpu if is_tpu else compile_for_gpu
    options = ALL_OPTIONS if variant.is_given_all and not is_tpu else None
    try:
        config = make_config(SHAPES[shape], topology, LAYOUTS[layout], variant, remat)
        plan = compile_step(config, topology, options=options, vocab_size=VOCAB_SIZE)
    except ValueError as error:
        return Row(shape, topology, layout, program, None, str(error))
    return Row(shape, topology, layout, program, plan)


def grown(rows: Sequence[Row], before: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each figure that has grown since the earlier run `before`."""
    known = {
        (row["shape"], row["topology"], row["layout"], row["program"]): row["figures"]
        for row in before["rows"]
    }
    sentences = []
    for row in rows:
        then, now = known.get(row.key), row.figures()
        name_of_row = ", ".join(row.key)
        if then and not now:
            sentences.append(f"{name_of_row}: it no longer compiles: {row.error}")
        sentences += [
            f"{name_of_row}: {name} is {now[name]:,.6g}, was {then[name]:,.6g}."
            for name in now
            if then and name in then and now[name] > then[name] * (1 + TOLERANCE)
        ]
    return sentences


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the programs; prints, writes and compares the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["fsdp"])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(COMPARED))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8x2048"])
    parser.add_argument("--remat", choices=REMATS, default="auto")
    parser.add_argument("--processes", type=int, default=1)
    for name in ("output", "json", "against"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.compiled_for_chips", argv)
    lines = ["## Compiled without devices", "", f"{conditions.sentence()}", ""]
    lines += [*(f"- {name}: {SHAPES[name]}" for name in args.shapes), ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADER, ["---"] * len(HEADER))]
    print("\n".join(lines), flush=True)
    wanted = list(itertools.product(args.shapes, args.topologies, args.layouts, args.programs))
    rows: list[Row] = []
    references: dict[tuple[str, ...], Row] = {}
    compile_one = functools.partial(compile_row, remat=args.remat)
    with concurrent.futures.ThreadPoolExecutor(args.processes) as pool:
        for row in pool.map(compile_one, *zip(*wanted, strict=True)):
            rows.append(row)
            if row.program == REFERENCE:
                references[row.key[:-1]] = row
            reference = references.get(row.key[:-1])
            lines.append(f"| {' | '.join(row.cells(reference))} |")
            print(lines[-1], flush=True)
    data = {
        "rows": [
            {
                "shape": row.shape,
                "topology": row.topology,
                "layout": row.layout,
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
    print("\n".join(sentences or ["No figure has grown."]))
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
