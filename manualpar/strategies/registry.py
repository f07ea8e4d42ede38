"""The strategies that configs can name.

A strategy is one file and one registration. The file has a `StrategyKind`: the builder, the config
fields that only this strategy has, and its colour. After `register(kind)` configs can name it,
`experiments.compare` and `experiments.plan` try it, and pictures show it in its colour. (Its
closed form, which the ledger is compared with, is part of the `Strategy` that its builder makes.)

Importing a module may change only three tables of the package: this one, the modes
(`manualpar.core.modes.manual`) and the model libraries (`manualpar.core.model.interface`).
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from manualpar.core.model.options import ProgramOptions
from manualpar.core.program.program import Program
from manualpar.strategies.fields import Field


@dataclasses.dataclass(frozen=True)
class StrategyKind:
    """A strategy's entry for configs, comparisons, plans and pictures.

    Attributes:
      name: The value of `config.parallel.strategy` that selects it.
      builder: `builder(model, tx, loss_fn, **options) -> Program`, see
        `manualpar.core.program.program.build_program`.
      color: Its colour in pictures, `#RRGGBB`.
      fields: The fields of `config.parallel` that not every strategy has, by the names of the
        builder's options, and the allowed values of each.
      constants: Options of the builder that a config does not set.
      replicates: Whether it replicates over the mesh axis `replica`, which the config's mesh must
        then have, and shards over the batch's other axes.
      fewest_minibatches: The fewest minibatches that a plan tries it with. With fewer it equals
        another strategy.
      on_torus: Whether a plan also tries it axis by axis on a TPU's torus.
      has_curve: Whether a plan shows how its step time changes with the number of devices.
      is_exact: Whether its steps equal the steps of one device. Otherwise it is planned and
        compared only on request.
    """

    name: str
    builder: Callable[..., Program]
    color: str
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicates: bool = False
    fewest_minibatches: int = 1
    on_torus: bool = False
    has_curve: bool = False
    is_exact: bool = True


_KINDS: dict[str, StrategyKind] = {}


def register(kind: StrategyKind) -> None:
    """Registers a strategy under its name.

    It may be registered again, because a config's file may run several times.

    Args:
      kind: The strategy.

    Raises:
      TypeError: Its builder is not a function that takes options, or its fields are not `Field`s.
      ValueError: Another strategy has that name, or has a field with the same name and other
        allowed values; or a field or constant is an option of all builders; or the colour is not
        `#RRGGBB`.
    """
    if not inspect.isfunction(kind.builder):
        raise TypeError(
            f"register: builder of {kind.name!r} is {kind.builder!r}, expected a function; options "
            "that do not change go into constants."
        )
    parameters = inspect.signature(kind.builder).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise TypeError(
            f"register: builder of {kind.name!r} takes {inspect.signature(kind.builder)}, expected "
            "(model, tx, loss_fn, **options), because every builder takes ProgramOptions."
        )
    if not re.fullmatch("#[0-9A-Fa-f]{6}", str(kind.color)):
        raise ValueError(
            f"register: color of {kind.name!r} is {kind.color!r}, expected one such as '#D55E00'."
        )
    if not isinstance(kind.fields, Mapping) or not all(
        isinstance(field, Field) for field in kind.fields.values()
    ):
        raise TypeError(
            f"register: fields of {kind.name!r} are {kind.fields!r}, expected a Field by the name "
            "of each option, such as STATE_SHARDING_FIELDS."
        )
    for name in sorted(ProgramOptions.__annotations__.keys() & {*kind.fields, *kind.constants}):
        raise ValueError(
            f"register: {kind.name!r} has {name!r} among its fields or constants, expected options "
            "of its own: every builder takes that one. Set it in the builder."
        )
    for other in _KINDS.values():
        if other.name == kind.name:
            if _origin(other) != _origin(kind):
                raise ValueError(
                    f"register: there is a strategy {kind.name!r} already, of "
                    f"{'.'.join(_origin(other))}, expected another name."
                )
            continue
        for name, field in kind.fields.items():
            if other.fields.get(name, field) != field:
                raise ValueError(
                    f"register: field {name!r} of {kind.name!r} is {field.expectation()}, and in "
                    f"{other.name!r} it is {other.fields[name].expectation()}; expected the same, "
                    "because a config has it once. Rename it."
                )
    _KINDS[kind.name] = kind


def strategy_kinds() -> dict[str, StrategyKind]:
    """Returns the registered strategies by name, in the order of their registration."""
    return dict(_KINDS)


def _origin(kind: StrategyKind) -> tuple[str, str]:
    return kind.builder.__module__, kind.builder.__qualname__
