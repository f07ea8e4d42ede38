"""Prints plans and searches as tables, and converts searches to plain values."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from manualpar.core.parameters.comm_policy import CommPolicy, Format
from manualpar.core.parameters.quantized_collectives import BlockQuantizer
from manualpar.inspect.step_ledger import describe_codes
from manualpar.planner.closed_form.layout import AnyCode
from manualpar.planner.hardware import Chip
from manualpar.planner.plan import StepEstimate
from manualpar.planner.sweep import Compared, Outcome
from manualpar.system.reports.tables import (
    describe_bytes,
    describe_count,
    describe_seconds,
    describe_share,
    print_line,
    print_table,
    print_wrapped,
)

SHOWN = 12  # Rows of each part of a search.
CURVE_FIELDS = ("topology", "step_seconds", "compute_seconds", "exposed_seconds", "fits", "mfu")
BY_LINKS = "  with each link by itself"
# The lines of the table of plans after the classes of memory.
LINES: Sequence[tuple[str, Callable[[StepEstimate], str]]] = (
    ("  all, at the peak", lambda plan: describe_bytes(plan.peak_bytes)),
    ("  of", lambda plan: describe_bytes(plan.hbm_bytes)),
    ("step, estimated", lambda plan: describe_seconds(plan.step_seconds)),
    (BY_LINKS, lambda plan: describe_seconds(plan.step_seconds_by_links)),
    ("  computing", lambda plan: describe_seconds(plan.compute_seconds)),
    ("    of it waiting for memory", lambda plan: describe_seconds(plan.hbm_seconds)),
    ("  sending, exposed", lambda plan: describe_seconds(plan.exposed_seconds)),
    ("  sending, overlapped", lambda plan: describe_seconds(plan.overlapped_seconds)),
    ("  waiting for other stages", lambda plan: describe_seconds(plan.bubble_seconds)),
    ("  sending over slow links", lambda plan: describe_seconds(plan.slow_seconds)),
    ("bytes sent a device", lambda plan: describe_bytes(plan.bytes_sent)),
    ("  over slow links", lambda plan: describe_bytes(plan.slow_bytes)),
    ("tokens/s", lambda plan: describe_count(plan.tokens_per_second)),
    ("  a device", lambda plan: describe_count(plan.tokens_per_second, plan.num_devices)),
    ("examples/s", lambda plan: describe_count(plan.examples_per_second)),
    ("MFU", lambda plan: describe_share(plan.mfu)),
)


def print_plans(console: rich.console.Console, plans: Sequence[StepEstimate]) -> None:
    """Prints plans of one step side by side, and the assumptions of each below them."""
    first = plans[0]
    mesh = " x ".join(f"{axis}={size}" for axis, size in first.mesh.items())
    title = f"{first.name} on {first.topology} ({first.num_devices:,} devices, {mesh})"
    headers = [f"{plan.source}, a model" if plan.is_model else plan.source for plan in plans]
    rows = [["fits", *map(_describe_fit, plans)]]
    for name in dict.fromkeys(name for plan in plans for name in plan.memory):
        sizes = [plan.memory.get(name) for plan in plans]
        if any(sizes):
            rows.append([f"  {name}", *map(describe_bytes, sizes)])
    has_tokens = any(plan.tokens_per_second for plan in plans)
    left_out = {"examples/s"} if has_tokens else {"tokens/s", "  a device"}
    if all(plan.bubble_seconds is None for plan in plans):
        left_out.add("  waiting for other stages")
    if all(plan.step_seconds_by_links is None for plan in plans):
        left_out.add(BY_LINKS)
    if not any(plan.slow_bytes for plan in plans):
        left_out |= {"  sending over slow links", "  over slow links"}
    rows += [[label, *map(text, plans)] for label, text in LINES if label not in left_out]
    print_table(console, ["", *headers], rows, title=title)
    for plan in plans:
        _print_collectives(console, plan)
        kind = "The model assumes" if plan.is_model else "The estimate assumes"
        print_wrapped(console, *(f"! {note}" for note in plan.notes), f"{kind}:")
        print_assumptions(console, plan)


def print_assumptions(console: rich.console.Console, plan: StepEstimate) -> None:
    """Prints the assumptions behind a plan."""
    print_wrapped(console, *(f"- {assumption}" for assumption in plan.assumptions))


def print_sources(console: rich.console.Console, chip: Chip) -> None:
    """Prints the source of a chip's numbers, and the data that they were calibrated on."""
    calibration = f"; calibrated: {chip.calibration}" if chip.calibration else "; not calibrated"
    print_wrapped(console, f"{chip.name}: {chip.source}{calibration}")


def _describe_fit(plan: StepEstimate) -> str:
    spare = describe_bytes(abs(plan.spare_bytes))
    return f"yes, {spare} spare" if plan.fits else f"NO, {spare} too much"


def _print_collectives(console: rich.console.Console, plan: StepEstimate) -> None:
    """Prints the collectives of a plan, the longest first."""
    rows = [
        (
            x.kind,
            x.purpose,
            x.phase,
            ",".join(x.axes),
            x.network,
            f"{x.times:,}",
            describe_bytes(x.bytes_sent),
            describe_seconds(x.seconds),
            describe_share(x.hidden_seconds or 0, x.seconds or 0),
        )
        for x in plan.collectives
    ]
    headers = ("collective", "for", "in", "over", "by", "times", "bytes", "takes", "hidden")
    title = f"{plan.source}: collectives of a step"
    print_table(console, headers, rows, title=title, words=5, most=SHOWN)


def print_search(
    console: rich.console.Console, outcomes: Sequence[Outcome[Compared]], *, title: str = ""
) -> None:
    """Prints a search in its order: the first candidates that fit, and why others do not.

    A memory that was not read off the candidate's own program has a tilde.
    """
    fitting = [(x, x.plan) for x in outcomes if not x.reason and x.plan]
    has_stages = any(plan.bubble_seconds is not None for _, plan in fitting)
    are_traced = any(outcome.is_traced for outcome, _ in fitting)
    rows = [
        (
            outcome.candidate.name,
            outcome.candidate.details,
            describe_seconds(plan.step_seconds),
            describe_seconds(plan.compute_seconds),
            describe_seconds(plan.exposed_seconds),
            *([describe_seconds(plan.bubble_seconds or 0.0)] if has_stages else []),
            describe_share(plan.mfu),
            ("~" if are_traced and not outcome.is_traced else "") + describe_bytes(plan.peak_bytes),
        )
        for outcome, plan in fitting
    ]
    headers = ("mesh", "how", "step", "computing", "exposed", *["bubble"] * has_stages)
    title = title or f"{len(fitting)} of {len(outcomes)} fit; the fastest, by a model"
    print_table(console, (*headers, "MFU", "memory"), rows, title=title, words=2, most=SHOWN)
    if are_traced and not all(outcome.is_traced for outcome, _ in fitting[:SHOWN]):
        print_line(console, "~: scaled from another candidate's, not traced.\n")
    if refused := [x for x in outcomes if x.reason]:
        _print_refused(console, refused)


def _print_refused(console: rich.console.Console, refused: Sequence[Outcome[Compared]]) -> None:
    """Prints why candidates are not ranked, grouped by strategy and mesh."""
    groups: defaultdict[str, list[Outcome[Compared]]] = defaultdict(list)
    for outcome in refused:
        groups[outcome.candidate.name].append(outcome)
    rows = []
    for name, members in groups.items():
        nearest = min(members, key=lambda x: x.plan.peak_bytes if x.plan else 0)
        rows.append((name, str(len(members)), f"{nearest.candidate.details}: {nearest.reason}"))
    headers = ("mesh", "how many", "the one that lacks least")
    print_table(console, headers, rows, title=f"{len(refused)} do not run", words=3)


def print_closed_form(
    console: rich.console.Console, *, gather_code: AnyCode, reduce_code: AnyCode
) -> None:
    """Prints the assumptions of the closed form of layouts, beyond those of the roofline."""
    gather, reduce = (
        Format(quantizer=BlockQuantizer(code) if code else None)
        for code in (gather_code, reduce_code)
    )
    codes = describe_codes(CommPolicy(gather, reduce))
    print_wrapped(
        console,
        "- Parameters and Adam's averages are float32; products, gathers and activations are "
        "bfloat16, and gradients are summed in float32. Layers split over model split their "
        "positions too.",
        "- Attention is one kernel that keeps its scores to itself, in time and in memory.",
        "- The roofline times the closed form as it times a traced program; see "
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
    outcome: Outcome[Compared],
    traced: StepEstimate | str,
    flags: Sequence[str],
) -> None:
    """Prints the estimate of a layout's traced program, or why there is none, and its flags."""
    if isinstance(traced, str):
        found = f"no program: {traced}"
    else:
        found = (
            f"{describe_seconds(traced.step_seconds)} by its traced program, MFU "
            f"{describe_share(traced.mfu)}"
        )
    closed = describe_seconds(outcome.seconds)
    print_wrapped(console, f"{outcome.candidate.name}: {closed} by the closed form, {found}")
    print_wrapped(console, f"  {' '.join(_quoted(flag) for flag in flags)}")


def _quoted(flag: str) -> str:
    """Quotes a flag for a shell; values contain single quotes, but no double quotes."""
    name, _, value = flag.partition("=")
    return f'{name}="{value}"' if " " in value else flag


def search_json(
    outcomes: Sequence[Outcome[Any]], curves: Mapping[str, Sequence[tuple[int, StepEstimate]]]
) -> dict[str, Any]:
    """Returns a search as plain values."""
    return {
        "candidates": [
            {
                **dataclasses.asdict(x.candidate),
                "mesh": dict(x.candidate.mesh),
                "fits": not x.reason,
                "reason": x.reason,
                "is_traced": x.is_traced,
                "plan": x.plan.to_json() if x.plan else None,
            }
            for x in outcomes
        ],
        "weak_scaling": {
            name: [
                {"devices": count} | {field: getattr(plan, field) for field in CURVE_FIELDS}
                for count, plan in curve
            ]
            for name, curve in curves.items()
        },
    }
