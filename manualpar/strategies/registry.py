"""The strategies that configs can name.

A strategy is one file and one registration. The file holds a `StrategyKind`: the builder, the
config fields that are its own, and its colour. After `register(kind)` configs can name it,
`experiments.compare` and `experiments.plan` try it, and pictures show it in its colour. (Its
closed form, which the ledger is compared with, is part of the `Strategy` that its builder makes.)

This table, that of the modes (`manualpar.core.modes.manual`) and that of the model libraries
(`manualpar.core.model.interface`) are the only things in the package that importing a module may
change.
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
    """What configs, comparisons, plans and pictures know about a strategy.

    Attributes:
      name: The value of `config.parallel.strategy` that selects it.
      builder: `builder(model, tx, loss_fn, **options) -> Program`, see
        `manualpar.core.program.program.build_program`.
      color: Its colour in pictures, `#RRGGBB`.
      fields: The fields of `config.parallel` that are its own, by the names of the builder's
        options, and what each may be. Fields that every strategy has are not among them.
      constants: Options of the builder that a config does not set.
      replicates: Whether it replicates over the mesh axis `replica`, which the config's mesh must
        then have, and shards over the batch's other axes.
      fewest_minibatches: The fewest minibatches that a plan tries it with, because with fewer it is
        another strategy.
      on_torus: Whether a plan tries it axis by axis on a TPU's torus too.
      has_curve: Whether a plan shows how its step time changes with the number of devices.
      is_exact: Whether its steps are those of one device. Otherwise it is planned and compared only
        on request.
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
    """Makes a strategy known by its name.

    A file that runs again, as a config's does, registers its strategy again.

    Args:
      kind: The strategy.

    Raises:
      TypeError: Its builder is not a function that takes options, or its fields are not `Field`s.
      ValueError: Another strategy has that name, a field of another strategy has the name of one of
        its fields and may be something else, or a field or constant is an option of all builders;
        or the colour is none.
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
                    f"register: field {name!r} of {kind.name!r} is {field.expectation()}, and that "
                    f"of {other.name!r} is {other.fields[name].expectation()}; expected the same, "
                    "because a config has it once. Rename it."
                )
    _KINDS[kind.name] = kind


def strategy_kinds() -> dict[str, StrategyKind]:
    """The strategies that are registered, by name, in the order of their registration."""
    return dict(_KINDS)


def _origin(kind: StrategyKind) -> tuple[str, str]:
    return kind.builder.__module__, kind.builder.__qualname__
