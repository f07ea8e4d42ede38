"""Draws plans and searches: how a step spends time and memory, and how it scales."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.planner.plan import StepEstimate
from manualpar.planner.sweep import Compared, Outcome
from manualpar.strategies import strategy_kinds
from manualpar.system.reports import pictures
from manualpar.system.reports.pictures import Bar
from manualpar.system.reports.tables import describe_bytes, describe_seconds, describe_share
from manualpar.training.task import SPLIT_AXIS

SHOWN = 10
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
    fitting = [(x.candidate, x.plan) for x in outcomes if x.plan and not x.reason][:SHOWN]
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
