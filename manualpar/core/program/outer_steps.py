"""Outer steps: replicas train separately, and exchange what they have learned every so often."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from manualpar.core.parameters.comm_policy import CommPolicy
from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import TrainState
from manualpar.core.trees import Batch

if TYPE_CHECKING:
    from manualpar.core.program.program import Program

# (state, batch) -> (state, metrics).
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class OuterSteps(abc.ABC):
    """The outer steps of a program whose replicas train separately, such as `manualpar.diloco`'s.

    Attributes:
      inner: The program of one replica, on a mesh without the replicas' axes. It can be traced.
      replica_axes: The mesh axes of the replicas.
      every: The number of steps between two outer steps of the same fragment of the parameters.
      fragments: The fragment's number for each of `Program.parameters`; `None` for a frozen
        parameter.
      steps: For each fragment a jitted `outer_step(state) -> state` that exchanges it. The state is
        donated.
      overlapped_steps: For each fragment a train step, `(state, batch) -> (state, metrics)`, that
        exchanges the fragment at the same time; `()` without overlap.
      comm: The format of exchanged differences.
    """

    inner: "Program"
    replica_axes: tuple[str, ...]
    every: int
    fragments: tuple[int | None, ...]
    steps: tuple[Any, ...]
    overlapped_steps: tuple[Any, ...]
    comm: CommPolicy

    @abc.abstractmethod
    def step_at(self, number: int) -> StepFunction:
        """Returns the function to call as step `number`, counted from 1."""

    @abc.abstractmethod
    def start_replicas(self, program: "Program", state: TrainState) -> TrainState:
        """Makes the replicas of a state start from its parameters."""

    @abc.abstractmethod
    def for_replicas_of(self, program: "Program", per_device: Mapping[str, Any]) -> "Program":
        """Returns a program that loads states with as many replicas as these per-device arrays.

        Args:
          program: The program of these outer steps.
          per_device: The arrays of `TrainState.local`, or their shapes.
        """

    @abc.abstractmethod
    def regroup(self, program: "Program", state: TrainState) -> TrainState:
        """Converts a state of another number of replicas to the program's number."""
