"""How often the devices of a pipeline run something, as a named scope says it to readers.

A pipeline is one program for all stages. In each tick a stage runs the branches of a `cond` that
its table says, so neither the jaxpr nor the compiled program shows how often that is.
"""

import re
from typing import NamedTuple

import numpy as np

_TICKS = re.compile(r"ticks((?:_\d+)+)_in_(\d+)_of_(\d+)")


class TickRuns(NamedTuple):
    """In how many of a pipeline's ticks something runs.

    Attributes:
      runs: A number for each stage, whatever else surrounds it.
      together: In how many ticks some stage runs it.
      ticks: How many ticks there are.
    """

    runs: tuple[int, ...]
    together: int
    ticks: int


def ticks_scope(is_run: np.ndarray) -> str:
    """The named scope around a `cond` that each stage passes in some of the ticks only.

    Args:
      is_run: `bool[T, S]`, whether a stage runs the branch that does something in a tick.
    """
    runs = "_".join(map(str, is_run.sum(axis=0).tolist()))
    return f"ticks_{runs}_in_{is_run.any(axis=1).sum()}_of_{len(is_run)}"


def innermost_ticks(scope: str) -> str:
    """The last such name in a scope; "" if there is none."""
    return next((name for name in reversed(scope.split("/")) if _TICKS.fullmatch(name)), "")


def ticks_run(scope: str) -> TickRuns | None:
    """What `ticks_scope` says of an operation, if it stands directly in such a scope."""
    if found := _TICKS.fullmatch(scope.rpartition("/")[2]):
        return TickRuns(tuple(map(int, found[1][1:].split("_"))), int(found[2]), int(found[3]))
    return None
