"""A named scope that gives how many times each stage of a pipeline runs a branch.

A pipeline is one program for all stages. In each tick a stage's table chooses the branches of a
`cond` that it runs, so neither the jaxpr nor the compiled program shows their number.
"""

import re
from typing import NamedTuple

import numpy as np

_TICKS = re.compile(r"ticks((?:_\d+)+)_in_(\d+)_of_(\d+)")


class TickRuns(NamedTuple):
    """The number of a pipeline's ticks in which an operation runs.

    Attributes:
      runs: The number of ticks for each stage. Outer scopes of ticks do not change it.
      together: The number of ticks in which at least one stage runs the operation.
      ticks: The number of all ticks.
    """

    runs: tuple[int, ...]
    together: int
    ticks: int


def ticks_scope(is_run: np.ndarray) -> str:
    """Returns the named scope around a `cond` whose branch each stage runs in some of the ticks.

    Args:
      is_run: `bool[T, S]`, whether a stage runs the branch that is not empty in a tick.
    """
    runs = "_".join(map(str, is_run.sum(axis=0).tolist()))
    return f"ticks_{runs}_in_{is_run.any(axis=1).sum()}_of_{len(is_run)}"


def innermost_ticks(scope: str) -> str:
    """Returns the last `ticks_scope` name in a scope; "" if there is none."""
    return next((name for name in reversed(scope.split("/")) if _TICKS.fullmatch(name)), "")


def ticks_run(scope: str) -> TickRuns | None:
    """Reads the numbers of a `ticks_scope`; `None` if it is not the innermost scope."""
    if found := _TICKS.fullmatch(scope.rpartition("/")[2]):
        return TickRuns(tuple(map(int, found[1][1:].split("_"))), int(found[2]), int(found[3]))
    return None
