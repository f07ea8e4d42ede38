"""Reads programs: what they hold and where."""

from manualpar.inspect.layout import layout_table, state_bytes

__all__ = ["layout_table", "state_bytes"]
