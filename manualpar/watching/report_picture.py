"""A run as a PNG: a chart beside the other.

Matplotlib is used without pyplot, whose figures, backend and settings would be the whole process's.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manualpar.watching.durable_files import explained
from manualpar.watching.run_record import Chart, decimate

# Okabe and Ito's colours, which those who see fewer of them tell apart.
COLORS = {"train": "#0072B2", "eval": "#D55E00", "test": "#009E73"}
OTHER_COLOR = "#CC79A7"
INK, GREY, FAINT = "#222222", "#767676", "#DDDDDD"
MOST_POINTS, FEW_POINTS = 4000, 60  # Of a line; fewer are marked each.


def draw_run(charts: Sequence[Chart], path: Path, *, title: str) -> None:
    """Draws charts into a PNG file.

    Args:
      charts: The charts; without any the picture says so.
      path: The file.
      title: What stands above them.

    Raises:
      WriteError: The file cannot be written.
    """
    # Matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(len(charts), 1)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(1 + 5 * columns, 4.2), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    for axes, chart in zip(figure.subplots(1, columns, squeeze=False)[0], charts, strict=False):
        _draw_chart(axes, chart)
    if not charts:
        figure.axes[0].set_axis_off()
        figure.axes[0].text(0.5, 0.5, "the run reported nothing", ha="center", color=INK)
    # A dollar sign would begin a formula.
    shown = title.encode(errors="backslashreplace").decode()  # A folder's name need not be text.
    figure.suptitle(shown, fontsize=13, color=INK, parse_math=False)
    with explained(path):
        figure.savefig(path, dpi=120)


def _draw_chart(axes: Any, chart: Chart) -> None:
    """Draws a chart."""
    for split, all_points in chart.lines.items():
        points = decimate(all_points, MOST_POINTS)
        values = [math.nan if value is None else value for _, value in points]
        axes.plot(
            [step for step, _ in points],
            values,
            color=COLORS.get(split, OTHER_COLOR),
            linewidth=1.4,
            marker="o" if len(points) <= FEW_POINTS else "",
            markersize=3.5,
            label=split,
        )
    gaps = [step for points in chart.lines.values() for step, value in points if value is None]
    if gaps:
        bottom = axes.get_xaxis_transform()
        mark = {"linestyle": "", "marker": "x", "color": INK, "clip_on": False}
        axes.plot(gaps, [0.0] * len(gaps), transform=bottom, label="not finite", **mark)
    for step in chart.resumes:
        axes.axvline(step, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_title(chart.title, fontsize=11, loc="left", color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel(chart.unit)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
    axes.set_axisbelow(True)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    # Beside the title, for inside there is no place that is free in every chart.
    legend = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(fontsize=9, frameon=False, ncols=4, columnspacing=1, **legend)
