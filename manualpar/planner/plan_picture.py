"""Plans and sweeps as pictures: what takes a step's time and memory, and how a step scales."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.planner.plan import Plan
from manualpar.planner.sweep import Outcome
from manualpar.strategies import strategy_kinds
from manualpar.watching.pictures import (
    BLUE,
    GREY,
    INK,
    MEMORY_COLORS,
    RED,
    ROOM,
    Bar,
    draw_bars,
    explain,
    new_figure,
    scale_in_bytes,
)
from manualpar.watching.tables import describe_bytes, describe_seconds, describe_share

HIDDEN = "#F3C9A8"  # A pale red.
TIME_COLORS = {"computing": BLUE, "sending, exposed": RED, "sending, hidden": HIDDEN}
SHOWN = 10
MARKERS = "osD^v"


def draw_plans(plans: Sequence[Plan], path: Path) -> None:
    """Draws plans of one step into a PNG file: a bar of time and one of memory for each."""
    title = f"{plans[0].name} on {plans[0].topology}: estimated, not measured"
    names = [f"{plan.source}\n(a model)" if plan.is_model else plan.source for plan in plans]
    with new_figure(path.name, (13, 2.6 + 0.9 * len(plans)), title=title) as figure:
        time, memory = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_times(time, plans, names, title="Step time")
        _draw_memory(memory, plans)
        figure.savefig(path)


def draw_sweep(
    outcomes: Sequence[Outcome],
    curves: Mapping[str, Sequence[tuple[int, Plan]]],
    path: Path,
    *,
    title: str,
    per_device: str,
) -> None:
    """Draws a sweep into a PNG file: the fastest, and step time against the number of devices.

    Args:
      outcomes: What was compared, the fastest first.
      curves: What `scaling_curves` returns.
      path: The file.
      title: What was planned on what.
      per_device: The load of each device, such as `4 examples`.
    """
    fitting = [(x.candidate, x.plan) for x in outcomes if x.plan and not x.reason][:SHOWN]
    labels = []
    for candidate, _ in fitting:
        details = [f"{candidate.num_minibatches} minib."]
        details += [f"remat {candidate.remat}"] if candidate.remat else []
        details += [f"gather {candidate.gather_dtype}"] if candidate.gather_dtype else []
        labels.append(f"{candidate.name}\n{', '.join(details)}")
    heading = f"The fastest of those that fit ({len(outcomes)} compared)"
    with new_figure(path.name, (15, 6.4), title=title) as figure:
        ranking, scaling = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_times(ranking, [plan for _, plan in fitting], labels, title=heading)
        _draw_curves(scaling, curves)
        scaling.set_title(f"Step time against devices, {per_device} on each (weak scaling)")
        figure.savefig(path)


def _draw_times(axes: Any, plans: Sequence[Plan], labels: Sequence[str], *, title: str) -> None:
    """Draws what steps compute and wait for; hidden collectives are thin bars below."""
    factor, unit = _time_unit(plans)
    bars = []
    for place, (plan, label) in enumerate(zip(plans, labels, strict=True)):
        mfu = "" if plan.mfu is None else f", MFU {describe_share(plan.mfu)}"
        computing, exposed, hidden = (
            factor * (seconds or 0)
            for seconds in (plan.compute_seconds, plan.exposed_seconds, plan.overlapped_seconds)
        )
        parts = [(computing, BLUE), (exposed, RED)]
        bars.append(Bar(label, parts, describe_seconds(plan.step_seconds) + mfu))
        axes.barh(place + 0.41, hidden, height=0.12, color=HIDDEN)
    draw_bars(axes, bars)
    axes.set_title(title)
    axes.set_xlabel(f"{unit} a step, estimated")
    explain(axes, TIME_COLORS)


def _draw_memory(axes: Any, plans: Sequence[Plan]) -> None:
    """Draws what a device holds, and a line at what it has."""
    bound, largest = max(p.hbm_bytes for p in plans), max(p.peak_bytes for p in plans)
    sizes: dict[str, int] = {}
    for name, size in (item for plan in plans for item in plan.memory.items()):
        sizes[name] = max(sizes.get(name, 0), size)
    # The others could not be seen.
    colors = {n: MEMORY_COLORS.get(n, GREY) for n, size in sizes.items() if size > 0.002 * largest}
    bars = [
        Bar(
            "",
            [(plan.memory.get(name, 0), color) for name, color in colors.items()],
            f"{describe_bytes(plan.peak_bytes)} of {describe_bytes(plan.hbm_bytes)}",
        )
        for plan in plans
    ]
    is_near = largest > 0.2 * bound
    draw_bars(axes, bars, end=ROOM * max(bound, largest) if is_near else 0)
    if is_near:
        axes.axvline(bound, color=RED, linewidth=1.2, linestyle="--")
    scale_in_bytes(axes)
    axes.set_title("Memory of a device at the step's peak")
    explain(axes, colors)


def _time_unit(plans: Sequence[Plan]) -> tuple[float, str]:
    """How many of a unit a second is, and the unit's name."""
    longest = max((plan.step_seconds or 0 for plan in plans), default=1)
    return (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[int, Plan]]]) -> None:
    """Draws step time against devices; the marker of a plan that does not fit is hollow."""
    factor, unit = _time_unit([plan for curve in curves.values() for _, plan in curve])
    for (name, curve), marker in zip(curves.items(), itertools.cycle(MARKERS), strict=False):
        color = strategy_kinds()[name].color
        counts = [count for count, _ in curve]
        times = [factor * (plan.step_seconds or 0) for _, plan in curve]
        faces = [color if plan.fits else "white" for _, plan in curve]
        axes.plot(counts, times, color=color, marker=marker, label=name)
        axes.scatter(counts, times, color=faces, edgecolors=color, marker=marker, zorder=3)
    longest = max(curves.values(), key=len, default=())
    counts = [count for count, _ in longest]
    computing = [factor * (plan.compute_seconds or 0) for _, plan in longest]
    axes.plot(counts, computing, color=GREY, linestyle="--", label="computing alone")
    axes.scatter([], [], color="white", edgecolors=INK, label="does not fit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=30)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel(f"{unit} a step, estimated")
    axes.legend()
