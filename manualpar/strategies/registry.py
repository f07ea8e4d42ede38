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
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from manualpar.core.model.options import PROGRAM_OPTIONS, Option, OptionTable
from manualpar.core.program.program import Program
from manualpar.strategies.shared_options import (
    PARAMETER_SHARDING,
    REPLICATED_SHARDING,
    STATE_SHARDING,
)

# -------------------------------------------------------------------------------------------------
# The allowed values of config fields, and the fields that set options of builders.


@dataclasses.dataclass(frozen=True)
class Field:
    """The allowed values of a config field.

    Attributes:
      kind: The type of the values; an integer is allowed for a float.
      minimum: The smallest number allowed.
      below: The upper limit of a number; the limit itself is not allowed.
      choices: All allowed values; `()` if any value of the type is allowed.
      holds_names: Whether a tuple contains names.
      holds_numbers: Whether a tuple contains numbers. A tuple with neither names nor numbers
        contains pairs of a name and one of: a mesh axis, a tuple of axes, `None`.
      default: The value for a config without the field, which keeps the behaviour from before the
        field existed. `None` if every config must set the field.
      expected: The allowed values in words, if the other attributes do not say them.
      meaning: The purpose of the field in one line, for `--help`.
    """

    kind: type
    minimum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    holds_names: bool = False
    default: Any = None
    expected: str = ""
    meaning: str = dataclasses.field(default="", compare=False)
    holds_numbers: bool = False

    def expectation(self) -> str:
        """Describes the allowed values in words."""
        if self.expected:
            return self.expected
        if self.choices and self.kind is tuple:
            return "a tuple of names among " + ", ".join(map(repr, self.choices))
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.holds_names:
            return "a tuple of names such as ('head',)"
        if self.holds_numbers:
            return "a tuple of numbers such as (1.0, 2.5)"
        if self.kind is tuple:
            return "a tuple of pairs such as (('embed', None), ('mlp', 'data'))"
        if self.kind is bool:
            return "True or False"
        noun = {int: "an integer", float: "a finite number", str: "a string", dict: "a dict"}[
            self.kind
        ]
        limits = [] if self.minimum is None else [f"at least {self.minimum}"]
        limits += [] if self.below is None else [f"less than {self.below}"]
        return ", ".join([noun, *filter(None, [" and ".join(limits)])])

    def allows(self, value: Any) -> bool:
        """Returns whether `value` is allowed."""
        if self.kind in (bool, dict, str):
            return isinstance(value, self.kind) and (not self.choices or value in self.choices)
        if self.kind is tuple:
            is_member = _is_name if self.holds_names else _is_rule
            is_member = _is_number if self.holds_numbers else is_member
            if not isinstance(value, tuple) or not all(map(is_member, value)):
                return False
            return not self.choices or set(value) <= set(self.choices)
        numbers = (int, float) if self.kind is float else (int,)
        if not isinstance(value, numbers) or isinstance(value, bool):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.below is None else self.below
        # NaN fails every comparison, and infinity fails the second.
        return low <= value < high and value != -math.inf


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_rule(value: Any) -> bool:
    """Returns whether a value is a pair of a name and a mesh axis, a tuple of axes or `None`."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], str):
        return False
    axes = value[1] if isinstance(value[1], tuple | list) else (value[1] or "",)
    return all(isinstance(axis, str) for axis in axes)


def fields_of_options(options: OptionTable) -> dict[str, Field]:
    """Returns a `Field` for each option that a config may set, by the option's name."""
    fields = {name: _field_of(option) for name, option in options.items() if option.field}
    return with_meanings(fields, {name: option.meaning for name, option in options.items()})


def with_meanings(fields: Mapping[str, Field], meanings: Mapping[str, str]) -> dict[str, Field]:
    """Returns fields with the meanings of the same names; a field may lack a meaning."""
    return {
        name: dataclasses.replace(field, meaning=meanings.get(name, ""))
        for name, field in fields.items()
    }


def values_of_options(options: OptionTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a config sets.

    Args:
      options: The options of a builder, by name.
      values: The config's values by dotted field name. An empty string or tuple stands for the
        default of the option.
    """
    found = {}
    for name, option in options.items():
        if option.field in values:
            value = values[option.field]
            found[name] = option.default if value in ("", ()) else value
    return found


def fields_of_manual_mode() -> dict[str, Any]:
    """Returns the defaults of those communication fields that only mode `"manual"` reads.

    The keys are dotted names such as `parallel.reduce_code`. In other modes XLA chooses.
    """
    options = {x.name: x for x in PROGRAM_OPTIONS.values() if x.xla_chooses}
    return {
        options[name].field: field.default for name, field in fields_of_options(options).items()
    }


def _field_of(option: Option) -> Field:
    """Returns the field for an option; in a string field, `""` stands for the option `None`."""
    choices = option.config_choices or option.choices
    if choices == (True, False):
        return Field(bool, default=option.default)
    if choices:
        strings = tuple(dict.fromkeys([*([""] * (option.default is None)), *filter(None, choices)]))
        return Field(str, choices=strings, default=option.default or "")
    if option.kind is int:
        return Field(int, option.minimum, default=option.default)
    return Field(tuple, holds_names=option.holds_names, default=())


STATE_SHARDING_FIELDS: Mapping[str, Field] = fields_of_options(STATE_SHARDING)
PARAMETER_SHARDING_FIELDS: Mapping[str, Field] = fields_of_options(PARAMETER_SHARDING)
REPLICATED_SHARDING_FIELDS: Mapping[str, Field] = fields_of_options(REPLICATED_SHARDING)


# -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StrategyKind:
    """A strategy's entry for configs, comparisons, plans and pictures.

    Attributes:
      name: The value of `config.parallel.strategy` that selects the strategy.
      builder: `builder(model, tx, loss_fn, **options) -> Program`, see
        `manualpar.strategies.build.build_program`.
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
