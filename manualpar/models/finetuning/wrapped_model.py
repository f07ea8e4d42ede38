"""The base class of model interfaces that wrap the interface of another model."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from manualpar.core.model.interface import InitArgs, ModelInterface


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WrappingInterface(ModelInterface):
    """A model interface that calls `base`, the interface of the *given* model.

    Attributes:
      base: The interface of the given model, the argument of `lora` or `quantized`.
    """

    base: Any = None
    makes_variables_in_calls: ClassVar[bool] = True

    @property
    def trainable(self) -> tuple[str, ...]:
        """The globs of the parameters that are trained by default, as in the given model."""
        globs: tuple[str, ...] = self.base.trainable
        return globs

    @property
    def decodes_weights(self) -> bool:
        """Whether the given model dequantizes weights."""
        return bool(self.base.decodes_weights)

    def encodings(self, leaves: Any) -> dict[str, Any]:
        """Returns the encodings of the given model."""
        return dict(self.base.encodings(leaves))

    def initial_call(
        self, batch: Any, init_args: InitArgs | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the given model's first call."""
        call: tuple[tuple[Any, ...], dict[str, Any]] = self.base.initial_call(batch, init_args)
        return call

    def called(self, base: Any) -> Any:
        """Returns a copy of the interface `base` with the module, phase and axes of `self`."""
        same = ("module", "phase", "axis_aliases", "loop_dims")
        return dataclasses.replace(base, **{name: getattr(self, name) for name in same})

    def check(self, trace: Callable[[ModelInterface], None]) -> None:
        """Checks the given model in the calls that this interface makes."""
        self.base.check(lambda base: trace(dataclasses.replace(self, base=base)))
