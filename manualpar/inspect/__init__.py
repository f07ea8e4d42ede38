"""Reads a step before it runs: where its state is stored, what it sends, its FLOPs and memory."""

from typing import TYPE_CHECKING

from manualpar.errors import old_names
from manualpar.inspect.communication import (
    Collective,
    bytes_by_axes,
    count_by_kind,
    ring_bytes,
    total_bytes,
    trace_collectives,
)
from manualpar.inspect.compiled import (
    Compiled,
    CompiledCollective,
    compiled_collectives,
    read_compiled,
)
from manualpar.inspect.expected_bytes import (
    ParameterForm,
    PipelineForm,
    outer_step_bytes,
    parameter_collectives,
    step_bytes,
    total_step_bytes,
)
from manualpar.inspect.flops import Computation, Product, ProductReader, TickParts, stage_costs
from manualpar.inspect.memory import Memory, step_memory
from manualpar.inspect.state_layout import draw_sharding, layout_table, state_bytes
from manualpar.inspect.step_ledger import (
    Ledger,
    describe_codes,
    ledger,
    trace_outer_steps,
    trace_step,
)
from manualpar.inspect.xla_changes import Change, find_changes

__all__ = [
    "Change",
    "Collective",
    "Compiled",
    "CompiledCollective",
    "Computation",
    "Ledger",
    "Memory",
    "ParameterForm",
    "PipelineForm",
    "Product",
    "ProductReader",
    "TickParts",
    "bytes_by_axes",
    "compiled_collectives",
    "count_by_kind",
    "describe_codes",
    "draw_sharding",
    "find_changes",
    "layout_table",
    "ledger",
    "outer_step_bytes",
    "parameter_collectives",
    "read_compiled",
    "ring_bytes",
    "stage_costs",
    "state_bytes",
    "step_bytes",
    "step_memory",
    "total_bytes",
    "total_step_bytes",
    "trace_collectives",
    "trace_outer_steps",
    "trace_step",
]


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__, {"of_parameters": "parameter_collectives"})
