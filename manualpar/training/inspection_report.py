"""Ledgers as tables: what a step sends, computes and holds, by what people ask of it.

Everything is of one device in one step. Read are the plain values that are also written to files,
see `manualpar.training.inspection`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import rich.console
from rich import box
from rich.table import Table
from rich.text import Text

from manualpar.inspect.budget import Verdict, name_module
from manualpar.inspect.formulas import OTHER_SCOPES
from manualpar.watching.progress import describe_bytes, print_line

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
MOST_MODULES = 24  # Of a table; the file has all.
LEFT: frozenset[str] = frozenset({"", "axes", "kind", "purpose", "module"})

Json = Mapping[str, Any]


def print_table(
    console: rich.console.Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    last: Sequence[str] | None = None,
) -> None:
    """Prints a table: words to the left, numbers to the right, a last row below a line."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for index, header in enumerate(headers):
        is_left = index == 0 or header in LEFT
        justify: Literal["left", "right"] = "left" if is_left else "right"
        table.add_column(header, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    if last:
        table.add_section()
        table.add_row(*map(Text, last))
    console.print(table)
    console.print()


def print_ledger(console: rich.console.Console, name: str, ledger: Json) -> None:
    """Prints the tables of a step.

    Args:
      console: Where to.
      name: What the config is called.
      ledger: What was read of its step.
    """
    mesh = ", ".join(f"{axis}={size}" for axis, size in ledger["mesh"].items())
    title = Text(f"{name}: {ledger['name']} on {mesh}; of a device in a step", style="bold")
    console.print(title, soft_wrap=True)
    rows = sent_by_purpose(ledger)
    print_table(
        console,
        ("purpose", "axes", "collectives", "sent", "share"),
        [
            (purpose, axes, f"{times:,}", describe_bytes(sent), _share(sent, total(rows)))
            for purpose, axes, times, sent in rows
        ],
        last=("total", "", f"{sum(row[2] for row in rows):,}", describe_bytes(total(rows)), ""),
    )
    _print_axes(console, ledger)
    _print_modules(console, ledger)
    _print_flops(console, ledger)
    _print_memory(console, ledger)
    _print_readings(console, ledger)


def sent_by_purpose(ledger: Json) -> list[tuple[str, str, int, float]]:
    """What is sent by purpose and axes: (purpose, axes, times, bytes), most bytes first.

    Where the compiler writes the collectives they are those of the compiled program.
    """
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for found in read_collectives(ledger):
        key = (found["purpose"], axes_text(found))
        times, sent = totals.get(key, (0, 0.0))
        totals[key] = (times + found["times"], sent + found["bytes"])
    rows = [(*key, *amounts) for key, amounts in totals.items()]
    return sorted(rows, key=lambda row: -row[3])


def total(rows: Iterable[Sequence[Any]]) -> float:
    """The bytes of rows that end with them."""
    return sum(float(row[-1]) for row in rows)


def read_collectives(ledger: Json) -> list[Json]:
    """The collectives to show: as written, or as compiled where none is written."""
    compiled = ledger["compiled"]
    if not ledger["collectives"] and compiled:
        return list(compiled["collectives"])
    return list(ledger["collectives"])


def axes_text(found: Json) -> str:
    """The axes of a collective; those of a compiled one are known as a number of devices alone."""
    axes = found.get("axes")
    if axes is None:
        return f"{found['group_size']} devices"
    return axes if isinstance(axes, str) else ",".join(axes)


def print_summary(console: rich.console.Console, ledgers: Mapping[str, Json]) -> None:
    """Prints one line for each config, side by side."""
    rows = []
    for name, ledger in ledgers.items():
        predicted, compiled, memory = (
            ledger[key] for key in ("predicted_bytes", "compiled", "memory")
        )
        rows.append(
            (
                name,
                f"{sum(ledger['counts'].values()):,}",
                describe_bytes(ledger["bytes"]["total"]),
                _bound(ledger) + describe_bytes(predicted["total"]) if predicted else "-",
                describe_bytes(compiled_bytes(compiled)) if compiled else "-",
                describe_flops(ledger["flops"]["total"]),
                describe_bytes(memory["peak"]) if memory else "-",
                _size(compiled and compiled["temporaries"]),
            )
        )
    headers = (
        "",
        "collectives",
        "sent",
        "closed form",
        "compiled",
        "FLOPs",
        "memory",
        "temporaries",
    )
    print_line(console, "side by side")
    print_table(console, headers, rows)


def print_verdict(console: rich.console.Console, name: str, verdict: Verdict) -> None:
    """Prints that a budget is kept, and softly what of it has slack; what is broken is an error."""
    if not verdict.broken:
        print_line(console, f"{name}: the budget is kept")
    for key in verdict.unchecked:
        print_line(console, f"  not checked, for nothing was compiled or it is not known: {key}")
    for finding in verdict.slack:
        print_line(console, f"  slack: {finding.sentence()}")


def describe_fit(peak: int, name: str, size: int) -> str:
    """Whether a step's memory fits into what there is, and how well."""
    there = f"the {name}'s {describe_bytes(size)}"
    if peak > size:
        return f"memory: does not fit {there}, by {describe_bytes(peak - size)}"
    share = peak / size
    return f"memory: {f'{share:.1%}' if share >= 0.001 else 'less than 0.1%'} of {there}"


def describe_flops(flops: float) -> str:
    """A number of operations in three digits, such as `3.33 GFLOP`."""
    if not flops:
        return "0"
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
    index = 0
    while flops >= 999.5 and index < len(units) - 1:
        flops, index = flops / 1000, index + 1
    return f"{flops:.3g} {units[index]}"


def compiled_bytes(compiled: Json) -> float:
    """What a device sends in a compiled step."""
    sent = compiled["bytes"]
    return float(sent["total"] if isinstance(sent, Mapping) else sent)


def explain_closed_form(ledger: Json) -> str:
    """How the closed form and what is written come to differ; `""` if there is nothing to say."""
    predicted = ledger["predicted_bytes"]
    if predicted is None or not ledger["collectives"]:
        return ""
    others: dict[str, float] = {}
    for found in ledger["collectives"]:
        if found["purpose"] in OTHER_SCOPES:
            others[found["purpose"]] = others.get(found["purpose"], 0) + found["bytes"]
    sent = ledger["bytes"]["total"] - sum(others.values())
    formula = f"{_bound(ledger)}{predicted['total']:,.0f} bytes"
    words = (
        f"the closed form is of parameters and gradients: {formula}, of which the step sends "
        f"{sent:,.0f}"
    )
    less = predicted["total"] - sent
    if less > 0 and ledger["predicted_is_bound"]:
        words += f" ({less:,.0f} less, for what backward does not need is not gathered again)"
    elif less:
        words += f" ({abs(less):,.0f} {'less' if less > 0 else 'more'})"
    if others:
        named = ", ".join(f"{name} {x:,.0f}" for name, x in others.items())
        words += f"; besides it sends {named}"
    return words


def _print_axes(console: rich.console.Console, ledger: Json) -> None:
    """Prints what goes over which axis, and what the closed form says of it."""
    sent = dict(ledger["bytes"]["by_axes"])
    predicted = ledger["predicted_bytes"]
    formula = predicted["by_axes"] if predicted else {}
    if not sent and not formula:
        return
    rows = [
        (
            axes,
            f"{_axes_size(ledger, axes):,}",
            describe_bytes(sent.get(axes, 0)),
            _share(sent.get(axes, 0), ledger["bytes"]["total"]),
            _bound(ledger) + describe_bytes(formula[axes]) if axes in formula else "-",
        )
        for axes in sorted(sent.keys() | formula.keys(), key=lambda x: -sent.get(x, 0))
    ]
    print_table(console, ("axes", "devices", "sent", "share", "closed form"), rows)


def _print_modules(console: rich.console.Console, ledger: Json) -> None:
    """Prints what each module sends and computes, the largest first; those alike in one line."""
    amounts: dict[str, tuple[int, float, int]] = dict.fromkeys(
        ledger["flops"]["by_module"], (0, 0.0, 0)
    )
    for found in read_collectives(ledger):
        count, sent, _ = amounts.get(found["module"], (0, 0.0, 0))
        amounts[found["module"]] = (count + found["times"], sent + found["bytes"], 0)
    for module, flops in ledger["flops"]["by_module"].items():
        amounts[module] = (*amounts[module][:2], flops)
    rows = sorted(_alike_together(amounts), key=lambda row: (-row[2], -row[3], row[0]))
    all_sent, all_flops = sum(row[2] for row in rows), ledger["flops"]["total"]
    print_table(
        console,
        ("module", "collectives", "sent", "share", "FLOPs", "share"),
        [
            (
                module,
                f"{count:,}",
                describe_bytes(sent),
                _share(sent, all_sent),
                describe_flops(flops),
                _share(flops, all_flops),
            )
            for module, count, sent, flops in rows[:MOST_MODULES]
        ],
    )
    if (left_out := len(rows) - MOST_MODULES) > 0:
        print_line(console, f"and {left_out} more lines of modules, which are in the file")


def _alike_together(
    amounts: Mapping[str, tuple[int, float, int]],
) -> list[tuple[str, int, float, int]]:
    """Amounts by module, the sum for those of which only a number in the name differs."""
    alike: dict[tuple[str, tuple[int, float, int]], list[str]] = {}
    for module, own in amounts.items():
        alike.setdefault((re.sub(r"\d+", "*", module), own), []).append(module)
    rows = []
    for (glob, (count, sent, flops)), modules in alike.items():
        n = len(modules)
        name = f"{glob} ({n})" if n > 1 else name_module(modules[0])
        rows.append((name, n * count, n * sent, n * flops))
    return rows


def _print_flops(console: rich.console.Console, ledger: Json) -> None:
    """Prints what is computed in which phase."""
    flops = ledger["flops"]
    rows = [
        (phase, describe_flops(x), _share(x, flops["total"]))
        for phase, x in flops["by_phase"].items()
    ]
    print_table(
        console, ("FLOPs", "", "share"), rows, last=("total", describe_flops(flops["total"]), "")
    )


def _print_memory(console: rich.console.Console, ledger: Json) -> None:
    """Prints what is held at the fullest moment, by class."""
    memory = ledger["memory"]
    if memory is None:
        return
    rows = [
        (name, describe_bytes(size), _share(size, memory["peak"]))
        for name, size in memory.items()
        if name != "peak"
    ]
    last = ("peak", describe_bytes(memory["peak"]), "")
    print_table(console, ("memory", "", "share"), rows, last=last)


def _print_readings(console: rich.console.Console, ledger: Json) -> None:
    """Prints the three readings of the step, and what makes them differ."""
    predicted, compiled, memory = (ledger[key] for key in ("predicted_bytes", "compiled", "memory"))
    counted = [ledger["counts"], compiled["counts"] if compiled else {}]
    kinds = [kind for kind in KINDS if any(kind in counts for counts in counted)]
    rows = []
    if predicted:
        sent = _bound(ledger) + describe_bytes(predicted["total"])
        rows.append(("closed form", sent, *["-"] * len(kinds), "-", "-"))
    rows.append(
        (
            "jaxpr",
            describe_bytes(ledger["bytes"]["total"]),
            *(f"{ledger['counts'].get(kind, 0):,}" for kind in kinds),
            describe_flops(ledger["flops"]["total"]),
            f"{describe_bytes(memory['peak'])} peak" if memory else "-",
        )
    )
    if compiled:
        arguments, temporaries = compiled["arguments"], compiled["temporaries"]
        held = None if temporaries is None else f"{_size(arguments)} + {_size(temporaries)}"
        rows.append(
            (
                "compiled",
                describe_bytes(compiled_bytes(compiled)),
                *(f"{compiled['counts'].get(kind, 0):,}" for kind in kinds),
                "-" if compiled["flops"] is None else describe_flops(compiled["flops"]),
                f"{held} temporaries" if held else "-",
            )
        )
    headers = [kind.replace("_", "-\n", 1) for kind in kinds]
    print_table(console, ("reading", "sent", *headers, "FLOPs", "memory"), rows)
    if words := explain_closed_form(ledger):
        print_line(console, f"  {words}")
    for change in ledger["changes"]:
        print_line(console, f"  {change['kind']}: {change['words']}")
    for note in ledger["notes"]:
        print_line(console, f"  note: {note}")
    if compiled:
        print_line(
            console, "  FLOPs compiled: XLA's count, elementwise ones too, a loop's body once"
        )
    print_line(console, "")


def _axes_size(ledger: Json, axes: str) -> int:
    """How many devices axes span together."""
    size = 1
    for axis in axes.split(","):
        size *= ledger["mesh"].get(axis, 1)
    return size


def _bound(ledger: Json) -> str:
    """What stands before a prediction that is the most that is sent."""
    return "≤ " if ledger["predicted_is_bound"] else ""


def _share(part: float, whole: float) -> str:
    """A share in percent."""
    return f"{part / whole:.1%}" if whole else "-"


def _size(size: float | None) -> str:
    """Bytes, where they are known."""
    return "-" if size is None else describe_bytes(size)
