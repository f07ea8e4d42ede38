"""How much of a program is trained, and what that costs: arrays, bytes held, bytes sent."""

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
    """Counts what is trained and what is frozen; every number but `elements` is of one device.

    Args:
      program: The program.
      collectives: Those of its traced step, which in other modes than `manual` are none.

    Returns:
      `trained` and `frozen`, each with the number of `arrays`, their `elements` in all and their
      `bytes`; `optimizer`, the bytes of the optimizer's state; `gradients_sent` and `gathers_sent`,
      the bytes that a step sends for gradients and for gathered parameters, `None` where XLA
      chooses them.
    """
    found: dict[str, Any] = {}
    parts = partition(program.step.placements, program.abstract_state.params)
    infos = [info for info, _ in program.parameters]
    for name, part in zip(("trained", "frozen"), parts, strict=True):
        own = [info for info in infos if info.trainable == (name == "trained")]
        found[name] = {
            "arrays": len(jax.tree.leaves(part)),
            "elements": sum(math.prod(info.shape) for info in own),
            "bytes": state_bytes(part)[0],
        }
    found["optimizer"] = state_bytes(program.abstract_state.opt_state)[0]
    collectives = list(collectives)
    for name, purposes in (("gradients_sent", GRADIENTS), ("gathers_sent", GATHERS)):
        sent = total_bytes(one for one in collectives if one.purpose in purposes)
        found[name] = as_number(sent) if program.mode == "manual" else None
    return found
