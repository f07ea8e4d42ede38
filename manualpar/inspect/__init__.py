"""Reads programs: what they hold and where, and what they send."""

from manualpar.inspect.communication import (
    Collective,
    bytes_by_axes,
    count_by_kind,
    ring_bytes,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import CompiledCollective, compiled_collectives
from manualpar.inspect.drawing import draw_sharding
from manualpar.inspect.formulas import of_parameters, step_bytes, total_step_bytes
from manualpar.inspect.layout import layout_table, state_bytes

__all__ = [
    "Collective",
    "CompiledCollective",
    "bytes_by_axes",
    "compiled_collectives",
    "count_by_kind",
    "draw_sharding",
    "layout_table",
    "of_parameters",
    "ring_bytes",
    "state_bytes",
    "step_bytes",
    "total_bytes",
    "total_step_bytes",
    "trace_collectives",
]
