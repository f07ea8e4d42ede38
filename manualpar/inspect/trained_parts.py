"""Counts a program's trained and frozen arrays, their stored bytes, and the bytes sent for them."""

import math
from collections.abc import Iterable
from typing import Any

import jax

from manualpar.core.parameters.trainable import partition
from manualpar.core.program.program import Program
from manualpar.core.tracing.scopes import GATHER_SCOPE, REDUCE_SCOPE, REGATHER, SCATTER_SCOPE
from manualpar.inspect.communication import Collective, as_number, total_bytes
from manualpar.inspect.state_layout import state_bytes

GRADIENTS = (SCATTER_SCOPE, REDUCE_SCOPE)
GATHERS = (GATHER_SCOPE, REGATHER)


def trained_parts(program: Program, collectives: Iterable[Collective]) -> dict[str, Any]:
    """Counts the trained and the frozen parameters; all numbers except `elements` are per device.

    Args:
      program: The program.
      collectives: The collectives of its traced step; none in modes other than `manual`.

    Returns:
      `trained` and `frozen`, each with the number of `arrays`, all their `elements` and their
      `bytes`; `optimizer`, the bytes of the optimizer's state; `gradients_sent` and `gathers_sent`,
      the bytes that a step sends for gradients and for gathered parameters, `None` if XLA chooses
      the collectives.
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
