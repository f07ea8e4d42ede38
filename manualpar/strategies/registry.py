"""The strategies that configs can name.

A strategy is one file and one registration. The file has a `StrategyKind`: the builder, the config
fields that only this strategy has, and its colour. After `register(kind)` configs can name the
strategy, `manualpar compare` and `manualpar plan` try it, and pictures show it in its colour.
(The builder makes a `Strategy`. Its function `sends` counts the collectives of a step.
`manualpar.inspect` computes from these counts the bytes that the step must send.)

Importing a module may change only three tables of the package: the strategies, the modes
(`manualpar.core.modes.manual`) and the model libraries (`manualpar.core.model.interface`).
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.core.program.program import Program
from manualpar.strategies.fields import Field


@dataclasses.dataclass(frozen=True)
class StrategyKind:
    """A strategy's entry for configs, comparisons, plans and pictures.

    Attributes:
      name: The value of `config.parallel.strategy` that selects the strategy.
      builder: `builder(model, tx, loss_fn, **options) -> Program`, see
        `manualpar.core.program.program.build_program`.
      color: The strategy's colour in pictures, `#RRGGBB`.
      fields: The fields of `config.parallel` that not every strategy has, and the allowed values of
        each. The keys are the names of the builder's options.
      constants: The builder's options that a config does not set, by name, with their values.
      replicates: Whether the strategy replicates over the mesh axis `replica` and shards over the
        batch's other axes. The config's mesh must then have this axis.
      averages: Whether every gradient is averaged by an all-reduce.
      fewest_minibatches: The fewest minibatches with which a plan tries the strategy. With fewer
        minibatches the strategy equals another strategy.
      on_torus: Whether a plan also tries the option `axis_by_axis` on a TPU's torus.
      has_curve: Whether a plan shows how the step time changes with the number of devices.
      is_exact: Whether the strategy's steps equal the steps of one device. If not, the strategy is
        planned and compared only on request.
    """

    name: str
    builder: Callable[..., Program]
    color: str
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicates: bool = False
    averages: bool = False
    fewest_minibatches: int = 1
    on_torus: bool = False
    has_curve: bool = False
    is_exact: bool = True


_KINDS: dict[str, StrategyKind] = {}


def register(kind: StrategyKind) -> None:
    """Registers a strategy under its name.

    A strategy may be registered again, because a config's file may run several times.

    Args:
      kind: The strategy.

    Raises:
      TypeError: The builder is not a function that takes options, or a field is not a `Field`.
      ValueError: Another strategy has the same name, or has a field with the same name and other
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
            f"register: color of {kind.name!r} is {kind.color!r}, expected a code like '#999933'."
        )
    if not isinstance(kind.fields, Mapping) or not all(
        isinstance(field, Field) for field in kind.fields.values()
    ):
        raise TypeError(
            f"register: fields of {kind.name!r} are {kind.fields!r}, expected a dict with a Field "
            "for the name of each option, such as STATE_SHARDING_FIELDS."
        )
    for name in sorted(PROGRAM_OPTIONS.keys() & {*kind.fields, *kind.constants}):
        raise ValueError(
            f"register: {kind.name!r} has {name!r} among its fields or constants, expected no "
            "option that every builder takes. Set this option in the builder."
        )
    for other in _KINDS.values():
        if other.name == kind.name:
            if _origin(other) != _origin(kind):
                raise ValueError(
                    f"register: another builder, {'.'.join(_origin(other))}, is registered as "
                    f"{kind.name!r}, expected another name."
                )
            continue
        for name, field in kind.fields.items():
            if other.fields.get(name, field) != field:
                raise ValueError(
                    f"register: field {name!r} of {kind.name!r} is {field.expectation()}, and in "
                    f"{other.name!r} it is {other.fields[name].expectation()}; expected the same "
                    "values in both, because a config has the field only once. Rename the field."
                )
    _KINDS[kind.name] = kind


def strategy_kinds() -> dict[str, StrategyKind]:
    """Returns the registered strategies by name, in the order of their registration."""
    return dict(_KINDS)


def _origin(kind: StrategyKind) -> tuple[str, str]:
    return kind.builder.__module__, kind.builder.__qualname__
