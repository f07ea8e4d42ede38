"""Shows the schedule of a config's pipeline: its table as text, and each stage's compute time."""

from typing import Any

import rich.console

from manualpar.core.program.program import Program
from manualpar.inspect.ledger_difference import Json
from manualpar.inspect.stage_costs import stage_costs
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedule_table import Costs, Table
from manualpar.layers.pipeline.schedule_text import describe_schedule
from manualpar.layers.pipeline.schedules import make_table
from manualpar.system.reports.tables import describe_flops, describe_share, print_line, print_table

MOST_TICKS = 100  # Ticks of a table that is printed.


def read_schedule(program: Program) -> Json | None:
    """Reads the schedule of a step, its parts' FLOPs, and its bubble; `None` if it has none.

    `bubble` is a device's share of idle time if only chunks are computed. `idle_share` also counts
    the rest of the model, which only the first and the last stage compute.
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
    """Reads back the table and the costs that `read_schedule` has put into a ledger."""
    sizes = (schedule[name] for name in ("num_stages", "num_microbatches", "chunks"))
    return make_table(schedule["schedule"], *sizes), Costs(**schedule["flops"])


def print_schedule(console: rich.console.Console, name: str, schedule: Json) -> None:
    """Prints the table, and a line for each stage."""
    table, costs = table_and_costs(schedule)
    lines = describe_schedule(table, width=console.width).splitlines()
    if table.num_ticks > MOST_TICKS:
        lines = [*lines[:2], f"{table.num_ticks} ticks are too many for text; see the picture."]
    print_line(console, "\n".join([f"{name}: {lines[0]}", *lines[1:], ""]))
    busy, times = table.busy(costs).sum(axis=(0, 1)), table.tick_times(costs)
    rows = []
    for stage in range(table.num_stages):
        ticks = [event.tick for event in table.events if event.stage == stage]
        cells: list[Any] = [stage, min(ticks), max(ticks), table.in_flight[stage]]
        shares = describe_share(busy[stage], times.sum())
        rows.append([*map(str, cells), describe_flops(busy[stage]), shares])
    headers = ["stage", "first tick", "last tick", "in flight", "computes", "of the time"]
    print_table(console, headers, rows)
    print_line(
        console,
        f"A device idles for {describe_share(schedule['idle_share'])} of the time. It would be "
        f"{describe_share(schedule['bubble'])}, the bubble, if chunks of layers were all there "
        "is.\n",
    )
