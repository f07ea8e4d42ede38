"""What the parts of a pipeline's ticks compute, in floating point operations.

In a traced step the work of a stage stands in the named scopes of `manualpar.pipeline.tick_scopes`.
They say in how many ticks each stage does it. So they say whether it is a chunk of layers, which
all stages compute, or what comes before the layers or after them. Layers that permute have no such
scope, because all stages compute them in every tick.
"""

import re

import jax

from manualpar.inspect.products import ProductReader
from manualpar.inspect.provenance import phase_of
from manualpar.pipeline.schedule_table import Costs, Table
from manualpar.pipeline.tick_scopes import TickRuns, ticks_run


def stage_costs(traced: jax.stages.Traced, table: Table) -> Costs:
    """Returns the operations that a stage does in a tick.

    Args:
      traced: The traced train step of a program with a pipeline, such as
        `program.train_step.trace(program.abstract_state, program.abstract_batch)`.
      table: The schedule of the pipeline.

    Returns:
      The costs. Where there is one stage, all are those of chunks.
    """
    costs: dict[str, float] = dict.fromkeys(Costs._fields[:-1], 0.0)
    always = False
    for stage in sorted({0, table.num_stages - 1}):
        for product in ProductReader("stage_costs", stage=stage).read(traced.jaxpr.jaxpr):
            phase = phase_of(product.scope)
            runs = _innermost(product.scope)
            part = _part(product.scope, runs)
            if phase == "update" or (part != "after" and stage):
                continue  # Chunks are the same on all stages.
            if part == "chunk":
                part = "forward" if phase == "forward" else "backward"
            always |= runs is None
            costs[part] += float(product.flops / (runs.runs[stage] if runs else table.num_ticks))
    return Costs(**costs, always=always)


def _innermost(scope: str) -> TickRuns | None:
    found = [runs for name in re.split(r"[/()]", scope) if (runs := ticks_run(name))]
    return found[-1] if found else None


def _part(scope: str, runs: TickRuns | None) -> str:
    if runs is None or len(runs.runs) == 1:
        return "chunk"
    if not any(runs.runs[1:]):
        return "before_backward" if "jvp(" in scope else "before"
    return "chunk" if any(runs.runs[:-1]) else "after"
