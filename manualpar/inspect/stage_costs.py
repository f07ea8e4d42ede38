"""What the parts of a pipeline's ticks compute, in floating point operations.

Layers that permute are in no part (`manualpar.inspect.tick_parts`), because all stages compute them
in every tick.
"""

import jax

from manualpar.inspect.products import ProductReader
from manualpar.inspect.provenance import phase_of
from manualpar.inspect.tick_parts import TickParts
from manualpar.pipeline.schedule_table import Costs, Table


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
    parts, always = TickParts(table), False
    for stage in sorted({0, table.num_stages - 1}):
        for product in ProductReader("stage_costs", stage=stage).read(traced.jaxpr.jaxpr):
            phase, part = phase_of(product.scope), parts.of(product.scope)
            if phase == "update" or (part != "after" and stage):
                continue  # Chunks are the same on all stages.
            runs = parts.runs(part, stage) if part else table.num_ticks
            always |= not part
            part = part or ("forward" if phase == "forward" else "backward")
            costs[part] += float(product.flops / runs)
    return Costs(**costs, always=always)
