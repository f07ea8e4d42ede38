"""Drawings of how parameters lie on the devices, by `jax.debug.visualize_sharding`.

A drawing has the dims of the array as its height and width, so jax draws one or two of them. Of an
array with more, those dims are drawn that are sharded, with the last ones to make up two.
"""

import difflib
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from manualpar.sharding.layout import path_name
from manualpar.sharding.mesh import axes_size, axis_tuple

ALL = "all"

# What jax takes to be the width of the output, the height it gives a drawing, and the columns that
# are as wide as a line is high.
MAX_WIDTH = 80
HEIGHT = 10
COLUMNS_PER_LINE = 2.5


def draw_sharding(params: Any, path: str = ALL) -> None:
    """Prints on standard output which devices hold which part of a parameter, or of all.

    Args:
      params: A tree of `jax.Array`s, or of `jax.ShapeDtypeStruct`s with shardings such as
        `program.abstract_state.params`: neither is anything compiled nor a device asked.
      path: The path of a parameter such as `input_dense/kernel`, or `"all"`.

    Raises:
      ValueError: There is no such parameter; or one has no sharding.
    """
    leaves = {path_name(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(params)}
    if path != ALL and path not in leaves:
        near = difflib.get_close_matches(path, leaves, n=1, cutoff=0)
        nearest = f"; the nearest one is {near[0]!r}" if near else ""
        raise ValueError(
            f"draw_sharding: path is {path!r}, expected that of a parameter or {ALL!r}{nearest}."
        )
    for name in leaves if path == ALL else [path]:
        _draw(name, leaves[name])


def _draw(name: str, x: Any) -> None:
    """Prints the drawing of one array under a line that names it."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"draw_sharding: {name!r} has no sharding. Pass program.abstract_state.params or those "
            "of a state."
        )
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    text = f"P({', '.join(map(repr, spec))})" if isinstance(sharding, NamedSharding) else sharding
    title = f"{name} {list(x.shape)} {text}"
    if not x.size:
        print(f"{title}: not drawn, it has no elements\n")
        return
    if not x.ndim:
        print(f"{title}: not drawn, it has no dims; whole on {sharding.num_devices} devices\n")
        return
    shape = x.shape
    if x.ndim > 2:
        spec = (*spec, *(None,) * (x.ndim - len(spec)))
        dims = _dims_to_draw(sharding, spec)
        if len(dims) > 2:
            print(f"{title}: not drawn, more than two of its dims are sharded\n")
            return
        title += f", of which dims {dims[0]} and {dims[1]}"
        shape = tuple(x.shape[dim] for dim in dims)
        if isinstance(sharding, NamedSharding):
            entries = PartitionSpec(*(spec[dim] for dim in dims))
            sharding = NamedSharding(sharding.mesh, entries)
    print(title)
    # In proportion, as long as that is not wider than the output.
    width = HEIGHT * COLUMNS_PER_LINE * (shape[1] if len(shape) == 2 else 1) / shape[0]
    jax.debug.visualize_sharding(shape, sharding, scale=min(1.0, MAX_WIDTH / math.ceil(width)))


def _dims_to_draw(sharding: Any, spec: tuple[Any, ...]) -> list[int]:
    """The dims that are sharded, with as many of the last others as make up two."""
    dims = [
        dim
        for dim, entry in enumerate(spec)
        if entry is not None and axes_size(sharding.mesh, axis_tuple(entry)) > 1
    ]
    others = [dim for dim in range(len(spec)) if dim not in dims]
    missing = max(2 - len(dims), 0)
    return sorted([*dims, *others[len(others) - missing :]])
