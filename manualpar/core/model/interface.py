"""The functions of a model that a program calls, the same for every model library.

Each library has a subclass of `ModelInterface`. Importing the subclass's module registers it. The
subclass for Linen is in `manualpar.core.model.linen.linen_model`, the subclass for NNX in
`manualpar.core.model.nnx.nnx_model`. Modules that call models import only this module.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import flax.linen as nn

from manualpar.core.model.axis_names import NO_ALIASES, AxisAliases
from manualpar.core.trees import Batch, Variables


class Applicable(Protocol):
    """A wrapped Linen module with `apply`, such as a module with a plan for tensor parallelism."""

    def apply(self, variables: Variables, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as `flax.linen.Module.apply` does."""


# A Linen module, an NNX module, or a function that makes an NNX module.
Model = nn.Module | Callable[..., Any] | Applicable
# Makes the arguments of a model's call from a batch.
InitArgs = Callable[[Any], tuple[Sequence[Any], Mapping[str, Any]]]
# "eval" turns training off. "eval_dropout" turns training off except for dropout.
RunPhase = Literal["train", "eval", "eval_dropout"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelInterface(abc.ABC):
    """A model, and the settings of a program that change the model's calls.

    Attributes:
      module: The module.
      phase: Whether calls train or evaluate.
      axis_aliases: Maps axis names in the module to mesh axes.
      loop_dims: For each parameter's path, the dims over which loops run; `None` until these dims
        have been found.
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
        """Returns the interface of a model of this library; `None` for anything else."""

    @classmethod
    def collections_of(cls, variables: Variables) -> Mapping[str, Any] | None:
        """Returns the arrays of this library's containers by collection; `None` for other types."""
        del variables
        return None

    @property
    def apply_fn(self) -> Callable[..., Any]:
        """The function for the field `apply_fn` of a training state."""
        return self.apply

    @property
    def trainable(self) -> tuple[str, ...]:
        """Globs over the paths of trained parameters, used if the option `trainable` is not set."""
        return ("*",)

    @property
    def decodes_weights(self) -> bool:
        """Whether calls dequantize stored parameters, in the named scope `DECODE_SCOPE`."""
        return False

    def encodings(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Returns, for each array that a program stores quantized, an object that quantizes it.

        The keys are the names of the unquantized arrays. `leaves` are the `Leaf`s of the program's
        state. An object has `plain`, the `Leaf` of the unquantized array, and `encode(array)`,
        which returns by name the arrays that the state stores instead, such as codes and scales.
        """
        del leaves
        return {}

    def initial_call(
        self, batch: Batch, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the `(args, kwargs)` with which `init` makes the variables for a batch."""
        del batch, init_args
        return (), {}

    def check(self, trace: Callable[["ModelInterface"], None]) -> None:
        """Refuses a model that would compute wrong results on the mesh.

        `trace(interface)` traces the loss with the calls of `interface`.
        """
        del trace

    @abc.abstractmethod
    def init(self, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Initialises the variables, by collection, from a key or from `{"params": key}`."""

    @abc.abstractmethod
    def apply(self, variables: Variables, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as `flax.linen.Module.apply` does; parameters may be in boxes."""


_INTERFACES: list[type[ModelInterface]] = []


def register_interface(interface: type[ModelInterface]) -> type[ModelInterface]:
    """Registers a class for `interface_of`; a decorator."""
    _INTERFACES.append(interface)
    return interface


def interface_of(model: Any) -> Any:
    """Returns the interface of a model; returns `model` itself if no class wraps it."""
    wrapped = (interface.wrap(model) for interface in _INTERFACES)
    return next((found for found in wrapped if found is not None), model)


def collections_of(variables: Variables) -> Mapping[str, Any] | None:
    """Splits a library's container of variables by collection; `None` for other types."""
    found = (interface.collections_of(variables) for interface in _INTERFACES)
    return next((tree for tree in found if tree is not None), None)
