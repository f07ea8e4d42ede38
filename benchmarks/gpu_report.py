"""The page of `benchmarks.gpu`: what was measured, beside what was compiled and planned."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_bandwidth import COLLECTIVES, bytes_per_second
from benchmarks.gpu_layouts import OURS
from benchmarks.gpu_rows import Row
from benchmarks.gpu_steps import PLAIN
from benchmarks.results import Conditions
from benchmarks.turns import table

ALLOWED = 1.02
COUNTED = ("flops", "accessed", "temporaries")
# The rows of mode `manual` with the attention and the loss of plain jit. In these rows an axis of
# size 1 must cost nothing.
HELD_AGAINST_PLAIN = ("manual fsdp", "manual fsdp, kept", "manual dp")
HELD_ON_CPU = HELD_AGAINST_PLAIN[:2]
GIB, MIB = 2**30, 2**20


def excesses(rows: Sequence[Row], machine: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each count of a manual step that exceeds plain jit by over 2%.

    With `remat="auto"` a program may unroll the loop over layers, which plain jit does not.
    """
    plain = next((row.counts for row in rows if row.name == PLAIN), None)
    if plain is None or machine.get("remat") == "auto":
        return []
    sentences = []
    is_cpu = machine["platform"] == "cpu"
    # On GPUs XLA counts no operations of calls to cuBLAS, and autotuning decides what is a call.
    counted = COUNTED if is_cpu else COUNTED[1:]
    for row in rows:
        if row.counts is None or row.name not in (HELD_ON_CPU if is_cpu else HELD_AGAINST_PLAIN):
            continue
        for name in counted:
            ratio = getattr(row.counts, name) / max(getattr(plain, name), 1)
            if ratio > ALLOWED:
                sentences.append(f"{row.name}: {name} are {ratio:.3f} of plain jit's.")
        kept = ("all_reduce",) if is_cpu else ()
        if number := sum(n for kind, n in row.counts.collectives.items() if kind not in kept):
            sentences.append(f"{row.name}: {number} collectives of one device are compiled.")
    return sentences


def page(
    conditions: Conditions,
    options: argparse.Namespace,
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    suite: str,
) -> list[str]:
    """Returns the lines of the page."""
    problems = [f"- {row.name}: {row.problem.rstrip('.')}." for row in rows if row.problem]
    return [
        *_introduction(conditions, options, machine),
        *_steps(options, rows, machine),
        *_collectives(rows, machine["used"]),
        "",
        "## What has no figure, or a wrong one",
        "",
        *(problems or ["Every row that was begun has its figures."]),
        "",
        *([suite, ""] if suite else []),
    ]


def _introduction(
    conditions: Conditions, options: argparse.Namespace, machine: Mapping[str, Any]
) -> list[str]:
    """Describes the machine, the command and the model."""
    missing = (
        " There is no accelerator here: not measured are the speed of one, MFU, its kernels, its "
        "links and its memory."
        if machine["platform"] == "cpu"
        else ""
    )
    processes = "process" if machine["processes"] == 1 else "processes"
    started = "each device in a process of its own" if options.processes == "gpu" else ""
    started = started or f"{machine['processes']} {processes}"
    limit = machine["memory"]
    held = f", {limit / GIB:.1f} GiB each" if limit else ""
    return [
        f"# {machine['used']} x {machine['kind']}",
        "",
        conditions.sentence(),
        "",
        f"{machine['used']} of {machine['devices']} devices{held}; {started}.{missing}",
        "",
    ]


def _steps(
    options: argparse.Namespace, rows: Sequence[Row], machine: Mapping[str, Any]
) -> list[str]:
    """Returns the table of training steps."""
    steps = [row for row in rows if row.seconds]
    if not steps:
        return []
    tokens = options.batch_size * options.sequence_length / machine["used"]
    header = [
        "",
        "ms a step",
        f"of {steps[0].name}'s time",
        "planned ms",
        "measured / planned",
        "tokens/s a device",
        "MFU",
        "peak MiB",
        "compiled MiB",
        "planned MiB",
        "tempor. MiB",
        "collectives",
    ]
    cells = []
    for row in steps:
        step, planned, counts = statistics.median(row.seconds), row.planned, row.counts
        seconds = planned.get("seconds")
        cells.append(
            [
                row.name,
                f"{1e3 * step:.2f}",
                "1" if row is steps[0] else row.ratio.show("{:.3f}".format) if row.ratio else "",
                f"{1e3 * seconds:.2f}" if seconds else "",
                f"{step / seconds:.2f}" if seconds else "",
                f"{tokens / step:,.0f}",
                "" if row.mfu is None else f"{row.mfu:.1%}",
                _mib(row.memory),
                _mib(row.compiled),
                _mib(planned.get("bytes")),
                _mib(counts.temporaries if counts else None),
                str(sum(counts.collectives.values())) if counts else "",
            ]
        )
    topology = next((row.planned["topology"] for row in steps if row.planned), "")
    plans = (
        f"The plan is the roofline's for {topology}, in mode manual with the compiler's default "
        "options."
        if topology
        else "No plan: the planner does not know this chip or number of devices; --chip names one."
    )
    return [
        "## Training steps",
        "",
        f"A transformer with {options.layers} layers of {options.hidden_size}, "
        f"{options.batch_size} x {options.sequence_length} tokens a step, {options.dtype}, remat "
        f"{options.remat}. The rows of experts have 8 experts in place of each MLP, so their time "
        "cannot be compared with the others. Times relative to the first row are medians over "
        "rounds, with intervals in brackets. *Peak* is the most memory in use on a device while "
        "the row ran, with the initialization of the state; *compiled* is what the compiled step "
        f"holds, and *tempor.* the temporaries in it. {plans}",
        "",
        *table(header, cells),
        "",
        *_options(steps),
        *_costs_of_one(rows, machine),
    ]


def _options(steps: Sequence[Row]) -> list[str]:
    """Lists the compiler options of the rows that have options of this package."""
    ours: dict[str, list[str]] = {}
    for row in steps:
        if row.name.endswith(OURS):
            ours.setdefault(row.options, []).append(row.name.removesuffix(OURS))
    if not ours:
        return []
    lines = [f"- {', '.join(names)}: {options}" for options, names in ours.items()]
    return [f"The options in the rows with *{OURS.removeprefix(', ')}*:", "", *lines, ""]


def _costs_of_one(rows: Sequence[Row], machine: Mapping[str, Any]) -> list[str]:
    """Says what an axis of size 1 costs; nothing with several devices."""
    if all(row.name != PLAIN or not row.counts for row in rows):
        return []
    above = excesses(rows, machine)
    said = "Above the 2% that an axis of size 1 may cost:" if above else "Nothing is above 2%."
    if machine.get("remat") == "auto":
        return []
    held = HELD_ON_CPU if machine["platform"] == "cpu" else HELD_AGAINST_PLAIN
    return [
        f"Held against plain jit: {', '.join(held)}. {said}",
        "",
        *(f"- {sentence}" for sentence in above),
        *([""] * bool(above)),
    ]


def _collectives(rows: Sequence[Row], devices: int) -> list[str]:
    """Returns the table of bandwidths."""
    measured = {row.name: dict(row.bandwidths) for row in rows if row.bandwidths}
    if not measured:
        return []
    names = [name for name in COLLECTIVES if name in measured]
    sizes = sorted({size for found in measured.values() for size in found})
    cells = [
        [
            f"{size:,}",
            *(_speed(name, size, measured[name].get(size), devices) for name in names),
        ]
        for size in sizes
    ]
    return [
        "## Collectives",
        "",
        "GB/s that a device sends (the bus bandwidth of nccl-tests), and µs in brackets, by the "
        "bytes of the whole array on a device: an all-gather's result, and the others' operand.",
        "",
        *table(["bytes", *names], cells),
    ]


def _speed(name: str, size: int, seconds: float | None, devices: int) -> str:
    if not seconds:
        return ""
    return f"{bytes_per_second(name, size, seconds, devices) / 1e9:.2f} ({1e6 * seconds:,.0f})"


def _mib(size: float | None) -> str:
    """Formats bytes in MiB; "" for none."""
    return "" if size is None else f"{size / MIB:,.1f}"
