"""The layout of a program's state, as numbers and as a table."""

import math
from typing import Any

import jax
from rich import box
from rich.table import Table

from manualpar.core.program import Program


def state_bytes(tree: Any) -> tuple[int, int]:
    """Counts the bytes of a tree of arrays.

    Args:
      tree: Arrays or `jax.ShapeDtypeStruct`s with shardings, such as
        `program.abstract_state.params`.

    Returns:
      The bytes on the fullest device, and those of the whole tree on one device that held
      everything.
    """
    leaves = jax.tree.leaves(tree)
    per_device = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return per_device, sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def layout_table(program: Program) -> Table:
    """Draws a program's layout.

    Args:
      program: The program; it needs neither to have been compiled nor initialised.

    Returns:
      A `rich.table.Table` with a row for each parameter: shape, dtype, partition spec (and that of
      its gradient and state if another; for one that the strategy could not shard, why), bytes on a
      device. Below them the totals of
      parameters, optimizer state and other collections, and what they are of the bytes that one
      device alone would hold.
    """
    mesh = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
    mode = "" if program.mode == "manual" else f", mode {program.mode},"
    title = f"{program.strategy.name}{mode} on {program.mesh.size} devices ({mesh})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("parameter", "shape", "dtype", "partition spec"):
        table.add_column(header, overflow="fold")
    table.add_column("bytes/device", justify="right", no_wrap=True)
    arrays = jax.tree.leaves(program.abstract_state.params)
    for (info, placement), x in zip(program.parameters, arrays, strict=True):
        spec = f"P({', '.join(map(repr, placement.spec))})"
        if placement.state_names is not None:
            spec = f"{spec}, state P({', '.join(map(repr, placement.state_spec))})"
        spec = f"{spec} {placement.note}" if placement.note else spec
        table.add_row(
            info.path,
            "x".join(map(str, info.shape)),
            str(info.dtype),
            spec,
            f"{state_bytes(x)[0]:,}",
        )
    table.add_section()
    state = program.abstract_state
    totals = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "other collections": state.collections,
    }
    for name, tree in totals.items():
        per_device, whole = state_bytes(tree)
        if whole:
            elements = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
            table.add_row(
                name,
                f"{elements:,}",
                "",
                f"{per_device / whole:.1%} of {whole:,} bytes",
                f"{per_device:,}",
            )
    return table
