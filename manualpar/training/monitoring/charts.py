"""Draws the charts of a run with matplotlib."""

import io
import math
from collections.abc import Sequence
from typing import Any

from manualpar.system.reports.pictures import (
    INK,
    OTHER_SPLIT,
    SPLIT_COLORS,
    count_steps,
    new_figure,
)
from manualpar.training.monitoring.run_record import Chart, Point

GREY = "#767676"  # Dark enough for a thin line.
COLUMNS = 2
# A line has at most MOST_POINTS points. If it has at most FEW_POINTS, each point is marked.
MOST_POINTS, FEW_POINTS = 1200, 60


def draw_charts(charts: Sequence[Chart], *, title: str) -> tuple[str, bytes]:
    """Draws charts in a grid; without charts, the picture has a text in their place.

    Returns:
      An `<svg>` element for a page, without the title, and a PNG with the title.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    columns = min(COLUMNS, max(len(charts), 1))
    rows = max(-(-len(charts) // columns), 1)
    png, svg = io.BytesIO(), io.StringIO()
    size = (1 + 5 * columns, 3.9 * rows)
    with new_figure("a report with charts", size, title=title) as figure:
        for index, chart in enumerate(charts, 1):
            draw_chart(figure.add_subplot(rows, columns, index), chart)
        if not charts:
            figure.text(0.5, 0.5, "the run reported nothing", ha="center")
        figure.savefig(png, format="png")
        # Keeps the layout for the second picture, because computing the layout takes most of the
        # time.
        figure.set_layout_engine("none")
        figure.suptitle("")
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", transparent=True, metadata=no_metadata)
    return svg.getvalue()[svg.getvalue().index("<svg") :], png.getvalue()


def draw_chart(axes: Any, chart: Chart) -> None:
    """Draws a chart into matplotlib's axes, with gaps and resumes marked."""
    for split, all_points in chart.lines.items():
        points = decimate(all_points, MOST_POINTS)
        axes.plot(
            [step for step, _ in points],
            [math.nan if value is None else value for _, value in points],
            color=SPLIT_COLORS.get(split, OTHER_SPLIT),
            linewidth=1.4,
            marker="o",
            markersize=3.5,
            markevery=None if len(points) <= FEW_POINTS else _lonely(points),
            label=split,
        )
    gaps = [step for points in chart.lines.values() for step, value in points if value is None]
    if gaps:
        mark = {"linestyle": "", "marker": "x", "color": INK, "clip_on": False}
        bottom = axes.get_xaxis_transform()
        axes.plot(gaps, [0.0] * len(gaps), transform=bottom, label="not finite", **mark)
    for index, step in enumerate(chart.resumes):
        label = "" if index else "resumed"
        axes.axvline(step, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), label=label)
    axes.set_title(chart.title)
    count_steps(axes)
    axes.set_ylabel(chart.unit)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    # The legend is next to the title, because inside the axes it could cover the lines.
    legend = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(ncols=5, columnspacing=1, **legend)


def _lonely(points: Sequence[Point]) -> list[int]:
    """Returns the indices of points between two gaps, which need a marker to be visible."""
    values = [None, *(value for _, value in points), None]
    triples = zip(values, values[1:], values[2:], strict=False)
    return [i for i, (a, x, b) in enumerate(triples) if x is not None and a is b is None]


def decimate(points: Sequence[Point], limit: int) -> list[Point]:
    """Chooses at most `limit` points that draw the same line; `limit` is at least 4.

    The first and the last point are kept. In each group of neighbours, the lowest point, the
    highest point, and one point that is not finite (if there is any) are kept.
    """
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit // 4))
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), size):
        group = range(start, min(start + size, len(points)))
        gaps = [index for index in group if points[index][1] is None]
        finite = sorted(set(group).difference(gaps), key=lambda index: points[index][1] or 0.0)
        chosen.update(gaps[:1], finite[:1], finite[-1:])
    return [points[index] for index in sorted(chosen)]
