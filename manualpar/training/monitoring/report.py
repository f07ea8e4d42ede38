"""Writes a run's report, `report.html` and `report.png`, into the run's folder.

A run writes its report when it ends, even if it failed. The report is made only from the files of
the run, so it can be made again at any time. The page needs no other file, and its content security
policy forbids content from other places.
"""

import datetime
import html
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manualpar.errors import MissingExtraError
from manualpar.system.reports.pictures import (
    INK,
    OTHER_SPLIT,
    SPLIT_COLORS,
    count_steps,
    new_figure,
)
from manualpar.system.storage.durable_files import replace_file
from manualpar.training.config import flatten_config
from manualpar.training.monitoring.run_record import (
    Chart,
    Interval,
    Point,
    RunRecord,
    RunTimes,
    add_up,
    final_numbers,
    make_charts,
    read_run,
    sort_splits,
)

PAGE_FILE = "report.html"
PICTURE_FILE = "report.png"
SHOWN_LOSSES = 200  # Rows of a table; `times.jsonl` has all intervals.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #ddd; --grey: #666; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181b; --faint: #3a3d42; --grey: #a0a4aa; }
  svg { filter: invert(0.9) hue-rotate(180deg); } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
figure { margin: 0; } svg { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--faint); padding: 0.2rem 1.2rem 0.2rem 0;
  text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; overflow-x: auto; font-size: 12px; line-height: 1.3; }
"""


def write_report(
    workdir: Path,
    *,
    title: str,
    facts: Mapping[str, object],
    report: Callable[[str], None] = print,
) -> Path:
    """Writes the report of a run, and returns the path of the page.

    Args:
      facts: Names and values to show in a table, such as the mesh or how the run ended.
      report: Called with a sentence for each file that has content which no run writes, so that it
        is left out. Also called if matplotlib is missing: then there are no charts.

    Raises:
      WriteError: The report cannot be written.
    """
    run = read_run(workdir)
    for sentence in run.left_out:
        report(sentence)
    charts = make_charts(run)
    try:
        svg, picture = draw_charts(charts, title=title)
        titles = ", ".join(chart.title for chart in charts) or "the run reported nothing"
        shown = f'<figure role="img" aria-label="By step: {html.escape(titles)}">{svg}</figure>'
        replace_file(workdir / PICTURE_FILE, picture)
    except MissingExtraError as error:
        report(str(error))
        shown = f"<p>{html.escape(str(error))}</p>"
    replace_file(workdir / PAGE_FILE, page_html(run, shown, title=title, facts=facts))
    return workdir / PAGE_FILE


def page_html(run: RunRecord, charts: str, *, title: str, facts: Mapping[str, object]) -> str:
    """Returns a run's page as HTML.

    `charts` is HTML; `write_report` documents the other arguments.
    """
    times = add_up(run.times)
    sections = {
        "Last numbers": _final_table(run),
        "Facts": make_table([[name, _plain(value)] for name, value in facts.items()]),
        "Resumes and rollbacks": _resumes_table(run),
        "Time": _times_table(times),
        "Starts, stops, saves and stalls": _losses_table(times.losses),
        "Left out": "\n".join(f"<p>{html.escape(text)}</p>" for text in run.left_out),
        "Config": make_table(
            [[name, _plain(value)] for name, value in flatten_config(run.config).items()]
        ),
    }
    return make_page(charts, sections, title=title)


def make_page(charts: str, sections: Mapping[str, str], *, title: str) -> str:
    """Returns a page as HTML: charts, and below them the sections that are not empty, by heading.

    `charts` and the sections are HTML.
    """
    name = html.escape(title)
    body = "\n".join(f"<h2>{head}</h2>\n{text}" for head, text in sections.items() if text)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
{charts}
{body}
</body>
</html>
"""


def _final_table(run: RunRecord) -> str:
    """Makes the table of the latest metrics, with a column for each split."""
    numbers = final_numbers(run)
    splits = sort_splits({split for values in numbers.values() for split in values})
    last = {record["split"]: record["step"] for record in run.metrics}
    rows = [["after step", *(f"{last[split]:,}" if split in last else "" for split in splits)]]
    for name, values in numbers.items():
        texts = {x: "not finite" if y is None else f"{y:,.6g}" for x, y in values.items()}
        rows.append([name, *(texts.get(split, "") for split in splits)])
    return make_table(rows, ["", *splits], cell='td class="number"') if numbers else ""


def _resumes_table(run: RunRecord) -> str:
    rows = [
        [
            f"{record['resumed_after_step']:,}",
            str(record.get("reason", "")),
            str(record.get("time", "")),
            f"{sum(len(lines) for lines in record.values() if isinstance(lines, list)):,}",
        ]
        for record in run.resumes
    ]
    return make_table(rows, ["after step", "what", "time", "lines cut off"])


def _times_table(times: RunTimes) -> str:
    """Makes the table of what the run spent its time on, whose rows add up to its time."""
    ordered = sorted(times.seconds.items(), key=lambda one: -one[1])
    rows = [[what, *_seconds(seconds, times.total)] for what, seconds in ordered]
    headers = ["", "seconds", "share"]
    rows += [["in all", *_seconds(times.total, times.total)]] if rows else []
    return make_table(rows, headers, cell='td class="number"')


def _seconds(seconds: float, total: float) -> list[str]:
    return [f"{seconds:,.1f}", f"{seconds / total:.1%}" if total else ""]


def _losses_table(losses: Sequence[Interval]) -> str:
    """Makes the table of the intervals without training; short ones of a kind share a row."""
    shown = sorted(losses, key=lambda one: -one.seconds)[:SHOWN_LOSSES]
    rows = [
        [
            one.what,
            datetime.datetime.fromtimestamp(one.began, datetime.UTC).isoformat(timespec="seconds"),
            f"{one.step:,}",
            f"{one.seconds:,.1f}",
        ]
        for one in losses
        if one in shown
    ]
    others = [one for one in losses if one not in shown]
    for what in dict.fromkeys(one.what for one in others):
        seconds = [one.seconds for one in others if one.what == what]
        rows.append([f"{len(seconds):,} shorter: {what}", "", "", f"{sum(seconds):,.1f}"])
    return make_table(rows, ["", "time", "after step", "seconds"], cell='td class="number"')


def _plain(value: Any) -> str:
    """Formats a value as it would appear in a config file."""
    return value if isinstance(value, str) and value else repr(value)


def make_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str] = (), *, cell: str = "td"
) -> str:
    """Makes an HTML table; a row's first cell is its heading. Returns '' if there are no rows."""
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in headers)
    lines = ['<div class="table"><table>', f"<thead><tr>{heads}</tr></thead>" if heads else ""]
    for first, *others in rows:
        cells = f'<th scope="row">{html.escape(first)}</th>'
        for text in map(html.escape, others):
            shown = f"<pre>{text}</pre>" if "\n" in text else text
            cells += f"<{cell}>{shown}</{cell.split()[0]}>"
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])


# -------------------------------------------------------------------------------------------------
# Draws the charts of a run with matplotlib.


GREY = "#767676"  # Dark enough for a thin line.
COLUMNS = 2
# An axis that may be logarithmic is, if the largest value is at least so many times the smallest.
LOG_RATIO = 10
# A line has at most MOST_POINTS points. If it has at most FEW_POINTS, each point is marked.
MOST_POINTS, FEW_POINTS = 1200, 60


def draw_charts(
    charts: Sequence[Chart], *, title: str, style: Callable[[str], Mapping[str, Any]] | None = None
) -> tuple[str, bytes]:
    """Draws charts in a grid; without charts, the picture has a text in their place.

    Args:
      style: Returns how matplotlib draws the line of a name, if the lines are of several runs. The
        charts then share a legend.

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
            draw_chart(figure.add_subplot(rows, columns, index), chart, style=style)
        if not charts:
            figure.text(0.5, 0.5, "the run reported nothing", ha="center")
        if style:
            lines: dict[str, Any] = {}
            for axes, chart in zip(figure.axes, charts, strict=True):
                lines |= zip(chart.lines, axes.get_lines(), strict=False)
            # A label that begins with an underscore would be left out.
            labels = [f" {label}" for label in lines]
            figure.legend(lines.values(), labels, loc="outside lower center", ncols=3)
        figure.savefig(png, format="png")
        # Keeps the layout for the second picture, because computing the layout takes most of the
        # time.
        figure.set_layout_engine("none")
        figure.suptitle("")
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", transparent=True, metadata=no_metadata)
    return svg.getvalue()[svg.getvalue().index("<svg") :], png.getvalue()


def draw_chart(
    axes: Any, chart: Chart, *, style: Callable[[str], Mapping[str, Any]] | None = None
) -> None:
    """Draws a chart into matplotlib's axes, with gaps and resumes marked.

    Without `style`, see `draw_charts`, a line has the colour of its split, and there is a legend.
    """
    for split, all_points in chart.lines.items():
        points = decimate(all_points, MOST_POINTS)
        axes.plot(
            [step for step, _ in points],
            [math.nan if value is None else value for _, value in points],
            **(style(split) if style else {"color": SPLIT_COLORS.get(split, OTHER_SPLIT)}),
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
    values = [x for points in chart.lines.values() for _, x in points if x is not None]
    if chart.is_log and values and 0 < LOG_RATIO * min(values) <= max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    elif 1e3 <= max(map(abs, values), default=0) < 1e9:
        axes.yaxis.set_major_formatter("{x:,.6g}" if max(map(abs, values)) < 1e5 else "{x:,.0f}")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if style:
        return
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
