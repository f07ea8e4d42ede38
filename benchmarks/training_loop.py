"""Measures what a training run costs in addition to its steps: Python, checkpoints, resuming.

python -m benchmarks.training_loop [--config configs/fsdp.py configs/fsdp_lm.py] [--steps N]
    [--seconds 0.7] [--rounds 7] [--processes 3] [--devices N] [--output FILE.md] [--json FILE.json]

A *bare* loop only calls the training step; the training loop is the loop of a run. The loops run in
turn, in short blocks. A result is the median of the ratios of two loops in the same round, with an
interval that contains the true median in at least 95 of 100 cases (see `turns`). Programs, data,
checkpoints and files are the same as in a run of the config. Without flags the command takes five
minutes on two cores; run it on an idle machine.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from benchmarks.checkpoint_costs import (
    measure_processes,
    measure_restoring,
    measure_saving,
)
from benchmarks.loop_blocks import Bench
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import Block, Estimate, estimate, ratios, table, take_turns
from manualpar.core.mesh.mesh import describe_mesh, simulate_devices
from manualpar.errors import UsageError
from manualpar.inspect.tables import describe_bytes

ROOT = Path(__file__).parent.parent
CONFIGS = [ROOT / "configs" / "fsdp.py", ROOT / "configs" / "fsdp_lm.py"]

BARE = "bare: the step compiled ahead of time"
BARE_JIT = "bare: the jitted step"
BARE_PROGRAM = "bare: `program.train_step`"
LOOP = "loop, one batch"
LOOP_BAR = "loop, one batch, a bar in a terminal"
BARE_PIPELINE = "bare, the data pipeline"
LOOP_PIPELINE = "loop, the data pipeline"

# How often a call of the step is timed, at least and at most.
FEWEST_CALLS, MOST_CALLS = 12, 200
# The number of steps that are timed to choose the length of a block.
TRIAL = 4


def measure_loops(bench: Bench, *, steps: int, rounds: int) -> dict[str, list[float]]:
    """Times blocks of `steps` steps; returns the seconds of each block, by the name of the loop."""
    program = bench.program
    blocks: Mapping[str, Block] = {
        BARE: functools.partial(bench.bare, bench.compiled),
        BARE_JIT: functools.partial(bench.bare, bench.jitted),
        BARE_PROGRAM: functools.partial(bench.bare, program.train_step),
        LOOP: lambda n: bench.loop(n).seconds,
        LOOP_BAR: lambda n: bench.loop(n, show="bar").seconds,
        BARE_PIPELINE: functools.partial(bench.bare, bench.compiled, source="pipeline"),
        LOOP_PIPELINE: lambda n: bench.loop(n, source="pipeline").seconds,
    }
    return take_turns(blocks, steps=steps, rounds=rounds)


def measure_calls(bench: Bench, *, calls: int) -> dict[str, list[float]]:
    """Measures the seconds until a call of the step returns, before its results are ready."""
    functions = {
        BARE: bench.compiled,
        BARE_JIT: bench.jitted,
        BARE_PROGRAM: bench.program.train_step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(calls):
        for name in list(functions) if number % 2 == 0 else reversed(list(functions)):
            state = jax.block_until_ready(bench.state)
            started = time.perf_counter()
            bench.state, _ = functions[name](state, bench.batch)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def steps_for(bench: Bench, seconds: float) -> int:
    """Returns how many steps of a bare loop take `seconds`."""
    bench.bare(bench.compiled, TRIAL)
    return max(TRIAL, round(seconds * TRIAL / bench.bare(bench.compiled, TRIAL)))


def report_loops(seconds: Mapping[str, Sequence[float]], *, steps: int) -> list[str]:
    """Makes the table of the costs of a step."""
    pairs = {LOOP_PIPELINE: BARE_PIPELINE}
    rows = []
    for name, values in seconds.items():
        to_bare = estimate(ratios(values, seconds[BARE]))
        same = pairs.get(name)
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(values) / steps:.3f}",
                to_bare.show("{:.3f}".format) if name != BARE else "1",
                estimate(ratios(values, seconds[same])).show("{:.3f}".format) if same else "",
            ]
        )
    header = ["", "ms a step", "in parts of the first", "in parts of bare with the pipeline"]
    return table(header, rows)


def report_calls(seconds: Mapping[str, Sequence[float]], *, step_seconds: float) -> list[str]:
    """Makes the table of the times until a call returns."""
    rows = []
    for name, values in seconds.items():
        difference = estimate(x - y for x, y in zip(values, seconds[BARE_JIT], strict=True))
        rows.append(
            [
                name,
                _show(estimate(values), 1e6, ",.0f"),
                _show(difference, 1e6, "+,.0f") if name != BARE_JIT else "",
                f"{statistics.median(values) / step_seconds:.1%}",
            ]
        )
    header = ["a call returns after", "µs", "more than the jitted step, µs", "of a step's time"]
    return table(header, rows)


def report_saving(bench: Bench, *, steps: int, rounds: int) -> list[str]:
    """Measures saving; returns the table."""
    costs = measure_saving(bench, steps=steps, rounds=rounds)
    every = bench.config.checkpoint.every_steps
    kinds = {
        "asynchronous": (costs.asynchronous, costs.blocked, costs.background),
        "synchronous": (costs.synchronous, costs.blocked_synchronous, None),
    }
    rows = [
        [
            name,
            _show(blocked, 1e3, ".0f"),
            _show(background, 1e3, ".0f") if background else "",
            _show(lost, 1, ".1f"),
            # A share of all the time of a run, including the saves themselves.
            f"{lost.median / (every + lost.median):.2%}" if every else "never saved",
        ]
        for name, (lost, blocked, background) in kinds.items()
    ]
    header = [
        "a save",
        "the loop waits, ms",
        "then in the background, ms",
        "costs, in steps",
        f"of a run that saves every {every} steps",
    ]
    return [
        f"Saving {describe_bytes(bench.state_bytes)} in blocks of {costs.steps} steps, of "
        f"{1e3 * costs.step_seconds:.3f} ms without:",
        "",
        *table(header, rows),
    ]


def report_resuming(
    bench: Bench, config: Path, *, rounds: int, processes: int, devices: int | None
) -> list[str]:
    """Measures resuming; returns the table."""
    times = measure_restoring(bench, rounds=rounds)
    rows = [
        ["restoring: hashing and comparing every file", times.verification.show("{:.3f}".format)],
        ["restoring: the rest, to a state on the devices", times.reading.show("{:.3f}".format)],
    ]
    if processes:
        seconds = measure_processes(
            config, bench.folder / "processes", rounds=processes, devices=devices
        )
        more = estimate(x - y for x, y in zip(seconds["resumed"], seconds["fresh"], strict=True))
        rows += [
            [f"a process to its first step, {name}", estimate(values).show("{:.2f}".format)]
            for name, values in seconds.items()
        ]
        rows += [["the resumed one longer by", more.show("{:+.2f}".format)]]
    return table(["", "seconds"], rows)


def measure_config(config: Path, arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Measures a config; yields its section of the report, table by table."""
    rounds, devices = arguments.rounds, arguments.devices
    with tempfile.TemporaryDirectory() as folder, Bench(config, Path(folder)) as bench:
        steps = arguments.steps or steps_for(bench, arguments.seconds)
        loops = measure_loops(bench, steps=steps, rounds=rounds)
        yield [
            f"### {config.name}",
            "",
            f"{describe_mesh(bench.program.mesh)}; {rounds} rounds of blocks of {steps} steps.",
            "",
            *report_loops(loops, steps=steps),
            "",
        ]
        calls = measure_calls(bench, calls=min(max(4 * steps, FEWEST_CALLS), MOST_CALLS))
        step_seconds = statistics.median(loops[BARE]) / steps
        yield [*report_calls(calls, step_seconds=step_seconds), ""]
        yield [*report_saving(bench, steps=arguments.steps, rounds=rounds), ""]
        processes = arguments.processes
        yield [
            *report_resuming(bench, config, rounds=rounds, processes=processes, devices=devices),
            "",
        ]


def introduction(conditions: Conditions) -> list[str]:
    """Describes the machine and the command, and how to read the report."""
    return [
        "## What training takes besides its steps",
        "",
        conditions.sentence(),
        "",
        "Medians, in brackets an interval for each. Ratios and differences are taken within a "
        "round. The loop records, writes, shows and watches as in a run, with nothing evaluated or "
        "saved; bare, the step is called and nothing else. A save costs the time by which a block "
        "that saves once is longer, in steps; the block ends when the checkpoint is complete. "
        "Restoring reads files that the machine still has in memory.",
        "",
    ]


def _show(value: Estimate, factor: float, form: str) -> str:
    """Formats an estimate in another unit."""
    return value.show(lambda x: format(factor * x, form))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, nargs="+", default=CONFIGS)
    parser.add_argument(
        "--steps", type=int, default=0, help="of a block; 0: by --seconds and the time of a save"
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a timed block")
    parser.add_argument("--rounds", type=int, default=7, help="of blocks")
    parser.add_argument("--processes", type=int, default=3, help="fresh and resumed ones to start")
    parser.add_argument("--devices", type=int, help="CPU devices to simulate")
    parser.add_argument("--output", type=Path, help="Markdown file that gets a section")
    parser.add_argument("--json", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    if arguments.steps < 0 or arguments.steps == 1:
        parser.error(f"--steps is {arguments.steps}, expected at least 2, or 0.")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}, expected at least 1.")
    simulate_devices(arguments.devices)
    conditions = note_conditions("benchmarks.training_loop", argv)
    lines = introduction(conditions)
    print("\n".join(lines), flush=True)
    for config in arguments.config:
        try:
            for part in measure_config(config, arguments):
                print("\n".join(part), flush=True)
                lines += part
                write_results(  # So an interrupted command has results.
                    conditions,
                    lines=lines,
                    data={},
                    output=arguments.output,
                    json_output=arguments.json,
                )
        except UsageError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
