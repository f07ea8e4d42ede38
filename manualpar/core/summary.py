"""Describes objects in a few lines: as their `repr`, and as tables in notebooks.

The `repr` that a dataclass writes prints every array and every parameter, and so fills pages. A
class that is `Summarized` prints its most important values, one on a line.
"""

import dataclasses
import functools
import html
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manualpar.core.trees import path_name

__all__ = [
    "Summarized",
    "as_text",
    "describe_fields",
    "describe_function",
    "describe_shapes",
    "describe_tree",
    "leaf_types",
    "show_array",
    "show_leaf",
]

WIDTH = 100  # The most characters of a value in a summary of fields.
SHOWN = 6  # The most leaves of a tree whose shapes are listed, and entries of a container.


class Summarized:
    """Prints a summary of at most fifteen lines in place of all fields.

    A dataclass passes `repr=False` to its decorator. By default the summary has the fields; another
    class overrides `_summary`.
    """

    def _summary(self) -> tuple[str, Mapping[str, str]]:
        """Returns the first line, and the other lines: a text by its name."""
        return type(self).__name__, describe_fields(self)

    def __repr__(self) -> str:
        return as_text(*self._summary())

    def _repr_html_(self) -> str:
        """Returns the summary as a table for notebooks."""
        title, lines = self._summary()
        rows = "".join(
            f'<tr><th style="text-align: left">{html.escape(name)}</th>'
            f'<td style="text-align: left">{html.escape(text)}</td></tr>'
            for name, text in lines.items()
        )
        caption = f'<caption style="text-align: left">{html.escape(title)}</caption>'
        return f"<table>{caption}{rows}</table>"


def as_text(title: str, lines: Mapping[str, str]) -> str:
    """Writes a summary, with a line for each text."""
    return "\n".join([title, *(f"  {name}: {text}" for name, text in lines.items())])


def describe_fields(value: Any) -> dict[str, str]:
    """Describes each public field of a dataclass or of a `NamedTuple` in a few words."""
    if dataclasses.is_dataclass(value):
        names: Iterable[str] = [x.name for x in dataclasses.fields(value) if x.repr]
    else:
        names = value._fields
    return {name: _describe(getattr(value, name)) for name in names if name[0] != "_"}


def describe_tree(tree: Any) -> str:
    """Describes a tree in a few words: how many leaves, numbers and bytes its arrays have."""
    leaves = jax.tree.leaves(tree)
    arrays = [x for x in leaves if _is_array(x)]
    if not leaves:
        return "empty"
    if len(arrays) < len(leaves):
        return f"{len(leaves)} leaves"
    numbers = sum(math.prod(x.shape) for x in arrays)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    return f"{len(arrays)} arrays, {numbers:,} numbers, {size:,} bytes"


def describe_shapes(tree: Any) -> str:
    """Lists the leaves of a tree with their dtypes and shapes: `.inputs float32[64, 12], ...`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shown = [f"{jax.tree_util.keystr(path)} {_describe(x)}".strip() for path, x in leaves[:SHOWN]]
    rest = [f"and {len(leaves) - SHOWN} more"] if len(leaves) > SHOWN else []
    return ", ".join([*shown, *rest]) or "none"


def describe_function(function: Any) -> str:
    """Returns the name of a function, with the arguments that a `functools.partial` binds."""
    if isinstance(function, functools.partial):
        bound = [*map(_describe, function.args)]
        bound += [f"{name}={_describe(x)}" for name, x in function.keywords.items()]
        return f"{describe_function(function.func)}({', '.join(bound)})"
    return str(getattr(function, "__qualname__", type(function).__name__))


def show_array(dtype: Any, shape: Any) -> str:
    """Writes a dtype and a shape, for messages: `float32[8,4]`."""
    name = getattr(dtype, "name", None) or jnp.dtype(dtype).name
    return f"{name}[{','.join(map(str, shape))}]"


def show_leaf(x: Any) -> str:
    """Writes the dtype and shape of an array, or the type of another leaf, for messages."""
    array = x if hasattr(x, "dtype") and hasattr(x, "shape") else np.asarray(x)
    if array.dtype == object:
        return f"a {type(x).__name__}"
    return show_array(array.dtype, array.shape)


def leaf_types(tree: Any) -> dict[str, str]:
    """Writes the dtype and shape of each array of a tree, by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): show_array(x.dtype, x.shape) for path, x in leaves}


def _describe(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping | tuple | list) and len(leaves := jax.tree.leaves(value)) > SHOWN:
        return f"{len(leaves)} entries"
    if isinstance(value, str) and len(value) > WIDTH:
        return f"{value[:WIDTH]!r}..."
    if callable(value) and not isinstance(value, Summarized):
        return describe_function(value)
    line, *more = repr(value).split("\n")
    is_summarized = isinstance(value, Summarized)
    if (more and not is_summarized) or getattr(type(value), "__repr__", None) is object.__repr__:
        return type(value).__name__
    return line if len(line) <= WIDTH else f"{line[:WIDTH]}..."


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
