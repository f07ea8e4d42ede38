"""Reads DiLoCo checkpoints into a program with another number of replicas.

Each array of `state.local` has the replicas in its first dimension. A checkpoint of more or fewer
replicas is first read with its own number of replicas; each device reads its part of all replicas.
Then the state is regrouped to the program's number.
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
    stored_replicas = int(examples.shape[0])
    replicas = program.abstract_state.local["examples"].shape[0]
    return program if stored_replicas == replicas else program.with_replicas(stored_replicas)


def as_held(program: Program, state: TrainState) -> TrainState:
    """Regroups the state that was read to the program's number of replicas."""
    if not isinstance(program, DiLoCoProgram):
        return state
    shape = program.abstract_state.local["examples"].shape
    return state if state.local["examples"].shape == shape else program.regrouped(state)
