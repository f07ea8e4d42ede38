"""The functions of a model that a program calls, whichever library the model was written with.

A library's adapter is a subclass of `ModelInterface` that is registered when its module is
imported: Linen's is in `manualpar.core.model.linen.linen_model`, NNX's in
`manualpar.core.model.nnx`. The modules that call models import neither.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import flax.linen as nn

from manualpar.core.model.axis_names import NO_ALIASES, AxisAliases


class Applicable(Protocol):
    """What holds a Linen module and is applied as one, such as a module with a plan."""

    def apply(self, variables: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""


# A Linen module, or what another adapter wraps: NNX modules, and functions that make one.
Model = nn.Module | Callable[..., Any] | Applicable
# Makes the arguments of a model's call from a batch.
InitArgs = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]
# In "eval" training is turned off, and in "eval_dropout" all of it but dropout.
RunPhase = Literal["train", "eval", "eval_dropout"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelInterface(abc.ABC):
    """A model, and what a program adds to each of its calls.

    Attributes:
      module: The module.
      phase: Whether calls train or evaluate.
      axis_aliases: The mesh axes that the axis names in the module stand for.
      loop_dims: The dimensions of each parameter that loops run over, by the parameter's path;
        `None` while they are unknown.
      makes_variables_in_calls: Whether a call may add to collections, as `sow` does.
    """

    module: Any
    phase: RunPhase = "train"
    axis_aliases: AxisAliases = NO_ALIASES
    loop_dims: Mapping[str, frozenset[int]] | None = None
    makes_variables_in_calls: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def wrap(cls, model: Any) -> Self | None:
        """The adapter of a model of this library; `None` for anything else."""

    @classmethod
    def collections_of(cls, variables: Any) -> Mapping[str, Any] | None:
        """The arrays of this library's own containers by collection; `None` for anything else."""
        del variables
        return None

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The function that a training state holds for its user."""
        return self.apply

    @property
    def trainable(self) -> tuple[str, ...]:
        """Globs over the paths of the parameters that are trained, unless a builder is told."""
        return ("*",)

    @property
    def decodes_weights(self) -> bool:
        """Whether calls make weights of parameters, in the scope `DECODE_SCOPE`."""
        return False

    def encodings(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """How arrays that `leaves` do not have become some of them, by their names.

        A value has a `plain` leaf for the array, and `encode(array)`, which gives leaves by name.
        """
        del leaves
        return {}

    def initial_call(
        self, batch: Any, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The `(args, kwargs)` that `init` takes to make the variables for a batch."""
        del batch, init_args
        return (), {}

    def check(self, trace: Callable[["ModelInterface"], None]) -> None:
        """Refuses a model that would be wrong on the mesh; `trace` traces the loss with another."""
        del trace

    @abc.abstractmethod
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Makes the variables by collection, of a key or of `{"params": key}`."""

    @abc.abstractmethod
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as `flax.linen.Module.apply` does; parameters may be in boxes."""


_ADAPTERS: list[type[ModelInterface]] = []


def register_interface(adapter: type[ModelInterface]) -> type[ModelInterface]:
    """Has `interface_of` try an adapter too; a decorator of its class."""
    _ADAPTERS.append(adapter)
    return adapter


def interface_of(model: Any) -> Any:
    """The adapter of a model; anything that no library's adapter takes is returned as it is."""
    wrapped = (adapter.wrap(model) for adapter in _ADAPTERS)
    return next((found for found in wrapped if found is not None), model)


def collections_of(variables: Any) -> Mapping[str, Any] | None:
    """Variables in a library's own container by collection; `None` for anything else."""
    found = (adapter.collections_of(variables) for adapter in _ADAPTERS)
    return next((tree for tree in found if tree is not None), None)
