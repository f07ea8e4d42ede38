"""Pairs the operations of two traces of the same code: on shards and on unsharded arrays.

Both traces have the same operations unless the code depends on the sizes of split dims.
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
    """Yields pairs `(on shards, on whole arrays)` of equations; `None` for a missing equation."""
    for eqn in shards:
        whole_eqn = next(whole, None)
        # A broadcast may be in only one trace: a device with one head needs no broadcast over
        # heads.
        while whole_eqn is not None and _is_broadcast(whole_eqn) and not _is_like(whole_eqn, eqn):
            whole_eqn = next(whole, None)
        yield eqn, whole_eqn
    yield from ((None, whole_eqn) for whole_eqn in whole if not _is_broadcast(whole_eqn))


def check_same_operation(eqn: Any, whole_eqn: Any) -> None:
    """Refuses a pair from `paired` if its two operations are not the same."""
    if eqn is None or whole_eqn is None or eqn.primitive is not whole_eqn.primitive:
        names = [x.primitive.name if x else "nothing" for x in (eqn, whole_eqn)]
        refuse(f"applies {names[0]} to shards and {names[1]} to whole arrays", "program")


def inner_programs(eqn: Any) -> list[Any]:
    """Returns the programs in an equation's parameters, with their constants if they have any."""
    if eqn.primitive.name == COMPOSITE:
        return [expanded(eqn)]
    params = [v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values()]
    return [v for values in params for v in values if isinstance(v, ClosedJaxpr | Jaxpr)]


def stands_in(eqn: Any, scopes: frozenset[str]) -> bool:
    """Returns whether an equation is inside one of `scopes`."""
    return not scopes.isdisjoint(str(eqn.source_info.name_stack).split("/"))


def module_of_equation(eqn: Any, but: frozenset[str] = frozenset()) -> str:
    """Returns the path of the module that contains an equation, without the scopes in `but`."""
    parts = str(eqn.source_info.name_stack).split("/")
    return "/".join(part for part in parts if part.isidentifier() and part not in but)


def place_of(eqn: Any) -> str:
    """Describes, for messages, the line of the user's code that made an equation."""
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
