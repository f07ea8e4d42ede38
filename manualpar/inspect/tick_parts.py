"""The parts of a pipeline's tick, found again in a traced step.

The named scopes of `manualpar.core.tracing.tick_scopes` say in how many ticks each stage runs a
part. That tells apart a chunk of layers, which all stages run, and what comes before the layers or
after them. A part and its backward pass run equally often, but in another phase of the step. A part
that permutes is run by all stages together, in the ticks in which one has to.
"""

import itertools

from manualpar.core.tracing.tick_scopes import innermost_ticks, ticks_run, ticks_scope
from manualpar.inspect.scope_parsing import phase_of
from manualpar.layers.pipeline.schedule_table import Table

# By the name of a part among `Costs` the row of the table that says who runs it.
ROWS = {
    "forward": "forward_microbatch",
    "backward": "backward_microbatch",
    "before": "is_first",
    "before_backward": "backward_is_first",
    "after": "is_last",
}


class TickParts:
    """Says of operations which part of a tick they belong to.

    Attributes:
      table: The schedule.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._by_scope: dict[str, list[str]] = {}
        for together, (part, row) in itertools.product((False, True), ROWS.items()):
            scope = ticks_scope(table.is_run(row, together=together))
            self._by_scope.setdefault(scope, []).append(part)

    def of(self, scope: str) -> str:
        """The part of an operation; "" for one that runs whatever the table says.

        What comes after the layers is one part, forward and backward. With one stage everything
        runs as often as a chunk, and is taken as one.
        """
        parts = self._by_scope.get(innermost_ticks(scope), ())
        is_backward = phase_of(scope) in ("backward", "recomputed")
        fitting = (part for part in parts if part == "after" or ("backward" in part) == is_backward)
        return next(fitting, "")

    def runs(self, scope: str, stage: int) -> int:
        """In how many ticks a stage runs an operation of a part."""
        ticks = ticks_run(innermost_ticks(scope))
        assert ticks
        return ticks.runs[stage]
