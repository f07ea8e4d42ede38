"""Shows how a program's state is sharded: its bytes, a table, and drawings of the parameters.

This module also counts trained and frozen parameters, and the bytes that a step sends for them.
"""

import io
import math
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

from manualpar.core.mesh.axes import AxisName, axes_size, axis_tuple
from manualpar.core.parameters.placement import partition
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.core.trees import path_name
from manualpar.errors import suggest
from manualpar.inspect.communication import Collective, as_number, total_bytes

GRADIENTS = (SCATTER_SCOPE, REDUCE_SCOPE)
GATHERS = (GATHER_SCOPE, REGATHER)
ALL = "all"  # Stands for all parameters, in place of a path.
# The sizes that `jax.debug.visualize_sharding` assumes:
MAX_WIDTH = 80  # The output has this many columns.
HEIGHT = 10  # A drawing has this many lines.
COLUMNS_PER_LINE = 2.5  # A line is as high as this many columns are wide.


def state_bytes(tree: Any) -> tuple[int, int]:
    """Counts the bytes of a tree of arrays.

    Args:
      tree: Arrays or `jax.ShapeDtypeStruct`s with shardings, such as
        `program.abstract_state.params`.

    Returns:
      The bytes on the fullest device, and the bytes of all elements.
    """
    leaves = jax.tree.leaves(tree)
    per_device = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return per_device, sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def trained_parts(program: Program, collectives: Iterable[Collective]) -> dict[str, Any]:
    """Counts trained and frozen parameters, and the bytes that are stored and sent for them.

    Args:
      collectives: The collectives of the program's traced step; none in modes other than `manual`.

    Returns:
      `trained` and `frozen`: for each a dict with the number of `arrays`, all their `elements` and
      their `bytes`. `optimizer`: the bytes of the optimizer's state. `gradients_sent` and
      `gathers_sent`: the bytes that a step sends for gradients and for gathered parameters, `None`
      if XLA chooses the collectives. All bytes are those of one device.
    """
    counts: dict[str, Any] = {}
    parts = partition(program.placements, program.abstract_state.params)
    infos = [info for info, _ in program.parameters]
    for name, part in zip(("trained", "frozen"), parts, strict=True):
        members = [info for info in infos if info.trainable == (name == "trained")]
        counts[name] = {
            "arrays": len(jax.tree.leaves(part)),
            "elements": sum(math.prod(info.shape) for info in members),
            "bytes": state_bytes(part)[0],
        }
    counts["optimizer"] = state_bytes(program.abstract_state.opt_state)[0]
    collectives = list(collectives)
    for name, purposes in (("gradients_sent", GRADIENTS), ("gathers_sent", GATHERS)):
        sent = total_bytes(
            collective for collective in collectives if collective.purpose in purposes
        )
        counts[name] = as_number(sent) if program.mode == "manual" else None
    return counts


def layout_table(program: Program) -> Table:
    """Makes a table of the shardings of a program's state.

    Args:
      program: The program; it need be neither compiled nor initialised.

    Returns:
      A `rich.table.Table` with a row for each parameter: shape, dtype, partition spec, bytes on a
      device. The column of the spec also has:

      - The spec of the gradient and of the optimizer's state, if it is another one.
      - The axes that split the parameter, if the model computes with its shards, and the axes along
        which several devices use the same entries.
      - Why the strategy has chosen the sharded dimension ("whole tiles", "largest", "only one that
        divides", "annotated"), or why it has not sharded the parameter over the data axes.
      - "frozen", if the parameter is not trained.

      The last rows are the totals of parameters, optimizer state and other collections, also as a
      share of the bytes that a single device would hold.
    """
    mesh = " x ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
    mode = "" if program.mode == "manual" else f", mode {program.mode},"
    title = f"{program.strategy.name}{mode} on {program.mesh.size} devices ({mesh})"
    table = FittedTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("parameter", "shape", "dtype", "partition spec"):
        table.add_column(header, overflow="fold")
    table.add_column("bytes/device", justify="right", overflow="fold")
    state = program.abstract_state
    parameters = zip(program.parameters, jax.tree.leaves(state.params), strict=True)
    for (info, placement), x in parameters:
        spec, axes = _spec_text(placement.spec), program.mesh.axis_names
        if placement.state_names is not None:
            spec += f", state {_spec_text(placement.state_spec)}"
        split = _axes_text("split over", [axis for axis in axes if axis in placement.split_axes])
        split += _axes_text("shared over", placement.shared_names)
        notes = [*filter(None, [placement.note, "" if info.trainable else "frozen"])]
        spec += split + (f"{';' * bool(split)} {', '.join(notes)}" if notes else "")
        shape = "x".join(map(str, info.shape))
        table.add_row(info.path, shape, str(info.dtype), spec, f"{state_bytes(x)[0]:,}")
    table.add_section()
    totals = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "other collections": state.collections,
        "per-device state": state.local,
    }
    for name, tree in totals.items():
        per_device, whole = state_bytes(tree)
        if whole:
            elements = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
            share = f"{per_device / whole:.1%} of {whole:,} bytes"
            table.add_row(name, f"{elements:,}", "", share, f"{per_device:,}")
    return table


def draw_sharding(params: Any, path: str = ALL) -> None:
    """Prints drawings that show which device stores which part of a parameter.

    `jax.debug.visualize_sharding` draws arrays of one or two dims. For an array with more dims, the
    sharded dims are drawn; if there are fewer than two, the last of the other dims are added.

    Args:
      params: A tree of `jax.Array`s, or of `jax.ShapeDtypeStruct`s with shardings such as
        `program.abstract_state.params`. Nothing is compiled, and no device is used.
      path: The path of a parameter such as `input_dense/kernel`, or `"all"` for all parameters.

    Raises:
      ValueError: There is no such parameter; or a parameter has no sharding.
    """
    leaves = {path_name(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(params)}
    if path != ALL and path not in leaves:
        raise ValueError(
            f"draw_sharding: path is {path!r}, expected the path of a parameter, or {ALL!r}"
            f"{suggest(path, leaves)}."
        )
    for name in leaves if path == ALL else [path]:
        _draw(name, leaves[name])


def _draw(name: str, x: Any) -> None:
    """Prints the drawing of one array below a line that names it."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"draw_sharding: {name!r} has no sharding. Pass program.abstract_state.params, or the "
            "params of a state."
        )
    is_named = isinstance(sharding, NamedSharding)
    title = f"{name} {list(x.shape)} {_spec_text(sharding.spec) if is_named else sharding}"
    reason, shape = "", x.shape
    if not x.size:
        reason = "it has no elements"
    elif not x.ndim:
        reason = f"it has no dims; whole on {sharding.num_devices} devices"
    elif x.ndim > 2:
        spec = [*sharding.spec] if is_named else []
        spec += [None] * (x.ndim - len(spec))
        dims = [
            dim
            for dim, entry in enumerate(spec)
            if entry is not None and axes_size(sharding.mesh, axis_tuple(entry)) > 1
        ]
        others = [dim for dim in range(x.ndim) if dim not in dims]
        dims = sorted([*dims, *others[len(others) - max(2 - len(dims), 0) :]])
        title += f", of which dims {dims[0]} and {dims[1]}" if len(dims) == 2 else ""
        reason = "" if len(dims) == 2 else "more than two of its dims are sharded"
        shape = tuple(x.shape[dim] for dim in dims)
        if is_named:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[dim] for dim in dims)))
    if reason:
        print(f"{title}: not drawn, {reason}\n")
        return
    print(title)
    # The drawing keeps the proportions of the array, unless it would be wider than the output.
    width = HEIGHT * COLUMNS_PER_LINE * (shape[1] if len(shape) == 2 else 1) / shape[0]
    jax.debug.visualize_sharding(shape, sharding, scale=min(1.0, MAX_WIDTH / math.ceil(width)))


def _axes_text(words: str, names: Sequence[AxisName | None]) -> str:
    """Returns `, WORDS AXIS and AXIS` for the axes in `names`, `''` if there are none."""
    axes = [axis for name in names for axis in axis_tuple(name)]
    return f", {words} {' and '.join(axes)}" if axes else ""


def _spec_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


# -------------------------------------------------------------------------------------------------
# A table for narrow terminals, whose cells are broken only between words.
#
# rich breaks words if a table does not fit, and then names in it cannot be searched.


WORDS_OF_NUMBER = 3  # Such as `≤ 6.98 MiB`.
NARROW = 100
NO_PADDING = (0, 0, 0, 0)


class FittedTable(Table):
    """A rich table that wraps its cells between words.

    In a narrow terminal there is less space between columns. Short cells that are aligned to the
    right are numbers, which are wrapped only if nothing else helps.

    If the words are too long even so, the table is wider than the terminal. Print it with
    `console.print(table, soft_wrap=True)`: otherwise a console cuts off longer lines. So without
    `soft_wrap` the table breaks words if it is too wide.
    """

    def __str__(self) -> str:
        """Returns the table as text, as wide as the terminal."""
        width = shutil.get_terminal_size((120, 24)).columns
        console = Console(file=io.StringIO(), width=width)
        with console.capture() as captured:
            console.print(self, soft_wrap=True)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the table with the widths that fit."""
        padding = self.padding
        try:
            unlimited = options.update_width(2**16)
            while options.max_width < NARROW and self.padding != NO_PADDING:
                if self._fit(console, unlimited) <= options.max_width:
                    break
                top, right, bottom, left = self.padding
                self.padding = (top, max(right - 1, 0), bottom, max(left - 1, 0))
            total = self._fit(console, options)
            if total > options.max_width:
                total = self._fit(console, options, wraps_numbers=True)
            if total > options.max_width and options.no_wrap:
                total = self._fit(console, options)
            if total > options.max_width and not options.no_wrap:
                self._set_widths([None] * len(self.columns))
            else:
                options = options.update_width(max(total, options.max_width))
            yield from super().__rich_console__(console, options)
        finally:
            self.padding = padding
            self._set_widths([None] * len(self.columns))

    def _fit(
        self, console: Console, options: ConsoleOptions, *, wraps_numbers: bool = False
    ) -> int:
        """Sets the widths of the columns; returns the width of the table."""
        self._set_widths([None] * len(self.columns))
        unlimited = options.update_width(2**16)
        kept = 0 if wraps_numbers else WORDS_OF_NUMBER
        measured = [_measure(column, console, unlimited, kept=kept) for column in self.columns]
        natural = [column.maximum for column in measured]
        between = console.measure(self, options=unlimited).maximum - sum(natural)
        least = [column.minimum for column in measured]
        widths = fit_widths(natural, least, options.max_width - between)
        self._set_widths(widths)
        return sum(widths) + between

    def _set_widths(self, widths: Sequence[int | None]) -> None:
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width


def fit_widths(natural: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Reduces widths until their sum is at most `total`, the largest width first.

    Args:
      natural: The widths without a limit.
      least: The smallest widths. If their sum is above `total`, they are the result.
    """
    widths = list(natural)
    while sum(widths) > total:
        shrinkable = [i for i, width in enumerate(widths) if width > least[i]]
        if not shrinkable:
            break
        widths[max(shrinkable, key=lambda i: widths[i])] -= 1
    return widths


def _measure(
    column: Column, console: Console, options: ConsoleOptions, *, kept: int
) -> Measurement:
    """Measures a column: the width of its longest line, and of the longest text to keep whole.

    Words are kept whole, and numbers of at most `kept` words.
    """
    header = Measurement.get(console, options, column.header)
    least, natural = [header.minimum], [header.maximum]
    for cell in column.cells:
        measured = Measurement.get(console, options, cell)
        is_number = column.justify == "right" and len(str(cell).split()) <= kept
        least.append(measured.maximum if is_number else measured.minimum)
        natural.append(measured.maximum)
    return Measurement(max(least), max(natural))
