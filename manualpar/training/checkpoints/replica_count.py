"""Checkpoints of another number of replicas than a program has, of those that train alone.

Each array of `state.local` has the replicas in its first dimension. A checkpoint of more or fewer
replicas is read as it is, each device its part of all of them, and made into a state of the
program.
"""

from collections.abc import Mapping
from typing import Any

from manualpar.core.program.program import Program
from manualpar.core.state.train_state import TrainState
from manualpar.strategies.diloco.program import DiLoCoProgram


def as_stored(program: Program, stored: Mapping[str, Any]) -> Program:
    """Returns the program with as many replicas as the stored state, so that it can be read.

    `stored` is a nested dict with a shape at each leaf.
    """
    examples = stored.get("local", {}).get("examples")
    if not isinstance(program, DiLoCoProgram) or examples is None or not examples.shape:
        return program
    number = int(examples.shape[0])
    own = program.abstract_state.local["examples"].shape[0]
    return program if number == own else program.with_replicas(number)


def as_held(program: Program, state: TrainState) -> TrainState:
    """Regroups the state that was read to the program's number of replicas."""
    if not isinstance(program, DiLoCoProgram):
        return state
    own = program.abstract_state.local["examples"].shape
    return state if state.local["examples"].shape == own else program.regrouped(state)
