"""The allowed values of config fields, and the fields that set options of builders."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from manualpar.core.model.option_table import Option, OptionTable
from manualpar.core.model.options import PROGRAM_OPTIONS
from manualpar.strategies.shared_options import (
    PARAMETER_SHARDING,
    REPLICATED_SHARDING,
    STATE_SHARDING,
)


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
            if self.choices and not set(value) <= set(self.choices):
                return False
            return isinstance(value, tuple) and all(map(is_member, value))
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
      options: The options.
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
