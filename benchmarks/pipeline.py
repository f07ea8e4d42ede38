"""A pipeline against FSDP alone: its bubble, its memory, its time, and its hops on TPUs.

python -m benchmarks.pipeline [--parts tables memory time tpu]
    [--layers 8 --hidden_size 64 --mlp_size 256 --sequence_length 64]
    [--microbatch 4 --microbatches 8 16 32] [--rounds 9] [--steps 1]
    [--topology v5e:4x4] [--output FILE.md] [--json FILE.json]

Each part writes a section of its own. All train a scanned Transformer on random tokens, in float32
on eight simulated CPU devices, 2 x 4 (data, stage), with a step's tokens cut into M microbatches.

- `tables`: bubble and slots of the schedules' tables beside their closed forms.
- `memory`: the temporaries of compiled steps for several M, and how much one more microbatch adds,
  beside the bytes of its slots in the traced step.
- `time`: processor time, that of all threads together. A device that idles leaves the processor to
  others, so there is no bubble in it: against FSDP on the same tokens it is the overhead of the
  executor. Programs that lack something say what the overhead consists of.
- `tpu`: what XLA's TPU compiler does between the start and the end of a permute over `stage`. It
  needs libtpu (`pip install "manualpar[tpu-compiler]"`), and minutes for each program.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import optax

from benchmarks.compiled_steps import CompiledStep, of_program
from benchmarks.pipeline_hops import TPU_VOCAB_SIZE, measure_hops
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import Estimate, estimate, ratios, table, take_turns
from manualpar import Batch, Pipeline, fsdp, make_mesh
from manualpar.core.program.program import Program
from manualpar.core.tracing.jaxprs import all_equations, scan_sizes
from manualpar.inspect import ledger
from manualpar.layers.pipeline.schedules import make_table
from manualpar.models import Transformer
from manualpar.models.cross_entropy import language_model_loss
from manualpar.training.devices import simulate_devices

PARTS = ("tables", "memory", "time", "tpu")
DATA, STAGES, DEVICES = 2, 4, 8
KIB, MIB = 2**10, 2**20
VOCAB_SIZE = 256


class Variant(NamedTuple):
    """A program.

    Attributes:
      mesh: The sizes of its mesh's axes.
      pipeline: The pipeline, if it is one.
      options: More options of `fsdp`.
      has_hops: Whether stages send; without, what it computes is wrong and takes as long.
    """

    mesh: Mapping[str, int]
    pipeline: Pipeline | None = None
    options: Mapping[str, Any] = {}
    has_hops: bool = True


MESH = {"data": DATA, "stage": STAGES}
ONCE = {"communicate_every": "step"}
FSDP, PAIR, PIPELINE = "FSDP on 8", "FSDP on 2", "1f1b"
PROGRAMS: Mapping[str, Variant] = {
    FSDP: Variant({"data": DEVICES}, options={"use_scan": True}),
    PAIR: Variant({"data": DATA}, options={"use_scan": True}),
    "1f1b, one stage": Variant({"data": DATA, "stage": 1}, Pipeline()),
    "1f1b, no hops": Variant(MESH, Pipeline(), has_hops=False),
    PIPELINE: Variant(MESH, Pipeline()),
    "1f1b, once a step": Variant(MESH, Pipeline(), ONCE),
    "FSDP on 8, once a step": Variant({"data": DEVICES}, options={"use_scan": True, **ONCE}),
    "1f1b, inputs": Variant(MESH, Pipeline(keep="inputs")),
    "1f1b, chunks=2": Variant(MESH, Pipeline(chunks=2)),
    "gpipe": Variant(MESH, Pipeline(schedule="gpipe")),
    "gpipe, inputs": Variant(MESH, Pipeline(schedule="gpipe", keep="inputs")),
}
IN_MEMORY = (FSDP, PIPELINE, "1f1b, inputs", "1f1b, chunks=2", "gpipe", "gpipe, inputs")
IN_TIME = tuple(name for name in PROGRAMS if not name.startswith("gpipe"))


def make_batch(args: argparse.Namespace, microbatches: int) -> Batch:
    """Random tokens, `microbatch` sequences a device of a pipeline's `data` and microbatch."""
    shape = (DATA * args.microbatch * microbatches, args.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, shape).astype(np.int32)
    return Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:])


def build(args: argparse.Namespace, variant: Variant, microbatches: int) -> Program:
    """One of `PROGRAMS`."""
    model = Transformer(
        vocab_size=VOCAB_SIZE,
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        mlp_size=args.mlp_size,
        num_heads=4,
        scan_layers=True,
    )
    options: dict[str, Any] = dict(variant.options)
    if variant.pipeline:
        options["pipeline"] = variant.pipeline
    return fsdp(
        model,
        optax.sgd(0.1),
        language_model_loss,
        mesh=make_mesh(variant.mesh, jax.devices()[: math.prod(variant.mesh.values())]),
        batch=make_batch(args, microbatches),
        num_minibatches=microbatches,
        min_weight_size=2**10,
        **options,
    )


def measure_tables(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Tables beside closed forms."""
    lines, data = [], []
    for chunks in (1, 2, 4):
        for number in args.microbatches:
            bubble = (STAGES - 1) / (chunks * number + STAGES - 1)
            for schedule in ("1f1b", "gpipe"):
                found = make_table(schedule, STAGES, number, chunks)
                row = {
                    "schedule": schedule,
                    "chunks": chunks,
                    "microbatches": number,
                    "ticks": found.num_ticks,
                    "bubble": found.bubble,
                    "closed_form": bubble,
                    "slots": [found.activation_slots, found.gradient_slots],
                }
                data.append(row)
                slots = "{} and {}".format(*row["slots"])
                lines.append(
                    [schedule, f"{chunks}", f"{number}", f"{found.num_ticks}"]
                    + [f"{share:.2%}" for share in (found.bubble, bubble)]
                    + [slots]
                )
    header = ("schedule", "chunks", "M", "ticks", "bubble", "(S-1)/(vM+S-1)", "slots")
    return table(header, lines), data


def carried_bytes(jaxpr: Any, turns: int) -> int:
    """The bytes that the largest scan of so many turns carries: slots, and sums of gradients."""
    found = [0]
    for eqn in all_equations(jaxpr):
        if eqn.primitive.name == "scan" and eqn.params["length"] == turns:
            first, number = scan_sizes(eqn.params)
            carry = (v.aval for v in eqn.invars[first : first + number])
            found.append(sum(math.prod(t.shape) * t.dtype.itemsize for t in carry))
    return max(found)


@dataclasses.dataclass(frozen=True)
class Memory:
    """A program's memory, bytes on a device by the number of microbatches.

    Attributes:
      temporaries: What the compiled step holds besides its arguments and results.
      carried: What the scan of a pipeline's ticks carries.
    """

    program: str
    temporaries: Mapping[int, int]
    carried: Mapping[int, int]


def slope(values: Mapping[int, int]) -> float | None:
    """What one more microbatch adds; `None` with a single number of them."""
    few, many = min(values), max(values)
    return (values[many] - values[few]) / (many - few) if many > few else None


def measure_memory(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Temporaries of compiled steps, and what one more microbatch adds to them."""
    rows, cells = [], []
    for name in IN_MEMORY:
        variant, temporaries, carried = PROGRAMS[name], {}, {}
        # GPipe's grow by the same for every microbatch, so that two numbers of them will do.
        for number in args.microbatches if name in (PIPELINE, FSDP) else args.microbatches[:2]:
            program = build(args, variant, number)
            traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
            if variant.pipeline:
                run = make_table(variant.pipeline.schedule, STAGES, number, variant.pipeline.chunks)
                carried[number] = carried_bytes(traced.jaxpr.jaxpr, run.num_ticks)
            analysis = traced.lower().compile().memory_analysis()
            temporaries[number] = analysis.temp_size_in_bytes
            _say(f"{name}, {number} microbatches: {temporaries[number] / KIB:,.1f} KiB")
        row = Memory(name, temporaries, carried)
        rows.append(row)
        grows, slots = slope(temporaries), slope(carried) if carried else None
        cells.append(
            [name]
            + [_kib(temporaries.get(number)) for number in args.microbatches]
            + [_kib(grows), _kib(slots)]
        )
    size = args.microbatch * args.sequence_length * args.hidden_size * 4
    header = ("KiB", *(f"M = {number}" for number in args.microbatches), "a microbatch adds")
    sentence = (
        f"An activation between stages has {_kib(size)} KiB. A microbatch of GPipe has one slot "
        "for its input, one for a gradient, and with `residuals` what autodiff keeps."
    )
    lines = [*table((*header, "its slots, traced"), cells), "", sentence]
    return lines, [dataclasses.asdict(row) for row in rows]


def count_flops(program: Program) -> int:
    """The floating point operations of a step, on all devices together."""
    stages = program.mesh.shape.get("stage", 1)
    counts = [ledger(program, stage=stage).total_flops for stage in range(stages)]
    return sum(counts) * program.mesh.size // stages


def compile_variant(args: argparse.Namespace, variant: Variant) -> tuple[CompiledStep, int]:
    """A step, ready to be timed, and its floating point operations."""
    number = args.microbatches[0]
    program = build(args, variant, number)
    flops = count_flops(program)
    if variant.has_hops:
        return of_program(program, make_batch(args, number)), flops
    jax.clear_caches()  # Two equal steps are traced once.
    with mock.patch.object(jax.lax, "ppermute", lambda x, *_: x):
        step = of_program(build(args, variant, number), make_batch(args, number))
    jax.clear_caches()
    return step, flops


def processor_time(step: CompiledStep) -> Callable[[int], float]:
    """A block of steps that returns the seconds of all threads of this process."""

    def block(steps: int) -> float:
        started = time.process_time()
        step.block(steps)
        return time.process_time() - started

    return block


def measure_time(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Processor time of steps, in parts of FSDP's in the same rounds."""
    steps, flops = {}, {}
    for name in IN_TIME:
        steps[name], flops[name] = compile_variant(args, PROGRAMS[name])
        _say(f"{name}, compiled in {steps[name].counts.compile_seconds:.1f} s")
    blocks = {name: processor_time(step) for name, step in steps.items()}
    taken = take_turns(blocks, steps=args.steps, rounds=args.rounds)

    def against(name: str, base: str) -> Estimate:
        return estimate(ratios(taken[name], taken[base]))

    lines, data = [], []
    for name in IN_TIME:
        compared = [against(name, base) for base in (FSDP, PAIR, PIPELINE)]
        median = statistics.median(taken[name]) / args.steps
        lines.append(
            [name, f"{flops[name] / 1e9:.2f}", f"{1e3 * median:,.0f}"]
            + [each.show("{:.3f}".format) for each in compared]
        )
        data.append(
            {
                "program": name,
                "flops": flops[name],
                "seconds": [seconds / args.steps for seconds in taken[name]],
                "ratios": [each._asdict() for each in compared],
            }
        )
    header = ("", "GFLOP a step", "processor ms", *(f"of {x}" for x in (FSDP, PAIR, PIPELINE)))
    return table(header, lines), data


HEADINGS: Mapping[str, str] = {
    "tables": "Pipelines: tables against closed forms",
    "memory": "Pipelines: temporaries",
    "time": "Pipelines: processor time against FSDP",
    "tpu": "Pipelines: hops compiled for TPU",
}


def _kib(size: float | None) -> str:
    return "" if size is None else f"{size / KIB:,.1f}"


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


MEASURES: Mapping[str, Callable[[argparse.Namespace], tuple[list[str], Any]]] = {
    "tables": measure_tables,
    "memory": measure_memory,
    "time": measure_time,
    "tpu": measure_hops,
}


def introduction(part: str, args: argparse.Namespace, conditions: Conditions) -> list[str]:
    """The heading of a part, and how to read its table."""
    model = (
        f"A Transformer of {args.layers} layers of {args.hidden_size} features, "
        f"{args.sequence_length} positions, {args.microbatch} sequences a device in a microbatch "
        f"of a pipeline on {DATA} x {STAGES} devices (data, stage), and as many tokens on FSDP "
        "alone, whose minibatches run in a scan."
    )
    words = {
        "tables": f"S = {STAGES} stages, M microbatches, v chunks of layers on a stage.",
        "memory": f"{model} In float32 on eight simulated CPU devices.",
        "time": (
            f"{model} In float32 on eight simulated CPU devices, M = {args.microbatches[0]}. "
            f"{args.rounds} rounds of blocks of {args.steps} steps; medians over rounds, in "
            "brackets their intervals (95 %). Processor time is that of all threads, so idling, "
            "which is the bubble, does not count. FSDP on 2 has minibatches of the same shape as "
            "the pipeline. One stage: the executor without hops, in the same shape. No hops: the "
            "same program with the permutes left out. Operations are counted in the traced step, "
            "on all devices together."
        ),
        "tpu": (
            f"{args.topology}, {STAGES} stages, M = {args.microbatches[0]}, 8 layers of 1,024, one "
            f"sequence of 1,024 tokens in a microbatch, {TPU_VOCAB_SIZE:,} tokens in the "
            "vocabulary, bfloat16. Of each permute in a tick: its time on the wire, and what the "
            "chip computes between its start and its end, in µs: outside of branches, in branches "
            "that all stages take, and in those of the first or the last stage alone."
        ),
    }
    return [f"## {HEADINGS[part]}", "", conditions.sentence(), "", words[part], ""]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16, 32])
    for name, default in (
        ("layers", 8),
        ("hidden_size", 64),
        ("mlp_size", 256),
        ("sequence_length", 64),
        ("microbatch", 4),
        ("rounds", 9),
        ("steps", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--topology", default="v5e:4x4")
    for name in ("output", "json"):
        parser.add_argument(f"--{name}", type=Path)
    args = parser.parse_args(argv)
    conditions = note_conditions("benchmarks.pipeline", argv)
    simulate_devices(DEVICES)
    data = {}
    for part in args.parts:
        lines = introduction(part, args, conditions)
        print("\n".join(lines), flush=True)
        rows, data[part] = MEASURES[part](args)
        print("\n".join(rows), flush=True)
        write_results(  # After each: a run that is broken off leaves what it has.
            conditions, lines=[*lines, *rows], data=data, output=args.output, json_output=args.json
        )


if __name__ == "__main__":
    main()
