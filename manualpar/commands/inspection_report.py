"""Prints ledgers and their differences as tables. Every number is per device and per step.

The tables show the JSON that is also written to files, see `manualpar.commands.inspect_command`.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping

import rich.console

from manualpar.core.tracing.scopes import CAST_SCOPE
from manualpar.inspect.budgets import Verdict
from manualpar.inspect.expected_bytes import is_of_parameters
from manualpar.inspect.ledger_difference import (
    Difference,
    Json,
    Sent,
    name_module,
    sent_by,
    totals,
)
from manualpar.inspect.scope_parsing import LAYER_SCOPES
from manualpar.system.reports.tables import (
    UNKNOWN,
    describe_bytes,
    describe_count,
    describe_difference,
    describe_flops,
    describe_share,
    print_line,
    print_table,
)

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
MOST_MODULES = 24  # Rows of a table; the JSON file has all of them.
MOST_CHANGES = 40
_OF_LAYERS = (*LAYER_SCOPES, CAST_SCOPE)
# The columns of the table of all configs: header -> the ledger's total.
SUMMARY = {
    "collectives": "collectives",
    "sent": "bytes sent",
    "closed form": "",  # The closed form is not one of the totals.
    "compiled": "compiled: bytes sent",
    "FLOPs": "FLOPs",
    "memory": "memory: peak",
    "temporaries": "compiled: temporaries",
}


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
    rows = []
    for name, ledger in ledgers.items():
        numbers = totals(ledger)
        cells = {header: _describe(total, numbers.get(total)) for header, total in SUMMARY.items()}
        cells["closed form"] = _closed_form(ledger)
        rows.append([name, *cells.values()])
    print_table(console, ["", *SUMMARY], rows, title="side by side")


def print_difference(
    console: rich.console.Console, name: str, found: Difference, against: object
) -> None:
    """Prints how a ledger differs from an earlier one."""
    if found.is_empty:
        print_line(console, f"{name}: no difference to {against}")
        return
    rows = [
        (
            change.what,
            change.purpose,
            name_module(change.module),
            change.kind,
            change.axes,
            _describe_sent(change.before, change.after),
            _describe_sent(change.after, change.before),
            describe_difference(change.bytes_more, describe_bytes),
        )
        for change in found.collectives
    ]
    headers = ("", "purpose", "module", "kind", "axes", "before", "after", "bytes")
    title = f"{name}: difference to {against}"
    print_table(console, headers, rows, title=title, words=5, most=MOST_CHANGES)
    numbers = [
        (total, *(_describe(total, each) for each in pair), _describe_more(total, *pair))
        for total, pair in found.totals.items()
    ]
    print_table(console, ("", "before", "after", "difference"), numbers)


def print_verdict(console: rich.console.Console, name: str, verdict: Verdict) -> None:
    """Prints whether a budget is kept, and which limits have slack; prints no broken limit."""
    if not verdict.broken:
        print_line(console, f"{name}: the budget is kept")
    for key in verdict.unchecked:
        unchecked = "not checked, because nothing was compiled or it is not known"
        print_line(console, f"  {unchecked}: {key}")
    for sentence in verdict.slack:
        print_line(console, f"  slack: {sentence}")


def read_collectives(ledger: Json) -> list[Json]:
    """Returns the traced collectives, or the compiled ones if the compiler inserts them.

    The axes of a compiled collective are not known; only its number of devices is known.
    """
    if ledger["collectives"] or not ledger["compiled"]:
        return list(ledger["collectives"])
    compiled = ledger["compiled"]["collectives"]
    return [{"axes": f"{found['group_size']} devices", **found} for found in compiled]


def describe_fit(peak: int, name: str, size: int) -> str:
    """Describes whether a step with this peak fits into the memory `size` of the chip `name`."""
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
            f" ({abs(less):,.0f} {how}: some are not used once, or the strategy's `sends` is wrong)"
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
    times, total = sum(x.times for x in sums.values()), sum(x.bytes for x in sums.values())
    rows = [
        (*names, f"{x.times:,}", describe_bytes(x.bytes), describe_share(x.bytes, total))
        for names, x in sorted(sums.items(), key=lambda item: -item[1].bytes)
    ]
    headers = ("purpose", "axes", "collectives", "sent", "share")
    last = ("total", "", f"{times:,}", describe_bytes(total), "")
    print_table(console, headers, rows, title=title, words=2, last=last)


def _print_axes(console: rich.console.Console, ledger: Json) -> None:
    sent = ledger["bytes"]["by_axes"]
    predicted = (ledger["predicted_bytes"] or {}).get("by_axes", {})
    predicted = predicted | (ledger.get("predicted_layers") or {}).get("by_axes", {})
    rows = [
        (
            axes,
            f"{math.prod(ledger['mesh'].get(axis, 1) for axis in axes.split(',')):,}",
            describe_bytes(sent.get(axes, 0)),
            describe_share(sent.get(axes, 0), ledger["bytes"]["total"]),
            _closed_form(ledger, axes) if axes in predicted else UNKNOWN,
        )
        for axes in sorted(sent.keys() | predicted.keys(), key=lambda x: (-sent.get(x, 0), x))
    ]
    print_table(console, ("axes", "devices", "sent", "share", "closed form"), rows)


def _print_trained(console: rich.console.Console, parts: Json) -> None:
    """Prints a table of the trained and the frozen parameters."""
    rows = []
    for name in ("trained", "frozen"):
        part, is_trained = parts[name], name == "trained"
        rows.append(
            (
                name,
                *(f"{part['arrays']:,}", f"{part['elements']:,}", describe_bytes(part["bytes"])),
                describe_bytes(parts["optimizer"] if is_trained else 0),
                describe_bytes(parts["gradients_sent"] if is_trained else 0),
            )
        )
    headers = ("parameters", "arrays", "elements", "held", "optimizer state", "gradients sent")
    print_table(console, headers, rows)


def _print_modules(console: rich.console.Console, ledger: Json) -> None:
    """Prints the bytes and FLOPs of each module, largest first; equal modules share a line."""
    sums = {module: sent for (module,), sent in sent_by(read_collectives(ledger), "module").items()}
    flops: Mapping[str, int] = ledger["flops"]["by_module"]
    alike: defaultdict[tuple[str, int, float, int], list[str]] = defaultdict(list)
    for module in sums.keys() | flops.keys():
        sent = sums.get(module, Sent(0, 0.0))
        glob = re.sub(r"\d+", "*", module)
        alike[glob, sent.times, sent.bytes, flops.get(module, 0)].append(module)
    found = []
    for (glob, times, sent_bytes, own_flops), modules in alike.items():
        n = len(modules)
        name = f"{glob} ({n})" if n > 1 else name_module(modules[0])
        found.append((name, n * times, n * sent_bytes, n * own_flops))
    found.sort(key=lambda row: (-row[2], -row[3], row[0]))
    total = sum(row[2] for row in found)
    rows = [
        (
            name,
            f"{times:,}",
            *(describe_bytes(sent_bytes), describe_share(sent_bytes, total)),
            *(describe_flops(own_flops), describe_share(own_flops, ledger["flops"]["total"])),
        )
        for name, times, sent_bytes, own_flops in found
    ]
    headers = ("module", "collectives", "sent", "share", "FLOPs", "share")
    print_table(console, headers, rows, most=MOST_MODULES)


def _print_parts(
    console: rich.console.Console,
    title: str,
    numbers: Mapping[str, int],
    describe: Callable[[float | None], str],
) -> None:
    """Prints numbers, of which the last is the sum of the others."""
    *parts, (last, total) = numbers.items()
    rows = [(name, describe(part), describe_share(part, total)) for name, part in parts]
    print_table(console, (title, "", "share"), rows, last=(last, describe(total), ""))


def _print_readings(console: rich.console.Console, ledger: Json) -> None:
    """Prints the closed form, the traced step and the compiled step side by side."""
    compiled, memory = ledger["compiled"], ledger["memory"]
    memory_text = f"{describe_bytes(memory['peak'])} peak" if memory else UNKNOWN
    flops, sent = ledger["flops"]["total"], ledger["bytes"]["total"]
    readings = [("jaxpr", sent, ledger["counts"], flops, memory_text)]
    if compiled:
        memory_text = " + ".join(
            describe_bytes(compiled[name]) for name in ("arguments", "temporaries")
        )
        numbers = compiled["bytes"], compiled["counts"], compiled["flops"]
        readings.append(("compiled", *numbers, f"{memory_text} temporaries"))
    kinds = [kind for kind in KINDS if any(kind in counts for _, _, counts, _, _ in readings)]
    rows = []
    if ledger["predicted_bytes"]:
        rows.append(["closed form", _closed_form(ledger), *[UNKNOWN] * (len(kinds) + 2)])
    for name, sent, counts, flops, memory_text in readings:
        times = (f"{counts.get(kind, 0):,}" for kind in kinds)
        rows.append([name, describe_bytes(sent), *times, describe_flops(flops), memory_text])
    headers = [kind.replace("_", "-\n", 1) for kind in kinds]
    print_table(console, ("reading", "sent", *headers, "FLOPs", "memory"), rows)


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
    """Formats the number of a ledger's total; `total` is the total's name."""
    if total.startswith("FLOPs"):
        return describe_flops(number)
    return (describe_count if total.endswith("collectives") else describe_bytes)(number)


def _describe_more(total: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return UNKNOWN
    text = describe_difference(after - before, functools.partial(_describe, total))
    return f"{text} ({(after - before) / before:+.1%})" if before and after != before else text


def _describe_sent(sent: Sent | None, other: Sent | None) -> str:
    """Describes some collectives: count, dtypes, and shapes if `other` has other shapes."""
    if sent is None:
        return UNKNOWN
    text = f"{sent.times:,} x {', '.join(sent.dtypes)}"
    if other and other.shapes != sent.shapes:
        text += " " + ", ".join("x".join(map(str, shape)) or "()" for shape in sent.shapes)
    return text
