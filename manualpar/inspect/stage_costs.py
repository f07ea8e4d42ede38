"""Floating point operations of the parts of a pipeline's ticks."""

import jax

from manualpar.inspect.flops import ProductReader
from manualpar.inspect.tick_parts import TickParts
from manualpar.layers.pipeline.schedule_table import Costs, Table


def stage_costs(traced: jax.stages.Traced, table: Table) -> Costs:
    """Returns the operations that a stage does in a tick.

    Args:
      traced: The traced train step of a program with a pipeline, such as
        `program.train_step.trace(program.abstract_state, program.abstract_batch)`.
      table: The schedule of the pipeline.

    Returns:
      The costs. With one stage, all operations count as operations of chunks.
    """
    costs: dict[str, float] = dict.fromkeys(Costs._fields, 0.0)
    parts = TickParts(table)
    for stage in sorted({0, table.num_stages - 1}):
        for product in ProductReader("stage_costs", stage=stage).read(traced.jaxpr.jaxpr):
            part = parts.of(product.scope)
            if part and (part == "after" or not stage):  # Chunks are the same on all stages.
                costs[part] += float(product.flops / parts.runs(product.scope, stage))
    return Costs(**costs)
