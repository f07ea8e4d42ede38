"""Plans and sweeps as tables and as plain values."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
from rich import box
from rich.table import Table

from manualpar.planner.hardware import Chip
from manualpar.planner.plan import Plan
from manualpar.planner.sweep import Outcome

SHOWN = 12  # Rows of each part of a sweep.
CURVE_FIELDS = ("topology", "step_seconds", "compute_seconds", "exposed_seconds", "fits", "mfu")


def print_plans(console: rich.console.Console, plans: Sequence[Plan]) -> None:
    """Prints plans of one step side by side, and below them what each rests on.

    Args:
      console: Where to.
      plans: The compiler's and the roofline's, or one of them.
    """
    first = plans[0]
    mesh = " x ".join(f"{axis}={size}" for axis, size in first.mesh.items())
    console.print(
        f"{first.name} on {first.topology} ({first.num_devices:,} devices, {mesh})", markup=False
    )
    table = Table("", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for plan in plans:
        header = f"{plan.source}, a model" if plan.is_model else plan.source
        table.add_column(header, justify="right")
    for label, show in _lines(plans):
        table.add_row(label, *map(show, plans))
    console.print(table)
    for plan in plans:
        console.print()
        console.print(_collective_table(plan))
        kind = "The model assumes" if plan.is_model else "The estimate assumes"
        _print_lines(console, [*(f"! {note}" for note in plan.notes), f"{kind}:"])
        print_assumptions(console, plan)


def print_assumptions(console: rich.console.Console, plan: Plan) -> None:
    """Prints what a plan rests on."""
    _print_lines(console, [f"- {assumption}" for assumption in plan.assumptions])


def print_sources(console: rich.console.Console, chip: Chip) -> None:
    """Prints the source of a chip's numbers."""
    _print_lines(console, [f"{chip.name}: {chip.source}"])


def _print_lines(console: rich.console.Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _lines(plans: Sequence[Plan]) -> list[tuple[str, Callable[[Plan], str]]]:
    """The lines of the table of plans: a label, and what to show of each plan."""
    classes = dict.fromkeys(name for plan in plans for name, size in plan.memory.items() if size)
    lines: list[tuple[str, Callable[[Plan], str]]] = [("fits", _fit)]
    lines += [(f"  {name}", _held(name)) for name in classes]
    lines += [
        ("  all, at the peak", lambda plan: _size(plan.peak_bytes)),
        ("  of", lambda plan: _size(plan.hbm_bytes)),
        ("step, estimated", lambda plan: seconds(plan.step_seconds)),
        ("  computing", lambda plan: seconds(plan.compute_seconds)),
        ("    of it waiting for memory", lambda plan: seconds(plan.hbm_seconds)),
        ("  sending, exposed", lambda plan: seconds(plan.exposed_seconds)),
        ("  sending, overlapped", lambda plan: seconds(plan.overlapped_seconds)),
        ("bytes sent a device", lambda plan: _size(plan.bytes_sent)),
    ]
    if any(plan.tokens_per_second for plan in plans):
        lines += [
            ("tokens/s", lambda plan: _rate(plan.tokens_per_second)),
            ("  a device", lambda plan: _rate(plan.tokens_per_second, plan.num_devices)),
        ]
    else:
        lines.append(("examples/s", lambda plan: _rate(plan.examples_per_second)))
    return [*lines, ("MFU", _mfu)]


def _table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table with columns of text, and columns of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in left:
        table.add_column(header)
    for header in right:
        table.add_column(header, justify="right")
    return table


def _collective_table(plan: Plan) -> Table:
    """What a plan sends, the longest first."""
    table = _table(
        f"{plan.source}: collectives of a step",
        ("collective", "for", "in", "over"),
        ("times", "bytes", "takes", "hidden"),
    )
    table.add_column("by")
    for each in plan.collectives[:SHOWN]:
        table.add_row(
            each.kind,
            each.purpose,
            each.phase,
            ",".join(each.axes),
            f"{each.times:,}",
            _size(each.bytes_sent),
            seconds(each.seconds),
            "-" if not each.seconds else f"{(each.hidden_seconds or 0) / each.seconds:.0%}",
            each.network,
        )
    if len(plan.collectives) > SHOWN:
        table.add_row(f"... and {len(plan.collectives) - SHOWN} others")
    return table


def print_sweep(console: rich.console.Console, outcomes: Sequence[Outcome]) -> None:
    """Prints a sweep: the first of those that fit, and why others don't.

    Args:
      console: Where to.
      outcomes: All of them, in their order.
    """
    fitting = [(each, each.plan) for each in outcomes if not each.reason and each.plan]
    table = _table(
        f"{len(fitting)} of {len(outcomes)} fit; the fastest, by a model",
        ("strategy, mesh", "minibatches", "remat", "gather"),
        ("step", "computing", "exposed", "MFU", "memory"),
    )
    for outcome, plan in fitting[:SHOWN]:
        candidate = outcome.candidate
        table.add_row(
            candidate.name,
            str(candidate.num_minibatches),
            candidate.remat or "-",
            candidate.gather_dtype or "as stored",
            seconds(plan.step_seconds),
            seconds(plan.compute_seconds),
            seconds(plan.exposed_seconds),
            _mfu(plan),
            ("" if outcome.is_traced else "~") + _size(plan.peak_bytes),
        )
    console.print(table)
    if not all(outcome.is_traced for outcome, _ in fitting[:SHOWN]):
        console.print("~: scaled from another candidate's, not traced.", highlight=False)
    console.print()
    _print_refused(console, [each for each in outcomes if each.reason])


def _print_refused(console: rich.console.Console, refused: Sequence[Outcome]) -> None:
    """Prints why candidates are not ranked, those of one strategy and mesh together."""
    if not refused:
        return
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in refused:
        groups[outcome.candidate.name].append(outcome)
    table = _table(f"{len(refused)} do not run", ())
    for header in ("strategy, mesh", "how many", "the one that lacks least"):
        table.add_column(header, overflow="fold")
    for name, members in groups.items():
        nearest = min(members, key=lambda each: each.plan.peak_bytes if each.plan else 0)
        candidate = nearest.candidate
        which = f"{candidate.num_minibatches} minibatches"
        which += f", remat {candidate.remat}" if candidate.remat else ""
        table.add_row(name, str(len(members)), f"{which}: {nearest.reason}")
    console.print(table)


def sweep_json(
    outcomes: Sequence[Outcome], curves: Mapping[str, Sequence[tuple[int, Plan]]]
) -> dict[str, Any]:
    """A sweep as plain values."""
    return {
        "candidates": [
            {
                **dataclasses.asdict(each.candidate),
                "fits": not each.reason,
                "reason": each.reason,
                "is_traced": each.is_traced,
                "plan": each.plan.to_json() if each.plan else None,
            }
            for each in outcomes
        ],
        "weak_scaling": {
            name: [
                {"devices": count} | {field: getattr(plan, field) for field in CURVE_FIELDS}
                for count, plan in curve
            ]
            for name, curve in curves.items()
        },
    }


def seconds(value: float | None) -> str:
    """Seconds in three digits."""
    if value is None:
        return "-"
    if abs(value) >= 0.9995:
        return f"{value:,.3g} s"
    if abs(value) * 1e3 >= 0.9995:
        return f"{value * 1e3:,.3g} ms"
    return f"{value * 1e6:,.3g} µs"


def _fit(plan: Plan) -> str:
    spare = plan.spare_bytes / 2**30
    return f"yes, {spare:,.2f} GiB spare" if plan.fits else f"NO, {-spare:,.2f} GiB too much"


def _held(name: str) -> Callable[[Plan], str]:
    return lambda plan: _size(plan.memory.get(name))


def _mfu(plan: Plan) -> str:
    return "-" if plan.mfu is None else f"{plan.mfu:.1%}"


def _size(size: float | None) -> str:
    """Bytes in a unit that shows three digits."""
    if size is None:
        return "-"
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= 0.1 * factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:,.0f} B"


def _rate(value: float | None, devices: int = 1) -> str:
    return "-" if value is None else f"{value / devices:,.0f}"
