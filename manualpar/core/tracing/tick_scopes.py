"""A named scope that records in how many ticks each stage of a pipeline runs a branch.

All stages of a pipeline run one program, a loop over the ticks of the schedule. In each tick a
stage looks up in a table which branch of a `cond` it runs. So neither the jaxpr nor the compiled
program shows how often a branch runs.
"""

import functools
import re
from typing import NamedTuple

import numpy as np

_TICKS = re.compile(r"ticks((?:_\d+)+)_in_(\d+)_of_(\d+)")


class TickRuns(NamedTuple):
    """The number of a pipeline's ticks in which an operation runs.

    Attributes:
      runs: For each stage, the number of ticks in which it runs the operation. Only the innermost
        `ticks_scope` counts.
      together: The number of ticks in which at least one stage runs the operation.
      ticks: The number of all ticks.
    """

    runs: tuple[int, ...]
    together: int
    ticks: int


def ticks_scope(is_run: np.ndarray) -> str:
    """Returns the named scope for a `cond` with one empty branch.

    Args:
      is_run: `bool[ticks, stages]`, whether the stage runs the other branch in the tick.
    """
    runs = "_".join(map(str, is_run.sum(axis=0).tolist()))
    return f"ticks_{runs}_in_{is_run.any(axis=1).sum()}_of_{len(is_run)}"


@functools.lru_cache(maxsize=4096)
def innermost_ticks(scope: str) -> str:
    """Returns the last `ticks_scope` name in a scope; "" if there is none."""
    return next((name for name in reversed(scope.split("/")) if _TICKS.fullmatch(name)), "")


def ticks_run(scope: str) -> TickRuns | None:
    """Reads the numbers from a `ticks_scope`; `None` if the innermost scope is another one."""
    if found := _TICKS.fullmatch(scope.rpartition("/")[2]):
        return TickRuns(tuple(map(int, found[1][1:].split("_"))), int(found[2]), int(found[3]))
    return None
