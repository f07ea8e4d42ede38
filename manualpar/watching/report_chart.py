"""A chart as SVG to stand in an HTML page, whose style sheet has its colours."""

import html
import math
from collections.abc import Sequence

from manualpar.watching.run_record import Chart, Point, decimate

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 26, 12, 44  # What is left free around the lines.
MOST_POINTS = 1200
FEW_POINTS = 60  # Fewer are marked each, with their number.


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers for an axis.

    Args:
      low: Where it begins.
      high: Where it ends, more than `low`.
      count: About how many to have.

    Returns:
      Multiples of 1, 2 or 5 times a power of ten, from one not above `low` to one not below `high`.
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_tick(value: float) -> str:
    """A number at an axis."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def chart_svg(chart: Chart) -> str:
    """Draws a chart.

    Args:
      chart: The chart; of long lines points are left out.

    Returns:
      An `<svg>` element. Lines have the class of their split; gaps and resumes are marked.
    """
    finite = [x for points in chart.lines.values() for _, x in points if x is not None]
    steps = [step for points in chart.lines.values() for step, _ in points]
    low = 0.0 if chart.from_zero else min(finite, default=0.0)
    ys = ticks(*_spread(low, max(finite, default=1.0)), 5)
    xs = [x for x in ticks(*_spread(min(steps), max(steps)), 7) if x == round(x)]

    def place_x(step: float) -> float:
        return LEFT + (step - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)

    def place_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)

    name = html.escape(f"{chart.title} by step")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">']
    for y in ys:
        at = f"{place_y(y):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(_text(LEFT - 8, place_y(y) + 4, format_tick(y), "end"))
    bottom = HEIGHT - BOTTOM
    for x in xs:
        at = f"{place_x(x):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(_text(place_x(x), bottom + 20, format_tick(x), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle"))
    for step in chart.resumes:
        if xs[0] <= step <= xs[-1]:
            at = f"{place_x(step):.1f}"
            parts.append(
                f'<line class="resume" x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}">'
                f"<title>resumed after step {step}</title></line>"
            )
    for split, points in chart.lines.items():
        parts.append(f'<g class="{_split_class(split)}">')
        kept = decimate(points, MOST_POINTS)
        for run in _runs(kept):
            places = [(step, x, place_x(step), place_y(x)) for step, x in run]
            if len(run) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for _, _, x, y in places)
                parts.append(f'<polyline points="{path}"/>')
            if len(run) == 1 or len(kept) <= FEW_POINTS:
                parts += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3">'
                    f"<title>{html.escape(split)}, step {step:,}: {value:.6g}</title></circle>"
                    for step, value, x, y in places
                ]
        for step, value in kept:
            if value is None:
                parts.append(
                    f'<path class="gap" d="M{place_x(step) - 4:.1f} {bottom - 4}l8 8m0 -8l-8 8">'
                    f"<title>{html.escape(split)}, step {step:,}: not finite</title></path>"
                )
        parts.append("</g>")
    parts.append("</svg>")
    return "\n".join(parts)


def _split_class(split: str) -> str:
    """The class of a line."""
    return split if split in ("train", "eval", "test") else "other"


def _spread(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty, nor so narrow that its ends are the same in floating point."""
    width = max(max(abs(low), abs(high)) * 1e-6, 1e-300)
    if high - low > width:
        return low, high
    # A step has whole numbers around it.
    margin = max(width, 1.0) if isinstance(low, int) else max(width, abs(low) * 0.1, 1e-6)
    return low - margin, high + margin


def _runs(points: Sequence[Point]) -> list[list[tuple[int, float]]]:
    """The parts of a line between its gaps."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    """A text in a chart."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
