"""The allowed values of config fields, and the config fields that several strategies share."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from manualpar.strategies.shared_options import COMMUNICATE_EVERY


@dataclasses.dataclass(frozen=True)
class Field:
    """The allowed values of a field.

    Attributes:
      kind: The type of the values; an integer is allowed for a float.
      minimum: The smallest number allowed.
      below: The upper limit of a number; the limit itself is not allowed.
      choices: All allowed values; `()` if any value of the type is allowed.
      holds_names: Whether a tuple contains names. If not, it contains pairs of a name and one of:
        a mesh axis, a tuple of axes, `None`.
      default: The value for a config without the field, which keeps the behaviour from before the
        field existed. `None` if every config must set the field.
    """

    kind: type
    minimum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    holds_names: bool = False
    default: Any = None

    def expectation(self) -> str:
        """Describes the allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(map(repr, self.choices))
        if self.kind is dict:
            return "a dict of axis sizes such as {'data': -1}"
        if self.holds_names:
            return "a tuple of names such as ('head',)"
        if self.kind is tuple:
            return "a tuple of pairs such as (('embed', None), ('mlp', 'data'))"
        if self.kind is bool:
            return "True or False"
        noun = {int: "an integer", float: "a finite number", str: "a string"}[self.kind]
        limits = [] if self.minimum is None else [f"at least {self.minimum}"]
        limits += [] if self.below is None else [f"less than {self.below}"]
        return ", ".join([noun, *filter(None, [" and ".join(limits)])])

    def allows(self, value: Any) -> bool:
        """Returns whether `value` is allowed."""
        if self.kind in (bool, dict, str):
            return isinstance(value, self.kind) and (not self.choices or value in self.choices)
        if self.kind is tuple:
            is_member = _is_name if self.holds_names else _is_rule
            return isinstance(value, tuple) and all(map(is_member, value))
        numbers = (int, float) if self.kind is float else (int,)
        if not isinstance(value, numbers) or isinstance(value, bool):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.below is None else self.below
        # NaN and infinity fail the second comparison.
        return low <= value < high


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_rule(value: Any) -> bool:
    """Returns whether a value is a pair of a name and a mesh axis, a tuple of axes or `None`."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], str):
        return False
    axes = value[1] if isinstance(value[1], tuple | list) else (value[1] or "",)
    return all(isinstance(axis, str) for axis in axes)


# The options that a config may set. `replicate` is left out, because no model of a config needs it.
STATE_SHARDING_FIELDS: Mapping[str, Field] = {
    "min_weight_size": Field(int, 0),
    "pad": Field(bool),
}
PARAMETER_SHARDING_FIELDS: Mapping[str, Field] = {
    **STATE_SHARDING_FIELDS,
    "reshard_after_forward": Field(bool),
    "communicate_every": Field(str, choices=COMMUNICATE_EVERY),
    "keep_gathered": Field(tuple, holds_names=True),
    "regather_axes": Field(tuple, holds_names=True, default=()),
}
