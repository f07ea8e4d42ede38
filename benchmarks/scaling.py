"""Measures how the costs of a training step grow with the number of devices and of layers.

python -m benchmarks.scaling [--devices 1 2 4 8] [--depths 2 4 8 16] [--workloads lm-scanned mlp]
    [--strategies fsdp dp] [--seconds 0.3] [--rounds 7] [--tiny] [--output FILE.md]
    [--json FILE.json]

The costs are stored bytes, sent bytes, the size of the program, compile time, and overhead. With
*strong* scaling the global batch stays the same, so that each device gets a smaller part. With
*weak* scaling each device's part stays the same. Bytes, operations and HLO instructions are
counted, and are the same in every run; seconds are not. Simulated devices share the cores of one
machine, so no step becomes faster with more devices. The overhead is the time of a step divided by
the time of a step on one device with the same global batch. It is the median over rounds in which
both run a block of steps (`turns`). An overhead of 1 means that sharding costs nothing here.

If layers are scanned, the compiler sees one layer, so the number of operations in the program must
not grow with the number of layers (the depth). With unrolled layers this number grows. The exit
code is 1 if the program of a scanned model grows.
"""

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.compiled_steps import CompiledStep, Counts, count, count_lowered, of_program
from benchmarks.results import note_conditions, write_results
from benchmarks.turns import Estimate, estimate, ratios, table, take_turns
from benchmarks.workloads import NAMES, Workload, make_workload
from manualpar import data_parallel, fsdp, make_mesh
from manualpar.core.mesh.mesh import simulate_devices
from manualpar.core.program.program import Program
from manualpar.inspect import total_bytes, total_step_bytes, trace_collectives
from manualpar.models import Transformer

Strategy = Literal["fsdp", "dp"]
STRATEGIES: tuple[Strategy, ...] = ("fsdp", "dp")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True)
class Point:
    """The results for one workload under one strategy on some number of devices.

    Attributes:
      scaling: `"strong"` or `"weak"`.
      strategy: The strategy.
      devices: The number of devices.
      batch_size: The size of the global batch.
      counts: The counts of the compiled step.
      traced: Bytes that a device sends in the traced program.
      formula: Bytes that a device sends for parameters and gradients, by formula.
      overhead: The time of a step divided by the step time of one device with the same batch.
    """

    scaling: str
    strategy: Strategy
    devices: int
    batch_size: int
    counts: Counts
    traced: float
    formula: float
    overhead: Estimate


@dataclasses.dataclass(frozen=True)
class Depth:
    """The results for a language model of some depth on some number of devices.

    Attributes:
      layers: The number of layers.
      is_scanned: Whether the layers run in a loop.
      devices: The number of devices.
      lowered: Operations of the program before XLA optimises it.
      counts: The counts of the compiled step; `None` if it was not compiled.
      trace_seconds: The seconds of tracing and lowering.
    """

    layers: int
    is_scanned: bool
    devices: int
    lowered: int
    counts: Counts | None
    trace_seconds: float


def build(workload: Workload, strategy: Strategy, num_devices: int, *, mode: Any) -> Program:
    """Builds a workload's program on the first `num_devices` devices."""
    options: dict[str, Any] = {
        "mesh": make_mesh({"data": num_devices}, jax.devices()[:num_devices]),
        "batch": workload.abstract_batch,
        "num_minibatches": workload.num_minibatches,
        "mode": mode,
    }
    if strategy == "dp":
        return data_parallel(workload.model, workload.tx, workload.loss_fn, **options)
    options["min_weight_size"] = workload.min_weight_size
    return fsdp(workload.model, workload.tx, workload.loss_fn, **options)


def measure_scaling(
    name: str,
    strategies: Sequence[Strategy],
    devices: Sequence[int],
    *,
    seconds: float,
    rounds: int,
    is_tiny: bool,
) -> list[Point]:
    """Measures strong and weak scaling of a workload."""
    whole = len(make_workload(name, is_tiny=is_tiny).batch.labels)
    most, points = max(devices), []
    for scaling in ("strong", "weak"):
        for number in devices:
            size = whole if scaling == "strong" else whole * number // most
            workload = make_workload(name, is_tiny=is_tiny, batch_size=size)
            # In mode `auto` on one device, the program is plain jit without communication.
            one = of_program(build(workload, "dp", 1, mode="auto"), workload.batch)
            steps = {"one": one}
            programs = {}
            for strategy in strategies:
                programs[strategy] = build(workload, strategy, number, mode="manual")
                steps[strategy] = of_program(programs[strategy], workload.batch)
            taken = time_steps(steps, seconds=seconds, rounds=rounds)
            for strategy, program in programs.items():
                traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
                points.append(
                    Point(
                        scaling,
                        strategy,
                        number,
                        size,
                        counts=steps[strategy].counts,
                        traced=float(total_bytes(trace_collectives(traced))),
                        formula=float(total_step_bytes(program)),
                        overhead=estimate(ratios(taken[strategy], taken["one"])),
                    )
                )
    return points


def time_steps(
    steps: dict[str, CompiledStep], *, seconds: float, rounds: int
) -> dict[str, list[float]]:
    """Times blocks of steps in turn; returns the seconds of each block by the name of the step."""
    slowest = max(step.block(2) for step in steps.values()) / 2
    blocks = {name: step.block for name, step in steps.items()}
    return take_turns(blocks, steps=max(1, math.ceil(seconds / slowest)), rounds=rounds)


def measure_depths(
    depths: Sequence[int], devices: Sequence[int], *, is_tiny: bool, is_compiled: bool = True
) -> list[Depth]:
    """Counts the operations of a language model's program for each depth and number of devices.

    The unrolled model is counted only on the largest number of devices, because it compiles slowly.
    """
    found = []
    for is_scanned in (True, False):
        for number in devices if is_scanned else devices[-1:]:
            for layers in depths:
                workload = make_workload("lm-scanned" if is_scanned else "lm", is_tiny=is_tiny)
                assert isinstance(workload.model, Transformer)
                # `clone` keeps the scale of initial values, which does not matter for counts.
                model = workload.model.clone(num_layers=layers)
                workload = dataclasses.replace(workload, model=model)
                program = build(workload, "fsdp", number, mode="manual")
                started = time.perf_counter()
                lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
                traced = time.perf_counter() - started
                counts = None
                if is_compiled:
                    started = time.perf_counter()
                    compiled = lowered.compile()
                    taken = time.perf_counter() - started
                    counts = count(lowered, compiled, _parts(program), taken)
                operations = count_lowered(lowered)
                found.append(Depth(layers, is_scanned, number, operations, counts, traced))
    return found


def _parts(program: Program) -> Any:
    """Returns the parameters and the optimizer's state of a program."""
    return program.abstract_state.params, program.abstract_state.opt_state


def growing(depths: Sequence[Depth]) -> list[str]:
    """Returns a sentence for each number of devices on which a scanned program grows with depth."""
    scanned = [each for each in depths if each.is_scanned]
    sentences = []
    for number in sorted({each.devices for each in scanned}):
        sizes = {each.layers: each.lowered for each in scanned if each.devices == number}
        by_depth = [sizes[layers] for layers in sorted(sizes)]
        if any(more > less for less, more in itertools.pairwise(by_depth)):
            sentences.append(
                f"on {number} devices the operations of a scanned model by its depth are {sizes}, "
                "expected no more for a deeper one."
            )
    return sentences


def report_scaling(name: str, points: Sequence[Point], *, is_tiny: bool) -> list[str]:
    """Makes the tables of strong and weak scaling of a workload."""
    header = [
        "",
        "devices",
        "batch",
        "state KiB",
        "tempor. KiB",
        "sent KiB, compiled",
        "traced",
        "formula",
        "collectives",
        "HLO instr.",
        "compile s (noisy)",
        "overhead (noisy)",
    ]
    rows = [
        [
            f"{point.scaling}, {point.strategy}",
            str(point.devices),
            str(point.batch_size),
            _kib(point.counts.state),
            _kib(point.counts.temporaries),
            _kib(float(point.counts.sent)),
            _kib(point.traced),
            _kib(point.formula),
            "/".join(str(point.counts.collectives.get(kind, 0)) for kind in KINDS),
            f"{point.counts.instructions:,}",
            f"{point.counts.compile_seconds:.1f}",
            point.overhead.show("{:.2f}".format),
        ]
        for point in sorted(points, key=lambda p: (p.scaling != "strong", p.strategy, p.devices))
    ]
    words = make_workload(name, is_tiny=is_tiny).words
    return [f"### {name}", "", f"{words}.", "", *table(header, rows), ""]


def report_depths(depths: Sequence[Depth]) -> list[str]:
    """Makes the table of depths, and the sentences of `growing`."""
    header = [
        "layers",
        "devices",
        "number of layers",
        "operations lowered",
        "HLO instr.",
        "tempor. KiB",
        "trace and lower s (noisy)",
        "compile s (noisy)",
    ]
    rows = [
        [
            "scanned" if each.is_scanned else "unrolled",
            str(each.devices),
            str(each.layers),
            f"{each.lowered:,}",
            f"{each.counts.instructions:,}" if each.counts else "",
            _kib(each.counts.temporaries) if each.counts else "",
            f"{each.trace_seconds:.1f}",
            f"{each.counts.compile_seconds:.1f}" if each.counts else "",
        ]
        for each in depths
    ]
    sentences = growing(depths) or ["The program of a scanned model does not grow with its depth."]
    return ["### Depth", "", "FSDP, mode manual.", "", *table(header, rows), "", *sentences, ""]


def _kib(size: float) -> str:
    """Formats bytes in KiB."""
    return f"{size / 1024:,.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--depths", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--workloads", nargs="*", choices=NAMES, default=["lm-scanned", "mlp"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a timed block")
    parser.add_argument("--rounds", type=int, default=7, help="of blocks")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    parser.add_argument("--output", type=Path, help="Markdown file that gets a section")
    parser.add_argument("--json", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    devices = sorted(set(arguments.devices))
    if devices[0] < 1 or arguments.rounds < 1 or min(arguments.depths, default=1) < 1:
        parser.error("--devices, --depths and --rounds are expected to be 1 or more.")
    conditions = note_conditions("benchmarks.scaling", argv)
    simulate_devices(devices[-1])
    lines = [
        "## How a step grows",
        "",
        conditions.sentence(),
        "",
        "Simulated devices on one machine; bytes are a device's. Sent: in a step, as compiled, as "
        "traced and by formula (the most that it can be for FSDP). Collectives, compiled: "
        "all-gathers / reduce-scatters / all-reduces. Overhead: a step's time in parts of that of "
        "plain jit on one device with the same global batch, median and interval (95 %).",
        "",
    ]
    print("\n".join(lines), flush=True)
    data: dict[str, Any] = {"scaling": {}, "depths": []}
    depths: list[Depth] = []

    def add(part: list[str]) -> None:
        print("\n".join(part), flush=True)
        lines.extend(part)
        write_results(
            conditions,
            lines=lines,
            data=data,
            output=arguments.output,
            json_output=arguments.json,
        )

    for name in arguments.workloads:
        points = measure_scaling(
            name,
            arguments.strategies,
            devices,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            is_tiny=arguments.tiny,
        )
        data["scaling"][name] = [dataclasses.asdict(point) for point in points]
        add(report_scaling(name, points, is_tiny=arguments.tiny))
    if arguments.depths:
        depths = measure_depths(sorted(set(arguments.depths)), devices, is_tiny=arguments.tiny)
        data["depths"] = [dataclasses.asdict(each) for each in depths]
        add(report_depths(depths))
    return 1 if growing(depths) else 0


if __name__ == "__main__":
    sys.exit(main())
