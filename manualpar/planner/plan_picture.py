"""A plan and a sweep as pictures: where a step's time and a device's memory go, and how it scales.

Matplotlib is used without pyplot, because pyplot's figures, backend and settings belong to the
whole process.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.extras import require
from manualpar.planner.plan import Plan
from manualpar.planner.plan_report import seconds
from manualpar.planner.sweep import Outcome
from manualpar.strategies import strategy_kinds

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PINK, YELLOW, PALE = "#D55E00", "#CC79A7", "#F0E442", "#F3C9A8"
INK, GREY = "#222222", "#B8BEC6"
MEMORY_COLORS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "gathered": SKY,
    "activations": PINK,
    "batch": YELLOW,
    "temporaries": "#999999",
}
TIME_COLORS = {"computing": BLUE, "sending, exposed": RED, "sending, hidden": PALE}
DPI = 120
SHOWN = 10
MARKERS = "osD^v"
GIB = 2**30


def draw_plans(plans: Sequence[Plan], path: Path) -> None:
    """Draws plans of one step into a PNG file: a bar of time and one of memory for each.

    Args:
      plans: The compiler's and the roofline's, or one of them.
      path: The file.
    """
    figure, (time, memory) = _figure((13, 2.6 + 0.9 * len(plans)), width_ratios=(1.1, 1))
    names = [f"{plan.source}\n(a model)" if plan.is_model else plan.source for plan in plans]
    _draw_times(time, plans, names, title="Step time")
    _draw_memory(memory, plans)
    first = plans[0]
    _save(figure, path, f"{first.name} on {first.topology}: estimated, not measured")


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
    figure, (ranking, scaling) = _figure((15, 6.4), width_ratios=(1, 1.25))
    fitting = [(x.candidate, x.plan) for x in outcomes if x.plan and not x.reason][:SHOWN]
    labels = []
    for candidate, _ in fitting:
        details = [f"{candidate.num_minibatches} minib."]
        details += [f"remat {candidate.remat}"] if candidate.remat else []
        details += [f"gather {candidate.gather_dtype}"] if candidate.gather_dtype else []
        labels.append(f"{candidate.name}\n{', '.join(details)}")
    heading = f"The fastest of those that fit ({len(outcomes)} compared)"
    _draw_times(ranking, [plan for _, plan in fitting], labels, title=heading)
    _draw_curves(scaling, curves)
    scaling.set_title(f"Step time against devices, {per_device} on each (weak scaling)", loc="left")
    _save(figure, path, title)


def _figure(size: tuple[float, float], *, width_ratios: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its two axes."""
    require("the picture of a plan", "matplotlib")
    # Matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, width_ratios=width_ratios)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=9)
    return figure, axes


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=DPI)


def _draw_bars(
    axes: Any,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    texts: Sequence[str],
) -> None:
    """Draws a horizontal bar of parts for each label, the first on top, and a text behind it."""
    places, ends = range(len(labels)), [0.0] * len(labels)
    for name, sizes in parts.items():
        color = colors.get(name, GREY)
        axes.barh(places, sizes, left=ends, height=0.5, color=color, label=name)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end, text in zip(places, ends, texts, strict=True):
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0}
        axes.text(end, place, f"  {text}", va="center", fontsize=9, bbox=white)
    axes.set_yticks(places, labels)
    axes.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.5 * max(ends, default=1) or 1)


def _draw_times(axes: Any, plans: Sequence[Plan], labels: Sequence[str], *, title: str) -> None:
    """Draws what steps compute and wait for; hidden collectives are thin bars below."""
    factor, unit = _time_unit(plans)
    computing, exposed, hidden = (
        [factor * (getattr(plan, f"{name}_seconds") or 0) for plan in plans]
        for name in ("compute", "exposed", "overlapped")
    )
    mfus = ["" if plan.mfu is None else f", MFU {plan.mfu:.1%}" for plan in plans]
    texts = [seconds(plan.step_seconds) + mfu for plan, mfu in zip(plans, mfus, strict=True)]
    parts = {"computing": computing, "sending, exposed": exposed}
    _draw_bars(axes, labels, parts, TIME_COLORS, texts=texts)
    below = [place + 0.33 for place in range(len(plans))]
    hidden_name = "sending, hidden"
    axes.barh(below, hidden, height=0.12, color=TIME_COLORS[hidden_name], label=hidden_name)
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"{unit} a step, estimated")
    _explain(axes)


def _draw_memory(axes: Any, plans: Sequence[Plan]) -> None:
    """Draws what a device holds, and a line at what it has."""
    bound, largest = max(p.hbm_bytes for p in plans), max(p.peak_bytes for p in plans)
    size, unit = (GIB, "GiB") if largest >= 0.1 * GIB else (2**20, "MiB")
    names = dict.fromkeys(name for plan in plans for name in plan.memory)
    parts = {name: [plan.memory.get(name, 0) / size for plan in plans] for name in names}
    texts = [
        f"{plan.peak_bytes / size:.2f} {unit} of {plan.hbm_bytes / GIB:.2f} GiB" for plan in plans
    ]
    shown = {name: sizes for name, sizes in parts.items() if max(sizes) > 0.002 * largest / size}
    _draw_bars(axes, [""] * len(plans), shown, MEMORY_COLORS, texts=texts)
    if largest > 0.2 * bound:
        axes.axvline(bound / size, color=RED, linewidth=1.2, linestyle="--")
        axes.set_xlim(0, 1.5 * max(bound, largest) / size)
    axes.set_title("Memory of a device at the step's peak", loc="left")
    axes.set_xlabel(unit)
    _explain(axes)


def _time_unit(plans: Sequence[Plan]) -> tuple[float, str]:
    """How many of a unit a second is, and the unit's name."""
    longest = max((plan.step_seconds or 0 for plan in plans), default=1)
    return (1.0, "seconds") if longest >= 1 else (1e3, "milliseconds")


def _explain(axes: Any) -> None:
    """Explains the colours below the axes."""
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[tuple[int, Plan]]]) -> None:
    """Draws step time against devices; the marker of a plan that does not fit is hollow."""
    factor, unit = _time_unit([plan for curve in curves.values() for _, plan in curve])
    for (name, curve), marker in zip(curves.items(), MARKERS, strict=False):
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
    axes.grid(alpha=0.4)
    axes.legend(fontsize=9, frameon=False)
