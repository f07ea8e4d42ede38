"""A plan and a sweep as pictures: where a step's time and a device's memory go, and how it scales.

Matplotlib is used without pyplot, whose figures, backend and settings would be the whole process's.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.extras import require
from manualpar.planner.plan import Plan
from manualpar.planner.plan_report import seconds
from manualpar.planner.sweep import Outcome
from manualpar.strategies import strategy_kinds

# Okabe and Ito's colours, which those who see fewer of them tell apart.
MEMORY_COLORS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "gathered": "#56B4E9",
    "activations": "#CC79A7",
    "batch": "#F0E442",
    "arguments": "#0072B2",
    "temporaries": "#999999",
}
COMPUTE, EXPOSED, HIDDEN = "#0072B2", "#D55E00", "#F3C9A8"
INK, GREY, FAINT = "#222222", "#B8BEC6", "#DDDDDD"
DPI = 120
GIB = 2**30
SHOWN = 10
MARKERS = "osD^v"


def draw_plans(plans: Sequence[Plan], path: Path) -> None:
    """Draws plans of one step into a PNG file: a bar of time and one of memory for each.

    Args:
      plans: The compiler's and the roofline's, or one of them.
      path: The file.
    """
    figure = _figure(13, 2.6 + 0.9 * len(plans))
    time, memory = figure.subplots(1, 2, width_ratios=(1.1, 1))
    names = [f"{plan.source}\n(a model)" if plan.is_model else plan.source for plan in plans]
    _draw_time(time, plans, names)
    _draw_memory(memory, plans, names)
    first = plans[0]
    title = f"{first.name} on {first.topology}: estimated, not measured"
    figure.suptitle(title, fontsize=13, color=INK)
    figure.savefig(path, dpi=DPI)


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
      per_device: What each device has to do, such as `4 examples`.
    """
    figure = _figure(15, 6.4)
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.25))
    _draw_ranking(figure.add_subplot(grid[0, 0]), outcomes)
    _draw_curves(figure.add_subplot(grid[0, 1]), curves, per_device)
    figure.suptitle(title, fontsize=13, color=INK)
    figure.savefig(path, dpi=DPI)


def _figure(width: float, height: float) -> Any:
    """An empty figure."""
    require("the picture of a plan", "matplotlib")
    # Matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Any, title: str) -> None:
    """What all axes have in common."""
    axes.set_title(title, fontsize=11, loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
    axes.set_axisbelow(True)


def _draw_time(axes: Any, plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Draws where a step's time goes; what is hidden lies as a thin bar below the compute."""
    _tidy(axes, "Step time")
    longest = max(((plan.step_seconds or 0) for plan in plans), default=0)
    factor, unit = _time_unit(longest)
    for place, plan in enumerate(plans):
        computing = factor * (plan.compute_seconds or 0)
        exposed = factor * (plan.exposed_seconds or 0)
        hidden = factor * (plan.overlapped_seconds or 0)
        axes.barh(place, computing, height=0.5, color=COMPUTE)
        axes.barh(place, exposed, left=computing, height=0.5, color=EXPOSED)
        axes.barh(place + 0.33, hidden, height=0.12, color=HIDDEN)
        text = f"  {seconds(plan.step_seconds)}"
        text += "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
        axes.text(computing + exposed, place, text, va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.4 * factor * longest or 1)
    axes.set_ylim(len(plans) - 0.4, -0.6)
    axes.set_yticks(range(len(plans)), names)
    axes.set_xlabel(unit)
    _legend(axes, {"computing": COMPUTE, "sending, exposed": EXPOSED, "sending, hidden": HIDDEN})


def _draw_memory(axes: Any, plans: Sequence[Plan], names: Sequence[str]) -> None:
    """Draws what a device holds, with what it has marked."""
    _tidy(axes, "Memory of a device at the step's peak")
    shown: dict[str, str] = {}
    bound, largest = max(p.hbm_bytes for p in plans), max(p.peak_bytes for p in plans)
    unit, in_words = (GIB, "GiB") if largest >= 0.1 * GIB else (2**20, "MiB")
    for place, plan in enumerate(plans):
        left = 0.0
        for name, size in plan.memory.items():
            color = MEMORY_COLORS.get(name, GREY)
            axes.barh(place, size / unit, left=left, height=0.5, color=color)
            left += size / unit
            if size > 0.002 * plan.peak_bytes:
                shown[name] = color
        text = f"{plan.peak_bytes / unit:.2f} {in_words} of {plan.hbm_bytes / GIB:.2f} GiB"
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        apart = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (left, place), fontsize=9, color=INK, bbox=white, **apart)
    if largest > 0.2 * bound:
        axes.axvline(bound / unit, color=EXPOSED, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.set_xlim(0, 1.45 * max(bound, largest) / unit)
    else:
        axes.set_xlim(0, 1.8 * largest / unit)
    axes.set_ylim(len(plans) - 0.4, -0.6)
    axes.set_yticks(range(len(plans)), [""] * len(names))
    axes.set_xlabel(in_words)
    _legend(axes, shown)


def _time_unit(longest: float) -> tuple[float, str]:
    """What to multiply seconds by, and what they are then."""
    return (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")


def _legend(axes: Any, colors: Mapping[str, str], *, below: float = 0.32) -> None:
    """Says what the colours are, below the axes."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(
        handles=handles,
        fontsize=8,
        frameon=False,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, -below),
    )


def _draw_ranking(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """Draws the fastest candidates as bars."""
    fitting = [each for each in outcomes if each.plan and not each.reason][:SHOWN]
    _tidy(axes, f"The fastest of those that fit ({len(outcomes)} compared)")
    labels = []
    slowest = max(((each.plan.step_seconds or 0) for each in fitting if each.plan), default=1)
    factor, unit = _time_unit(slowest)
    for place, outcome in enumerate(fitting):
        plan, candidate = outcome.plan, outcome.candidate
        assert plan is not None
        computing = factor * (plan.compute_seconds or 0)
        exposed = factor * (plan.exposed_seconds or 0)
        axes.barh(place, computing, height=0.66, color=COMPUTE)
        axes.barh(place, exposed, left=computing, height=0.66, color=EXPOSED)
        text = f"  {seconds(plan.step_seconds)}"
        axes.text(computing + exposed, place, text, va="center", fontsize=9, color=INK)
        details = [f"{candidate.num_minibatches} minib."]
        details += [f"remat {candidate.remat}"] if candidate.remat else []
        details += [f"gather {candidate.gather_dtype}"] if candidate.gather_dtype else []
        labels.append(f"{candidate.name}\n{', '.join(details)}")
    axes.set_xlim(0, 1.25 * factor * slowest)
    axes.set_ylim(max(len(fitting), 1) - 0.4, -0.6)
    axes.set_yticks(range(len(fitting)), labels, fontsize=8)
    axes.set_xlabel(f"{unit} a step, estimated")
    _legend(axes, {"computing": COMPUTE, "sending, exposed": EXPOSED}, below=0.1)


def _draw_curves(
    axes: Any, curves: Mapping[str, Sequence[tuple[int, Plan]]], per_device: str
) -> None:
    """Draws step time against devices; what does not fit is hollow."""
    _tidy(axes, f"Step time against devices, {per_device} on each (weak scaling)")
    slowest = [plan.step_seconds or 0 for curve in curves.values() for _, plan in curve]
    factor, unit = _time_unit(max(slowest, default=1))
    for index, (name, curve) in enumerate(curves.items()):
        color = strategy_kinds()[name].color
        counts = [count for count, _ in curve]
        times = [factor * (plan.step_seconds or 0) for _, plan in curve]
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(counts, times, color=color, linewidth=1.6, label=name, zorder=2)
        for (count, plan), time in zip(curve, times, strict=True):
            face = color if plan.fits else "white"
            axes.plot(
                [count], [time], marker=marker, markersize=6, color=color, markerfacecolor=face
            )
    longest = max(curves.values(), key=len, default=())
    if longest:
        computing = [factor * (plan.compute_seconds or 0) for _, plan in longest]
        counts = [count for count, _ in longest]
        axes.plot(counts, computing, color=GREY, linestyle=(0, (4, 2)), label="computing alone")
    axes.set_xscale("log", base=2)
    if longest:
        axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * factor * max(slowest, default=1))
    axes.set_xlabel("devices")
    axes.set_ylabel(f"{unit} a step, estimated")
    axes.grid(color=FAINT, linewidth=0.6)
    hollow = {"marker": "o", "linestyle": "", "color": INK, "markerfacecolor": "white"}
    axes.plot([], [], label="does not fit", **hollow)
    axes.legend(fontsize=9, frameon=False)
