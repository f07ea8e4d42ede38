"""A run as one HTML file that needs no other: charts as SVG, tables, and a style for day and night.

Nothing in it is fetched: its content security policy forbids whatever is not in the file.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from manualpar.watching.report_chart import chart_svg
from manualpar.watching.run_record import SPLITS, Chart, RunRecord, final_numbers, sort_splits

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# Okabe and Ito's colours, brighter at night.
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #ddd; --grey: #666;
  --train: #0072b2; --eval: #c04a00; --test: #00734f; --other: #a04d80; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #16181b; --faint: #3a3d42; --grey: #a0a4aa;
    --train: #56b4e9; --eval: #f0954a; --test: #2bbf91; --other: #dd99c0; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
figcaption span { font-weight: 400; margin-left: 0.8rem; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--grey); font-size: 13px; }
svg .grid { stroke: var(--faint); } svg .axis { stroke: var(--grey); }
svg .resume { stroke: var(--grey); stroke-dasharray: 5 4; }
svg polyline { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; }
svg circle { fill: currentColor; } svg .gap { stroke: var(--ink); stroke-width: 1.6; fill: none; }
.train { color: var(--train); } .eval { color: var(--eval); }
.test { color: var(--test); } .other { color: var(--other); }
.table { overflow-x: auto; }
table { border-collapse: collapse; } caption { text-align: left; color: var(--grey); }
th, td { border-bottom: 1px solid var(--faint); padding: 0.2rem 1.2rem 0.2rem 0;
  text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { margin: 0; overflow-x: auto; font-size: 12px; line-height: 1.3; }
"""


def page_html(
    run: RunRecord, charts: Sequence[Chart], *, title: str, facts: Mapping[str, object]
) -> str:
    """Writes the page of a run.

    Args:
      run: What its files hold.
      charts: What to draw of it.
      title: Its heading.
      facts: What else to say, in a table of names and values; one of several lines keeps them.

    Returns:
      The text of an HTML file.
    """
    name = html.escape(title)
    body = [f"<h1>{name}</h1>", _charts(charts)]
    body.append(_section("Last numbers", _final_table(run)))
    body.append(_section("Facts", _table(facts)))
    body.append(_section("Resumes and rollbacks", _resumes_table(run)))
    body.append(_section("Left out", _lines(run.left_out)))
    body.append(_section("Config", _table(_by_dotted_name(run.config))))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *filter(None, body),
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(heading: str, content: str) -> str:
    """A part of the page, empty if there is nothing in it."""
    return f"<h2>{heading}</h2>\n{content}" if content else ""


def _lines(texts: Sequence[str]) -> str:
    """Sentences, each a paragraph."""
    return "\n".join(f"<p>{html.escape(text)}</p>" for text in texts)


def _charts(charts: Sequence[Chart]) -> str:
    """All charts, each with a legend."""
    if not charts:
        return "<p>The run reported nothing.</p>"
    figures = []
    for chart in charts:
        unit = f" ({html.escape(chart.unit)})" if chart.unit else ""
        legend = "".join(
            f'<span class="{split if split in SPLITS else "other"}">● {html.escape(split)}</span>'
            for split in chart.lines
        )
        if any(value is None for points in chart.lines.values() for _, value in points):
            legend += "<span>✕ not finite</span>"
        if chart.resumes:
            legend += "<span>┆ resumed</span>"
        caption = f"<figcaption>{html.escape(chart.title)}{unit}{legend}</figcaption>"
        figures.append(f"<figure>{caption}\n{chart_svg(chart)}</figure>")
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def _final_table(run: RunRecord) -> str:
    """The last numbers, a column for each split."""
    numbers = final_numbers(run)
    splits = sort_splits({split for values in numbers.values() for split in values})
    last = {
        split: max(record["step"] for record in run.metrics if record["split"] == split)
        for split in splits
        if any(record["split"] == split for record in run.metrics)
    }
    if not numbers:
        return ""
    rows = [["after step", *(f"{last[split]:,}" if split in last else "" for split in splits)]]
    for name, values in numbers.items():
        row = [name]
        for split in splits:
            value = values.get(split)
            missing = "not finite" if split in values else ""
            row.append(missing if value is None else f"{value:,.6g}")
        rows.append(row)
    return _rows(["", *splits], rows)


def _resumes_table(run: RunRecord) -> str:
    """When the run was resumed or rolled back, and how many lines that cost."""
    rows = [
        [
            f"{record['resumed_after_step']:,}",
            str(record.get("reason", "")),
            str(record.get("time", "")),
            f"{sum(len(lines) for lines in record.values() if isinstance(lines, list)):,}",
        ]
        for record in run.resumes
    ]
    return (
        _rows(["after step", "what", "time", "lines cut off"], rows, numbers=False) if rows else ""
    )


def _table(values: Mapping[str, object]) -> str:
    """Names and values."""
    rows = [[name, _plain(value)] for name, value in values.items()]
    return _rows(["", ""], rows, numbers=False) if rows else ""


def _plain(value: Any) -> str:
    """A value as a config file would have it."""
    return value if isinstance(value, str) and value else repr(value)


def _rows(headers: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A table, the first cell of each row its heading."""
    lines = ['<div class="table"><table>']
    if any(headers):
        cells = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in headers)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    kind = ' class="number"' if numbers else ""
    for first, *others in rows:
        cells = f'<th scope="row">{html.escape(first)}</th>'
        for text in others:
            escaped = html.escape(text)
            escaped = f"<pre>{escaped}</pre>" if "\n" in text else escaped
            cells += f"<td{kind}>{escaped}</td>"
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</tbody>", "</table></div>"])


def _by_dotted_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested dicts, `model.dtype`, `parallel.mesh.data`."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in _by_dotted_name(value).items()}
        else:
            values[name] = value
    return values
