"""Counts the operations of each part of a pipeline's tick in a traced step.

The parts are a chunk of layers, the model before its layers (first stage) and the model after its
layers with the loss (last stage), each forward and backward; see
`manualpar.layers.pipeline.schedule_table.Costs`. The named scopes of
`manualpar.core.tracing.tick_scopes` contain the number of ticks in which each stage runs a part.
These numbers tell the parts apart. A part and its backward pass run equally often, but in different
phases of the step. If a part has permutes, all stages run it together, in the ticks in which at
least one stage has to run it.
"""

import itertools

import jax

from manualpar.core.tracing.tick_scopes import innermost_ticks, ticks_run, ticks_scope
from manualpar.inspect.flops import ProductReader
from manualpar.inspect.scope_parsing import phase_of
from manualpar.layers.pipeline.schedule_table import Costs, Table

# Name of a part, as in `Costs` -> the row of the schedule's table that has an entry in the ticks in
# which a stage runs the part.
ROWS = {
    "forward": "forward_microbatch",
    "backward": "backward_microbatch",
    "before": "is_first",
    "before_backward": "backward_is_first",
    "after": "is_last",
}


class TickParts:
    """Finds the part of a tick that an operation belongs to, by the operation's scope.

    Attributes:
      table: The pipeline's schedule.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._by_scope: dict[str, list[str]] = {}
        self._scopes: dict[tuple[str, bool], str] = {}
        for together, (part, row) in itertools.product((False, True), ROWS.items()):
            scope = ticks_scope(table.is_run(row, together=together))
            self._by_scope.setdefault(scope, []).append(part)
            self._scopes[part, together] = scope

    def scope(self, part: str, *, together: bool) -> str:
        """Returns the scope of a part; with `together` all stages run it in the same ticks."""
        return self._scopes[part, together]

    def of(self, scope: str) -> str:
        """Returns the part of an operation with this scope; "" outside of a tick's parts.

        Forward and backward operations after the layers are one part. With one stage all parts run
        as often as a chunk, so every operation counts as an operation of a chunk.
        """
        parts = self._by_scope.get(innermost_ticks(scope), ())
        is_backward = phase_of(scope) in ("backward", "recomputed")
        fitting = (part for part in parts if part == "after" or ("backward" in part) == is_backward)
        return next(fitting, "")

    def runs(self, scope: str, stage: int) -> int:
        """Returns the number of ticks in which a stage runs an operation with this scope."""
        ticks = ticks_run(innermost_ticks(scope))
        assert ticks
        return ticks.runs[stage]


def stage_costs(traced: jax.stages.Traced, table: Table) -> Costs:
    """Returns the number of operations of each part of a tick.

    Args:
      traced: The traced train step of a program with a pipeline, such as
        `program.train_step.trace(program.abstract_state, program.abstract_batch)`.
      table: The schedule of the pipeline.

    Returns:
      The floating point operations of each part in one tick. With one stage, all operations count
      as operations of chunks.
    """
    costs: dict[str, float] = dict.fromkeys(Costs._fields, 0.0)
    parts = TickParts(table)
    for stage in sorted({0, table.num_stages - 1}):
        for product in ProductReader("stage_costs", stage=stage).read(traced.jaxpr.jaxpr):
            part = parts.of(product.scope)
            if part and (part == "after" or not stage):  # Chunks are the same on all stages.
                costs[part] += float(product.flops / parts.runs(product.scope, stage))
    return Costs(**costs)
