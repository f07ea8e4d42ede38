"""Shows the communication, memory and FLOPs of configs' steps, without running a step.

Each config's step is traced, and compiled unless it needs too many devices to simulate. The result
is a *ledger*: the step's collectives, memory and FLOPs. The ledgers are printed, written as JSON,
drawn, and compared with older ledgers and with budgets. The folder of the results contains

    <config>.json   the ledger, see `manualpar.inspect.step_ledger`, and the config
    inspect.png     all ledgers, see `manualpar.commands.inspect_command`
    <config>.schedule.png   with --schedule, the schedule of the config's pipeline

The exit code is 1 if a budget is broken.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import rich.console

from manualpar.commands.command_line import (
    DEFAULT_CONFIG,
    CommandLine,
    NamedConfig,
    Syntax,
    run_absl,
)
from manualpar.commands.results import (
    answer,
    check_output,
    choose_devices,
    results_folder,
    users_mistakes,
    with_picture,
    write_json,
)
from manualpar.core.mesh.mesh import describe_links
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import CAST_SCOPE
from manualpar.errors import UsageError, print_error
from manualpar.inspect.budgets import (
    Budget,
    Verdict,
    budget_for,
    budget_text,
    check_budget,
    parse_budgets,
    parse_size,
    read_budgets,
    replace_budget,
)
from manualpar.inspect.communication import as_number, bytes_by_axes, total_bytes
from manualpar.inspect.expected_bytes import is_of_parameters
from manualpar.inspect.flops import stage_costs
from manualpar.inspect.ledger_difference import (
    LOW_PRECISION,
    NAMES,
    NOTHING,
    Difference,
    Json,
    Sent,
    bytes_more,
    compare_ledgers,
    flops_by_dtype,
    name_module,
    sent_by,
    totals,
)
from manualpar.inspect.scope_parsing import LAYER_SCOPES, OTHER
from manualpar.inspect.state_layout import trained_parts
from manualpar.inspect.step_ledger import ledger
from manualpar.inspect.tables import (
    UNKNOWN,
    TableColumn,
    describe_bytes,
    describe_count,
    describe_difference,
    describe_flops,
    describe_share,
    print_line,
    print_table,
    share_of,
    text_columns,
)
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedules import (
    Costs,
    Table,
    describe_place,
    describe_schedule,
    make_table,
)
from manualpar.models import Transformer
from manualpar.models.transformer_collectives import transformer_sends
from manualpar.planner.hardware import chip_named
from manualpar.system.reports import pictures
from manualpar.system.reports.flags import Flag
from manualpar.system.reports.pictures import Bar
from manualpar.system.storage.untrusted import read_object, write_named_file
from manualpar.training.experiment import Experiment, prepare

# -------------------------------------------------------------------------------------------------
# Prints ledgers and their differences as tables. Every number is per device and per step.
#
# The tables show the JSON that is also written to files, see `manualpar.commands.inspect_command`.
# A table is declared as a list of `TableColumn`s, each of which takes one value from every row.


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
MOST_MODULES = 24  # Rows of a table; the JSON file has all of them.
MOST_CHANGES = 40
_OF_LAYERS = (*LAYER_SCOPES, CAST_SCOPE)
PARTS: Sequence[TableColumn[Json]] = (
    TableColumn("parameters", "name"),
    TableColumn("arrays", "arrays", describe_count),
    TableColumn("elements", "elements", describe_count),
    TableColumn("held", "bytes", describe_bytes),
    TableColumn("optimizer state", "optimizer", describe_bytes),
    TableColumn("gradients sent", "sent", describe_bytes),
)
READINGS: Sequence[TableColumn[Json]] = (
    TableColumn("reading", "name"),
    TableColumn("sent", "sent", str),
    *(TableColumn(x.replace("_", "-"), x, describe_count, is_optional=True) for x in KINDS),
    TableColumn("FLOPs", "flops", describe_flops),
    TableColumn("memory", "memory", str),
)
SUMMARY: Sequence[TableColumn[Json]] = (
    TableColumn("", "name"),
    TableColumn("collectives", "collectives", describe_count),
    TableColumn("sent", "bytes sent", describe_bytes),
    TableColumn("formula", "formula", str),
    TableColumn("compiled", "compiled: bytes sent", describe_bytes),
    TableColumn("FLOPs", "FLOPs", describe_flops),
    TableColumn("memory", "memory: peak", describe_bytes),
    TableColumn("temporaries", "compiled: temporaries", describe_bytes),
)


def print_ledger(console: rich.console.Console, name: str, ledger: Json) -> None:
    """Prints the tables of a config's step."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in ledger["mesh"].items())
    links = f" ({ledger['links']})" if ledger.get("links") else ""
    title = f"{name}: {ledger['name']} on {mesh}{links}; of a device in a step"
    _print_purposes(console, ledger, title)
    _print_axes(console, ledger)
    if ledger["parts"]["frozen"]["arrays"]:
        _print_trained(console, ledger["parts"])
    _print_modules(console, ledger)
    flops = {**ledger["flops"]["by_phase"], "total": ledger["flops"]["total"]}
    of_dtypes = flops_by_dtype(ledger)
    if of_dtypes.keys() & LOW_PRECISION:
        flops |= {f"in {dtype}": number for dtype, number in of_dtypes.items()}
    _print_parts(console, "FLOPs", flops, describe_flops)
    if ledger["memory"]:
        _print_parts(console, "memory", ledger["memory"], describe_bytes)
    _print_readings(console, ledger)
    notes = [explain_formula(ledger)]
    if ledger.get("compiler_options"):
        notes.append(f"compiler options: {ledger['compiler_options']}")
    notes += [f"{change['kind']}: {change['words']}" for change in ledger["changes"]]
    notes += [f"note: {note}" for note in ledger["notes"]]
    if ledger["compiled"]:
        notes.append("FLOPs compiled: XLA's count, elementwise ones too, a loop's body once")
    print_line(console, "".join(f"  {note}\n" for note in notes if note))


def print_summary(console: rich.console.Console, ledgers: Mapping[str, Json]) -> None:
    """Prints a table that compares the configs, with a line for each."""
    rows = [
        {"name": name, "formula": _formula(ledger), **totals(ledger)}
        for name, ledger in ledgers.items()
    ]
    print_table(console, SUMMARY, rows, title="side by side")


def print_difference(
    console: rich.console.Console, name: str, found: Difference, against: object
) -> None:
    """Prints how a ledger differs from an earlier ledger."""
    if found.is_empty:
        print_line(console, f"{name}: no difference to {against}")
        return
    rows = [
        (
            _describe_change(before, after),
            *(purpose, name_module(module), *others),
            *(_describe_sent(before, after), _describe_sent(after, before)),
            describe_difference(bytes_more(before, after), describe_bytes),
        )
        for (purpose, module, *others), (before, after) in found.collectives.items()
    ]
    columns = text_columns(("", *NAMES, "before", "after", "bytes"), words=1 + len(NAMES))
    title = f"{name}: difference to {against}"
    print_table(console, columns, rows, title=title, most=MOST_CHANGES)
    numbers = [
        (total, *(_describe(total, each) for each in pair), _describe_more(total, *pair))
        for total, pair in found.totals.items()
    ]
    print_table(console, text_columns(("", "before", "after", "difference")), numbers)


def print_verdict(console: rich.console.Console, name: str, verdict: Verdict) -> None:
    """Prints whether a step keeps its budget, which limits have slack and which are unchecked."""
    if not verdict.broken:
        print_line(console, f"{name}: the budget is kept")
    for key in verdict.unchecked:
        unchecked = "not checked, because nothing was compiled or the number is not known"
        print_line(console, f"  {unchecked}: {key}")
    for sentence in verdict.slack:
        print_line(console, f"  slack: {sentence}")


def read_collectives(ledger: Json) -> list[Json]:
    """Returns the traced collectives; if the trace has none, returns the compiled collectives.

    The `axes` of a compiled collective are a text with the number of devices, because the compiled
    program does not name mesh axes.
    """
    if ledger["collectives"] or not ledger["compiled"]:
        return list(ledger["collectives"])
    compiled = ledger["compiled"]["collectives"]
    return [{"axes": f"{found['group_size']} devices", **found} for found in compiled]


def describe_fit(peak: int, name: str, size: int) -> str:
    """Describes whether a step's peak fits into a memory of `size` bytes, called `name`."""
    there = f"the {name}'s {describe_bytes(size)}"
    if peak > size:
        return f"does not fit {there}, by {describe_bytes(peak - size)}"
    share = describe_share(peak, size) if peak >= 0.001 * size else "less than 0.1%"
    return f"{share} of {there}"


def explain_formula(ledger: Json) -> str:
    """Explains why the formula and the traced step differ; `""` if one of them is missing."""
    predicted = ledger["predicted_bytes"]
    if predicted is None or not ledger["collectives"]:
        return ""
    layers = ledger.get("predicted_layers")  # Ledgers that were written earlier have none.
    besides, of_layers = list[Json](), list[Json]()
    for each in ledger["collectives"]:
        if not is_of_parameters(each["scope"], each["purpose"]):
            is_of_layers = layers and each["purpose"] in _OF_LAYERS
            (of_layers if is_of_layers else besides).append(each)
    sent_by_layers = sum(each["bytes"] for each in of_layers)
    others = {name: sent.bytes for (name,), sent in sent_by(besides, "purpose").items()}
    sent = ledger["bytes"]["total"] - sum(others.values()) - sent_by_layers
    is_bound = ledger["predicted_is_bound"]
    words = (
        f"the formula for parameters and gradients gives {'≤ ' * is_bound}"
        f"{predicted['total']:,.0f} bytes; the step sends {sent:,.0f} of these"
    )
    less = predicted["total"] - sent
    if less > 0 and is_bound:
        words += (
            f" ({less:,.0f} less, because parameters that the backward pass does not need are not "
            "gathered again)"
        )
    elif less:
        how = "less" if less > 0 else "more"
        words += (
            f" ({abs(less):,.0f} {how}: some parameters are not used exactly once, or the "
            "strategy's `sends` is wrong)"
        )
    if layers and (layers["total"] or sent_by_layers):
        words += (
            f"; the formula for layers gives {layers['total']:,.0f} bytes; the step sends "
            f"{sent_by_layers:,.0f} of these"
        )
    if others:
        named = ", ".join(f"{name} {size:,.0f}" for name, size in others.items())
        words += f"; the step also sends {named}"
    return words


def _print_purposes(console: rich.console.Console, ledger: Json, title: str) -> None:
    sums = sent_by(read_collectives(ledger), "purpose", "axes")
    rows = [(*names, *x) for names, x in sorted(sums.items(), key=lambda item: -item[1].bytes)]
    times, total = sum(x.times for x in sums.values()), sum(x.bytes for x in sums.values())
    columns = [TableColumn("purpose", 0), TableColumn("axes", 1), *_sent_columns(2, total)]
    print_table(console, columns, rows, title=title, last=("total", "", times, total))


def _sent_columns(index: int, total: float) -> list[TableColumn[Any]]:
    """Returns columns for a number of collectives, at `index` in a row, and their bytes."""
    return [
        TableColumn("collectives", index, describe_count),
        TableColumn("sent", index + 1, describe_bytes),
        TableColumn("share", index + 1, share_of(total), is_summed=False),
    ]


def _print_axes(console: rich.console.Console, ledger: Json) -> None:
    sent, mesh = ledger["bytes"]["by_axes"], ledger["mesh"]
    predicted = (ledger["predicted_bytes"] or {}).get("by_axes", {})
    predicted = predicted | (ledger.get("predicted_layers") or {}).get("by_axes", {})
    rows = [
        (
            axes,
            math.prod(mesh.get(axis, 1) for axis in axes.split(",")),
            sent.get(axes, 0),
            _formula(ledger, axes) if axes in predicted else None,
        )
        for axes in sorted(sent.keys() | predicted.keys(), key=lambda x: (-sent.get(x, 0), x))
    ]
    columns: list[TableColumn[Any]] = [
        TableColumn("axes", 0),
        TableColumn("devices", 1, describe_count),
        TableColumn("sent", 2, describe_bytes),
        TableColumn("share", 2, share_of(ledger["bytes"]["total"])),
        TableColumn("formula", 3, str),
    ]
    print_table(console, columns, rows)


def _print_trained(console: rich.console.Console, parts: Json) -> None:
    """Prints a table of the trained and the frozen parameters."""
    of_trained = {"optimizer": parts["optimizer"], "sent": parts["gradients_sent"]}
    rows = [
        {"name": "trained", **parts["trained"], **of_trained},
        {"name": "frozen", **parts["frozen"], "optimizer": 0, "sent": 0},
    ]
    print_table(console, PARTS, rows)


def _print_modules(console: rich.console.Console, ledger: Json) -> None:
    """Prints the bytes and FLOPs of each module, largest first; equal modules share a line."""
    sums = {module: sent for (module,), sent in sent_by(read_collectives(ledger), "module").items()}
    flops: Mapping[str, int] = ledger["flops"]["by_module"]
    alike: defaultdict[tuple[str, Sent, int], list[str]] = defaultdict(list)
    for module in sums.keys() | flops.keys():
        sent, glob = sums.get(module, NOTHING), re.sub(r"\d+", "*", module)
        alike[glob, Sent(sent.times, sent.bytes), flops.get(module, 0)].append(module)
    rows = []
    for (glob, sent, own_flops), modules in alike.items():
        n = len(modules)
        name = f"{glob} ({n})" if n > 1 else name_module(modules[0])
        rows.append((name, n * sent.times, n * sent.bytes, n * own_flops))
    rows.sort(key=lambda row: (-row[2], -row[3], row[0]))
    columns = [
        TableColumn("module", 0),
        *_sent_columns(1, sum(row[2] for row in rows)),
        TableColumn("FLOPs", 3, describe_flops),
        TableColumn("share", 3, share_of(ledger["flops"]["total"])),
    ]
    print_table(console, columns, rows, most=MOST_MODULES)


def _print_parts(
    console: rich.console.Console,
    title: str,
    numbers: Mapping[str, int],
    describe: Callable[[float | None], str],
) -> None:
    """Prints a table of numbers; the last number must be the sum of the others."""
    *parts, total = numbers.items()
    share: TableColumn[Any] = TableColumn("share", 1, share_of(total[1]), is_summed=False)
    print_table(
        console, [TableColumn(title, 0), TableColumn("", 1, describe), share], parts, last=total
    )


def _print_readings(console: rich.console.Console, ledger: Json) -> None:
    """Prints the formula, the traced step and the compiled step side by side."""
    rows: list[Json] = []
    none, compiled, memory = dict.fromkeys(KINDS, 0), ledger["compiled"], ledger["memory"]
    if ledger["predicted_bytes"]:
        rows.append({"name": "formula", "sent": _formula(ledger)})
    traced = {
        "name": "jaxpr",
        "sent": describe_bytes(ledger["bytes"]["total"]),
        "flops": ledger["flops"]["total"],
        "memory": f"{describe_bytes(memory['peak'])} peak" if memory else None,
    }
    rows.append(none | ledger["counts"] | traced)
    if compiled:
        sizes = (describe_bytes(compiled[name]) for name in ("arguments", "temporaries"))
        found = {
            "name": "compiled",
            "sent": describe_bytes(compiled["bytes"]),
            "flops": compiled["flops"],
            "memory": f"{' + '.join(sizes)} temporaries",
        }
        rows.append(none | compiled["counts"] | found)
    print_table(console, READINGS, rows)


def _formula(ledger: Json, axes: str = "") -> str:
    """Formats the bytes of the formula, in total or over `axes` only."""
    if not (predicted := ledger["predicted_bytes"]):
        return UNKNOWN
    both = [predicted, ledger.get("predicted_layers") or {"total": 0, "by_axes": {}}]
    size = sum(each["by_axes"].get(axes, 0) if axes else each["total"] for each in both)
    sent = ledger["bytes"]["by_axes"].get(axes)
    bound = "≤ " if ledger["predicted_is_bound"] and size != sent else ""
    return bound + describe_bytes(size)


def _describe(total: str, number: float | None) -> str:
    """Formats one of a ledger's totals; `total` is its name, and `number` its value."""
    if total.startswith("FLOPs"):
        return describe_flops(number)
    return (describe_count if total.endswith("collectives") else describe_bytes)(number)


def _describe_more(total: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return UNKNOWN
    text = describe_difference(after - before, functools.partial(_describe, total))
    return f"{text} ({(after - before) / before:+.1%})" if before and after != before else text


def _describe_change(before: Sent, after: Sent) -> str:
    if NOTHING in (before, after):
        return "added" if before == NOTHING else "removed"
    return "changed"


def _describe_sent(sent: Sent, other: Sent) -> str:
    """Describes some collectives: count, dtypes, and shapes if `other` has different shapes."""
    if sent == NOTHING:
        return UNKNOWN
    text = f"{sent.times:,} x {', '.join(sent.dtypes)}"
    if other != NOTHING and other.shapes != sent.shapes:
        text += " " + ", ".join("x".join(map(str, shape)) or "()" for shape in sent.shapes)
    return text


# -------------------------------------------------------------------------------------------------
# Draws ledgers: the bytes that each step sends, by purpose, and the memory that it needs.
#
# Lines mark numbers to compare with: the strategy's formula, the compiled step, and limits
# such as the memory of a chip.


ONE_SCALE = 12.0  # If bars differ by more than this ratio, each step has its own scale.
NEAR = 2.5  # A bound that is more than this many times the bar is shown only as text.
# The styles of the lines across bars.
FORMULA, COMPILED, BOUND = "-", ":", "--"


class Bound(NamedTuple):
    """A limit on memory, with its name."""

    name: str
    size: int


class _Mark(NamedTuple):
    """A line across a bar, and its text."""

    x: float
    line: str
    text: str


class _Panel(NamedTuple):
    """One half of a ledger's picture: the first bar is the total, the others are its parts."""

    bars: list[Bar]
    marks: list[_Mark]

    @property
    def longest(self) -> float:
        total = self.bars[0].length
        near = [mark.x for mark in self.marks if mark.line != BOUND or mark.x <= NEAR * total]
        return max([total, *near])


def draw_ledgers(
    ledgers: Mapping[str, Json], path: Path, *, bounds: Mapping[str, Sequence[Bound]]
) -> None:
    """Draws the ledger of each config's step, and the bounds of memory, into a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    panels = [
        (_sent_panel(ledger), _memory_panel(ledger, bounds[name]))
        for name, ledger in ledgers.items()
    ]
    lines = [max(2, len(sent.bars), len(held.bars)) for sent, held in panels]
    ends = [_ends([panel.longest for panel in column]) for column in zip(*panels, strict=True)]
    differ = any(len(set(column)) > 1 for column in ends)
    title = (
        "Per device and step: the bytes sent (left) and the peak memory (right)"
        f"{'; the scales differ' * differ}\n"
        "Lines: formula of the strategy (solid), compiled step (dotted), bound (dashed)"
    )
    size = (15, 0.33 * sum(lines) + 0.85 * len(lines) + 1.2)
    with pictures.saved_figure(path, size, title=title) as figure:
        grid = figure.subplots(len(panels), 2, squeeze=False, height_ratios=lines)
        for row, (name, ledger) in enumerate(ledgers.items()):
            for column in (0, 1):
                axes = grid[row, column]
                _draw_panel(axes, panels[row][column], ends[column][row])
                axes.set_ylim(lines[row] - 0.45, -0.65)
            mesh = " x ".join(f"{axis}={size:,}" for axis, size in ledger["mesh"].items())
            heading = f"{name}: {ledger['name']}, {mesh}"
            grid[row, 0].set_title(heading, fontweight="bold", pad=20)


def _sent_panel(ledger: Json) -> _Panel:
    """Makes the panel of the bytes that a step sends, by purpose, the largest first."""
    sums = sent_by(read_collectives(ledger), "purpose")
    parts = [
        (
            f"{purpose}  {sent.times:,} ×",
            sent.bytes,
            pictures.PURPOSE_COLORS.get(purpose, pictures.GREY),
        )
        for (purpose,), sent in sorted(sums.items(), key=lambda item: -item[1].bytes)
    ]
    marks = []
    if predicted := ledger["predicted_bytes"]:
        bound = "at most " if ledger["predicted_is_bound"] else ""
        text = f"formula {bound}{describe_bytes(predicted['total'])}"
        marks.append(_Mark(predicted["total"], FORMULA, text))
    return _panel("sent", parts, marks + _compiled_marks(ledger, "bytes"))


def _memory_panel(ledger: Json, bounds: Sequence[Bound]) -> _Panel:
    """Makes the panel of a step's peak memory, by class of arrays."""
    if not (memory := ledger["memory"]):
        return _Panel([Bar("memory: not known", [], "")], [])
    colors = {**pictures.MEMORY_COLORS, "other": pictures.GREY}
    parts = [(name, memory[name], color) for name, color in colors.items() if memory[name]]
    marks = _compiled_marks(ledger, "peak")
    for name, size in bounds:
        marks.append(_Mark(size, BOUND, describe_fit(memory["peak"], name, size)))
    return _panel("held", parts, marks)


def _compiled_marks(ledger: Json, key: str) -> list[_Mark]:
    compiled = ledger["compiled"]
    text = compiled and f"compiled {describe_bytes(compiled[key])}"
    return [_Mark(compiled[key], COMPILED, text)] if compiled else []


def _panel(label: str, parts: Sequence[tuple[str, float, str]], marks: list[_Mark]) -> _Panel:
    total = sum(size for _, size, _ in parts)
    bars = [Bar(f"{label}  {describe_bytes(total)}", [part[1:] for part in parts], "")]
    for name, size, color in parts:
        share = f"  ({size / total:.0%})" if total else ""
        bars.append(Bar(name, [(size, color)], describe_bytes(size) + share))
    return _Panel(bars, marks)


def _draw_panel(axes: Any, panel: _Panel, end: float) -> None:
    pictures.draw_bars_of_bytes(axes, panel.bars, end=end)
    axes.get_yticklabels()[0].set_fontweight("bold")
    for x, line, _ in panel.marks:
        if x <= end:
            axes.plot([x, x], [-0.52, 0.52], color=pictures.INK, linestyle=line, linewidth=2)
    above = {"xycoords": "axes fraction", "xytext": (0, 6), "textcoords": "offset points"}
    words = "     ".join(mark.text for mark in panel.marks)
    axes.annotate(words, (0, 1), color=pictures.DARK, **above)


def _ends(longest: Sequence[float]) -> list[float]:
    """Chooses the end of each step's scale: one for all, unless some bars would be invisible."""
    shown = [length for length in longest if length] or [1.0]
    if max(shown) <= ONE_SCALE * min(shown):
        return [pictures.ROOM * max(shown)] * len(longest)
    return [pictures.ROOM * (length or 1.0) for length in longest]


# -------------------------------------------------------------------------------------------------
# Shows the schedule of a config's pipeline: its table as text, and each stage's compute time.


MOST_TICKS = 100  # A table with more ticks is not printed.


def read_schedule(program: Program) -> Json | None:
    """Reads a pipeline's schedule, its bubble, and the FLOPs of a tick; `None` without a pipeline.

    `bubble` is the share of time that a device is idle if only the chunks of layers take time.
    `idle_share` also counts the time of the rest of the model, which only the first and the last
    stage compute.
    """
    run = program.pipeline
    if not isinstance(run, PipelineRun):
        return None
    table = run.table
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    costs = stage_costs(traced, table)
    return {
        "schedule": table.name,
        "num_stages": table.num_stages,
        "num_microbatches": table.num_microbatches,
        "chunks": table.chunks,
        "keep": run.keep,
        "activation_slots": table.activation_slots,
        "gradient_slots": table.gradient_slots,
        "flops": costs._asdict(),
        "bubble": table.bubble,
        "idle_share": table.idle_share(costs),
    }


def table_and_costs(schedule: Json) -> tuple[Table, Costs]:
    """Parses the table and the costs from the JSON that `read_schedule` returned."""
    sizes = (schedule[name] for name in ("num_stages", "num_microbatches", "chunks"))
    return make_table(schedule["schedule"], *sizes), Costs(**schedule["flops"])


def print_schedule(console: rich.console.Console, name: str, schedule: Json) -> None:
    """Prints the schedule's table, and a line for each stage."""
    table, costs = table_and_costs(schedule)
    lines = describe_schedule(table, width=console.width).splitlines()
    if table.num_ticks > MOST_TICKS:
        lines = [*lines[:2], f"{table.num_ticks} ticks are too many for text; see the picture."]
    print_line(console, "\n".join([f"{name}: {lines[0]}", *lines[1:], ""]))
    busy = table.busy(costs).sum(axis=(0, 1))
    ticks = {
        stage: [x.tick for x in table.events if x.stage == stage] for stage in range(len(busy))
    }
    columns: list[TableColumn[int]] = [
        TableColumn("stage", str),
        TableColumn("first tick", lambda stage: min(ticks[stage]), str),
        TableColumn("last tick", lambda stage: max(ticks[stage]), str),
        TableColumn("in flight", lambda stage: table.in_flight[stage], str),
        TableColumn("computes", lambda stage: busy[stage], describe_flops),
        TableColumn(
            "of the time", lambda stage: busy[stage], share_of(table.tick_times(costs).sum())
        ),
    ]
    print_table(console, columns, list(ticks))
    print_line(
        console,
        f"A device idles for {describe_share(schedule['idle_share'])} of the time. It would be "
        f"{describe_share(schedule['bubble'])}, the bubble, if only the chunks of layers took "
        "time.\n",
    )


# -------------------------------------------------------------------------------------------------
# Draws a pipeline's schedule: the work of each stage over time, and the inputs that it keeps.


MOST_NUMBERS = 48  # Up to this many ticks, each tick shows a number.
MOST_NAMED = 8


def draw_schedule(table: Table, path: Path, *, title: str, costs: Costs | None = None) -> None:
    """Draws a schedule's table into a PNG file, with a row per stage and the kept inputs below.

    The width of a tick is the time of its slowest stage.

    Args:
      costs: The FLOPs of each part of a tick. Without costs, a backward pass takes as long as two
        forward passes, and nothing else takes time.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    height = 1.2 + 0.4 * table.num_stages
    with pictures.saved_figure(path, (13, 3.6 + height), title=title) as figure:
        stages, kept = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.6))
        _draw_stages(stages, table, costs or Costs())
        _draw_inputs(kept, table, costs or Costs())
        kept.set_xlabel(
            "time, in forward passes of a chunk" if costs is None else "operations of a device"
        )
        if costs:
            pictures.format_ticks(kept.xaxis, describe_flops)


def _starts(table: Table, costs: Costs) -> np.ndarray:
    """Returns the time at which each tick starts, and the time at which the last tick ends."""
    return np.concatenate([[0.0], np.cumsum(table.tick_times(costs))])


def _draw_stages(axes: Any, table: Table, costs: Costs) -> None:
    starts = _starts(table, costs)
    forward, backward = table.busy(costs)
    for kind, lengths, lefts in (
        ("forward", forward, np.broadcast_to(starts[:-1, None], forward.shape)),
        ("backward", backward, starts[:-1, None] + forward),
    ):
        microbatches, chunks = table.rows[f"{kind}_microbatch"], table.rows[f"{kind}_chunk"]
        places = np.nonzero(microbatches >= 0)
        colors = pictures.FORWARD if kind == "forward" else pictures.BACKWARD
        axes.barh(
            places[1],
            lengths[places],
            left=lefts[places],
            color=[colors[chunk % len(colors)] for chunk in chunks[places]],
            edgecolor="white",
            linewidth=0.6,
            height=0.8,
        )
        if table.num_ticks <= MOST_NUMBERS:
            for tick, stage in zip(*places, strict=True):
                text = describe_place(table, microbatches[tick, stage], chunks[tick, stage])
                middle = lefts[tick, stage] + lengths[tick, stage] / 2
                axes.text(middle, stage, text, ha="center", va="center", color="white")
    axes.set_yticks(range(table.num_stages), [f"stage {i}" for i in range(table.num_stages)])
    axes.set_ylim(table.num_stages - 0.5, -0.5)
    axes.set_xlim(0, starts[-1])
    axes.set_facecolor(pictures.WAITING)
    axes.grid(visible=False)
    axes.tick_params(left=False)
    axes.set_title(
        f"Microbatches forward (slate) and backward (brown); a device idles for "
        f"{describe_share(table.idle_share(costs))} of the time"
    )


def _draw_inputs(axes: Any, table: Table, costs: Costs) -> None:
    """Draws how many chunk inputs each stage keeps in each tick."""
    starts = _starts(table, costs)
    shades = np.linspace(0.75, 0, table.num_stages)
    for stage, kept in enumerate(table.kept.T):
        axes.stairs(kept, starts, baseline=None, color=str(shades[stage]), label=f"stage {stage}")
    axes.axhline(
        table.activation_slots,
        color=pictures.MEMORY_COLORS["activations"],
        linestyle="--",
        linewidth=1,
    )
    axes.set_ylim(0, 1.15 * table.activation_slots)
    pictures.count_along(axes.yaxis)
    axes.set_title(f"Inputs that a stage keeps, in {table.activation_slots} slots")
    if table.num_stages <= MOST_NAMED:
        axes.legend(
            ncols=table.num_stages, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0
        )


# -------------------------------------------------------------------------------------------------


USAGE = """Shows the communication, memory and FLOPs of each config's step, before any step runs.

{program} [CONFIG ...] [--<field>=<value> ...]
    [--mesh=<axis>=<size>,...] [--devices=<number>] [--compile | --no-compile]
    [--output=<folder>] [--against=<ledger.json or folder>]
    [--budget=configs/budgets.toml [--write-budget]]
    [--memory=<16GiB or v5p>] [--schedule]

Nothing is trained. With --no-compile nothing is compiled either, so that --devices=4096 needs no
devices. Exit codes: 0; 1 if a budget is broken; 2 for a mistake on the command line, in a config or
in a budget.
"""
BROKEN_EXIT_CODE = 1
FOLDER = Path("runs/inspect")
PICTURE = "inspect.png"
# The keys that a ledger from a file must have to be compared.
NEEDED = ("mesh", "bytes", "counts", "collectives", "flops", "memory", "compiled")
MOST_COMPILED = 64
INSPECT_FLAGS: Mapping[str, Flag] = {
    "devices": Flag(
        "The number of devices that a step is for; by default all existing devices, or 8 simulated "
        "devices if there is only a CPU.",
        int,
    ),
    "compile": Flag(
        "Whether to compile the steps too (for simulated CPU devices if --devices is given); by "
        f"default up to {MOST_COMPILED} devices. --no-compile needs no devices.",
        bool,
    ),
    "output": Flag("Folder of the results, by default a new runs/inspect/<next number>.", Path),
    "against": Flag("An earlier ledger, or a folder of earlier ledgers, to compare with.", Path),
    "budget": Flag("A TOML file with each config's limits on bytes, memory and FLOPs.", Path),
    "write_budget": Flag("Writes the measured numbers into the file of --budget.", bool, False),
    "schedule": Flag("Also prints and draws the schedule of each config's pipeline.", bool, False),
    "memory": Flag(
        "The memory of a device, such as 16GiB, or the name of a chip, such as v5p; the picture "
        "marks this memory."
    ),
}


def _refine(line: CommandLine) -> None:
    """Decides whether to compile, and turns the text of `--memory` into a `Bound`."""
    flags = line.flags
    if flags.write_budget and not flags.budget:
        raise UsageError(
            "--write-budget needs the name of the file, as in --budget=configs/budgets.toml "
            "--write-budget."
        )
    if flags.compile is None:
        flags.compile = (flags.devices or 1) <= MOST_COMPILED
    if flags.memory is not None:
        flags.memory = _read_memory(flags.memory)


INSPECTING = Syntax(INSPECT_FLAGS, takes_several=True, refine=_refine)


def main(argv: Sequence[str]) -> NoReturn:
    """Runs the command line `argv` and ends the process."""
    run_absl(inspect_command, argv, USAGE, DEFAULT_CONFIG, INSPECTING)


def _read_memory(text: str) -> Bound:
    """Parses the memory of a device: a size, or a chip's name."""
    if size := parse_size(text):
        return Bound("device", size)
    with users_mistakes(f"--memory={text}: expected a size such as 16GiB, or a chip: "):
        return Bound(text, chip_named(text).hbm_bytes)


def inspect_command(line: CommandLine) -> int:
    """Inspects the configs of a command line; returns the exit code for `absl.app.run`."""
    broken: list[str] = []
    code = answer(lambda console: _inspect(line, console, broken))
    for sentence in broken:
        print_error(f"over budget: {sentence}")
    return BROKEN_EXIT_CODE if broken else code


def read_ledger(
    named: NamedConfig, *, devices: int | None, compile: bool, needs_pipeline: bool = False
) -> dict[str, Any]:
    """Traces the step of a config, and compiles it if `compile` is set.

    The step is for `devices` devices, or for all existing devices if `devices` is `None`.

    Returns:
      `Ledger.to_json()` and these keys: `config_file`, `config`, `devices`, `links`, `jax` and
      `compiler_options`; `predicted_is_bound`, whether the formula is an upper bound;
      `predicted_layers`, the formula for the collectives of split layers, or `None`;
      `schedule`, see `read_schedule`; and `parts`, see `trained_parts`. A compiled collective also
      has a `purpose` and a `module`, as far as XLA has kept these names. If XLA merged several
      collectives, their names are joined with `+`.
    """
    with users_mistakes(f"{named.path}: "):
        experiment = prepare(named.config, devices=None if compile else devices)
        mesh = experiment.program.mesh
        if needs_pipeline and experiment.program.pipeline is None:
            raise UsageError(
                f"--schedule: {named.path} has no pipeline on the mesh {dict(mesh.shape)}; "
                "expected a mesh with an axis for stages, as in "
                """--config.parallel.mesh="{'data': -1, 'stage': 2}"."""
            )
        schedule = read_schedule(experiment.program)
        read = ledger(experiment.program, compile=compile)
    found, root = read.to_json(), type(experiment.task.model).__name__
    if read.compiled:
        shown = found["compiled"]["collectives"]
        for each, values in zip(read.compiled.collectives, shown, strict=True):
            names = each.names(root)
            values["purpose"] = "+".join(dict.fromkeys(name for name, _ in names)) or OTHER
            values["module"] = "+".join(dict.fromkeys(name for _, name in names if name))
    return {
        "config_file": str(named.path),
        "config": named.config.to_dict(),
        "devices": mesh.size,
        "links": describe_links(mesh) if isinstance(mesh, jax.sharding.Mesh) else "",
        "jax": jax.__version__,
        "compiler_options": str(experiment.chosen),
        "predicted_is_bound": experiment.program.strategy.reshard_after_forward,
        "predicted_layers": _predict_layers(experiment, read.stage or 0),
        "schedule": schedule,
        "parts": trained_parts(experiment.program, read.collectives),
        **found,
    }


def _predict_layers(experiment: Experiment, stage: int) -> Json | None:
    program, model = experiment.program, experiment.task.model
    if program.mode != "manual" or not isinstance(model, Transformer):
        return None
    if experiment.config.model.lora:  # LoRA adapters of row-parallel layers also communicate.
        return None
    try:
        sends = transformer_sends(program, model, stage=stage)
    except ValueError:  # These layers have no formula.
        return None
    by_axes = {",".join(axes): as_number(sent) for axes, sent in bytes_by_axes(sends).items()}
    return {"total": as_number(total_bytes(sends)), "by_axes": by_axes}


def _inspect(line: CommandLine, console: rich.console.Console, broken: list[str]) -> Path:
    """Inspects the configs, writes the results, and returns the folder of the results.

    Adds a sentence to `broken` for each limit of a budget that a step exceeds.
    """
    flags, names = line.flags, [named.name for named in line.configs]
    with users_mistakes():  # Checks and reads everything that is possible before tracing.
        budgets = {} if flags.write_budget else _read_budgets(flags.budget, names)
        earlier = {name: _read_earlier(flags.against, name) for name in names if flags.against}
        # Refuses a training's folder. An earlier inspection may be overwritten.
        check_output(flags.output, FOLDER)
    ledgers = _read_ledgers(line, console)
    if len(ledgers) > 1:
        print_summary(console, ledgers)
    for name, (path, before) in earlier.items():
        print_difference(console, name, compare_ledgers(before, ledgers[name]), path)
    verdicts = {
        name: check_budget(budget, ledgers[name], flags.budget) for name, budget in budgets.items()
    }
    bounds = {name: [flags.memory] if flags.memory else [] for name in names}
    for name, verdict in verdicts.items():
        print_verdict(console, name, verdict)
        broken += verdict.broken
        if (allowed := budgets[name].most("peak_memory")) is not None:
            bounds[name].insert(0, Bound("budget", allowed))
    with results_folder(flags.output, FOLDER) as output:
        for name, found in ledgers.items():
            write_json(output / f"{name}.json", found)
        with with_picture(console):
            draw_ledgers(ledgers, output / PICTURE, bounds=bounds)
            for name in ledgers if flags.schedule else ():
                table, costs = table_and_costs(ledgers[name]["schedule"])
                draw_schedule(table, output / f"{name}.schedule.png", title=name, costs=costs)
    if flags.write_budget:
        _write_budgets(flags.budget, ledgers)
        print_line(console, f"budgets: {flags.budget}")
    return output


def _read_ledgers(line: CommandLine, console: rich.console.Console) -> dict[str, Json]:
    """Reads and prints the ledger of each config."""
    flags = line.flags
    if flags.compile or flags.devices is None:  # In other cases tracing needs no device.
        try:
            choose_devices(flags.devices)
        except RuntimeError as error:
            raise UsageError(f"--devices={flags.devices}: {error}.") from error
        except ValueError as error:
            raise UsageError(f"{error} With --nocompile no devices are needed.") from error
    ledgers: dict[str, Json] = {}
    for named in line.configs:
        options = {"compile": flags.compile, "needs_pipeline": flags.schedule}
        found = read_ledger(named, devices=flags.devices, **options)
        ledgers[named.name] = found
        print_ledger(console, named.name, found)
        if flags.schedule:
            print_schedule(console, named.name, found["schedule"])
        if found["memory"] and flags.memory is not None:
            bound: Bound = flags.memory
            words = describe_fit(found["memory"]["peak"], bound.name, bound.size)
            print_line(console, f"{named.name}: memory: {words}\n")
    return ledgers


def _read_budgets(path: Path | None, names: list[str]) -> dict[str, Budget]:
    if path is None:
        return {}
    with users_mistakes(f"--budget={path}: "):
        budgets = read_budgets(path)
    return {name: budget_for(budgets, name, path) for name in names}


def _write_budgets(path: Path, ledgers: Mapping[str, Json]) -> None:
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        earlier = parse_budgets(text, path)
        for name, found in ledgers.items():
            text = replace_budget(text, name, budget_text(name, found, earlier.get(name)))
        write_named_file(path, text)
    except OSError as error:
        raise UsageError(f"--budget={path} cannot be written: {error}.") from error


def _read_earlier(against: Path, name: str) -> tuple[Path, Json]:
    """Reads the ledger to compare with; returns its file and its content."""
    path = against / f"{name}.json" if against.is_dir() else against
    try:
        found = read_object(path, follow_links=True)
    except OSError as error:
        raise UsageError(
            f"--against={against}: {path} cannot be read ({error.strerror or error}); name a "
            "ledger that this command has written, or a folder of such ledgers."
        ) from error
    except ValueError as error:
        raise UsageError(f"--against={against}: {path} {error}.") from error
    missing = [key for key in NEEDED if key not in found]
    if missing:
        raise UsageError(
            f"--against={against}: {path} lacks {', '.join(missing)}; expected a ledger that this "
            "command has written."
        )
    return path, found
