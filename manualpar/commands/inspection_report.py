"""Prints ledgers and their differences as tables. Every number is per device and per step.

The tables show the JSON that is also written to files, see `manualpar.commands.inspect_command`. A
table is declared as a list of `Column`s, each of which takes one value from every row.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from manualpar.core.tracing.scopes import CAST_SCOPE
from manualpar.inspect.budgets import Verdict
from manualpar.inspect.expected_bytes import is_of_parameters
from manualpar.inspect.ledger_difference import (
    NAMES,
    NOTHING,
    Difference,
    Json,
    Sent,
    bytes_more,
    name_module,
    sent_by,
    totals,
)
from manualpar.inspect.scope_parsing import LAYER_SCOPES
from manualpar.system.reports.tables import (
    UNKNOWN,
    Column,
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

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
MOST_MODULES = 24  # Rows of a table; the JSON file has all of them.
MOST_CHANGES = 40
_OF_LAYERS = (*LAYER_SCOPES, CAST_SCOPE)
PARTS: Sequence[Column[Json]] = (
    Column("parameters", "name"),
    Column("arrays", "arrays", describe_count),
    Column("elements", "elements", describe_count),
    Column("held", "bytes", describe_bytes),
    Column("optimizer state", "optimizer", describe_bytes),
    Column("gradients sent", "sent", describe_bytes),
)
READINGS: Sequence[Column[Json]] = (
    Column("reading", "name"),
    Column("sent", "sent", str),
    *(Column(x.replace("_", "-"), x, describe_count, is_optional=True) for x in KINDS),
    Column("FLOPs", "flops", describe_flops),
    Column("memory", "memory", str),
)
SUMMARY: Sequence[Column[Json]] = (
    Column("", "name"),
    Column("collectives", "collectives", describe_count),
    Column("sent", "bytes sent", describe_bytes),
    Column("closed form", "closed form", str),
    Column("compiled", "compiled: bytes sent", describe_bytes),
    Column("FLOPs", "FLOPs", describe_flops),
    Column("memory", "memory: peak", describe_bytes),
    Column("temporaries", "compiled: temporaries", describe_bytes),
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
    _print_parts(console, "FLOPs", flops, describe_flops)
    if ledger["memory"]:
        _print_parts(console, "memory", ledger["memory"], describe_bytes)
    _print_readings(console, ledger)
    notes = [explain_closed_form(ledger)]
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
        {"name": name, "closed form": _closed_form(ledger), **totals(ledger)}
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


def explain_closed_form(ledger: Json) -> str:
    """Explains why the closed form and the traced step differ; `""` if one of them is missing."""
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
        f"the closed form for parameters and gradients is {'≤ ' * is_bound}"
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
            f"; the closed form for layers is {layers['total']:,.0f} bytes; the step sends "
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
    columns = [Column("purpose", 0), Column("axes", 1), *_sent_columns(2, total)]
    print_table(console, columns, rows, title=title, last=("total", "", times, total))


def _sent_columns(index: int, total: float) -> list[Column[Any]]:
    """Returns columns for a number of collectives, at `index` in a row, and their bytes."""
    return [
        Column("collectives", index, describe_count),
        Column("sent", index + 1, describe_bytes),
        Column("share", index + 1, share_of(total), is_summed=False),
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
            _closed_form(ledger, axes) if axes in predicted else None,
        )
        for axes in sorted(sent.keys() | predicted.keys(), key=lambda x: (-sent.get(x, 0), x))
    ]
    columns: list[Column[Any]] = [
        Column("axes", 0),
        Column("devices", 1, describe_count),
        Column("sent", 2, describe_bytes),
        Column("share", 2, share_of(ledger["bytes"]["total"])),
        Column("closed form", 3, str),
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
        Column("module", 0),
        *_sent_columns(1, sum(row[2] for row in rows)),
        Column("FLOPs", 3, describe_flops),
        Column("share", 3, share_of(ledger["flops"]["total"])),
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
    share: Column[Any] = Column("share", 1, share_of(total[1]), is_summed=False)
    print_table(console, [Column(title, 0), Column("", 1, describe), share], parts, last=total)


def _print_readings(console: rich.console.Console, ledger: Json) -> None:
    """Prints the closed form, the traced step and the compiled step side by side."""
    rows: list[Json] = []
    none, compiled, memory = dict.fromkeys(KINDS, 0), ledger["compiled"], ledger["memory"]
    if ledger["predicted_bytes"]:
        rows.append({"name": "closed form", "sent": _closed_form(ledger)})
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


def _closed_form(ledger: Json, axes: str = "") -> str:
    """Formats the bytes of the closed form, in total or over `axes` only."""
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
