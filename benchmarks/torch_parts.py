"""Where a training step's time goes, part by part, in manualpar's model and in PyTorch's.

python -m benchmarks.torch_parts [--batch_size 16] [--rounds 9] [--seconds 0.5] [--tiny]
    [--output FILE.md] [--json FILE.json]

It needs PyTorch (`pip install 'manualpar[torch,train]'`). It measures the step that `torch_fsdp`
measures, in one process with one core and one device, without collectives: one layer's MLP,
attention and norm, the head with the loss, the optimizer's update, one product of them, and the
whole step. Each is computed forward and backward, on as many tokens as one of two processes has.

What counts is the time of the processor, of all threads, so what else the machine does matters
little. The parts of both libraries take turns (`turns`). The last contender is manualpar with
glibc's allocator told to keep what XLA frees: XLA:CPU allocates the temporaries of every step anew,
and the kernel has to clear these pages.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_group import ProcessGroup
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.torch_fsdp import INSTALL
from benchmarks.turns import estimate, ratios, table, take_turns

TORCH, OURS, KEEPS = "PyTorch", "manualpar", "manualpar, memory kept"
# By the part's name, what it is and how often a step has it.
PARTS = {
    "product": ("a product of the MLP", 0),
    "mlp": ("MLP", 3),
    "attention": ("attention", 3),
    "norm": ("norm", 7),
    "loss": ("head and loss", 1),
    "update": ("AdamW", 1),
    "step": ("the whole step", 1),
}
# Environment variables of glibc, see its manual's "Malloc Tunable Parameters".
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**29),
}
TRIAL = 2


def measure(
    *, batch_size: int, rounds: int, seconds: float, is_tiny: bool, report: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Times all parts.

    Args:
      batch_size: Sequences.
      rounds: How many blocks of each part and contender.
      seconds: How long a block of PyTorch's takes.
      is_tiny: Whether the model is tiny.
      report: Told how far it is.

    Returns:
      For each part by contender the seconds of the processor by round, in `"seconds"`, and those of
      the kernel of all rounds together, in `"system"`.
    """
    results: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        groups = {}
        for name in (TORCH, OURS, KEEPS):
            settings = {
                "library": "torch" if name == TORCH else "manualpar",
                "batch_size": batch_size,
                "is_tiny": is_tiny,
                "cores": [min(os.sched_getaffinity(0))],
            }
            variables = KEEP_MEMORY if name == KEEPS else {}
            groups[name] = stack.enter_context(
                ProcessGroup(
                    "benchmarks.torch_parts_worker", settings, num_processes=1, variables=variables
                )
            )
        for part in PARTS:
            system: dict[str, list[float]] = {name: [] for name in groups}
            blocks = {name: _block(group, part, system[name]) for name, group in groups.items()}
            for block in blocks.values():
                block(1)  # It is compiled.
            steps = max(1, math.ceil(seconds * TRIAL / max(blocks[TORCH](TRIAL), 1e-3)))
            for answers in system.values():
                answers.clear()
            taken = take_turns(blocks, steps=steps, rounds=rounds)
            results[part] = {
                name: {
                    "seconds": [x / steps for x in taken[name]],
                    # The first block warms up.
                    "system": sum(system[name][1:]) / steps / rounds,
                }
                for name in groups
            }
            report(f"{part}: blocks of {steps}")
    return results


def _block(group: ProcessGroup, part: str, system: list[float]) -> Callable[[int], float]:
    def block(steps: int) -> float:
        (answer,) = group.ask("block", part=part, steps=steps)
        system.append(answer["system"])
        return float(answer["seconds"])

    return block


def report_parts(results: dict[str, dict[str, Any]]) -> list[str]:
    """The table."""
    header = ["", "in a step", TORCH, OURS, "of PyTorch's", KEEPS, "of PyTorch's", "kernel's"]
    rows = []
    for part, found in results.items():
        words, times = PARTS[part]
        cells = [words, str(times) if times else "", _ms(found[TORCH])]
        for name in (OURS, KEEPS):
            ratio = estimate(ratios(found[name]["seconds"], found[TORCH]["seconds"]))
            cells += [_ms(found[name]), ratio.show("{:.2f}".format)]
        kernel = (f"{1e3 * found[name]['system']:.1f}" for name in (TORCH, OURS, KEEPS))
        rows.append([*cells, " / ".join(kernel)])
    return table(header, rows)


def _ms(found: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(found['seconds']):.2f}"


def introduction(conditions: Conditions, batch_size: int) -> list[str]:
    """What was run on what, and how to read it."""
    return [
        "## Parts of a step, by manualpar and by PyTorch",
        "",
        conditions.sentence(),
        "",
        f"The language model of `torch_fsdp` in float32, {batch_size} sequences, one process on "
        "one core, no collectives. Milliseconds of the processor for a part once, forward and "
        "backward; of PyTorch's: the median over rounds, in brackets its interval (95 %), below 1 "
        "is faster. Memory kept: glibc keeps what XLA frees, by "
        f"`{' '.join(f'{name}={value}' for name, value in KEEP_MEMORY.items())}`. Kernel's: the "
        "share of the three that the operating system's kernel takes, which is clearing pages.",
        "",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the report and writes it where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=16, help="sequences")
    parser.add_argument("--rounds", type=int, default=9, help="of blocks")
    parser.add_argument("--seconds", type=float, default=0.5, help="that a block takes")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--output", type=Path, help="a Markdown file, for a section of its own")
    parser.add_argument("--json", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.batch_size < 1:
        parser.error("--rounds and --batch_size are expected to be at least 1.")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"PyTorch is not installed; {INSTALL}")
    conditions = note_conditions("benchmarks.torch_parts", argv)
    results = measure(
        batch_size=arguments.batch_size,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        is_tiny=arguments.tiny,
        report=lambda text: print(f"  {text}", flush=True),
    )
    lines = [*introduction(conditions, arguments.batch_size), *report_parts(results), ""]
    print("\n".join(lines), flush=True)
    write_results(
        conditions,
        lines=lines,
        data={"parts": results},
        output=arguments.output,
        json_output=arguments.json,
    )


if __name__ == "__main__":
    main()
