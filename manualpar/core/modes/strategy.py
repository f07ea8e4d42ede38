"""What a strategy is: where parameters live, when they are communicated, and what that costs.

A strategy is data. One program (`manualpar.core.program.program`) and one step
(`manualpar.core.program.step`) read it, so a strategy has no code of its own but the function that
builds it: see `manualpar.strategies` for those that there are, and `manualpar.strategies.registry`
for how a config finds one.

A strategy answers three questions.

1. *Where does each parameter live?* `place` maps what is known of a parameter to a `Placement`: how
   the parameter is sharded between steps, and how its gradient and its optimizer state are.
2. *When is it communicated?* A sharded parameter is gathered wherever it is used, or once a step.
   The gradient of a parameter that was gathered where it is used is scattered by the backward pass.
   The gradient of a parameter that is whole during the step is scattered once a step, or once a
   minibatch.
3. *What does that cost?* `sends` is a closed form: how many times a step sends each parameter.
   Tests compare it with what stands in the traced program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from manualpar.core.modes.gradients import Reduce, WeightedLoss
from manualpar.core.parameters.placement import PlaceFn
from manualpar.core.state.metrics import Metrics

ModeName = Literal["manual", "auto", "explicit", "auto-unconstrained"]
MODES: tuple[ModeName, ...] = ("manual", "auto", "explicit", "auto-unconstrained")
Every = Literal["minibatch", "step"]


class CommCounts(NamedTuple):
    """How many times a step sends a parameter.

    Each counts only for a parameter that is sharded: what is whole on every device, as is its
    optimizer state, costs one all-reduce of its gradient a step under every strategy.

    Attributes:
      uses: How many times the forward and the backward pass ask for it. A parameter that is sharded
        over other axes than those of the batch is gathered over them each time.
      gathers: All-gathers of the parameter.
      scatters: Reduce-scatters of its gradient.
      new_gathers: All-gathers of the updated parameter, where only its state is sharded.
    """

    uses: int
    gathers: int = 0
    scatters: int = 0
    new_gathers: int = 0


# (number of minibatches, whether the parameter is kept until the backward pass) -> the counts.
SendsFn = Callable[[int, bool], CommCounts]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to spread the training state over devices.

    Attributes:
      name: Its name, which begins every error message about it.
      place: Where each parameter, its gradient and its optimizer state live.
      sends: How many times a step sends a parameter, from the number of minibatches and whether the
        parameter is kept (`Placement.keep`). The most that it can be: a parameter that the backward
        pass does not need, such as a bias, is not gathered again for it.
      replica_axes: Mesh axes that examples are split over besides `axis_name`, over which nothing
        is sharded.
      gather_every: How often a sharded parameter is gathered: where it is used in each minibatch,
        or once a step.
      reduce_every: How often the gradients of parameters that are whole in a step are scattered.
      reshard_after_forward: Whether gathered parameters are dropped after the forward pass and
        gathered again for the backward one.
      regather_axes: The mesh axes over which they are gathered again; what came over others is
        kept. All if it is `None`.
    """

    name: str
    place: PlaceFn
    sends: SendsFn
    replica_axes: tuple[str, ...] = ()
    gather_every: Every = "minibatch"
    reduce_every: Every = "step"
    reshard_after_forward: bool = False
    regather_axes: tuple[str, ...] | None = None


class Pipelined(Protocol):
    """A schedule whose minibatches are on different layers, on different devices, at one time."""

    def __call__(
        self, loss: WeightedLoss, params: Any, collections: Any, minibatches: Any, reduce: Reduce, /
    ) -> tuple[Any, Metrics, Any]:
        """A `Schedule`. What it differentiates at once is one stage's, see `Stages.on_mesh`."""

    def arrange(self, tree: Any, *, back: bool = False) -> Any:
        """Parameters of the layers that run here; or, `back`, gradients of those stored here."""

    def metrics(self, measure: Callable[..., Metrics], *args: Any) -> Metrics:
        """`measure(params, collections, batch, rng)`, part by part through the stages."""


@runtime_checkable
class Stages(Protocol):
    """How a model's layers are spread over an axis: what `manualpar.Pipeline` is to the core."""

    axis: str

    def check(self, strategy: Strategy, options: Mapping[str, Any]) -> None:
        """Refuses a strategy and options of the program that it does not go with."""

    def stacked(self, loss: ClosedJaxpr, paths: Sequence[str], size: int) -> frozenset[str]:
        """The paths of the parameters with layers in dim 0, spread over `size` devices.

        `loss` is the traced loss; its inputs are the whole parameters at `paths`.
        """

    def on_mesh(
        self, mesh: Mesh, strategy: Strategy, placements: Any, num_minibatches: int
    ) -> Pipelined:
        """Its schedule of a step, whose parameters lie as the placements say."""
