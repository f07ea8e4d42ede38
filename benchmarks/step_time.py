"""Times training steps of this package, and compares them with `jit`, the notebook and one device.

python -m benchmarks.step_time [--workloads classifier lm lm-scanned lm-wide mlp] [--programs ...]
    [--devices 8] [--seconds 0.5] [--rounds 15] [--batch_size 0] [--tiny]
    [--output FILE.md] [--json FILE.json]

Every program trains the same model from the same parameters on the same global batch. The programs
are: FSDP in each mode; FSDP in mode `manual` with other options, and with layers that are split
over a second axis; the step in the style of the notebook (`notebook_way`); and the step on one
device. First each program runs three steps, whose losses must equal the losses on one device. Then
the programs are timed in turn, in short blocks (`turns`). A program's result is its time divided by
the time of FSDP in mode `manual` in the same round, as a median with an interval: a ratio above 1
is slower. If other programs use the machine, look at the ratio of processor time, which counts all
threads. Bytes and collectives of the compiled step explain the ratios.

Simulated devices share the cores of one machine, and a collective between them is a copy. So the
ratio of one device shows what sharding costs on this machine, and no speed-up.
"""

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.compiled_steps import CompiledStep, of_program
from benchmarks.notebook_way import notebook_step
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import Block, Estimate, estimate, ratios, table, take_turns
from benchmarks.workloads import NAMES, Workload, make_workload
from manualpar import data_parallel, fsdp, make_mesh
from manualpar.core.mesh.mesh import simulate_devices
from manualpar.core.program.program import Program
from manualpar.inspect import total_bytes, total_step_bytes, trace_collectives

MANUAL, NOTEBOOK, ONE_DEVICE = "manual", "notebook", "one device"
# The options of `fsdp` for each program, by the program's name.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    MANUAL: {},
    "manual, kept": {"reshard_after_forward": False},
    "manual, once a step": {"communicate_every": "step"},
    "auto": {"mode": "auto"},
    "auto-unconstrained": {"mode": "auto-unconstrained"},
    "explicit": {"mode": "explicit"},
}
# The number of devices over which layers are split (along the axis `model`), by program name.
SPLIT: Mapping[str, int] = {f"manual, split over {size}": size for size in (2, 4, 8)}
PROGRAMS = (*OPTIONS, *SPLIT, NOTEBOOK, ONE_DEVICE)
# The allowed difference of losses, because programs add sums in different orders.
LOSS_TOLERANCE = 1e-4
LOSS_STEPS = 3
TRIAL = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """The results for one program.

    Attributes:
      program: The program's name, one of `PROGRAMS`.
      step: The compiled step with its counts.
      loss_difference: The largest distance of a loss from the loss on one device.
      seconds: The seconds of a step, by round.
      ratio: A step's time divided by the time of program `manual` in the same round.
      processor: Processor seconds of a step, for all threads, by round.
      processor_ratio: Like `ratio`, for processor time.
      traced: Bytes that a device sends in the traced program; `None` if XLA adds collectives.
      formula: Bytes that a device sends for parameters and gradients, by the formula
        `step_bytes`; `None` if the program has no formula.
    """

    program: str
    step: CompiledStep
    loss_difference: float
    seconds: tuple[float, ...]
    ratio: Estimate
    processor: tuple[float, ...]
    processor_ratio: Estimate
    traced: float | None
    formula: float | None


def build(workload: Workload, name: str, num_devices: int) -> Program:
    """Builds the program called `name` in `PROGRAMS`; the notebook's program is not built here."""
    options: dict[str, Any] = {
        "batch": workload.abstract_batch,
        "num_minibatches": workload.num_minibatches,
    }
    if name == ONE_DEVICE:
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        return data_parallel(
            workload.model, workload.tx, workload.loss_fn, mesh=mesh, mode="auto", **options
        )
    options["min_weight_size"] = workload.min_weight_size
    devices = jax.devices()[:num_devices]
    if name in SPLIT:
        mesh = make_mesh({"data": -1, "model": SPLIT[name]}, devices)
        # A device needs only its part of a split weight, which is small. So it keeps the gathered
        # part for the backward pass.
        options |= {"mesh": mesh, "reshard_after_forward": False}
        return fsdp(workload.split_model, workload.tx, workload.loss_fn, **options)
    options |= {"mesh": make_mesh({"data": num_devices}, devices), **OPTIONS[name]}
    return fsdp(workload.model, workload.tx, workload.loss_fn, **options)


def compile_all(
    workload: Workload, programs: Sequence[str], *, num_devices: int, report: Callable[[str], None]
) -> tuple[dict[str, CompiledStep], dict[str, Program]]:
    """Compiles the steps of some programs.

    Args:
      workload: The workload to train.
      programs: The names of the programs.
      num_devices: The number of devices, except for the program on one device.
      report: Called with a line after each compilation.

    Returns:
      The steps and their programs.
    """
    steps, built = {}, {}
    for name in programs:
        started = time.perf_counter()
        if name == NOTEBOOK:
            one = build(workload, ONE_DEVICE, num_devices)
            params = jax.device_get(one.init(jax.random.key(0)).params)
            mesh = make_mesh({"data": num_devices}, jax.devices()[:num_devices])
            steps[name] = notebook_step(workload, mesh, params)
        else:
            built[name] = build(workload, name, num_devices)
            steps[name] = of_program(built[name], workload.batch)
        report(f"{workload.name}: {name}, compiled in {time.perf_counter() - started:.1f} s")
    return steps, built


def measure(
    workload: Workload,
    programs: Sequence[str],
    *,
    num_devices: int,
    seconds: float,
    rounds: int,
    report: Callable[[str], None],
) -> tuple[list[Row], int]:
    """Compiles, trains and times steps.

    Args:
      workload: The workload to train.
      programs: The names of the programs, which include `manual` and `one device`.
      num_devices: The number of devices.
      seconds: The approximate seconds of a block of program `manual`.
      rounds: The number of blocks of each program.
      report: Called with lines of progress.

    Returns:
      A row for each program, and the number of steps in a block.

    Raises:
      RuntimeError: The losses of a program differ from those of one device.
    """
    steps, built = compile_all(workload, programs, num_devices=num_devices, report=report)
    losses = {name: step.losses(LOSS_STEPS) for name, step in steps.items()}
    differences = {
        name: [abs(x - y) for x, y in zip(values, losses[ONE_DEVICE], strict=True)]
        for name, values in losses.items()
    }
    allowed = LOSS_TOLERANCE * max(map(abs, losses[ONE_DEVICE]))
    for name, each in differences.items():
        if not all(difference <= allowed for difference in each):
            raise RuntimeError(
                f"{workload.name}: the losses of {name} are {losses[name]}, expected those of one "
                f"device, {losses[ONE_DEVICE]}: it is not the same computation."
            )
    trial = steps[MANUAL].block(TRIAL) / TRIAL
    num_steps = max(1, math.ceil(seconds / trial))
    processor: dict[str, list[float]] = {name: [] for name in steps}
    blocks = {name: _noting(step.block, processor[name]) for name, step in steps.items()}
    taken = take_turns(blocks, steps=num_steps, rounds=rounds)
    processor = {name: each[1:] for name, each in processor.items()}  # The first block warms up.
    rows = []
    for name, step in steps.items():
        is_predicted = name in built and name not in ("auto-unconstrained", ONE_DEVICE)
        program = built.get(name)
        rows.append(
            Row(
                program=name,
                step=step,
                loss_difference=max(differences[name]),
                seconds=tuple(x / num_steps for x in taken[name]),
                ratio=estimate(ratios(taken[name], taken[MANUAL])),
                processor=tuple(x / num_steps for x in processor[name]),
                processor_ratio=estimate(ratios(processor[name], processor[MANUAL])),
                traced=_traced(program) if program and name.startswith(MANUAL) else None,
                formula=float(total_step_bytes(program)) if program and is_predicted else None,
            )
        )
    return rows, num_steps


def _noting(block: Block, processor: list[float]) -> Block:
    """Wraps a block; appends the block's processor seconds to `processor`."""

    def run(steps: int) -> float:
        started = time.process_time()
        seconds = block(steps)
        processor.append(time.process_time() - started)
        return seconds

    return run


def _traced(program: Program) -> float:
    """Returns the bytes that a device sends in the traced step."""
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    return float(total_bytes(trace_collectives(traced)))


def report_workload(workload: Workload, rows: Sequence[Row], *, num_steps: int) -> list[str]:
    """Makes the part of the report about one workload."""
    header = [
        "",
        "ms a step",
        "of manual's time",
        "processor ms",
        "of manual's",
        "tempor. KiB",
        "sent KiB, compiled",
        "traced",
        "formula",
        "collectives",
        "HLO instr.",
        "compile s",
    ]
    cells = []
    for row in rows:
        counts, kinds = row.step.counts, ("all_gather", "reduce_scatter", "all_reduce")
        others = sum(counts.collectives.values()) - sum(
            counts.collectives.get(kind, 0) for kind in kinds
        )
        numbers = [counts.collectives.get(kind, 0) for kind in kinds] + ([others] * bool(others))
        cells.append(
            [
                row.program,
                f"{1e3 * statistics.median(row.seconds):.2f}",
                "1" if row.program == MANUAL else row.ratio.show("{:.3f}".format),
                f"{1e3 * statistics.median(row.processor):.2f}",
                "1" if row.program == MANUAL else row.processor_ratio.show("{:.3f}".format),
                _kib(counts.temporaries),
                _kib(float(counts.sent)),
                _kib(row.traced),
                _kib(row.formula),
                "/".join(map(str, numbers)),
                f"{counts.instructions:,}",
                f"{counts.compile_seconds:.1f}",
            ]
        )
    largest = max(row.loss_difference for row in rows)
    return [
        f"### {workload.name}",
        "",
        f"{workload.words}. {len(rows[0].seconds)} rounds of blocks of {num_steps} steps. Losses "
        f"of the first {LOSS_STEPS} steps are within {largest:.1e} of those of one device.",
        "",
        *table(header, cells),
        "",
    ]


def introduction(conditions: Conditions, num_devices: int) -> list[str]:
    """Describes the machine and the command, and how to read the report."""
    return [
        "## A step against XLA's own, the notebook's way and one device",
        "",
        conditions.sentence(),
        "",
        f"FSDP on {num_devices} {jax.devices()[0].platform} devices; split over M: layers over "
        "M of them, and FSDP, kept, over the rest. Of manual's time: the median over rounds, in "
        "brackets its interval (95 %), above 1 is slower; then processor time, of all threads. "
        "Sent: by a device in a step, as compiled, as traced (manual alone, metrics included) and "
        "by formula (parameters and gradients; the most that it can be where weights are "
        "gathered again). Collectives, compiled: all-gathers / reduce-scatters / all-reduces / "
        "others. XLA:CPU merges a gather with one before it where no loop is between them, so the "
        "unrolled models send less than they are written to.",
        "",
    ]


def _can_split(workload: Workload, program: str, num_devices: int) -> bool:
    return workload.split_model is not None and num_devices % SPLIT[program] == 0


def _kib(size: float | None) -> str:
    """Formats bytes in KiB."""
    return "" if size is None else f"{size / 1024:,.1f}"


def _plain(workload: Workload, rows: Sequence[Row], num_steps: int) -> dict[str, Any]:
    """Converts a workload's results to values that JSON can represent."""
    return {
        "workload": workload.name,
        "words": workload.words,
        "steps_of_a_block": num_steps,
        "rows": [
            {
                "program": row.program,
                "loss_difference": row.loss_difference,
                "step_seconds": list(row.seconds),
                "ratio_to_manual": row.ratio._asdict(),
                "processor_ratio_to_manual": row.processor_ratio._asdict(),
                "traced_bytes": row.traced,
                "formula_bytes": row.formula,
                "counts": dataclasses.asdict(row.step.counts),
            }
            for row in rows
        ],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--devices", type=int, help="CPU devices to simulate")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a timed block")
    parser.add_argument("--rounds", type=int, default=15, help="of blocks")
    parser.add_argument("--batch_size", type=int, default=0, help="0: the workload's own")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    parser.add_argument("--output", type=Path, help="Markdown file that gets a section")
    parser.add_argument("--json", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, expected at least 1.")
    conditions = note_conditions("benchmarks.step_time", argv)
    simulate_devices(arguments.devices)
    # These two always run, because all other programs are compared with them.
    programs = [p for p in PROGRAMS if p in (*arguments.programs, MANUAL, ONE_DEVICE)]
    num_devices = len(jax.devices())
    lines, data = introduction(conditions, num_devices), []
    print("\n".join(lines), flush=True)
    for name in arguments.workloads:
        workload = make_workload(name, is_tiny=arguments.tiny, batch_size=arguments.batch_size)
        rows, num_steps = measure(
            workload,
            [p for p in programs if p not in SPLIT or _can_split(workload, p, num_devices)],
            num_devices=num_devices,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            report=lambda text: print(f"  {text}", flush=True),
        )
        part = report_workload(workload, rows, num_steps=num_steps)
        print("\n".join(part), flush=True)
        lines += part
        data.append(_plain(workload, rows, num_steps))
        write_results(  # So an interrupted command has results.
            conditions,
            lines=lines,
            data={"devices": num_devices, "workloads": data},
            output=arguments.output,
            json_output=arguments.json,
        )


if __name__ == "__main__":
    main()
