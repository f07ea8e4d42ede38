"""Plans and sweeps as tables and as plain values."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from rich import box
from rich.table import Table

from manualpar.planner.hardware import Chip
from manualpar.planner.plan import Plan
from manualpar.planner.sweep import Outcome

SHOWN = 12  # Rows of each part of a sweep.


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for plan in plans:
        header = f"{plan.source}, a model" if plan.is_model else plan.source
        table.add_column(header, justify="right")
    for header, *cells in _rows(plans):
        table.add_row(header, *cells)
    console.print(table)
    for plan in plans:
        console.print()
        console.print(_collective_table(plan))
        for note in plan.notes:
            console.print(f"! {note}", markup=False, highlight=False)
        kind = "The model assumes" if plan.is_model else "The estimate assumes"
        console.print(f"{kind}:", markup=False, highlight=False)
        for assumption in plan.assumptions:
            console.print(f"- {assumption}", markup=False, highlight=False)


def _rows(plans: Sequence[Plan]) -> list[list[str]]:
    """The lines of the table of plans."""
    classes = list(dict.fromkeys(name for plan in plans for name in plan.memory))
    rows = [["fits", *(_fit(plan) for plan in plans)]]
    rows += [
        [f"  {name}", *(_gib(plan.memory.get(name)) for plan in plans)]
        for name in classes
        if any(plan.memory.get(name) for plan in plans)
    ]
    rows.append(["  all, at the peak", *(_gib(plan.peak_bytes) for plan in plans)])
    rows.append(["  of", *(_gib(plan.hbm_bytes) for plan in plans)])
    rows.append(["step, estimated", *(seconds(plan.step_seconds) for plan in plans)])
    rows.append(["  computing", *(seconds(plan.compute_seconds) for plan in plans)])
    rows.append(["    of it waiting for memory", *(seconds(plan.hbm_seconds) for plan in plans)])
    rows.append(["  sending, exposed", *(seconds(plan.exposed_seconds) for plan in plans)])
    rows.append(["  sending, overlapped", *(seconds(plan.overlapped_seconds) for plan in plans)])
    rows.append(["bytes sent a device", *(_gib(plan.bytes_sent) for plan in plans)])
    if any(plan.tokens_per_second for plan in plans):
        rows.append(["tokens/s", *(_rate(plan.tokens_per_second) for plan in plans)])
        per_device = [
            plan.tokens_per_second and plan.tokens_per_second / plan.num_devices for plan in plans
        ]
        rows.append(["  a device", *map(_rate, per_device)])
    else:
        rows.append(["examples/s", *(_rate(plan.examples_per_second) for plan in plans)])
    rows.append(["MFU", *("-" if plan.mfu is None else f"{plan.mfu:.1%}" for plan in plans)])
    return rows


def _collective_table(plan: Plan) -> Table:
    """What a plan sends, the longest first."""
    title = f"{plan.source}: collectives of a step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("collective", "for", "in", "over"):
        table.add_column(header)
    for header in ("times", "bytes", "takes", "hidden"):
        table.add_column(header, justify="right")
    table.add_column("by")
    for each in plan.collectives[:SHOWN]:
        by = each.network or {True: "asynchronous", False: "synchronous", None: ""}[each.is_async]
        table.add_row(
            each.kind,
            each.purpose,
            each.phase,
            ",".join(each.axes),
            f"{each.times:,}",
            _gib(each.bytes_sent),
            seconds(each.seconds),
            "-" if not each.seconds else f"{(each.hidden_seconds or 0) / each.seconds:.0%}",
            by,
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
    fitting = [each for each in outcomes if not each.reason and each.plan]
    table = Table(
        title=f"{len(fitting)} of {len(outcomes)} fit; the fastest, by a model",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for header in ("strategy, mesh", "minibatches", "remat", "gather"):
        table.add_column(header)
    for header in ("step", "computing", "exposed", "MFU", "memory"):
        table.add_column(header, justify="right")
    for outcome in fitting[:SHOWN]:
        plan, candidate = outcome.plan, outcome.candidate
        assert plan is not None
        table.add_row(
            candidate.name,
            str(candidate.num_minibatches),
            candidate.remat or "-",
            candidate.gather_dtype or "as stored",
            seconds(plan.step_seconds),
            seconds(plan.compute_seconds),
            seconds(plan.exposed_seconds),
            "-" if plan.mfu is None else f"{plan.mfu:.1%}",
            ("" if outcome.is_traced else "~") + _gib(plan.peak_bytes),
        )
    console.print(table)
    if any(not each.is_traced for each in fitting[:SHOWN]):
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
    title = f"{len(refused)} do not run"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("strategy, mesh", "how many", "the one that lacks least"):
        table.add_column(header, overflow="fold")
    for name, members in groups.items():
        nearest = min(members, key=lambda each: each.plan.peak_bytes if each.plan else 0)
        candidate = nearest.candidate
        which = f"{candidate.num_minibatches} minibatches"
        which += f", remat {candidate.remat}" if candidate.remat else ""
        table.add_row(name, str(len(members)), f"{which}: {nearest.reason}")
    console.print(table)


def print_sources(console: rich.console.Console, chip: Chip) -> None:
    """Prints where a chip's numbers are from."""
    console.print(f"{chip.name}: {chip.source}", markup=False, highlight=False)


def sweep_json(
    outcomes: Sequence[Outcome], curves: Mapping[str, Sequence[tuple[int, Plan]]]
) -> dict[str, Any]:
    """A sweep as plain values."""
    return {
        "candidates": [
            {
                "strategy": each.candidate.strategy,
                "mesh": dict(each.candidate.mesh),
                "num_minibatches": each.candidate.num_minibatches,
                "remat": each.candidate.remat,
                "gather_dtype": each.candidate.gather_dtype,
                "fits": not each.reason,
                "reason": each.reason,
                "is_traced": each.is_traced,
                "plan": each.plan.to_json() if each.plan else None,
            }
            for each in outcomes
        ],
        "weak_scaling": {
            name: [
                {
                    "devices": count,
                    "topology": plan.topology,
                    "step_seconds": plan.step_seconds,
                    "compute_seconds": plan.compute_seconds,
                    "exposed_seconds": plan.exposed_seconds,
                    "fits": plan.fits,
                    "mfu": plan.mfu,
                }
                for count, plan in curve
            ]
            for name, curve in curves.items()
        },
    }


def seconds(value: float | None) -> str:
    """Seconds in three digits."""
    if value is None:
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 0.9995 or unit == "µs":
            return f"{value * factor:,.3g} {unit}"
    raise AssertionError("the last unit takes everything")


def _fit(plan: Plan) -> str:
    """Whether a plan fits, and by how much."""
    spare = plan.spare_bytes / 2**30
    return f"yes, {spare:,.2f} GiB spare" if plan.fits else f"NO, {-spare:,.2f} GiB too much"


def _gib(size: float | None) -> str:
    """Bytes in a unit that shows three digits."""
    if size is None:
        return "-"
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= 0.1 * factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:,.0f} B"


def _rate(value: float | None) -> str:
    """Things a second."""
    return "-" if value is None else f"{value:,.0f}"
