"""Fully sharded training in as many processes by manualpar and by PyTorch's FSDP2, side by side.

python -m benchmarks.torch_fsdp [--processes 2 4] [--steps 0] [--rounds 9] [--tiny]
    [--output FILE.md] [--json FILE.json]

It needs PyTorch (`pip install 'manualpar[torch,train]'`). The same transformer with the same
parameters, AdamW, the same global batch of tokens, float32, gloo between the processes, the same
cores for each. manualpar's layers are unrolled, or scanned, and it is also measured as one process
that simulates as many devices. All are kept alive and take turns, a block of steps each (`turns`),
and what counts is the median, with its interval, of the ratio to PyTorch in the same round: below 1
is faster. The losses of the first steps must be the same. `torch_parts` says where the time goes.

The memory of a process is its largest resident set during steps, after compiling. The bytes of a
step are those that the kernel counts on the loopback device while the processes of one library take
steps, divided by the number of processes: so both are measured by the same instrument, headers and
acknowledgements included. What else uses that device is counted too; to be alone on it, run

unshare --net sh -c 'ip link set lo up; exec python -m benchmarks.torch_fsdp'
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.process_group import ProcessGroup
from benchmarks.results import Conditions, note_conditions, write_results
from benchmarks.turns import Estimate, estimate, ratios, table, take_turns
from benchmarks.workloads import ADAMW, make_workload
from manualpar.models import Transformer

TORCH = "PyTorch FSDP2"
SIMULATED = "manualpar, simulated"
# The workload, the options of `fsdp` and whether one process has all devices, by name.
OURS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "manualpar": ("lm", {}, False),
    "manualpar, kept": ("lm", {"reshard_after_forward": False}, False),
    "manualpar, scanned": ("lm-scanned", {}, False),
    SIMULATED: ("lm", {}, True),
}
CONTENDERS = (TORCH, *OURS)
INSTALL = "pip install 'manualpar[torch,train]'"
LOSS_STEPS = 5
LOSS_TOLERANCE = 1e-4
TRIAL = 3
BLOCK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one contender.

    Attributes:
      name: Its name.
      num_processes: How many processes it has.
      losses: Of its first steps.
      seconds: Of a step, by round.
      ratio: Of a step's time to PyTorch's in the same round.
      processor: Seconds of a step that the threads of all its processes compute, by round.
      processor_ratio: Of these to PyTorch's in the same round.
      imported: Resident bytes of a process with its libraries imported, before there is a model;
        the largest of its processes, as of the next two.
      highest: The most until steps are timed, compiling included.
      peak: The most while steps are timed.
      sent: Bytes that a process sends in a step, by the loopback device; by round.
      counts: What it says itself of what it sends, see the workers.
    """

    name: str
    num_processes: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    ratio: Estimate
    processor: tuple[float, ...]
    processor_ratio: Estimate
    imported: int
    highest: int
    peak: int
    sent: tuple[float, ...]
    counts: Mapping[str, Any]


def write_files(path: Path, *, is_tiny: bool) -> dict[str, Any]:
    """Writes the parameters and the batch that all begin with; returns the model's shape."""
    workload = make_workload("lm", is_tiny=is_tiny)
    model = workload.model
    assert isinstance(model, Transformer)
    params = model.init(jax.random.key(0), workload.batch.inputs[:1])["params"]
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(name, simple=True, separator="/"): np.asarray(x)
        for name, x in jax.tree_util.tree_leaves_with_path(params)
    }
    batch = {"batch.inputs": workload.batch.inputs, "batch.labels": workload.batch.labels}
    np.savez(path, **arrays, **batch)
    fields = ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")
    return {name: getattr(model, name) for name in (*fields, "rope_base")}


def start(
    name: str, *, num_processes: int, files: Path, shape: Mapping[str, Any], is_tiny: bool
) -> ProcessGroup:
    """Starts the processes of a contender."""
    settings: dict[str, Any] = {"files": str(files)}
    if name == TORCH:
        settings |= {"shape": shape, "optimizer": ADAMW}
        return ProcessGroup("benchmarks.torch_fsdp_worker", settings, num_processes=num_processes)
    workload, options, is_alone = OURS[name]
    count = 1 if is_alone else num_processes
    settings |= {
        "workload": workload,
        "is_tiny": is_tiny,
        "devices": num_processes // count,
        "options": options,
    }
    return ProcessGroup("benchmarks.manualpar_worker", settings, num_processes=count)


def measure(
    num_processes: int,
    names: Sequence[str],
    *,
    steps: int,
    rounds: int,
    is_tiny: bool,
    report: Callable[[str], None],
) -> tuple[list[Row], int]:
    """Trains and times contenders.

    Args:
      num_processes: How many processes, or simulated devices, each has.
      names: Which of `CONTENDERS`; the first is what the others are held against.
      steps: Of a block; 0 for as many as the first takes in `BLOCK_SECONDS`.
      rounds: How many blocks of each.
      is_tiny: Whether the model is tiny.
      report: Told how far it is.

    Returns:
      A row for each, and how many steps a block had.

    Raises:
      RuntimeError: A process has failed; or losses are not the same.
    """
    with contextlib.ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "given.npz"
        shape = write_files(files, is_tiny=is_tiny)
        groups, losses, counts, before = {}, {}, {}, {}
        for name in names:
            group = start(
                name, num_processes=num_processes, files=files, shape=shape, is_tiny=is_tiny
            )
            groups[name] = stack.enter_context(group)
            losses[name] = group.ask("losses", steps=LOSS_STEPS)[0]["losses"]
            counts[name] = group.ask("counts")[0]
            group.ask("block", steps=1)
            before[name] = group.ask("forget")
            report(f"{num_processes} processes: {name}, losses {losses[name]}")
        check_losses(losses)
        first = groups[names[0]]
        steps = steps or max(1, math.ceil(BLOCK_SECONDS * TRIAL / first.block(TRIAL)))
        sent: dict[str, list[float]] = {name: [] for name in names}
        processor: dict[str, list[float]] = {name: [] for name in names}
        blocks = {
            name: _counting(group, sent[name], processor[name]) for name, group in groups.items()
        }
        seconds = take_turns(blocks, steps=steps, rounds=rounds)
        computed = {name: values[1:] for name, values in processor.items()}
        return [
            Row(
                name=name,
                num_processes=len(before[name]),
                losses=tuple(losses[name]),
                seconds=tuple(x / steps for x in seconds[name]),
                ratio=estimate(ratios(seconds[name], seconds[names[0]])),
                processor=tuple(computed[name]),
                processor_ratio=estimate(ratios(computed[name], computed[names[0]])),
                imported=max(answer["imported"] for answer in before[name]),
                highest=max(answer["peak"] for answer in before[name]),
                peak=max(answer["peak"] for answer in groups[name].ask("memory")),
                sent=tuple(sent[name][1:]),  # A block before the rounds is not counted.
                counts=counts[name],
            )
            for name in names
        ], steps


def _counting(
    group: ProcessGroup, sent: list[float], processor: list[float]
) -> Callable[[int], float]:
    """A block of a group that also notes a step's bytes, of a process, and processor time, of all.

    Threads that wait by turning in a loop compute too.
    """

    def block(num_steps: int) -> float:
        # What the beginning and the end of a block send is none of the steps'.
        around = max(answer["loopback"] for answer in group.ask("block", steps=0))
        answers = group.ask("block", steps=num_steps)
        # Each of them has seen the traffic of all.
        whole = max(answer["loopback"] for answer in answers)
        sent.append(max(whole - around, 0) / num_steps / len(answers))
        processor.append(sum(answer["processor"] for answer in answers) / num_steps)
        return float(max(answer["seconds"] for answer in answers))

    return block


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Refuses losses that are not the same."""
    (first, expected), *others = losses.items()
    for name, values in others:
        allowed = LOSS_TOLERANCE * max(map(abs, expected))
        if not all(abs(x - y) <= allowed for x, y in zip(values, expected, strict=True)):
            raise RuntimeError(
                f"the losses of {name} are {list(values)}, expected those of {first}, "
                f"{list(expected)}: it is not the same training."
            )


def report_processes(num_processes: int, rows: Sequence[Row], *, steps: int) -> list[str]:
    """The part of the report on a number of processes."""
    header = [
        "",
        "processes",
        "ms a step",
        "of PyTorch's time",
        "processor ms",
        "of PyTorch's",
        "peak MiB",
        "above imports",
        "with compiling",
        "sent KiB, measured",
        "as compiled",
        "as traced",
        "collectives",
    ]
    cells = [
        [
            row.name,
            str(row.num_processes),
            f"{1e3 * statistics.median(row.seconds):.1f}",
            row.ratio.show("{:.3f}".format) if row is not rows[0] else "1",
            f"{1e3 * statistics.median(row.processor):.1f}",
            row.processor_ratio.show("{:.3f}".format) if row is not rows[0] else "1",
            _mib(row.peak),
            _mib(row.peak - row.imported),
            _mib(row.highest),
            "" if row.num_processes == 1 else f"{statistics.median(row.sent) / 1024:,.1f}",
            _kib(row.counts.get("compiled_bytes")),
            _kib(row.counts.get("traced_bytes")),
            _collectives(row.counts),
        ]
        for row in rows
    ]
    largest = max(
        abs(x - y) for row in rows for x, y in zip(row.losses, rows[0].losses, strict=True)
    )
    return [
        f"### {num_processes} processes",
        "",
        f"{len(rows[0].seconds)} rounds of blocks of {steps} steps. Losses of the first "
        f"{LOSS_STEPS} steps differ by at most {largest:.1e}.",
        "",
        *table(header, cells),
        "",
    ]


def introduction(conditions: Conditions, *, is_tiny: bool) -> list[str]:
    """What was run on what, and how to read it."""
    return [
        "## Fully sharded training by manualpar and by PyTorch's FSDP2",
        "",
        conditions.sentence(),
        "",
        f"{make_workload('lm', is_tiny=is_tiny).words}, float32, AdamW, gloo. Each process has one "
        "core, shared where there are more processes than cores; the one that simulates has all. "
        "Of PyTorch's time: the median over rounds, in brackets its interval (95 %), below 1 is "
        "faster. Processor: what the threads of all processes together compute in a step, which "
        "other work on the machine changes little. MiB of a process, the largest: its peak during "
        "steps, that less what it held with its libraries imported, and its peak before, compiling "
        "included. Sent by a process in a step: by the loopback device, headers included; as "
        "compiled and as traced by the formulas for rings. Collectives of a step, as compiled or "
        "as PyTorch calls them.",
        "",
    ]


def _collectives(counts: Mapping[str, Any]) -> str:
    """Collectives by their names."""
    found = counts.get("compiled") or counts.get("collectives", {})
    return ", ".join(f"{n} {name.split('.')[-1]}" for name, n in sorted(found.items()))


def _mib(size: float) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:,.1f}"


def _kib(size: float | None) -> str:
    """Bytes in KiB."""
    return "" if size is None else f"{size / 1024:,.1f}"


def _plain(row: Row) -> dict[str, Any]:
    """A row as plain values."""
    both = {name: getattr(row, name)._asdict() for name in ("ratio", "processor_ratio")}
    return {**dataclasses.asdict(row), **both}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the report and writes it where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=0, help="of a block; 0: as many as fill 1 s")
    parser.add_argument("--rounds", type=int, default=9, help="of blocks")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--output", type=Path, help="a Markdown file, for a section of its own")
    parser.add_argument("--json", type=Path, help="a JSON file")
    arguments = parser.parse_args(argv)
    if min(arguments.processes) < 2:
        parser.error(f"--processes is {arguments.processes}, expected 2 or more each.")
    if arguments.rounds < 1 or arguments.steps < 0:
        parser.error("--rounds is expected to be at least 1, and --steps not to be negative.")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"PyTorch is not installed; {INSTALL}")
    conditions = note_conditions("benchmarks.torch_fsdp", argv)
    jax.config.update("jax_platforms", "cpu")
    names = [name for name in CONTENDERS if name in (TORCH, *arguments.contenders)]
    lines, data = introduction(conditions, is_tiny=arguments.tiny), []
    print("\n".join(lines), flush=True)
    for num_processes in arguments.processes:
        rows, steps = measure(
            num_processes,
            names,
            steps=arguments.steps,
            rounds=arguments.rounds,
            is_tiny=arguments.tiny,
            report=lambda text: print(f"  {text}", flush=True),
        )
        part = report_processes(num_processes, rows, steps=steps)
        print("\n".join(part), flush=True)
        lines += part
        results = {"processes": num_processes, "steps_of_a_block": steps}
        data.append({**results, "rows": [_plain(row) for row in rows]})
        write_results(
            conditions,
            lines=lines,
            data={"runs": data},
            output=arguments.output,
            json_output=arguments.json,
        )


if __name__ == "__main__":
    main()
