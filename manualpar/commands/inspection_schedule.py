"""Shows the schedule of a config's pipeline: its table as text, and each stage's compute time."""

import rich.console

from manualpar.core.program.program import Program
from manualpar.inspect.ledger_difference import Json
from manualpar.inspect.tick_parts import stage_costs
from manualpar.layers.pipeline.executor import PipelineRun
from manualpar.layers.pipeline.schedule_table import Costs, Table
from manualpar.layers.pipeline.schedule_text import describe_schedule
from manualpar.layers.pipeline.schedules import make_table
from manualpar.system.reports.tables import (
    Column,
    describe_flops,
    describe_share,
    print_line,
    print_table,
    share_of,
)

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
    columns: list[Column[int]] = [
        Column("stage", str),
        Column("first tick", lambda stage: min(ticks[stage]), str),
        Column("last tick", lambda stage: max(ticks[stage]), str),
        Column("in flight", lambda stage: table.in_flight[stage], str),
        Column("computes", lambda stage: busy[stage], describe_flops),
        Column("of the time", lambda stage: busy[stage], share_of(table.tick_times(costs).sum())),
    ]
    print_table(console, columns, list(ticks))
    print_line(
        console,
        f"A device idles for {describe_share(schedule['idle_share'])} of the time. It would be "
        f"{describe_share(schedule['bubble'])}, the bubble, if only the chunks of layers took "
        "time.\n",
    )
