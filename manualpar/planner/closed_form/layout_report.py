"""Shows the layouts of a transformer on many devices, as a table and as plain values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.console

from manualpar.core.parameters.comm_policy import CommPolicy, Format
from manualpar.core.parameters.quantized_collectives import BlockQuantizer
from manualpar.inspect.step_ledger import describe_codes
from manualpar.planner.closed_form.layout_estimate import LayoutEstimate
from manualpar.planner.plan import StepEstimate
from manualpar.system.reports.tables import (
    describe_bytes,
    describe_seconds,
    describe_share,
    print_table,
    print_wrapped,
)

SHOWN = 12  # Rows of the table.


def print_layouts(console: rich.console.Console, plans: Sequence[LayoutEstimate]) -> None:
    """Prints the fastest plan of each mesh, the fastest mesh first, and the assumptions."""
    fastest = fastest_of_each_mesh(plans)
    rows = [
        (
            plan.layout.name,
            plan.layout.details,
            describe_seconds(plan.seconds),
            describe_seconds(plan.computing),
            describe_seconds(plan.seconds - plan.computing - plan.bubble),
            describe_seconds(plan.bubble),
            describe_share(plan.mfu),
            describe_bytes(plan.memory.peak),
        )
        for plan in fastest
    ]
    headers = ("mesh", "how", "step", "computing", "exposed", "bubble", "MFU", "memory")
    title = f"{len(plans):,} layouts on {len(fastest):,} meshes fit; the fastest, by a closed form"
    print_table(console, headers, rows, title=title, words=2, most=SHOWN)
    layout = fastest[0].layout
    gather, reduce = (
        Format(quantizer=BlockQuantizer(code) if code else None)
        for code in (layout.gather_code, layout.reduce_code)
    )
    codes = describe_codes(CommPolicy(gather, reduce))
    print_wrapped(
        console,
        "- Parameters and Adam's averages are float32; products, gathers and activations are "
        "bfloat16, and gradients are summed in float32. Layers split over model split their "
        "positions too.",
        "- Attention is one kernel that keeps its scores to itself, in time and in memory.",
        "- What the closed form shares with the roofline is assumed as there; see "
        "manualpar.planner.closed_form.layout_estimate.",
    )
    if codes:
        print_wrapped(
            console,
            f"- Sent quantized: {codes}; gradients only between replicas, if there are several. "
            "The time to quantize and dequantize is left out.",
        )


def print_traced(
    console: rich.console.Console,
    plan: LayoutEstimate,
    traced: StepEstimate | str,
    flags: Sequence[str],
) -> None:
    """Prints the estimate of a layout's traced program, or why there is none, and its flags."""
    if isinstance(traced, str):
        outcome = f"no program: {traced}"
    else:
        outcome = (
            f"{describe_seconds(traced.step_seconds)} by its traced program, MFU "
            f"{describe_share(traced.mfu)}"
        )
    closed = describe_seconds(plan.seconds)
    print_wrapped(console, f"{plan.layout.name}: {closed} by the closed form, {outcome}")
    print_wrapped(console, f"  {' '.join(_quoted(flag) for flag in flags)}")


def _quoted(flag: str) -> str:
    """Quotes a flag for a shell; values contain single quotes, but no double quotes."""
    name, _, value = flag.partition("=")
    return f'{name}="{value}"' if " " in value else flag


def fastest_of_each_mesh(plans: Sequence[LayoutEstimate]) -> list[LayoutEstimate]:
    """Returns the first of the plans with each mesh, in their order."""
    fastest: dict[str, LayoutEstimate] = {}
    for plan in plans:
        fastest.setdefault(plan.layout.name, plan)
    return list(fastest.values())


def layout_values(plan: LayoutEstimate) -> dict[str, Any]:
    """Returns a plan as plain values."""
    more = {"seconds": plan.seconds, "fits": plan.fits, "peak_bytes": plan.memory.peak}
    return dataclasses.asdict(plan) | more | {"mesh": plan.layout.mesh}
