"""Prints plans and searches as tables, and converts searches to plain values."""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from manualpar.core.parameters.collectives import Format, MixedPrecisionPolicy
from manualpar.inspect.step_ledger import describe_codes
from manualpar.inspect.tables import (
    TableColumn,
    describe_bytes,
    describe_count,
    describe_seconds,
    describe_share,
    print_line,
    print_side_by_side,
    print_table,
    print_wrapped,
    text_columns,
)
from manualpar.planner.hardware import Chip
from manualpar.planner.plan import FITS, LINES, PlannedCollective, StepEstimate
from manualpar.plans.layouts.layout import AnyCode
from manualpar.plans.sweep import Compared, Outcome
from manualpar.quantization.quantized_collectives import make_quantizer
from manualpar.strategies import strategy_kinds
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import Bar
from manualpar.training.task import SPLIT_AXIS

SHOWN = 12  # Rows of each part of a search.
CURVE_FIELDS = ("topology", "step_seconds", "compute_seconds", "exposed_seconds", "fits", "mfu")


def _describe_hidden(line: PlannedCollective) -> str:
    """Returns the share of a line that is hidden, or that XLA runs it synchronously."""
    if line.is_async is False:
        return "synchronous"
    return describe_share(line.hidden_seconds or 0, line.seconds or 0)


_optional = functools.partial(TableColumn, is_optional=True)
# The columns of the table of a search's candidates that fit.
FITTING: Sequence[TableColumn[Any]] = (
    TableColumn("mesh", lambda x: x.candidate.name),
    TableColumn("how", lambda x: x.candidate.details),
    TableColumn("step", lambda x: x.plan.step_seconds, describe_seconds),
    TableColumn("computing", lambda x: x.plan.compute_seconds, describe_seconds),
    TableColumn("exposed", lambda x: x.plan.exposed_seconds, describe_seconds),
    _optional("bubble", lambda x: x.plan.bubble_seconds or 0.0, describe_seconds),
    TableColumn("MFU", lambda x: x.plan.mfu, describe_share),
)
COLLECTIVES: Sequence[TableColumn[PlannedCollective]] = (
    TableColumn("collective", "kind"),
    TableColumn("for", "purpose"),
    TableColumn("in", "phase"),
    TableColumn("over", lambda x: ",".join(x.axes)),
    TableColumn("by", "network"),
    TableColumn("times", "times", describe_count),
    TableColumn("bytes", "bytes_sent", describe_bytes),
    TableColumn("takes", "seconds", describe_seconds),
    TableColumn("hidden", _describe_hidden, str),
)


def print_plans(console: rich.console.Console, plans: Sequence[StepEstimate]) -> None:
    """Prints plans of one step side by side, and then the assumptions of each plan."""
    first = plans[0]
    mesh = " x ".join(f"{axis}={size}" for axis, size in first.mesh.items())
    title = f"{first.name} on {first.topology} ({first.num_devices:,} devices, {mesh})"
    headers = [f"{plan.source}, a model" if plan.is_model else plan.source for plan in plans]
    classes = dict.fromkeys(name for plan in plans for name in plan.memory)
    sizes = (_optional(f"  {x}", _size_of(x), describe_bytes) for x in classes)
    lines = [FITS, *sizes, *LINES]
    print_side_by_side(console, lines, plans, names=headers, title=title)
    for plan in plans:
        title = f"{plan.source}: collectives of a step"
        print_table(console, COLLECTIVES, plan.collectives, title=title, most=SHOWN)
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


def _size_of(name: str) -> Callable[[StepEstimate], int | None]:
    return lambda plan: plan.memory.get(name)


def print_search(
    console: rich.console.Console, outcomes: Sequence[Outcome[Compared]], *, title: str = ""
) -> None:
    """Prints the first candidates that fit, in the order of the search, and why others do not.

    A tilde marks a memory that was derived from another candidate's program.
    """
    fitting = [x for x in outcomes if not x.reason and x.plan]
    are_traced = any(x.is_traced for x in fitting)

    def memory(x: Any) -> str:
        return "~" * (are_traced and not x.is_traced) + describe_bytes(x.plan.peak_bytes)

    title = title or f"{len(fitting)} of {len(outcomes)} fit; the fastest, by a model"
    columns = (*FITTING, TableColumn("memory", memory, str))
    print_table(console, columns, fitting, title=title, most=SHOWN)
    if are_traced and not all(x.is_traced for x in fitting[:SHOWN]):
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
    columns = text_columns(("mesh", "how many", "the one that lacks least"), words=3)
    print_table(console, columns, rows, title=f"{len(refused)} do not run")


def print_formula(
    console: rich.console.Console, *, gather_code: AnyCode, reduce_code: AnyCode
) -> None:
    """Prints the assumptions of the formula of layouts, beyond those of the roofline."""
    gather, reduce = (Format(quantizer=make_quantizer(code)) for code in (gather_code, reduce_code))
    codes = describe_codes(MixedPrecisionPolicy(gather, reduce))
    print_wrapped(
        console,
        "- Parameters and Adam's averages are float32; products, gathers and activations are "
        "bfloat16, and gradients are summed in float32. Layers split over model split their "
        "positions too.",
        "- Attention is one kernel that keeps its scores to itself, in time and in memory.",
        "- The roofline times the formula as it times a traced program; see "
        "manualpar.plans.layouts.layout_estimate.",
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
    """Prints a layout's flags, and the estimate of its traced program or why there is none."""
    if isinstance(traced, str):
        found = f"no program: {traced}"
    else:
        found = (
            f"{describe_seconds(traced.step_seconds)} by its traced program, MFU "
            f"{describe_share(traced.mfu)}"
        )
    expected = describe_seconds(outcome.seconds)
    print_wrapped(console, f"{outcome.candidate.name}: {expected} by formula, {found}")
    print_wrapped(console, f"  {' '.join(_quoted(flag) for flag in flags)}")


def _quoted(flag: str) -> str:
    """Quotes a flag for a shell; values contain single quotes, but no double quotes."""
    name, _, value = flag.partition("=")
    return f'{name}="{value}"' if " " in value else flag


def search_json(
    outcomes: Sequence[Outcome[Any]], curves: Mapping[str, Sequence[tuple[int, StepEstimate]]]
) -> dict[str, Any]:
    """Returns the candidates and the scaling curves of a search as values for JSON."""
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


# -------------------------------------------------------------------------------------------------
# Draws plans and searches: how a step spends time and memory, and how it scales.


PICTURED = 10
MARKERS = "osD^v"


def draw_plans(plans: Sequence[StepEstimate], path: Path) -> None:
    """Draws plans of one step into a PNG file: a bar of time and one of memory for each."""
    title = f"{plans[0].name} on {plans[0].topology}: estimated, not measured"
    names = [f"{plan.source}\n(a model)" if plan.is_model else plan.source for plan in plans]
    with pictures.saved_figure(path, (13, 2.6 + 0.9 * len(plans)), title=title) as figure:
        time, memory = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_times(time, plans, names, title="Step time")
        _draw_memory(memory, plans)


def draw_search(
    outcomes: Sequence[Outcome[Compared]],
    curves: Mapping[str, Sequence[tuple[int, StepEstimate]]],
    path: Path,
    *,
    title: str,
    per_device: str,
) -> None:
    """Draws a search into a PNG file: the fastest candidates, and step time against devices.

    `outcomes` are in the order of the search. `curves` come from `scaling_curves` and may be empty.
    `per_device` is the load of each device, such as `4 examples`.
    """
    fitting = [(x.candidate, x.plan) for x in outcomes if x.plan and not x.reason][:PICTURED]
    labels = [f"{candidate.name}\n{candidate.details}" for candidate, _ in fitting]
    heading = f"The fastest of those that fit ({len(outcomes)} compared)"
    with pictures.saved_figure(path, (15, 6.4), title=title) as figure:
        ranking, *rest = figure.subplots(
            1, 1 + bool(curves), width_ratios=(1, 1.25)[: 1 + bool(curves)], squeeze=False
        )[0]
        _draw_times(ranking, [plan for _, plan in fitting], labels, title=heading)
        for scaling in rest:
            _draw_curves(scaling, curves)
            scaling.set_title(f"Step time against devices, {per_device} on each (weak scaling)")


def _draw_times(
    axes: Any, plans: Sequence[StepEstimate], labels: Sequence[str], *, title: str
) -> None:
    """Draws the compute and the waits of steps; hidden collectives are thin bars below."""
    bars = []
    for place, (plan, label) in enumerate(zip(plans, labels, strict=True)):
        mfu = "" if plan.mfu is None else f", MFU {describe_share(plan.mfu)}"
        parts = [
            (plan.compute_seconds or 0, pictures.COMPUTING),
            (plan.exposed_seconds or 0, pictures.SENDING),
        ]
        bars.append(Bar(label, parts, describe_seconds(plan.step_seconds) + mfu))
        hidden = plan.overlapped_seconds or 0
        axes.barh(place + 0.41, hidden, height=0.12, color=pictures.SENDING_HIDDEN)
    pictures.draw_bars(axes, bars)
    pictures.format_ticks(axes.xaxis, describe_seconds)
    axes.set_title(title)
    axes.set_xlabel("step time, estimated")
    colors = {"computing": pictures.COMPUTING, "sending, exposed": pictures.SENDING}
    pictures.add_legend(axes, {**colors, "sending, hidden": pictures.SENDING_HIDDEN})


def _draw_memory(axes: Any, plans: Sequence[StepEstimate]) -> None:
    """Draws the bytes that a device holds, and a line at the size of its memory."""
    bound, largest = max(p.hbm_bytes for p in plans), max(p.peak_bytes for p in plans)
    bars: list[Bar] = []
    seen: dict[str, str] = {}
    for plan in plans:
        colors = {name: pictures.MEMORY_COLORS.get(name, pictures.GREY) for name in plan.memory}
        parts = [(size, colors[name]) for name, size in plan.memory.items()]
        text = f"{describe_bytes(plan.peak_bytes)} of {describe_bytes(plan.hbm_bytes)}"
        bars.append(Bar("", parts, text))
        seen |= {name: colors[name] for name in colors if plan.memory[name] > 0.002 * largest}
    is_near = largest > 0.2 * bound
    pictures.draw_bars_of_bytes(
        axes,
        bars,
        end=pictures.ROOM * max(bound, largest) if is_near else 0,
        title="Memory of a device at the step's peak",
    )
    if is_near:
        axes.axvline(bound, color=pictures.INK, linewidth=1.2, linestyle="--")
    pictures.add_legend(axes, seen)


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[int, StepEstimate]]]) -> None:
    """Draws step time against devices; the marker of a plan that does not fit is hollow."""
    for (name, curve), marker in zip(curves.items(), itertools.cycle(MARKERS), strict=False):
        color = strategy_kinds()[name].color
        counts = [count for count, _ in curve]
        times = [plan.step_seconds or 0 for _, plan in curve]
        faces = [color if plan.fits else "white" for _, plan in curve]
        split = curve[0][1].mesh.get(SPLIT_AXIS) if curve else None
        label = f"{name}, {SPLIT_AXIS}={split}" if split else name
        axes.plot(counts, times, color=color, marker=marker, label=label)
        axes.scatter(counts, times, color=faces, edgecolors=color, marker=marker, zorder=3)
    longest = max(curves.values(), key=len, default=())
    counts = [count for count, _ in longest]
    computing = [plan.compute_seconds or 0 for _, plan in longest]
    axes.plot(counts, computing, color=pictures.COMPUTING, linestyle="--", label="computing alone")
    axes.scatter([], [], color="white", edgecolors=pictures.INK, label="does not fit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=30)
    axes.set_ylim(bottom=0)
    pictures.format_ticks(axes.yaxis, describe_seconds)
    axes.set_xlabel("devices")
    axes.set_ylabel("step time, estimated")
    axes.legend()
