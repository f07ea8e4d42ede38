"""Strategies: how parameters are sharded, and when and how many times they are communicated.

A strategy is data, which `manualpar.core.program.program` and `manualpar.core.program.step` read.
So the only code of a strategy is the function that builds it. The strategies are in
`manualpar.strategies`. Configs look up strategies in `manualpar.strategies.registry`.

A strategy answers three questions.

1. *How is each parameter sharded?* `place` maps a `ParameterInfo` to a `Placement`: how the
   parameter, its gradient and its optimizer state are sharded between steps.
2. *When is it communicated?* A sharded parameter is gathered wherever it is used, or once a step.
   If it is gathered where it is used, the backward pass scatters its gradient. If it is replicated
   during the step, its gradient is scattered once a step, or once a minibatch.
3. *How many times is it communicated?* `sends` is a formula for the number of times that a step
   sends each parameter. Tests compare this number with the collectives of the traced program.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.mesh.mesh import platform_of
from manualpar.core.modes.gradients import ParamPair, Parts, Reduce, WeightedLoss
from manualpar.core.parameters.placement import ParameterInfo, PlaceFn, Placement, split_names
from manualpar.core.state.metrics import Metrics, StepSums
from manualpar.core.summary import Summarized, describe_function
from manualpar.core.trees import Collections, Grads, Placements
from manualpar.errors import check_choice

__all__ = [
    "MODES",
    "CommCounts",
    "ModeName",
    "Strategy",
    "check_strategy",
    "place_parameter",
]

ModeName = Literal["manual", "auto", "explicit", "auto-unconstrained"]
MODES: tuple[ModeName, ...] = ("manual", "auto", "explicit", "auto-unconstrained")
Every = Literal["minibatch", "step"]


class CommCounts(NamedTuple):
    """How many times a step sends a parameter.

    The counts are for a sharded parameter. If a parameter and its optimizer state are replicated,
    every strategy sends one all-reduce of the gradient a step.

    Attributes:
      uses: The number of times that the forward and the backward pass read the parameter. Each
        read gathers the parameter over its axes that do not split the batch.
      gathers: All-gathers of the parameter.
      scatters: Reduce-scatters of its gradient.
      new_gathers: All-gathers of the updated parameter, if only its optimizer state is sharded.
    """

    uses: int
    gathers: int = 0
    scatters: int = 0
    new_gathers: int = 0


# (number of minibatches, whether the parameter is kept until the backward pass) -> the counts.
SendsFn = Callable[[int, bool], CommCounts]


@dataclasses.dataclass(frozen=True, repr=False)
class Strategy(Summarized):
    """A way to spread the training state over devices.

    Attributes:
      name: The strategy's name. Every error message about the strategy begins with it.
      place: Decides how each parameter, its gradient and its optimizer state are sharded.
      sends: Counts how many times a step sends a parameter. The arguments are the number of
        minibatches and whether the parameter is kept (`Placement.keep`). The count is an upper
        bound: the backward pass does not gather a parameter that it does not need, such as a bias.
      replica_axes: Mesh axes in addition to `axis_name` that split the examples. Parameters are
        replicated over these axes.
      gather_every: How often a sharded parameter is gathered: at each use in each minibatch, or
        once a step.
      reduce_every: How often the gradient of a parameter is scattered, if the parameter is
        replicated during the step. With `"minibatch"` the gradients of layers in a loop are
        scattered in the loop, if the loss allows this, see `ReplicatedParameter`.
      reshard_after_forward: Whether gathered parameters are dropped after the forward pass and
        gathered again for the backward pass.
      regather_axes: The mesh axes over which parameters are gathered again; `None` for all axes.
        The part that was gathered over the other axes is kept from the forward pass.
      averages_in_backward: Whether the backward pass of a gather also averages the gradient over
        `replica_axes`. Otherwise the step does so once, after the last backward pass.
    """

    name: str
    place: PlaceFn
    sends: SendsFn
    replica_axes: tuple[str, ...] = ()
    gather_every: Every = "minibatch"
    reduce_every: Every = "step"
    reshard_after_forward: bool = False
    regather_axes: tuple[str, ...] | None = None
    averages_in_backward: bool = False

    @property
    def scatters_in_backward(self) -> bool:
        """Whether the backward pass may scatter the gradients of replicated parameters."""
        return self.gather_every == self.reduce_every == "minibatch"

    def reduces_where_used(self, placement: Placement) -> bool:
        """Returns whether a loop should reduce the gradient of a replicated parameter itself."""
        scatters = self.scatters_in_backward and placement.state_names is not None
        return scatters or placement.mean_in_loop

    def _summary(self) -> tuple[str, dict[str, str]]:
        again = ""
        if self.reshard_after_forward:
            over = f" over {', '.join(self.regather_axes)}" if self.regather_axes else ""
            again = f", and again{over} for the backward pass"
        return f"Strategy({self.name})", {
            "placement": describe_function(self.place),
            "replicated over": ", ".join(self.replica_axes) or "no axis",
            "sharded parameters are gathered": f"in every {self.gather_every}{again}",
            "gradients are scattered": f"in every {self.reduce_every}",
            **({"replicas' mean": "in the backward pass"} if self.averages_in_backward else {}),
        }


class Pipelined(Protocol):
    """A schedule that runs several microbatches at the same time, each on another stage."""

    def __call__(
        self,
        loss: WeightedLoss,
        params: ParamPair,
        collections: Collections,
        parts: Parts,
        reduce: Reduce,
        /,
    ) -> tuple[Grads, StepSums, Collections]:
        """Accumulates gradients like an `Accumulation`, but differentiates one stage at a time."""

    def with_all_layers(self, params: ParamPair) -> ParamPair:
        """Returns a pair of parameters with the layers of all stages, as types to trace a loss."""

    def exchange_layers(self, tree: Any, *, back: bool = False) -> Any:
        """Sends each stage the layers that it runs; with `back`, sends their gradients back."""

    def metrics(self, measure: Callable[..., Metrics], *args: Any) -> Metrics:
        """Runs `measure(params, collections, batch, rng)` on microbatches, through the stages."""


@runtime_checkable
class Stages(Protocol):
    """The core's interface to `manualpar.Pipeline`, which splits layers over a mesh axis."""

    axis: str

    def check(self, strategy: Strategy, options: Mapping[str, Any]) -> None:
        """Refuses a strategy, or options of the program, that pipelines do not support."""

    def stacked(self, loss: ClosedJaxpr, paths: Sequence[str], size: int) -> frozenset[str]:
        """Finds the parameters with layers stacked in dim 0, which `size` devices split.

        `loss` is the traced loss; its inputs are the full parameters at `paths`.
        """

    def on_mesh(
        self, mesh: Mesh, strategy: Strategy, placements: Placements, num_minibatches: int
    ) -> Pipelined:
        """Makes the schedule of a step; `placements` says how parameters are sharded."""


# -------------------------------------------------------------------------------------------------
# Checks a strategy and its placements; errors name the strategy and the parameter.


def check_strategy(strategy: Strategy, num_minibatches: int) -> None:
    """Refuses a strategy with a wrong value in a field."""
    name = strategy.name
    check_choice(name, "gather_every", strategy.gather_every, ("minibatch", "step"))
    check_choice(name, "reduce_every", strategy.reduce_every, ("minibatch", "step"))
    _check_signature(strategy, "place", 3, "(parameter, axes, number of devices) -> Placement")
    _check_signature(strategy, "sends", 2, "(number of minibatches, keep) -> CommCounts")
    if not isinstance(strategy.replica_axes, tuple):
        raise TypeError(
            f"{name}: replica_axes={strategy.replica_axes!r}, expected a tuple of axes."
        )
    try:
        sends = strategy.sends(num_minibatches, False)
    except Exception as error:
        error.add_note(
            f"raised by `sends` of strategy {name!r}, called with ({num_minibatches}, False)"
        )
        raise
    if not isinstance(sends, CommCounts):
        raise TypeError(f"{name}: sends returned {sends!r}, expected a CommCounts.")


def _check_signature(strategy: Strategy, field: str, count: int, expected: str) -> None:
    """Refuses a function in a field of the strategy that does not take `count` arguments."""
    function, shown = getattr(strategy, field), ""
    try:
        shown = f"{describe_function(function)}{inspect.signature(function)}"
        inspect.signature(function).bind(*[None] * count)
    except ValueError:  # Some builtins have no signature.
        return
    except TypeError as error:
        raise TypeError(
            f"{strategy.name}: {field} is {shown or repr(function)}, expected a function "
            f"{expected} ({error})."
        ) from None


def place_parameter(
    strategy: Strategy, info: ParameterInfo, axes: tuple[str, ...], mesh: Mesh
) -> Placement:
    """Asks a strategy for the placement of a parameter, and checks the placement."""
    prefix = f"{strategy.name}: place of parameter {info.path!r} of shape {info.shape}"
    shared = {axis for name in info.shared_names for axis in axis_tuple(name)}
    axes = tuple(axis for axis in axes if axis not in info.split_axes | shared)
    if not axes:  # The model computes with shards over all axes, so the strategy gets none.
        return Placement(info.names)
    info = dataclasses.replace(info, platform=platform_of(mesh))
    try:
        placement = strategy.place(info, axes, axes_size(mesh, axes))
    except Exception as error:
        error.add_note(f"raised by {prefix}")
        raise
    if not isinstance(placement, Placement):
        raise TypeError(f"{prefix} returned {placement!r}, expected a Placement.")
    for field, names, padding in (
        ("names", placement.names, placement.parameter_padding),
        ("state_names", placement.sharded_names, placement.padding),
    ):
        if len(names) != len(info.shape):
            raise ValueError(
                f"{prefix} has {field}={names}, expected one entry for each dimension."
            )
        if any(names[d] != n for d, n in enumerate(split_names(info)) if n):
            raise ValueError(
                f"{prefix} has {field}={names}, expected {split_names(info)} to stay: the model "
                "computes with the shards of these dims. Shard another dim."
            )
        if any(names[dim] for dim in info.unsharded_dims):
            raise ValueError(
                f"{prefix} has {field}={names}, expected None for dims "
                f"{sorted(info.unsharded_dims)}, because a loop runs over them or devices share "
                "their entries."
            )
        used = [axis for name in names for axis in axis_tuple(name)]
        if len(set(used)) < len(used) or not set(used) <= set(mesh.shape):
            raise ValueError(
                f"{prefix} has {field}={names}, expected each mesh axis at most once, of "
                f"{list(mesh.shape)}."
            )
        widths = padding or (0,) * len(names)
        for dim, (size, width, name) in enumerate(zip(info.shape, widths, names, strict=True)):
            shards = axes_size(mesh, axis_tuple(name))
            if (size + width) % shards:
                raise ValueError(
                    f"{prefix} has {field}={names}, and {size + width} elements along dim {dim} do "
                    f"not divide over {shards} devices; choose a dim that divides, or a padding."
                )
    return placement
