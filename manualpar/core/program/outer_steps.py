"""The interface of outer steps, in which replicas that train separately exchange parameters."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from manualpar.core.parameters.comm_policy import CommPolicy
from manualpar.core.state.metrics import Metrics
from manualpar.core.state.train_state import TrainState
from manualpar.core.summary import Summarized
from manualpar.core.trees import Batch

if TYPE_CHECKING:
    from manualpar.core.program.program import Program

# (state, batch) -> (state, metrics).
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True, repr=False)
class OuterSteps(Summarized, abc.ABC):
    """The outer steps of a program whose replicas train separately, such as DiLoCo.

    Attributes:
      inner: The program of one replica, on a mesh without the replicas' axes. This program can be
        traced.
      replica_axes: The mesh axes of the replicas.
      every: The number of steps between two exchanges of the same fragment. A fragment is a set of
        parameters that are exchanged in the same outer step.
      fragments: For each of `Program.parameters` the number of its fragment; `None` for a frozen
        parameter.
      steps: For each fragment, a jitted `outer_step(state) -> state` that exchanges the fragment.
        The state is donated.
      overlapped_steps: For each fragment, a train step `(state, batch) -> (state, metrics)` that
        also exchanges the fragment; `()` without overlap.
      comm: The format in which the replicas' differences from the common parameters are sent.
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
        """Returns the function that takes step `number`, counted from 1."""

    @abc.abstractmethod
    def start_replicas(self, program: "Program", state: TrainState) -> TrainState:
        """Replaces all replicas in a state by new ones that start with the state's parameters."""

    @abc.abstractmethod
    def for_replicas_of(self, program: "Program", per_device: Mapping[str, Any]) -> "Program":
        """Returns a program that loads states with the number of replicas in `per_device`.

        Args:
          program: The program of these outer steps.
          per_device: The arrays of `TrainState.local`, or their shapes.
        """

    @abc.abstractmethod
    def regroup(self, program: "Program", state: TrainState) -> TrainState:
        """Converts a state with another number of replicas to a state of `program`."""
