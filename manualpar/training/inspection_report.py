"""Ledgers and their differences as tables; every number is of one device in one step.

What is printed is the JSON that is also written to files, see `manualpar.training.inspection`.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import rich.console
from rich import box
from rich.table import Table
from rich.text import Text

from manualpar.inspect.budgets import Verdict
from manualpar.inspect.formulas import OTHER_SCOPES
from manualpar.inspect.ledger_difference import Difference, Json, Sent, name_module, sent_by
from manualpar.watching.screen import describe_bytes, print_line

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
MOST_MODULES = 24  # In a table; the file has all.
MOST_CHANGES = 40
LEFT = frozenset({"", "axes", "kind", "purpose", "module"})  # The columns of words.


def print_ledger(console: rich.console.Console, name: str, ledger: Json) -> None:
    """Prints the tables of a step.

    Args:
      console: The console.
      name: The name of the config.
      ledger: What was read of its step.
    """
    mesh = ", ".join(f"{axis}={size}" for axis, size in ledger["mesh"].items())
    title = Text(f"{name}: {ledger['name']} on {mesh}; of a device in a step", style="bold")
    console.print(title, soft_wrap=True)
    _print_purposes(console, ledger)
    _print_axes(console, ledger)
    _print_modules(console, ledger)
    flops, memory = ledger["flops"], ledger["memory"]
    _print_parts(console, "FLOPs", {**flops["by_phase"], "total": flops["total"]})
    if memory:
        _print_parts(console, "memory", memory)
    _print_readings(console, ledger)
    if words := explain_closed_form(ledger):
        print_line(console, f"  {words}")
    for change in ledger["changes"]:
        print_line(console, f"  {change['kind']}: {change['words']}")
    for note in ledger["notes"]:
        print_line(console, f"  note: {note}")
    if ledger["compiled"]:
        print_line(
            console, "  FLOPs compiled: XLA's count, elementwise ones too, a loop's body once"
        )
    print_line(console, "")


def print_summary(console: rich.console.Console, ledgers: Mapping[str, Json]) -> None:
    """Prints a line for each config, side by side."""
    rows = []
    for name, ledger in ledgers.items():
        compiled, memory = ledger["compiled"], ledger["memory"]
        rows.append(
            (
                name,
                f"{sum(ledger['counts'].values()):,}",
                describe_bytes(ledger["bytes"]["total"]),
                _closed_form(ledger),
                describe_bytes(compiled["bytes"]) if compiled else "-",
                describe_flops(ledger["flops"]["total"]),
                describe_bytes(memory["peak"]) if memory else "-",
                describe_bytes(compiled["temporaries"]) if compiled else "-",
            )
        )
    sent = ("collectives", "sent", "closed form", "compiled")
    print_line(console, "side by side")
    _print_table(console, ("", *sent, "FLOPs", "memory", "temporaries"), rows)


def print_difference(
    console: rich.console.Console, name: str, found: Difference, against: object
) -> None:
    """Prints how a ledger differs from one that was written earlier."""
    if found.is_empty:
        print_line(console, f"{name}: no difference to {against}")
        return
    print_line(console, f"{name}: difference to {against}")
    rows = [
        (
            change.what,
            change.purpose,
            name_module(change.module),
            change.kind,
            change.axes,
            _describe_sent(change.before, change.after),
            _describe_sent(change.after, change.before),
            _signed(change.bytes_more, describe_bytes(abs(change.bytes_more))),
        )
        for change in found.collectives[:MOST_CHANGES]
    ]
    names = ("purpose", "module", "kind", "axes")
    _print_table(console, ("", *names, "before", "after", "bytes"), rows)
    if (left_out := len(found.collectives) - MOST_CHANGES) > 0:
        print_line(console, f"and {left_out} more, which are in the files")
    numbers = [
        (
            total,
            _describe(total, before),
            _describe(total, after),
            _describe_difference(total, before, after),
        )
        for total, (before, after) in found.totals.items()
    ]
    _print_table(console, ("", "before", "after", "difference"), numbers)


def print_verdict(console: rich.console.Console, name: str, verdict: Verdict) -> None:
    """Prints whether a budget is kept, and what of it has slack; broken limits are errors."""
    if not verdict.broken:
        print_line(console, f"{name}: the budget is kept")
    for key in verdict.unchecked:
        print_line(
            console, f"  not checked, because nothing was compiled or it is not known: {key}"
        )
    for sentence in verdict.slack:
        print_line(console, f"  slack: {sentence}")


def read_collectives(ledger: Json) -> list[Json]:
    """The collectives to show: the traced ones or, where the compiler inserts them, the compiled.

    The axes of a compiled collective are not known, only their number of devices.
    """
    if ledger["collectives"] or not ledger["compiled"]:
        return list(ledger["collectives"])
    compiled = ledger["compiled"]["collectives"]
    return [{"axes": f"{found['group_size']} devices", **found} for found in compiled]


def describe_fit(peak: int, name: str, size: int) -> str:
    """Whether a step with this peak of memory fits into some memory, and how well."""
    there = f"the {name}'s {describe_bytes(size)}"
    if peak > size:
        return f"does not fit {there}, by {describe_bytes(peak - size)}"
    share = peak / size
    return f"{f'{share:.1%}' if share >= 0.001 else 'less than 0.1%'} of {there}"


def describe_flops(flops: float) -> str:
    """A number of operations in three digits, such as `3.33 GFLOP`."""
    if not flops:
        return "0"
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
    index = 0
    while flops >= 999.5 and index < len(units) - 1:
        flops, index = flops / 1000, index + 1
    return f"{flops:.3g} {units[index]}"


def explain_closed_form(ledger: Json) -> str:
    """Why the closed form and the traced step differ; `""` if there is nothing to compare."""
    predicted = ledger["predicted_bytes"]
    if predicted is None or not ledger["collectives"]:
        return ""
    others = {
        purpose: sent.bytes
        for (purpose,), sent in sent_by(ledger["collectives"], "purpose").items()
        if purpose in OTHER_SCOPES
    }
    sent = ledger["bytes"]["total"] - sum(others.values())
    bound = "≤ " if ledger["predicted_is_bound"] else ""
    words = (
        f"the closed form is of parameters and gradients: {bound}{predicted['total']:,.0f} bytes, "
        f"of which the step sends {sent:,.0f}"
    )
    less = predicted["total"] - sent
    if less > 0 and ledger["predicted_is_bound"]:
        words += f" ({less:,.0f} less, because what backward does not need is not gathered again)"
    elif less:
        words += f" ({abs(less):,.0f} {'less' if less > 0 else 'more'})"
    if others:
        named = ", ".join(f"{name} {x:,.0f}" for name, x in others.items())
        words += f"; besides it sends {named}"
    return words


def _print_purposes(console: rich.console.Console, ledger: Json) -> None:
    sums = sent_by(read_collectives(ledger), "purpose", "axes")
    largest = sorted(sums.items(), key=lambda item: -item[1].bytes)
    times, total = sum(x.times for x in sums.values()), sum(x.bytes for x in sums.values())
    rows = [
        (*names, f"{x.times:,}", describe_bytes(x.bytes), _share(x.bytes, total))
        for names, x in largest
    ]
    last = ("total", "", f"{times:,}", describe_bytes(total), "")
    _print_table(console, ("purpose", "axes", "collectives", "sent", "share"), rows, last)


def _print_axes(console: rich.console.Console, ledger: Json) -> None:
    """Prints what goes over which axes, and what the closed form says of it."""
    sent = ledger["bytes"]["by_axes"]
    predicted = (ledger["predicted_bytes"] or {}).get("by_axes", {})
    rows = [
        (
            axes,
            f"{math.prod(ledger['mesh'].get(axis, 1) for axis in axes.split(',')):,}",
            describe_bytes(sent.get(axes, 0)),
            _share(sent.get(axes, 0), ledger["bytes"]["total"]),
            _closed_form(ledger, axes) if axes in predicted else "-",
        )
        for axes in sorted(sent.keys() | predicted.keys(), key=lambda x: (-sent.get(x, 0), x))
    ]
    _print_table(console, ("axes", "devices", "sent", "share", "closed form"), rows)


def _print_modules(console: rich.console.Console, ledger: Json) -> None:
    """Prints what each module sends and computes, the largest first; those alike in one line."""
    sums = {module: sent for (module,), sent in sent_by(read_collectives(ledger), "module").items()}
    flops: Mapping[str, int] = ledger["flops"]["by_module"]
    alike: dict[tuple[str, int, float, int], list[str]] = {}
    for module in sums.keys() | flops.keys():
        sent, own_flops = sums.get(module, Sent(0, 0.0)), flops.get(module, 0)
        key = (re.sub(r"\d+", "*", module), sent.times, sent.bytes, own_flops)
        alike.setdefault(key, []).append(module)
    rows = []
    for (glob, times, sent_bytes, own_flops), modules in alike.items():
        n = len(modules)
        name = f"{glob} ({n})" if n > 1 else name_module(modules[0])
        rows.append((name, n * times, n * sent_bytes, n * own_flops))
    rows.sort(key=lambda row: (-row[2], -row[3], row[0]))
    total = sum(row[2] for row in rows)
    texts = [
        (
            name,
            f"{times:,}",
            describe_bytes(sent_bytes),
            _share(sent_bytes, total),
            describe_flops(own_flops),
            _share(own_flops, ledger["flops"]["total"]),
        )
        for name, times, sent_bytes, own_flops in rows[:MOST_MODULES]
    ]
    _print_table(console, ("module", "collectives", "sent", "share", "FLOPs", "share"), texts)
    if (left_out := len(rows) - MOST_MODULES) > 0:
        print_line(console, f"and {left_out} more lines of modules, which are in the file")


def _print_parts(console: rich.console.Console, title: str, numbers: Mapping[str, int]) -> None:
    """Prints numbers of which the last one is the sum of the others."""
    describe = describe_flops if title == "FLOPs" else describe_bytes
    *parts, (last, whole) = numbers.items()
    rows = [(name, describe(part), _share(part, whole)) for name, part in parts]
    _print_table(console, (title, "", "share"), rows, (last, describe(whole), ""))


def _print_readings(console: rich.console.Console, ledger: Json) -> None:
    """Prints the closed form, the traced step and the compiled step side by side."""
    compiled, memory = ledger["compiled"], ledger["memory"]
    counted = [ledger["counts"], compiled["counts"] if compiled else {}]
    kinds = [kind for kind in KINDS if any(kind in counts for counts in counted)]
    rows = []
    if ledger["predicted_bytes"]:
        rows.append(("closed form", _closed_form(ledger), *["-"] * len(kinds), "-", "-"))
    sent, flops = ledger["bytes"]["total"], ledger["flops"]["total"]
    held = f"{describe_bytes(memory['peak'])} peak" if memory else "-"
    readings = [("jaxpr", sent, ledger["counts"], flops, held)]
    if compiled:
        held = " + ".join(describe_bytes(compiled[name]) for name in ("arguments", "temporaries"))
        held += " temporaries"
        sent, flops = compiled["bytes"], compiled["flops"]
        readings.append(("compiled", sent, compiled["counts"], flops, held))
    for name, sent, counts, flops, held in readings:
        times = (f"{counts.get(kind, 0):,}" for kind in kinds)
        operations = "-" if flops is None else describe_flops(flops)
        rows.append((name, describe_bytes(sent), *times, operations, held))
    headers = [kind.replace("_", "-\n", 1) for kind in kinds]
    _print_table(console, ("reading", "sent", *headers, "FLOPs", "memory"), rows)


def _print_table(
    console: rich.console.Console,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    last: Sequence[str] | None = None,
) -> None:
    """Prints a table, if it has rows: words to the left, numbers to the right, `last` below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for index, header in enumerate(headers):
        is_left = index == 0 or header in LEFT
        table.add_column(header, justify="left" if is_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if not table.row_count:
        return
    if last:
        table.add_section()
        table.add_row(*map(Text, last))
    console.print(table)
    console.print()


def _closed_form(ledger: Json, axes: str = "") -> str:
    """The bytes of the closed form, in all or over some axes."""
    if not (predicted := ledger["predicted_bytes"]):
        return "-"
    bound = "≤ " if ledger["predicted_is_bound"] else ""
    return bound + describe_bytes(predicted["by_axes"][axes] if axes else predicted["total"])


def _describe(name: str, number: float | None) -> str:
    """One of the totals of a ledger."""
    if number is None:
        return "-"
    if name.startswith("FLOPs"):
        return describe_flops(number)
    return f"{number:,.0f}" if name.endswith("collectives") else describe_bytes(number)


def _describe_difference(name: str, before: float | None, after: float | None) -> str:
    if before == after:
        return "="
    if before is None or after is None:
        return "-"
    part = f" ({(after - before) / before:+.1%})" if before else ""
    return _signed(after - before, _describe(name, abs(after - before))) + part


def _describe_sent(sent: Sent | None, other: Sent | None) -> str:
    """What some collectives carry, with as much of it as tells them from the others."""
    if sent is None:
        return "-"
    text = f"{sent.times:,} x {', '.join(sent.dtypes)}"
    if other and other.shapes != sent.shapes:
        text += " " + ", ".join("x".join(map(str, shape)) or "()" for shape in sent.shapes)
    return text


def _signed(more: float, text: str) -> str:
    return f"+{text}" if more > 0 else f"-{text}" if more < 0 else "="


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
