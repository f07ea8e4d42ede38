"""Two traces of the same code, on shards and on whole arrays, walked side by side.

Both consist of the same operations as long as the code does not look at sizes of what is split.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from manualpar.core.checks.shard_operations import refuse
from manualpar.core.model.probe import LIBRARIES
from manualpar.core.tracing.jaxprs import COMPOSITE, expanded

CASTS = frozenset({"pvary", "pcast"})


def paired(shards: Iterator[Any], whole: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """The operations that correspond to each other; `None` for one that is missing."""
    for one in shards:
        other = next(whole, None)
        # A device's one head needs no broadcasting, as all heads do.
        while other is not None and _is_broadcast(other) and not _is_like(other, one):
            other = next(whole, None)
        yield one, other
    yield from ((None, other) for other in whole if not _is_broadcast(other))


def check_same_operation(one: Any, other: Any) -> None:
    """Refuses a pair of `paired` that is not twice the same operation."""
    if one is None or other is None or one.primitive is not other.primitive:
        names = [eqn.primitive.name if eqn else "nothing" for eqn in (one, other)]
        refuse(f"applies {names[0]} to shards and {names[1]} to whole arrays", "program")


def inner_programs(eqn: Any) -> list[Any]:
    """The programs that are parameters of an equation, with their constants if they have some."""
    if eqn.primitive.name == COMPOSITE:
        return [expanded(eqn)]
    values = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    return [v for some in values for v in some if isinstance(v, ClosedJaxpr | Jaxpr)]


def stands_in(eqn: Any, scopes: frozenset[str]) -> bool:
    """Whether an equation stands in one of some named scopes."""
    return not scopes.isdisjoint(str(eqn.source_info.name_stack).split("/"))


def module_of_equation(eqn: Any, but: frozenset[str] = frozenset()) -> str:
    """The path of the module that an equation stands in, without some named scopes."""
    parts = str(eqn.source_info.name_stack).split("/")
    return "/".join(part for part in parts if part.isidentifier() and part not in but)


def place_of(eqn: Any) -> str:
    """The line of the user's code that an equation comes from."""
    folders = [Path(str(sys.modules[name].__file__)).parent for name in LIBRARIES & {*sys.modules}]
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file = Path(frame.file_name)
        if file.exists() and not any(file.is_relative_to(folder) for folder in folders):
            return f" at {file.name}:{frame.line_num}"
    return ""


def _is_broadcast(eqn: Any) -> bool:
    return bool(eqn.primitive.name == "broadcast_in_dim")


def _is_like(broadcast: Any, eqn: Any) -> bool:
    dims = "broadcast_dimensions"
    return _is_broadcast(eqn) and eqn.params[dims] == broadcast.params[dims]
